"""The main job as several processes: the same losses as one, and an end, not a hang, where one of them
fails.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from models import launch
from tests import kill

pytestmark = pytest.mark.processes

TINY = ["--size", "tiny", "--batch", "10", "--seq", "32", "--steps", "20"]
BOUND = 40  # seconds after a peer's death: ten without a sign of life, ten for the end, on a busy machine


def start(count: int, folder: Path, *argv: str) -> list[subprocess.Popen]:
    out = ["--out", str(folder / "loss.png")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return launch.start(count, [*TINY, *out, *argv], **pipes)


def printed(processes: list[subprocess.Popen]) -> str:
    """What the first one printed; all must have ended well."""
    texts = [process.communicate() for process in processes]
    assert [p.returncode for p in processes] == [0] * len(processes), "\n".join(
        error[-2000:] for _, error in texts
    )
    return texts[0][0]


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+/20  loss ([\d.]+)", text)]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_do_not_depend_on_the_processes(tmp_path, count):
    """10 rows over 4 devices rest otherwise than wanted: a process holds parts of rows."""
    alone = printed(start(1, tmp_path))
    assert len(losses(alone)) == 11
    text = printed(start(count, tmp_path))
    assert f"8 cpu devices of {count} processes" in text
    np.testing.assert_allclose(losses(text), losses(alone), rtol=1e-4)
    assert re.findall(r"held-out loss: (\S+)", text) and "plan of the train step" in text


def test_a_killed_peer_ends_the_others_and_the_restart_resumes(tmp_path):
    saving = ["--checkpoints", str(tmp_path / "kept"), "--save-every", "5"]
    processes = start(2, tmp_path, *saving)
    assert processes[0].stdout is not None
    for line in processes[0].stdout:
        if "step 12/" in line:
            break
    processes[1].kill()
    killed = time.monotonic()
    for process in processes:
        process.communicate(timeout=BOUND)
    assert processes[0].returncode != 0 and time.monotonic() - killed < BOUND
    saved = kill.newest(tmp_path / "kept")
    assert saved in (5, 10, 15)
    again = printed(start(2, tmp_path, *saving))
    assert f"goes on after step {saved}" in again and "step 20/20" in again
    assert len(kill.saved_log(tmp_path / "kept")["losses"]) == 20


WORKER = """
import sys
import jax, numpy as np
address, me, rate, rows, stop = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
jax.distributed.initialize(address, 2, me, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10)
import shardax as sx
from shardax.transform import processes
from jax.sharding import AxisType, PartitionSpec as P
if stop == "absent":
    processes.PATIENCE = 3
mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
step = sx.shard_jit(lambda w, x: w - rate * (x.T @ x @ w), mesh=mesh, in_shardings=(P("model"), P("data")))
if not (stop == "absent" and me):
    step(np.ones((6, 3), np.float32), np.ones((rows, 6), np.float32)).block_until_ready()
print("came to the end", flush=True)
"""


# Programs of some of three processes, between those of all. The last program of all is not the same on the
# third.
SOME = """
import sys
import jax, numpy as np
address, me = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 3, me, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10)
import shardax as sx
from shardax.transform import processes
from jax.sharding import AxisType, PartitionSpec as P
processes.PATIENCE = 20
def total(*members, rate=1.0):
    if me in members:
        devices = [d for d in jax.devices() if d.process_index in members]
        mesh = jax.make_mesh((len(devices),), ("x",), (AxisType.Auto,), devices=devices)
        program = sx.shard_jit(lambda x: rate * (x * len(members)).sum(), mesh=mesh, in_shardings=P("x"))
        assert program(np.arange(5, dtype=np.float32)) == rate * 10 * len(members)
for members in [(0, 1), (0, 1), (0, 1, 2), (1, 2), (0,), (2,), (0, 2), (0, 1, 2), (1,), (0, 1)]:
    total(*members)
print("came so far", flush=True)
total(0, 1, 2, rate=2.0 if me == 2 else 3.0)
print("came to the end", flush=True)
"""


# A pipelined step on packed weights, the stages on different processes; on each, the same on one device.
PIPELINED = """
import sys
import jax, jax.numpy as jnp, numpy as np
address, me = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, me, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10)
import shardax as sx
from jax.sharding import AxisType, PartitionSpec as P
def loss(layers, x):
    for w in layers:
        x = jnp.tanh(x @ w)
    return (x ** 2).mean()
def step(grad, layers, x):
    value, grads = grad(layers, x)
    return jax.tree.map(lambda w, g: w - 0.5 * g, layers, grads), value
layers = [np.random.RandomState(i).randn(6, 6).astype(np.float32) for i in range(4)]
x = np.random.RandomState(9).randn(8, 6).astype(np.float32)
mesh = jax.make_mesh((2, 2), ("stage", "data"), (AxisType.Auto,) * 2)
grad = sx.pipeline.value_and_grad(loss, microbatches=2)
packing = sx.pipeline.packing(grad, layers, x, mesh=mesh)
packed = sx.shard_jit(lambda w: sx.pipeline.pack(w, packing), mesh=mesh, out_shardings=packing.specs)(layers)
ours = sx.shard_jit(lambda w, x: step(grad, w, x), mesh=mesh, in_shardings=(packing.specs, P("data")), donate_argnums=0)
theirs = jax.jit(lambda w, x: step(jax.value_and_grad(loss), w, x))
for _ in range(2):
    packed, value = ours(packed, x)
    layers, wanted = theirs(layers, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
mine = {d.process_index for d in packed.arrays[0].sharding.device_set}
assert mine == {0, 1} and all(s.data.shape[0] == 1 for s in packed.arrays[0].addressable_shards)
print("came to the end", flush=True)
"""


def disagreeing(rates=(0.1, 0.1), rows=(5, 5), stop: str = "no") -> list[str]:
    """The errors of two processes that run the same function with other constants, or on other shapes."""
    texts = ended(WORKER, 4, *((str(rates[i]), str(rows[i]), stop) for i in (0, 1)))
    return [error if "came to the end" not in text else "" for text, error in texts]


def ended(program: str, devices: int, *arguments: tuple[str, ...]) -> list[tuple[str, str]]:
    """What processes of this program, with these arguments and so many devices each, printed: their output
    and their errors.
    """
    address = f"127.0.0.1:{launch.free_port()}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, address, str(i), *given], env=launch.environment(devices), **pipes
        )
        for i, given in enumerate(arguments)
    ]
    return [process.communicate(timeout=2 * BOUND) for process in processes]


def test_processes_that_agree():
    assert disagreeing() == ["", ""]


def test_stages_on_two_processes():
    for text, error in ended(PIPELINED, 2, (), ()):
        assert "came to the end" in text, error[-3000:]


def test_another_constant_is_an_error_on_both():
    for error in disagreeing(rates=(0.1, 0.2)):
        assert (
            "ValueError: processes disagree on the program: process 1 has the program at <string>:" in error
        )
        assert "process 0 has '" in error and "mul 0.1" in error
        assert (
            error.count("Every process must call the same functions on the same shapes, in the same order")
            >= 1
        )


def test_other_shapes_are_an_error_on_both():
    for error in disagreeing(rows=(5, 7)):
        assert "f32[7,6] in P(" in error and "process 0 has f32[6,3] in " in error


def test_a_process_that_stays_away_is_named():
    first, _ = disagreeing(stop="absent")
    assert "ValueError: process 1 did not come to the program at <string>:" in first and "within 3 s" in first


def test_programs_of_some_processes_do_not_put_others_out_of_step():
    for text, error in ended(SOME, 1, (), (), ()):
        assert "came so far" in text and "came to the end" not in text, error
        assert (
            "ValueError: processes disagree on the program: process 2 has the program at <string>:" in error
        )
