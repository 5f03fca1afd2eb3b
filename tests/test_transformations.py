"""The product of two transformations and shard_jit, and its table in docs/transformations.md."""

from contextlib import nullcontext

import jax
import pytest

from tests.transformations import MESHES, PAGE, REASONS, TRANSFORMS, check, compiled, page


@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_product(outer, inner):
    check(outer, inner)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:custom_lin .* runs replicated")  # before JAX refuses it
@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_product_compiled(outer, inner):
    check(outer, inner, compiled)


def pairs():
    """Each transformation with itself, and with every fourth that follows; the rest is slow."""
    for i, outer in enumerate(TRANSFORMS):
        for j, inner in enumerate(TRANSFORMS):
            marks = [] if (i - j) % 4 == 0 else [pytest.mark.slow]
            yield pytest.param(outer, inner, id=f"{outer}-{inner}", marks=marks)


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:custom_lin .* runs replicated")  # before JAX refuses it
@pytest.mark.parametrize("outer, inner", list(pairs()))
def test_product_on_explicit_axes(outer, inner):
    """Compiled: outside of a jit JAX evaluates no operation that has such a type on one device. What it refuses
    it compiles in parts, for which it wants the mesh in context.
    """
    with jax.set_mesh(MESHES["Explicit"]) if (outer, inner) in REASONS else nullcontext():
        check(outer, inner, compiled, MESHES["Explicit"])


def test_the_table_is_current():
    assert page(PAGE.read_text()) == PAGE.read_text(), "run python -m tests.transformations"
