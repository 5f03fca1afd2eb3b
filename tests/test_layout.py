"""Layouts: equal ones are one object, whoever makes them."""

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from shardax.sharding import Layout, Owing, Sharding, layout_of

pytestmark = pytest.mark.quick
DIMS = (("x",), ())


def test_equal_ones_are_one_object():
    layout = Layout(Sharding(DIMS), (8, 3))
    assert Layout(Sharding(DIMS), (8, 3), ()) is layout_of(DIMS, (8, 3)) is layout
    others = [
        Layout(Sharding(DIMS), (12, 3)),
        Layout(Sharding((("y",), ())), (8, 3)),
        Layout(Sharding(DIMS), (8, 3), (("y", "sum"),)),
        Layout(Sharding(DIMS, Owing(("y",))), (8, 3)),
    ]
    assert len({layout, *others}) == 5
    assert others[2].settled() is layout


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_the_same_object(copied):
    layout = Layout(Sharding(DIMS), (8, 3), (("y", "max"),))
    assert copied(layout) is layout


def test_threads_make_the_same_object():
    threads, rounds = 4, 300
    barrier = Barrier(threads)

    def make(_):
        found = []
        for size in range(rounds):
            barrier.wait()
            found.append(Layout(Sharding(DIMS), (10_000 + size, 3)))
        return found

    with ThreadPoolExecutor(threads) as pool:
        for same in zip(*pool.map(make, range(threads)), strict=True):
            assert len(set(map(id, same))) == 1


def test_what_nobody_has_any_more_is_made_anew():
    kept = Layout(Sharding(DIMS), (77, 3))
    Layout(Sharding(DIMS), (78, 3))
    gc.collect()
    assert str(Layout(Sharding(DIMS), (78, 3))) == "P('x', None)@[78, 3]"
    assert Layout(Sharding(DIMS), (77, 3)) is kept


def test_an_axis_splits_one_dim():
    with pytest.raises(ValueError, match="used twice"):
        Layout(Sharding((("x",), ("x",))), (8, 8))
