"""JAX's internals stay in one file, whose docstring accounts for all that is in it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardax import _jax

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for folder in ("shardax", "models", "benchmarks", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
]
INTERNALS = re.compile(
    r"^\s*(from|import) jax\._src|^\s*from jax import .*\b_src\b|\bjax\._src\.|__version_info__", re.M
)


@pytest.mark.parametrize(
    "line",
    ["from jax._src import core", "    import jax._src.core", "from jax import _src", "jax._src.core.Jaxpr"],
)
def test_the_pattern_finds(line):
    assert INTERNALS.search(line)


def test_no_other_file_touches_them():
    mine = {Path(_jax.__file__).resolve(), Path(__file__).resolve()}
    assert len(SOURCES) > 100
    assert [
        str(path) for path in SOURCES if path.resolve() not in mine and INTERNALS.search(path.read_text())
    ] == []


def test_every_entry_has_a_reason_and_their_number_is_right():
    text = Path(_jax.__file__).read_text()
    entries = re.findall(r"^(?:def |class )([a-zA-Z]\w*)|^([a-zA-Z]\w*) = ", text, re.M)
    entries = {a or b for a, b in entries}
    doc = _jax.__doc__ or ""
    assert {name for name in entries if not re.search(rf"\b{name}\b", doc)} == set()
    assert f"{len(entries)} entries" in doc


RAISES = {
    "another library": (lambda: np.testing.assert_equal(1, 2), True),
    "JAX, of its operands": (lambda: jnp.reshape(np.ones(3), (2,)), False),
    "JAX, of a mesh": (lambda: jax.lax.with_sharding_constraint(np.ones(3), P("x")), True),
    "the user's own": (lambda: int("one"), False),
    "the user's own, without a word": (lambda: unwritten(), False),
}


def unwritten():
    raise NotImplementedError


@pytest.mark.parametrize("what", RAISES)
def test_which_errors_another_context_may_not_raise(what):
    f, wanted = RAISES[what]
    with pytest.raises(Exception) as caught:
        jax.eval_shape(lambda: f())
    assert _jax.is_of_context(caught.value) == wanted
