"""What choosing all ways together spares against the walk, and what it costs. Needs no devices.

`python -m benchmarks.search` plans the train step of a GPT-2 (--size, with --layers layers) on two meshes twice, and prints the
bytes that each device sends, the collectives, the estimated seconds of a step (`Plan.estimate`), the processor seconds of
choice, and by how much at most the price of what the search chose is above the optimum.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from unittest import mock

from jax.sharding import AbstractMesh, AxisType

import shardax as sx
from benchmarks.planner import MESHES, job_of
from models.gpt2_sharding import BATCH, param_specs
from models.job import Job
from models.rules import on_axes
from models.steps import State

WAYS = {"walk": sx.Options(), "search": sx.Options(search=True)}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    job = job_of(args, args.layers)
    for shape in MESHES:
        mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
        print(", ".join(f"{axis}={size}" for axis, size in shape.items()))
        for name, options in WAYS.items():
            print(f"  {name:<8}{told(planned(job, mesh, options), args.chip)}", flush=True)
    return 0


def planned(job: Job, mesh: AbstractMesh, options: sx.Options):
    axes = mesh.axis_names
    specs = (State(param_specs(job.state.params, axes), None, None), on_axes(BATCH, axes))
    step = sx.shard_jit(job.step, mesh=mesh, in_shardings=specs, donate_argnums=0, options=options)
    with mock.patch.object(time, "perf_counter", time.process_time):  # by which phases are timed
        return step.plan(job.state, job.batch)


def told(plan, chip: str) -> str:
    sent = f"{plan.comm_bytes / 1e9:8.3f} GB in {len(plan.collectives)} collectives"
    decided = f"choice {plan.phases['choice']:.2f} s"
    gap = plan.decisions.gap / plan.decisions.price if plan.decisions.price else 0.0
    return f"{sent}, {plan.estimate(chip).seconds:.3f} s on {chip}, {decided}" + (f", at most {gap:.1%} above" if gap else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="search", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="gpt2-xl", help="of the model (default: gpt2-xl)")
    parser.add_argument("--layers", type=int, default=4, help="(default: 4)")
    parser.add_argument("--batch", type=int, default=1024, help="sequences a step (default: 1024)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens a sequence (default: 1024)")
    parser.add_argument("--chip", default="v5e", help="of the estimate (default: v5e)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
