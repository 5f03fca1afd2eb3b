"""What a decode step costs under `shard_jit` beside `jax.jit`: the models of `examples/` that write text,
on 8 virtual CPU devices.

`python -m benchmarks.decode` prints for each model and each mesh the bytes that a device sends in one step,
read off both compiled programs, and milliseconds. It fails if more is sent or if a ratio of times is over
1.05. Both programs run in turn, step by step, each with a cache of its own that it is given back; a ratio
is the median of the rounds' ratios.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  (reads the flags above)
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import shardax as sx  # noqa: E402
from benchmarks import hlo_cost  # noqa: E402
from examples import deepseek, inference, llama  # noqa: E402
from examples.inference import Model  # noqa: E402

MAX_RATIO = 1.05
MODELS = {"llama": llama.MODEL, "deepseek": deepseek.MODEL}
MESHES = ((2, 2, 2), (4, 2, 1), (2, 1, 4))


@dataclass(frozen=True)
class Compiled:
    """Bytes of one step of one device: sent, and of results that are written where an argument was."""

    sent: int
    aliased: int


class Decoding:
    """A decode step, and the state that it is called on again and again."""

    def __init__(self, model: Model, mesh: Mesh, jit):
        config = model.config(mesh, jit)
        weights, self.cache = model.init(config, inference.PROMPTS)
        self.tokens_B1 = jax.device_put(np.ones((config.batch, 1), np.int32), NamedSharding(mesh, P("x")))
        self.step, self.weights, self.config = model.step(config), weights, config

    def __call__(self) -> Any:
        args = self.config, self.tokens_B1, self.weights, self.cache
        self.tokens_B1, logits_BV, self.cache = self.step(*args)
        return logits_BV

    def compiled(self) -> Compiled:
        program = self.step.lower(self.config, self.tokens_B1, self.weights, self.cache).compile()
        sent = hlo_cost.cost(program.as_text()).sent.total()
        return Compiled(sent, program.memory_analysis().alias_size_in_bytes)


def compiled(model: Model, mesh: Mesh, jit) -> Compiled:
    with jax.set_mesh(mesh):
        return Decoding(model, mesh, jit).compiled()


def measure(model: Model, mesh: Mesh, rounds: int) -> tuple[float, float, float]:
    """Milliseconds of a step under `jax.jit` and under `shard_jit`, and the ratio."""
    with jax.set_mesh(mesh):
        both = [Decoding(model, mesh, jit) for jit in (jax.jit, sx.shard_jit)]
        for decoding in both:
            jax.block_until_ready([decoding() for _ in range(3)])
        times = [_round(both) for _ in range(rounds)]
    jit, shard_jit = (statistics.median(column) for column in zip(*times, strict=True))
    return jit, shard_jit, statistics.median(b / a for a, b in times)


def _round(both: Sequence[Decoding], steps: int = 20) -> list[float]:
    """Milliseconds of a step of each."""
    seconds = [0.0, 0.0]
    for i in (0, 1, 1, 0) * (steps // 2):
        start = time.perf_counter()
        jax.block_until_ready(both[i]())
        seconds[i] += time.perf_counter() - start
    return [1e3 * s / steps for s in seconds]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="of twenty steps of each (default: 30)")
    rounds = parser.parse_args(argv).rounds
    print(
        f"JAX {jax.__version__}; a decode step under jax.jit and under shard_jit, median of {rounds} rounds"
    )
    print(f"{'':10}{'mesh x,y,z':>12}{'bytes sent':>20}{'ms':>15}{'ratio':>9}")
    failed = False
    for (name, model), shape in itertools.product(MODELS.items(), MESHES):
        mesh = inference.make_mesh(*shape)
        theirs, ours = (compiled(model, mesh, jit).sent for jit in (jax.jit, sx.shard_jit))
        jit, shard_jit, ratio = measure(model, mesh, rounds)
        row = f"{name:10}{','.join(map(str, shape)):>12}{theirs:>11,}{ours:>9,}"
        print(f"{row}{jit:>9.2f}{shard_jit:>6.2f}{ratio:>9.3f}")
        failed |= ours > theirs or ratio > MAX_RATIO
    print(f"a step may send no more, and take {MAX_RATIO} of the time")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
