"""Programs compiled for a TPU v5e-8, without a TPU, each in a process of its own: libtpu reads its environment
when it is first asked for a topology, before JAX starts.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import Mesh

import shardax as sx

ROOT = Path(__file__).parents[1]
WITHOUT_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is opened, so several processes may compile at once
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def run(module: str, *argv: str, timeout: int = 900) -> str:
    """What `python -m module ...` prints; the test is skipped where there is no libtpu."""
    pytest.importorskip("libtpu")
    how = {"env": os.environ | WITHOUT_TPU, "capture_output": True, "text": True, "timeout": timeout}
    done = subprocess.run([sys.executable, "-m", module, *argv], **how)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def found(module: str, *argv: str, timeout: int = 900) -> Any:
    """What `python -m module ...` prints in its last line, as JSON; the other lines are printed again."""
    *lines, result = run(module, *argv, timeout=timeout).splitlines()
    print(*lines, sep="\n")
    return json.loads(result)


def mesh(**axes: int) -> Mesh:
    """Of the eight devices, in such a process."""
    from jax.experimental import topologies

    return topologies.make_mesh(
        topologies.get_topology_desc("v5e:2x4", "tpu"), tuple(axes.values()), tuple(axes)
    )


def bytes_of(step: Any, state: Any, batch: Any) -> dict[str, int]:
    """What a program takes in such a process as XLA allocates it: of a device (also what is in use at once
    there, without gaps between buffers), and of the host. `step` is sharded, and is called with both.
    """
    lowered = step.lower(sx.abstract_state(step, state, batch), batch)
    with tempfile.TemporaryDirectory() as at:
        how = {"xla_dump_to": at, "xla_dump_hlo_as_text": True}
        found = lowered.compile(compiler_options=how).memory_analysis()
        (assignment,) = Path(at).glob("*.after_optimizations-buffer-assignment.txt")
        (temporaries,) = re.findall(r": size (\d+), preallocated-temp:", assignment.read_text()) or ["0"]
    return {
        "device": found.argument_size_in_bytes + int(temporaries),
        "in use": found.peak_memory_in_bytes - found.host_argument_size_in_bytes,
        "host": found.host_argument_size_in_bytes,
        "temporaries at the host": found.host_temp_size_in_bytes,
    }
