"""The main job's step compiles for a TPU v5e-8, without a TPU, and XLA's compiled program sends what the plan says.

`make test-tpu`. The topology must be asked for before JAX starts, so this file compiles as a program of its own.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "PYTHONPATH": str(ROOT),
}


def equivalents(kind: str, devices: int, nbytes: int, mark: str):
    """What the TPU compiler may make of a collective; all that is allowed to differ from the plan."""
    if kind == "all_gather":
        yield kind, devices, nbytes // 2, mark  # what feeds only products is gathered as bfloat16, in which they are computed
        yield "all_reduce", devices, nbytes * devices, mark  # short ones: of the whole, zeros elsewhere
    if kind == "reduce_scatter":
        yield "all_reduce", devices, nbytes, mark  # short ones along the minor-most dim, and a slice


def normalized(planned: Counter, compiled: Counter) -> tuple[Counter, Counter]:
    """What only the plan holds and what only the compiled program holds."""
    only_planned, only_compiled = planned - compiled, compiled - planned
    for entry in sorted(only_planned):
        for other in equivalents(*entry):
            matched = min(only_planned[entry], only_compiled[other])
            only_planned[entry] -= matched
            only_compiled[other] -= matched
    return +only_planned, +only_compiled


def test_normalization():
    planned = Counter({("all_gather", 2, 64, ""): 3, ("reduce_scatter", 4, 32, ""): 1, ("all_reduce", 4, 8, ""): 2})
    compiled = Counter({("all_gather", 2, 32, ""): 2, ("all_reduce", 4, 32, ""): 1, ("all_reduce", 4, 8, ""): 3})
    assert normalized(planned, compiled) == ({("all_gather", 2, 64, ""): 1}, {("all_reduce", 4, 8, ""): 1})


@pytest.mark.tpu
@pytest.mark.parametrize("mesh", ["data=4,model=2", "data=8"])
def test_default_step(mesh):
    pytest.importorskip("libtpu")
    found = subprocess.run(
        [sys.executable, __file__, mesh], env=os.environ | WITHOUT_TPU, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, found.stderr[-4000:]
    planned, lowered, compiled = (
        Counter({tuple(key): n for key, n in side}) for side in json.loads(found.stdout.splitlines()[-1])
    )
    assert planned == lowered
    assert normalized(planned, compiled) == (Counter(), Counter())


def main(mesh_text: str) -> None:
    """Prints what the default step sends on this mesh: by the plan, in StableHLO, in the program compiled for TPU."""
    from jax.experimental import topologies

    import shardax as sx
    from models import options
    from models.gpt2_sharding import BATCH, param_specs
    from models.job import make_job
    from models.rules import on_axes
    from models.steps import State
    from shardax.explain import hlo

    shape = options.mesh_shape(mesh_text)
    topology = topologies.get_topology_desc("v5e:2x4", "tpu")
    mesh = topologies.make_mesh(topology, tuple(shape.values()), tuple(shape))
    job = make_job(options.parse([]))
    specs = (State(param_specs(job.state.params, shape), None, None), on_axes(BATCH, shape))
    step = sx.shard_jit(job.step, mesh=mesh, in_shardings=specs, donate_argnums=0)
    lowered = step.lower(job.state, job.batch)
    sides = (
        step.plan(job.state, job.batch).collectives,
        hlo.lowered(lowered.compiler_ir()),
        hlo.compiled(lowered.compile().as_text()),
    )
    print(json.dumps([list(hlo.counts(side).items()) for side in sides]))


if __name__ == "__main__":
    main(*sys.argv[1:])
