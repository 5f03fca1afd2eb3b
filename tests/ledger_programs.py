"""Programs of many kinds, on eight devices: for comparing what plans say with what lowered and compiled
programs do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import convnet, gpt2
from tests.test_source import PROGRAMS as SMALL

DATA_MODEL = {"data": 4, "model": 2}


@dataclass(frozen=True)
class Program:
    """`make(mesh)` gives what `shard_jit` made, and its arguments as shapes."""

    make: Callable[[Any], tuple[Any, tuple[Any, ...]]]
    mesh: dict[str, int]


def floats(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def of(fun: Callable[..., Any], specs: Any, args: Sequence[Any], **mesh: int) -> Program:
    return Program(lambda m: (sx.shard_jit(fun, mesh=m, in_shardings=specs), tuple(args)), mesh or DATA_MODEL)


def gpt2_step(**mesh: int) -> Program:
    return Program(lambda m: gpt2.program(m, size="tiny", batch=8, seq=16), mesh)


def convnet_step(mesh):
    config = convnet.Config(side=8, features=(4, 8))
    init, step = convnet.train(config, optax.sgd(0.1))
    state = jax.eval_shape(init, jax.random.key(0))
    specs = state._replace(
        params=convnet.param_specs(state.params, mesh.axis_names), opt_state=None, step=None
    )
    batch = floats(8, 8, 8, 3), floats(8, dtype=jnp.int32)
    return sx.shard_jit(step, mesh=mesh, in_shardings=(specs, convnet.BATCH)), (state, batch)


def mixture(x_GSM, gate_ME, up_EMH, down_EHM):
    """Experts over `model`, groups over `data`: GShard's einsums."""
    gates_GSE = jax.nn.softmax(jnp.einsum("gsm,me->gse", x_GSM, gate_ME))
    chosen_GSE = jax.nn.one_hot(jnp.argmax(gates_GSE, -1), gate_ME.shape[1]) * gates_GSE
    place_GSE = jnp.cumsum(chosen_GSE > 0, axis=1) - 1
    send_GSEC = chosen_GSE[..., None] * jax.nn.one_hot(place_GSE, 4)
    y_EGCM = sx.annotate(jnp.einsum("gsec,gsm->egcm", send_GSEC, x_GSM), P("model", "data"))
    h_EGCH = jax.nn.relu(jnp.einsum("egcm,emh->egch", y_EGCM, up_EMH))
    out_EGCM = sx.annotate(jnp.einsum("egch,ehm->egcm", h_EGCH, down_EHM), P("model", "data"))
    return jnp.einsum("gsec,egcm->gsm", send_GSEC, out_EGCM)


def nested_loops(w, x):
    def inner(c, _):
        return jnp.tanh(c @ w) @ w.T, c.sum()

    def outer(c, _):
        c, sums = lax.scan(inner, c, None, length=3)
        return c + sums.mean(), None

    return lax.scan(outer, x, None, length=4)[0]


def island(x, w):
    def ring(block):
        return lax.ppermute(block, "data", [(i, (i + 1) % 4) for i in range(4)]) + lax.psum(block, "data")

    y = jax.shard_map(ring, in_specs=P("data"), out_specs=P("data"))(jnp.sin(x))
    return (y @ w).sum(0)


def half_precision(w, x):
    w, x = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    return jax.nn.relu(x @ w) @ w.T


def to_a_while(x):
    """Rows are summed until they are small, in branches that send differently."""

    def body(c):
        return lax.cond(c.sum() > 8, lambda c: c / jnp.sort(c, axis=0).max(), lambda c: c - c.mean(0), c) / 2

    return lax.while_loop(lambda c: jnp.abs(c).max() > 0.5, body, x)


def three_ways(x_BM, w_MN):
    return jnp.einsum("bm,mn->n", x_BM, w_MN), (x_BM @ w_MN).max(0)


PROGRAMS = {
    "gpt2 4x2": gpt2_step(data=4, model=2),
    "gpt2 2x4": gpt2_step(data=2, model=4),
    "gpt2 2x2x2": gpt2_step(data=2, fsdp=2, model=2),
    "convnet": Program(convnet_step, DATA_MODEL),
    "mixture": of(
        mixture,
        (P("data"), P(), P("model"), P("model")),
        (floats(4, 8, 16), floats(16, 4), floats(4, 16, 32), floats(4, 32, 16)),
    ),
    "nested loops": of(nested_loops, (P(None, "model"), P("data")), (floats(16, 32), floats(8, 16))),
    "island": of(island, (P("data"), P(None, "model")), (floats(8, 16), floats(16, 6))),
    "half precision": of(half_precision, (P(None, "model"), P("data")), (floats(16, 32), floats(8, 16))),
    "while with branches": of(to_a_while, P("data"), (floats(12, 6),)),
    "three axes": of(three_ways, (P("a", ("b", "c")), P("c")), (floats(7, 20), floats(20, 9)), a=2, b=2, c=2),
    **{
        name: of(fun, specs, tuple(jax.eval_shape(make)))
        for name, (fun, specs, make) in SMALL.items()
    },
}  # fmt: skip
