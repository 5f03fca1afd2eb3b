"""Every example trains, and as on one device."""

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

from examples import run
from models.devices import make_mesh

pytestmark = [pytest.mark.promotes_ranks, pytest.mark.mixed_dtypes]

FOLDER = Path(run.__file__).parent
EXAMPLES = sorted(f.stem for f in FOLDER.glob("*.py") if "main(train)" in f.read_text())
STEPS = 10


@pytest.fixture(autouse=True)
def quick_compilation():
    """XLA's optimizations are not under test here, and most of the time would go there."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("name", EXAMPLES)
def test_trains_as_on_one_device(name):
    train = importlib.import_module(f"examples.{name}").train
    sharded, plain = train(make_mesh(run.MESH), STEPS), train(None, STEPS)
    assert len(plain) == STEPS
    np.testing.assert_allclose(sharded, plain, rtol=1e-5)
    assert np.mean(plain[-3:]) < 0.97 * np.mean(plain[:3])


def test_there_is_one_for_each_library():
    assert EXAMPLES == ["equinox_cnn", "flax_linen", "flax_nnx", "haiku_vae", "raw_jax"]


def test_prints_losses_side_by_side(capsys):
    run.main(lambda mesh, steps: [2.0, 1.0] if mesh is None else [2.0, 1.5], steps=2)
    assert capsys.readouterr().out.splitlines() == [
        "step   data=2,model=4   one device",
        "   0         2.000000     2.000000",
        "   1         1.500000     1.000000",
    ]
