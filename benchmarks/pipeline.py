"""A pipelined training step against a shifting buffer under `jax.jit`: seconds a step on virtual CPU devices,
both in one run. `python -m benchmarks.pipeline --schedule gpipe`

The model: a residual stream through feed-forward layers, a loss at its end.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks.shifting_buffer import shifting_buffer


def main() -> None:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=__doc__
    )
    add = partial(parser.add_argument, type=int)
    add("--stages", default=4)
    add("--data", default=2)
    add("--layers", default=8)
    add("--model", default=256)
    add("--batch", default=1024)
    add("--microbatches", default=8)
    add("--rounds", default=9)
    parser.add_argument("--schedule", default="gpipe")
    parser.add_argument("--dump", type=Path, help="a file: the text of our compiled program")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.stages * options.data)
    compare(options)


def compare(options) -> None:
    axes = {"stage": options.stages, "data": options.data}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 2)
    params, x = arguments(options, mesh)
    steps = {"shardax": ours(options, mesh), "shifting buffer, jax.jit": theirs(options, mesh)}
    compiled = {name: f.lower(params, x).compile() for name, f in steps.items()}
    if options.dump:
        options.dump.write_text(compiled["shardax"].as_text())
    values = {name: f(params, x)[1] for name, f in compiled.items()}
    times = seconds(compiled, options.rounds, params, x)
    for name, f in compiled.items():
        memory = f.memory_analysis().temp_size_in_bytes / 2**20
        shown = f"{1e3 * statistics.median(times[name]):8.1f} ms a step   {memory:8.1f} MiB"
        print(f"{name:26} {shown}   loss {values[name]:.6f}")
    ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
    print(f"ratio {ratio:.2f}, median of {options.rounds} pairs; schedule {options.schedule}")


def arguments(options, mesh: Mesh) -> tuple[dict[str, jax.Array], jax.Array]:
    """Stacked layers, each stage with its own, and a batch."""
    up, down, rows = jax.random.split(jax.random.key(0), 3)

    def weights(key, *shape: int):
        w = jax.random.normal(key, (options.layers, *shape)) / shape[0] ** 0.5
        return jax.device_put(w, NamedSharding(mesh, P("stage")))

    model, hidden = options.model, 4 * options.model
    x = jax.random.normal(rows, (options.batch, model))
    params = {"up": weights(up, model, hidden), "down": weights(down, hidden, model)}
    return params, jax.device_put(x, NamedSharding(mesh, P("data")))


def layer(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def step(grad: Callable[..., Any], params, x):
    value, grads = grad(params, x)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, params, grads), value


def ours(options, mesh: Mesh):
    def loss(params, x):
        out = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0]
        return (out**2).mean()

    grad = sx.pipeline.value_and_grad(loss, microbatches=options.microbatches, schedule=options.schedule)
    return sx.shard_jit(partial(step, grad), mesh=mesh, in_shardings=(P("stage"), P("data")))


def theirs(options, mesh: Mesh):
    of_stages = NamedSharding(mesh, P("stage", "data"))
    buffer = shifting_buffer(layer, options.stages, lambda b: jax.lax.with_sharding_constraint(b, of_stages))

    def loss(params, x):
        rows = jnp.swapaxes(x.reshape(-1, options.microbatches, options.model), 0, 1)
        return (buffer(params, rows) ** 2).mean()

    params, batch = NamedSharding(mesh, P("stage")), NamedSharding(mesh, P("data"))
    grad = jax.value_and_grad(loss)
    return jax.jit(partial(step, grad), in_shardings=(params, batch), out_shardings=(params, None))


def seconds(compiled: Mapping[str, Any], rounds: int, *args) -> dict[str, list[float]]:
    """Of each step in each round, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(rounds):
        for name, f in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(f(*args))
            times[name].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
