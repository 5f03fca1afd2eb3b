"""How long planning takes where every unrolled layer has a loop in it: attention that goes over its keys in
blocks, and is recomputed in the backward pass. Needs no devices.

`python -m benchmarks.loops_in_layers` prints processor seconds of completion and of choice for 24 and for 96
such layers, and fails if both together take more than 1.5 times as long for 96 as planning 24 does in all.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks.planner import LAYERS, MAX_OVER_FEWER_LAYERS, Timing, decided, timed, verdict

WIDTH, ROWS, BLOCKS = 512, 1024, 8
MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
SPECS = {**dict.fromkeys(("q", "k", "v", "up"), P(None, "model")), "o": P("model"), "down": P("model")}


@jax.checkpoint
def layer(weights, x):
    """A block of attention, its sums over keys in a scan, then an MLP."""
    q, k, v = (x @ weights[name] for name in "qkv")

    def of_block(carry, keys_and_values):
        most, total, mixed = carry
        k, v = keys_and_values
        scores = q @ k.T
        new = jnp.maximum(most, scores.max(1))
        parts, old = jnp.exp(scores - new[:, None]), jnp.exp(most - new)
        return (new, old * total + parts.sum(1), old[:, None] * mixed + parts @ v), None

    empty = jnp.full(len(x), -jnp.inf), jnp.zeros(len(x)), jnp.zeros_like(v)
    blocks = jax.tree.map(lambda a: a.reshape(BLOCKS, -1, WIDTH), (k, v))
    (_, total, mixed), _ = lax.scan(of_block, empty, blocks)
    x = x + mixed / total[:, None] @ weights["o"]
    return x + jax.nn.relu(x @ weights["up"]) @ weights["down"]


def step(weights, x):
    def loss(weights):
        y = x
        for each in weights:
            y = layer(each, y)
        return (y**2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def plan(layers: int):
    sizes = {**dict.fromkeys("qkvo", (WIDTH, WIDTH)), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    weights = [{name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in sizes.items()}] * layers
    jitted = sx.shard_jit(step, mesh=MESH, in_shardings=([SPECS] * layers, P("data")), donate_argnums=0)
    return jitted.plan(weights, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))


def main() -> int:
    fewer, more = (min((timed(partial(plan, n)) for _ in range(2)), key=decided) for n in LAYERS)
    for layers, timing in zip(LAYERS, (fewer, more), strict=True):
        print(row(layers, timing))
    what = f"completion and choice of {LAYERS[1]} layers / plan of {LAYERS[0]} layers in all"
    return verdict([(what, decided(more) / fewer.total, MAX_OVER_FEWER_LAYERS)])


def row(layers: int, timing: Timing) -> str:
    completion, choice = (timing.phases[name] for name in ("completion", "choice"))
    return (
        f"{layers} layers: completion {completion:.2f} s, choice {choice:.2f} s, plan in all "
        f"{timing.total:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
