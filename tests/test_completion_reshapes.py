"""Which axes have to be cut in two, because a reshape or an annotation splits a dim in the middle of one."""

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardax.completion.complete import complete
from shardax.completion.reshapes import split_inside
from tests.graphs import auto_mesh, graph

pytestmark = pytest.mark.quick


def cuts(f, shape, *specs, **sizes) -> list[tuple[str, int]]:
    """The axes that are cut, each with the size of its major part: f is given annotations by their specs."""
    mesh = auto_mesh(**sizes)

    def noted(x, spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    program = graph(lambda x: f(x, *(lambda x, spec=spec: noted(x, spec) for spec in specs)), shape)
    return list(split_inside(program, complete(program, [None], sizes)))


def heads(x, before):
    return before(x).reshape(8, 16, 4)


def test_heads_take_a_part_of_the_axis():
    assert set(cuts(heads, (8, 64), P(None, "x"), x=32)) == {("x", 16)}


def test_an_axis_that_the_heads_hold_is_not_cut():
    assert cuts(heads, (8, 64), P(None, "x"), x=16) == []
    assert cuts(heads, (8, 64), P(None, "x"), x=8) == []


def test_the_part_is_the_common_divisor():
    assert set(cuts(lambda x, before: before(x).reshape(12, 8), (96,), P("x"), x=8)) == {("x", 4)}


def test_the_second_axis_is_cut_where_the_first_splits_a_part_of_the_heads():
    assert set(cuts(heads, (8, 64), P(None, ("y", "x")), y=4, x=8)) == {("x", 4)}


def test_nothing_is_in_common():
    assert cuts(lambda x, before: before(x).reshape(5, 64), (320,), P("x"), x=8) == []


def test_a_result_that_asks_for_the_whole_dim_needs_no_cut():
    whole = lambda x, before, after: after(before(x).reshape(8, 16, 4))  # noqa: E731
    assert cuts(whole, (8, 64), P(None, "x"), P(None, None, None), x=32) == []


def test_more_devices_than_heads():
    assert cuts(lambda x, note: note(x), (4, 8), P("x"), x=8) == [("x", 4)]
    assert cuts(lambda x, note: note(x), (4, 8), P(("y", "x")), y=2, x=8) == [("x", 2)]


def test_rows_that_the_devices_do_not_share_evenly_are_padded():
    assert cuts(lambda x, note: note(x), (3, 8), P("x"), x=8) == []
    assert cuts(lambda x, note: note(x), (1, 8), P("x"), x=8) == []
    assert cuts(lambda x, note: note(x), (12, 8), P("x"), x=8) == []
