"""The main job's step and programs of many kinds compile for a TPU v5e-8, without a TPU, and send what the
plans say.

`make test-tpu`. The topology must be asked for before JAX starts, so this file compiles as a program of its
own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardax.explain import hlo

ROOT = Path(__file__).parents[1]
WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "PYTHONPATH": str(ROOT),
}


@pytest.mark.tpu
@pytest.mark.parametrize("mesh", ["data=4,model=2", "data=8"])
def test_default_step(mesh):
    pytest.importorskip("libtpu")
    assert compiled_there(mesh) == {"default": [True, [], []]}


@pytest.mark.tpu
def test_programs_of_many_kinds():
    pytest.importorskip("libtpu")
    found = compiled_there("programs")
    assert len(found) >= 20
    for name, (exact, planned, there) in found.items():
        assert exact, name
        if name in CUT:
            assert sum(n * what[2] for what, n in there) < sum(n * what[2] for what, n in planned), name
        else:
            assert (planned, there) == ([], []), name


CUT = ("convnet", "gpt2 2x2x2")  # of what is gathered, and then cut, XLA gathers less than was planned


def compiled_there(what: str) -> dict[str, list]:
    """Of each program whether the lowered one is as planned, and what only the plan and only the compiled one
    hold.
    """
    command = [sys.executable, __file__, what]
    found = subprocess.run(command, env=os.environ | WITHOUT_TPU, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stderr[-4000:]
    *rewritings, result = found.stdout.splitlines()
    print(*rewritings, sep="\n")
    return json.loads(result)


def main(what: str) -> None:
    """Prints how XLA rewrote each program for TPU, and last what the listed rewritings do not explain, as
    JSON.

    `what`: a mesh for the default step, or "programs".
    """
    from jax.experimental import topologies

    topology = topologies.get_topology_desc("v5e:2x4", "tpu")
    found = {}
    for name, (shape, make) in (programs() if what == "programs" else default_step(what)).items():
        f, args = make(topologies.make_mesh(topology, tuple(shape.values()), tuple(shape)))
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
