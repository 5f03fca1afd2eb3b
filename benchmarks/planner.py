"""How long planning takes: the train step of a GPT-2 of 48 unrolled layers, for 8 devices and for 2048. Needs
no devices.

`python -m benchmarks.planner` prints the seconds of each phase beside JAX's own tracing, and fails if a bound
is broken: planning for 2048 devices takes at most 1.1 times as long as for 8, planning at most 2.5 times as
long as JAX's tracing, completion alone at most half as long. Layers that are alike are completed and chosen
once: for 96 of them that takes at most 1.5 times as long as planning 24 in all. (How it compares with
completion and choice for 24 is printed too.) Every measurement starts with JAX's caches empty and no garbage,
and is of processor seconds. A ratio is the median of those of the rounds, in each of which both sides run one
after the other: other programs on the machine slow both. (Those of layers are of the best.) What shardax
itself remembers, such as prices of reshards, is kept from the first round on.
"""

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
from jax.sharding import AbstractMesh, AxisType

import shardax as sx
from models import gpt2, options
from models.gpt2_sharding import BATCH, param_specs
from models.job import Job, make_job
from models.rules import on_axes
from models.steps import State

MESHES = ({"data": 4, "model": 2}, {"data": 128, "model": 16})
MAX_GROWTH = 1.1
MAX_OVER_TRACING = 2.5
MAX_COMPLETION_OVER_TRACING = 0.5
LAYERS = (24, 96)
MAX_OVER_FEWER_LAYERS = 1.5


@dataclass(frozen=True)
class Timing:
    """Processor seconds in all, and those of each phase."""

    total: float
    phases: Mapping[str, float]
    sent: float = 0.0  # bytes, by one device


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    job = job_of(args)
    print(f"{heading(job)}; best of {args.rounds}, in seconds")
    rounds = [measure(job) for _ in range(args.rounds)]
    tracing, *plans = (min(timings, key=lambda timing: timing.total) for timings in zip(*rounds, strict=True))
    print(table(tracing, plans))
    layers = [] if args.no_layers else [best(args, layers) for layers in LAYERS]
    return verdict(list(bounds(rounds, layers)))


def job_of(args: argparse.Namespace, layers: int | None = None) -> Job:
    """A train step, of another number of layers than its size says where one is given."""
    size = gpt2.SIZES[args.size]
    with mock.patch.dict(gpt2.SIZES, {args.size: replace(size, layers=layers or size.layers)}):
        return make_job(
            options.parse(["--size", args.size, "--seq", str(args.seq), "--batch", str(args.batch)])
        )


def best(args: argparse.Namespace, layers: int) -> Timing:
    job = job_of(args, layers)
    return min((timed(lambda: plan(job, MESHES[0])) for _ in range(args.rounds)), key=decided)


def decided(timing: Timing) -> float:
    """Seconds of completion and choice."""
    return timing.phases["completion"] + timing.phases["choice"]


def bounds(
    rounds: Sequence[Sequence[Timing]], layers: Sequence[Timing]
) -> Iterator[tuple[str, float, float]]:
    """(what, ratio, at most)"""
    few, many = (math.prod(shape.values()) for shape in MESHES)
    ratios = [
        (most.total / least.total, least.total / tracing.total, least.phases["completion"] / tracing.total)
        for tracing, least, most in rounds
    ]
    growth, over, completion = map(statistics.median, zip(*ratios, strict=True))
    yield f"plan for {many} devices / for {few}", growth, MAX_GROWTH
    yield f"plan for {few} devices / JAX's own tracing", over, MAX_OVER_TRACING
    yield "completion / JAX's own tracing", completion, MAX_COMPLETION_OVER_TRACING
    if layers:
        fewer, more = layers
        what = f"completion and choice of {LAYERS[1]} layers"
        print(f"{what} / of {LAYERS[0]}: {decided(more) / decided(fewer):.2f}")
        yield (
            f"{what} / plan of {LAYERS[0]} layers in all",
            decided(more) / fewer.total,
            MAX_OVER_FEWER_LAYERS,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="gpt2-xl", help="of the model (default: gpt2-xl)")
    parser.add_argument("--batch", type=int, default=1024, help="sequences a step (default: 1024)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens a sequence (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument(
        "--no-layers", action="store_true", help=f"leave out those of {LAYERS[0]} and {LAYERS[1]} layers"
    )
    return parser


def heading(job: Job) -> str:
    params = jax.tree.leaves(job.state.params)
    return (
        f"train step of a GPT-2 of {sum(leaf.size for leaf in params) / 1e9:.2f} B parameters in "
        f"{len(params)} arrays"
    )


def measure(job: Job) -> list[Timing]:
    """JAX's own tracing, then a plan for each mesh."""
    tracing = timed(
        lambda: jax.make_jaxpr(job.step)(job.state, job.batch)
    )  # the shapes of the state are traced, too
    return [tracing, *(timed(lambda shape=shape: plan(job, shape)) for shape in MESHES)]


def timed(run: Callable[[], Any]) -> Timing:
    jax.clear_caches()
    gc.collect()  # else what one plan leaves is walked at some time in the next
    start = time.process_time()
    with mock.patch.object(time, "perf_counter", time.process_time):  # by which phases are timed
        result = run()
    return Timing(
        time.process_time() - start, getattr(result, "phases", {}), getattr(result, "comm_bytes", 0.0)
    )


def plan(job: Job, shape: Mapping[str, int]):
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    state = job.state
    specs = (State(param_specs(state.params, shape), None, None), on_axes(BATCH, shape))
    return sx.shard_jit(job.step, mesh=mesh, in_shardings=specs, donate_argnums=0).plan(state, job.batch)


def table(tracing: Timing, plans: Sequence[Timing]) -> str:
    meshes = [", ".join(f"{axis}={size}" for axis, size in shape.items()) for shape in MESHES]
    rows = [("", meshes), ("JAX's own tracing", [f"{tracing.total:.2f}"] * len(plans))]
    rows += [(f"plan: {phase}", [f"{plan.phases[phase]:.2f}" for plan in plans]) for phase in plans[0].phases]
    rows += [("plan in all", [f"{plan.total:.2f}" for plan in plans])]
    rows += [("GB sent by each", [f"{plan.sent / 1e9:.1f}" for plan in plans])]
    return "\n".join(f"{name:<20}" + "".join(f"{cell:>20}" for cell in cells) for name, cells in rows)


def verdict(ratios: Sequence[tuple[str, float, float]]) -> int:
    """Prints the ratios; 1 if one breaks its bound."""
    for what, ratio, most in ratios:
        print(f"{what}: {ratio:.2f} (at most {most})")
    return int(any(ratio > most for _, ratio, most in ratios))


if __name__ == "__main__":
    sys.exit(main())
