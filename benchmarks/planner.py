"""How long planning takes: the train step of a GPT-2 of 48 unrolled layers, for 8 devices and for 2048. Needs no devices.

`python -m benchmarks.planner` prints the seconds of each phase beside JAX's own tracing, and fails if a bound is broken:
planning for 2048 devices takes at most 1.1 times as long as for 8, planning at most 3 times as long as JAX's tracing.
Every measurement starts with JAX's caches empty. Totals are processor seconds, so that other programs on the machine do not
count; phases are by the clock.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

import shardax as sx
from models import options
from models.gpt2_sharding import BATCH, param_specs
from models.job import Job, make_job
from models.rules import on_axes
from models.steps import State

MESHES = ({"data": 4, "model": 2}, {"data": 128, "model": 16})
MAX_GROWTH = 1.1
MAX_OVER_TRACING = 3.0


@dataclass(frozen=True)
class Timing:
    """Processor seconds in all, and by the clock those of each phase."""

    total: float
    phases: Mapping[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    job = make_job(options.parse(["--size", args.size, "--seq", str(args.seq), "--batch", str(args.batch)]))
    print(f"{heading(job)}; best of {args.rounds}, in seconds")
    rounds = [measure(job) for _ in range(args.rounds)]
    tracing, *plans = (min(timings, key=lambda timing: timing.total) for timings in zip(*rounds, strict=True))
    print(table(tracing, plans))
    return verdict(plans[-1].total / plans[0].total, plans[0].total / tracing.total)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="gpt2-xl", help="of the model (default: gpt2-xl)")
    parser.add_argument("--batch", type=int, default=1024, help="sequences a step (default: 1024)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens a sequence (default: 1024)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    return parser


def heading(job: Job) -> str:
    params = jax.tree.leaves(job.state.params)
    return f"train step of a GPT-2 of {sum(leaf.size for leaf in params) / 1e9:.2f} B parameters in {len(params)} arrays"


def measure(job: Job) -> list[Timing]:
    """JAX's own tracing, then a plan for each mesh."""
    tracing = timed(lambda: jax.make_jaxpr(job.step)(job.state, job.batch))
    return [tracing, *(timed(lambda shape=shape: plan(job, shape)) for shape in MESHES)]


def timed(run: Callable[[], Any]) -> Timing:
    jax.clear_caches()
    start = time.process_time()
    result = run()
    return Timing(time.process_time() - start, getattr(result, "phases", {}))


def plan(job: Job, shape: Mapping[str, int]):
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    specs = (State(param_specs(job.state.params, shape), None, None), on_axes(BATCH, shape))
    return sx.shard_jit(job.step, mesh=mesh, in_shardings=specs, donate_argnums=0).plan(job.state, job.batch)


def table(tracing: Timing, plans: Sequence[Timing]) -> str:
    meshes = [", ".join(f"{axis}={size}" for axis, size in shape.items()) for shape in MESHES]
    rows = [("", meshes), ("JAX's own tracing", [f"{tracing.total:.2f}"] * len(plans))]
    rows += [(f"plan: {phase}", [f"{plan.phases[phase]:.2f}" for plan in plans]) for phase in plans[0].phases]
    rows += [("plan in all", [f"{plan.total:.2f}" for plan in plans])]
    return "\n".join(f"{name:<20}" + "".join(f"{cell:>20}" for cell in cells) for name, cells in rows)


def verdict(growth: float, over_tracing: float) -> int:
    """Prints both ratios; 1 if one breaks its bound."""
    devices = [shape["data"] * shape["model"] for shape in MESHES]
    print(f"plan for {devices[1]} devices / for {devices[0]}: {growth:.2f} (at most {MAX_GROWTH})")
    print(f"plan for {devices[0]} devices / JAX's own tracing: {over_tracing:.2f} (at most {MAX_OVER_TRACING})")
    return int(growth > MAX_GROWTH or over_tracing > MAX_OVER_TRACING)


if __name__ == "__main__":
    sys.exit(main())
