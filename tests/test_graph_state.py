"""Which arguments come back: parameters and moments, no batch."""

import pytest

from shardax.graph.state import state

pytestmark = pytest.mark.quick

W, V, X = ((8, 4), "float32"), ((4,), "float32"), ((6, 8), "float32")
RATE = ((), "float32")


def test_what_has_the_type_of_a_result():
    assert state([W, V, X], {W, V, RATE}, ()) == {0, 1}
    assert state([W, W, X], {W}, ()) == {0, 1}


def test_scalars_are_none():
    assert state([W, RATE], {W, RATE}, ()) == {0}


def test_another_dtype_is_another_type():
    assert state([((8, 4), "bfloat16"), X], {W, X}, ()) == {1}


def test_where_few_come_back_only_what_is_succeeded_counts():
    """An activation passes through a layer, and has the type of the result."""
    assert state([W, V, X], {X}, ()) == set()
    assert state([W, V, X], {X}, [2]) == {2}
