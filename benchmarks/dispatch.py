"""What a call costs beside `jax.jit`'s, for the same function, arguments and shardings, on virtual CPU
devices.

`python -m benchmarks.dispatch` prints microseconds and ratios, and fails if a ratio is over 1.05. A number is
processor time of the calling thread in one call, the median of rounds in which both are called in turn, so
that other programs on the machine count little; a ratio is the median of the rounds' ratios.
"""

import argparse
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  (reads the flags above)
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import shardax as sx  # noqa: E402

MAX_RATIO = 1.05
DEVICES, LEAVES, GIVEN = (1, 8), (1, 200), (True, False)


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call of `jax.jit` and of `shard_jit`, and the latter over the former."""

    jit: float
    shard_jit: float
    ratio: float


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    gc.disable()
    print(f"JAX {jax.__version__}; microseconds a call, median of {args.rounds} rounds")
    print(f"{'devices':>8}{'leaves':>8}  {'in_shardings':<14}{'jax.jit':>10}{'shard_jit':>11}{'ratio':>8}")
    worst = 0.0
    for devices, leaves, given in itertools.product(DEVICES, LEAVES, GIVEN):
        timing = measure(devices, leaves, given, args.rounds)
        row = f"{devices:>8}{leaves:>8}  {'given' if given else 'inferred':<14}"
        print(f"{row}{timing.jit:>10.2f}{timing.shard_jit:>11.2f}{timing.ratio:>8.3f}")
        worst = max(worst, timing.ratio)
    print(f"the worst ratio is {worst:.3f} (at most {MAX_RATIO})")
    return int(worst > MAX_RATIO)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dispatch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=101, help="of about 20 ms each (default: 101)")
    return parser


def measure(devices: int, leaves: int, given: bool, rounds: int) -> Timing:
    """Both called on the same tree of arrays, split over all devices; `given` says whether in_shardings tell
    so too.
    """
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    split = NamedSharding(mesh, P("x"))
    tree = {f"leaf{i}": jax.device_put(np.ones((8, 4), np.float32), split) for i in range(leaves)}
    calls = (
        jax.jit(add_one, in_shardings=split if given else None),
        sx.shard_jit(add_one, mesh=mesh, in_shardings=P("x") if given else None),
    )
    for call in calls:
        jax.block_until_ready([call(tree) for _ in range(3)])
    number = max(5, 500 // leaves // devices)
    times = [_round(calls, tree, number) for _ in range(rounds)]
    jit, ours = (statistics.median(column) for column in zip(*times, strict=True))
    return Timing(jit, ours, statistics.median(b / a for a, b in times))


def add_one(tree):
    return jax.tree.map(lambda x: x + 1, tree)


def _round(calls: Sequence[Callable[[Any], Any]], tree, number: int) -> list[float]:
    """Microseconds of a call of each: both are called `number` times, in one order and in the other."""
    seconds = [0.0, 0.0]
    for i in (0, 1, 1, 0):
        start = time.thread_time()
        results = [calls[i](tree) for _ in range(number)]
        seconds[i] += time.thread_time() - start
        jax.block_until_ready(results)
        del results  # or the next measurement pays for it
    return [1e6 * s / (2 * number) for s in seconds]


if __name__ == "__main__":
    sys.exit(main())
