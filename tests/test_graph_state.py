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


TOKENS, KEY, MASK = ((6, 5), "int32"), ((2,), "uint32"), ((8, 4), "bool")


def test_results_that_are_like_data():
    """Predictions have the type of tokens. What is donated tells them from state; without it none does."""
    assert state([W, TOKENS, TOKENS], {W, TOKENS}, [0]) == {0}
    assert state([W, V, X, TOKENS], {W, V, TOKENS}, [0, 1]) == {0, 1}
    assert state([W, TOKENS, TOKENS], {W, TOKENS}, ()) == {0, 1, 2}


def test_where_all_come_back_what_is_donated_tells_which_is_data():
    """A reconstruction has the type of what it is of."""
    assert state([W, X], {W, X}, [0]) == {0}
    assert state([W, X], {W, X}, ()) == {0, 1}


def test_state_beside_what_is_donated():
    """Parameters whose moments alone are donated, a mask of weights, what has other moments, a random key."""
    assert state([W, W, X], {W}, [1]) == {0, 1}
    assert state([W, MASK, X], {W, MASK}, [0]) == {0, 1}
    assert state([W, V, X], {W, V}, [1]) == {0, 1}
    assert state([W, KEY, X], {W, KEY}, [0]) == {0, 1}
    assert state([W, RATE, X], {W, RATE}, [1]) == {0}
