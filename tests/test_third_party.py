"""The page of train steps after other people's: each trains as on one device, and the page tells what it
does.
"""

import jax
import numpy as np
import pytest

from examples.third_party import page

pytestmark = [pytest.mark.promotes_ranks, pytest.mark.mixed_dtypes]

STEPS = 4  # on Explicit axes
QUICK = ("third_party.optax_quickstart", "third_party.flax_mnist")


@pytest.fixture(autouse=True)
def quick_compilation():
    """XLA's optimizations are not under test here, and most of the time would go there."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def cells(name: str) -> list[str]:
    """What the page says of a train step."""
    file = f"examples/{name.replace('.', '/')}.py"
    (line,) = (line for line in page.PAGE.read_text().splitlines() if f"`{file}`" in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def numbers(cell: str) -> list[float]:
    return [float(x) for x in cell.split()]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in page.ROWS]
)
def test_train_step(name):
    found = page.row(name)
    assert len(found.plain) == page.STEPS >= 10
    np.testing.assert_allclose(found.sharded, found.plain, rtol=1e-5)
    assert np.mean(found.plain[-4:]) < np.mean(found.plain[:4])
    _, _, _, sharded, plain, sent = cells(name)
    for shown, losses in ((sharded, found.sharded), (plain, found.plain)):
        np.testing.assert_allclose(numbers(shown), [losses[i] for i in page.SHOWN], rtol=1e-4)
    stated = int(
        sent.replace(",", "")
    )  # programs may come to send less, not more; another JAX traces other programs
    same_jax = f"JAX {jax.__version__}." in page.PAGE.read_text()
    assert 0.5 * stated < found.sent <= (stated if same_jax else 1.2 * stated)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in page.ROWS]
)
def test_train_step_on_explicit_axes(name):
    """As on Auto axes; where JAX gives the step no types, completion decides as there."""
    step, mesh = page.example(name), jax.make_mesh(tuple(page.MESH.values()), tuple(page.MESH))
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
    sharded, auto = (step.train(m, STEPS) for m in (mesh, page.make_mesh(page.MESH)))
    np.testing.assert_allclose(sharded, auto, rtol=1e-6)
    np.testing.assert_allclose(sharded[0], step.train(None, 1)[0], rtol=1e-6)
    sent, on_auto = (step.plan(m).comm_bytes for m in (mesh, page.make_mesh(page.MESH)))
    assert sent <= 1.05 * on_auto


def test_page_has_ten_of_them():
    assert len(page.ROWS) == 10
    lines = [line for line in page.PAGE.read_text().splitlines() if line.startswith("| [")]
    assert [line.split("](")[0] for line in lines] == [f"| [{what}" for what, _, _ in page.ROWS.values()]
    assert page.PAGE.read_text().startswith(page.HEAD)


def test_only_the_decorator_is_other():
    """The step that runs on one device is the one that runs on the mesh."""
    for name in page.ROWS:
        step = page.example(name)
        if isinstance(step, page.TrainStep):
            mesh = page.make_mesh(page.MESH)
            assert step.on(None).__wrapped__ is step.on(mesh).__wrapped__ is step.step
