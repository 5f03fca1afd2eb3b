"""The states that the main job saves: resumed on other meshes, refused for another run, whole after a
kill.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from models import train
from models.options import Options, parse
from models.report import largest_difference
from models.text import Text
from tests import kill

# flax and optax mix weakly typed floats with integer counts
pytestmark = [pytest.mark.promotes_ranks, pytest.mark.mixed_dtypes]

CORPUS = Text(np.arange(5000, dtype=np.uint16) % 251, np.arange(500, dtype=np.uint16) % 251)


class Stopped(Exception):
    pass


def options(folder, *argv: str) -> Options:
    tiny = ["--size", "tiny", "--batch", "8", "--seq", "32", "--steps", "12", "--save-every", "2"]
    return parse([*tiny, "--out", str(folder / "loss.png"), "--checkpoints", str(folder / "kept"), *argv])


def losses(options: Options, stop_at: int | None = None):
    """The losses of a run; `stop_at`: the step that does not come to its end."""
    trainer = train.make_trainer("shardax", train.make_job(options), train.make_mesh(options.mesh), options)
    steps = iter(range(stop_at or options.steps))

    def step(state, batch):
        if next(steps, None) is None:
            raise Stopped
        return trainer.step(state, batch)

    with train.checkpoints(options) as kept:
        return train.run(replace(trainer, step=step), options, CORPUS, kept)[1]


@pytest.mark.once
@pytest.mark.parametrize(
    "before, after",
    [
        (["--zero", "3"], ["--zero", "1", "--offload", "optimizer"]),
        pytest.param(["--zero", "3", "--offload", "both"], ["--zero", "1"], marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_where_it_stopped_on_another_mesh(tmp_path, before, after):
    """And in another stage of ZeRO, with state at the host and without."""
    whole = losses(replace(options(tmp_path), checkpoints=None))
    with pytest.raises(Stopped):
        losses(options(tmp_path, "--mesh", "data=4,model=2", *before), stop_at=5)
    assert kill.newest(tmp_path / "kept") in (2, 4)
    curve = losses(options(tmp_path, "--mesh", "data=1,fsdp=2,model=2", *after))  # on half of the devices
    assert len(curve) == len(whole) == 12
    assert largest_difference(curve, whole) < 1e-5
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["10", "12"]
    assert kill.saved_log(tmp_path / "kept")["losses"] == curve


@pytest.mark.once
def test_another_run_is_refused(tmp_path):
    losses(options(tmp_path, "--steps", "2"))
    with pytest.raises(SystemExit) as error:
        losses(options(tmp_path, "--steps", "2", "--rate", "0.5"))
    assert error.value.code == (
        f"train: --checkpoints {tmp_path / 'kept'} holds a run with --rate 0.001, and this one has 0.5: "
        "name another folder, or train on as it was begun"
    )


@pytest.mark.once
def test_what_is_saved_is_the_state_of_that_step(tmp_path):
    """The next step is given the buffers of the state while they are still being written."""
    some = options(tmp_path, "--steps", "4", "--save-every", "1")
    job = train.make_job(some)
    trainer = train.make_trainer("shardax", job, train.make_mesh(some.mesh), some)
    states = []

    def step(state, batch):
        states.append(jax.tree.map(np.array, state))
        return trainer.step(state, batch)

    with train.checkpoints(some) as kept:
        train.run(replace(trainer, step=step), some, CORPUS, kept)
    with train.checkpoints(some) as kept:
        jax.tree.map(
            np.testing.assert_array_equal, jax.tree.map(np.array, kept.at(3, trainer.state)), states[3]
        )


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["--partitioner", "both"],
            "train: --checkpoints keeps the states of one partitioner: name it, --partitioner shardax or xla",
        ),
        (["--checkpoints", "README.md"], "train: --checkpoints README.md is a file: name a folder"),
        (["--save-every", "0"], "train: argument --save-every: '0' is not an integer of at least 1"),
    ],
)
def test_bad_options(tmp_path, argv, message):
    with pytest.raises(SystemExit) as error:
        options(tmp_path, *argv)
    assert error.value.code == message


@pytest.mark.slow  # `make test-kill` kills it 20 times; of several processes one is killed by default
@pytest.mark.processes
def test_killed_twice(tmp_path):
    *_, last = kill.survive(2, seed=0, folder=tmp_path)
    assert last.startswith("after 2 kills: 120 losses")
