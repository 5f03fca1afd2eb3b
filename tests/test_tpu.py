"""The main job's step and programs of many kinds compile for a TPU v5e-8, without a TPU, and send what the
plans say.

`make test-tpu`.
"""

import json
import sys

import pytest

from shardax.explain import hlo
from tests import on_tpu

OTHERWISE = {  # what only the plan and only the compiled program hold
    # Of the gradient of positions 24 elements of the minor-most dim are left to each device: XLA adds up 32 of each, and
    # puts them right by a ppermute. The nominal chip, for which the plan is made, has no lanes.
    "data=4,model=2": (
        [[["reduce_scatter", 4, 128 * 96 * 4, ""], 1]],
        [[["all_reduce", 4, 128 * 128 * 4, ""], 1], [["ppermute", 6, 128 * 24 * 4, ""], 1]],
    ),
    "data=8": ([], []),
}


@pytest.mark.tpu
@pytest.mark.parametrize("mesh", OTHERWISE)
def test_default_step(mesh):
    assert compiled_there(mesh) == {"default": [True, *OTHERWISE[mesh]]}


@pytest.mark.tpu
def test_programs_of_many_kinds():
    found = compiled_there("programs")
    assert len(found) >= 20
    for name, (exact, planned, there) in found.items():
        assert exact, name
        if name in CUT:
            assert sum(n * what[2] for what, n in there) < sum(n * what[2] for what, n in planned), name
        else:
            assert (planned, there) == ([], []), name


CUT = ("convnet",)  # of what is gathered, and then cut, XLA gathers less than was planned


def compiled_there(what: str) -> dict[str, list]:
    """Of each program whether the lowered one is as planned, and what only the plan and only the compiled one
    hold.
    """
    return on_tpu.found("tests.test_tpu", what)


def main(what: str) -> None:
    """Prints how XLA rewrote each program for TPU, and last what the listed rewritings do not explain, as
    JSON.

    `what`: a mesh for the default step, or "programs".
    """
    found = {}
    for name, (shape, make) in (programs() if what == "programs" else default_step(what)).items():
        f, args = make(on_tpu.mesh(**shape))
        planned, lowered = f.plan(*args).collectives, f.lower(*args)
        exact = hlo.counts(planned) == hlo.counts(hlo.lowered(lowered.compiler_ir()))
        *left, applied = hlo.normalized(planned, hlo.compiled(lowered.compile().as_text()), "tpu")
        print(name, dict(applied))
        found[name] = [exact, *(list(side.items()) for side in left)]
    print(json.dumps(found))


def programs():
    from tests.ledger_programs import PROGRAMS

    return {name: (program.mesh, program.make) for name, program in PROGRAMS.items()}


def default_step(mesh_text: str):
    from models import options
    from models.gpt2_sharding import sharded_step
    from models.job import make_job

    job = make_job(options.parse([]))
    return {
        "default": (
            options.mesh_shape(mesh_text),
            lambda mesh: (sharded_step(job.step, job.state, mesh), (job.state, job.batch)),
        )
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
