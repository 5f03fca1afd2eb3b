"""The product of two transformations and shard_jit, and its table in docs/transformations.md."""

import pytest

from tests.transformations import PAGE, TRANSFORMS, check, compiled, page


@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_product(outer, inner):
    check(outer, inner)


@pytest.mark.slow
@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_product_compiled(outer, inner):
    check(outer, inner, compiled)


def test_the_table_is_current():
    assert page(PAGE.read_text()) == PAGE.read_text(), "run python -m tests.transformations"
