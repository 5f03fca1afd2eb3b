"""A pipelined training step against a shifting buffer under `jax.jit`: seconds a step on virtual CPU devices,
both in one run. `python -m benchmarks.pipeline --schedule gpipe`

The model: a residual stream through feed-forward layers, a loss at its end.
"""

import argparse
import os
import statistics
import time
from functools import partial


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
    parser.add_argument("--dump", help="a file: the text of our compiled program")
    options = parser.parse_args()
    count = options.stages * options.data
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    )
    compare(options)


def compare(options) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import shardax as sx
    from benchmarks.shifting_buffer import shifting_buffer

    axes = ("stage", "data")
    mesh = jax.make_mesh((options.stages, options.data), axes, axis_types=(AxisType.Auto,) * 2)
    split = {name: NamedSharding(mesh, spec) for name, spec in (("w", P("stage")), ("x", P("data")))}
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (options.model, 4 * options.model), "down": (4 * options.model, options.model)}
    params = {
        name: jax.device_put(jax.random.normal(key, (options.layers, *shape)) / shape[0] ** 0.5, split["w"])
        for (name, shape), key in zip(shapes.items(), keys, strict=False)
    }
    x = jax.device_put(jax.random.normal(keys[2], (options.batch, options.model)), split["x"])

    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    def loss(params, x):
        out = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0]
        return (out**2).mean()

    constrain = lambda b: jax.lax.with_sharding_constraint(b, NamedSharding(mesh, P("stage", "data")))  # noqa: E731
    buffer = shifting_buffer(layer, options.stages, constrain)

    def buffered(params, x):
        x = jnp.swapaxes(x.reshape(-1, options.microbatches, options.model), 0, 1)
        return buffer(params, x)

    def step(grad, params, x):
        value, grads = grad(params, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, grads), value

    ours = sx.pipeline.value_and_grad(loss, microbatches=options.microbatches, schedule=options.schedule)
    theirs = jax.value_and_grad(lambda params, x: (buffered(params, x) ** 2).mean())
    shardings = split["w"], split["x"]
    places = jax.tree.map(lambda _: split["w"], params), split["x"]
    steps = {
        "shardax": sx.shard_jit(partial(step, ours), mesh=mesh, in_shardings=shardings),
        "shifting buffer, jax.jit": jax.jit(
            partial(step, theirs), in_shardings=places, out_shardings=(places[0], None)
        ),
    }
    compiled = {name: f.lower(params, x).compile() for name, f in steps.items()}
    if options.dump:
        with open(options.dump, "w") as file:
            file.write(compiled["shardax"].as_text())
    values = {name: f(params, x)[1] for name, f in compiled.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, f in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(f(params, x))
            times[name].append(time.perf_counter() - start)
    first, second = times.values()
    for name, seconds in times.items():
        memory = compiled[name].memory_analysis().temp_size_in_bytes / 2**20
        shown = f"{1e3 * statistics.median(seconds):8.1f} ms a step   {memory:8.1f} MiB"
        print(f"{name:26} {shown}   loss {values[name]:.6f}")
    ratio = statistics.median(a / b for a, b in zip(first, second, strict=True))
    print(f"ratio {ratio:.2f}, median of {options.rounds} pairs; schedule {options.schedule}")


if __name__ == "__main__":
    main()
