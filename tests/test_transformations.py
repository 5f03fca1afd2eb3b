"""The product of two transformations and shard_jit, and its table in docs/transformations.md."""

import pytest

from tests.transformations import MESHES, PAGE, TRANSFORMS, check, compiled, page

EITHER = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)


@EITHER
@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_product(outer, inner, mesh):
    check(outer, inner, mesh=mesh)


@pytest.mark.slow
@EITHER
@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_product_compiled(outer, inner, mesh):
    check(outer, inner, compiled, mesh)


def test_the_table_is_current():
    assert page(PAGE.read_text()) == PAGE.read_text(), "run python -m tests.transformations"
