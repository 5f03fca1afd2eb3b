"""One step of completion: what an equation teaches its results, or its operands."""

import jax.numpy as jnp
import pytest
from jax import lax

from shardax.completion.cells import ALL, DATA, SPREAD_STATE, Cell, Cells
from shardax.completion.edges import edges_of
from shardax.completion.node_classes import edge_patterns
from shardax.sharding import Sharding
from tests.graphs import graph

pytestmark = pytest.mark.quick

SIZES = {"x": 4, "y": 2}


def tie_of(f, *shapes):
    (node,) = graph(f, *shapes).nodes
    (edge,) = edge_patterns(edges_of(node), node.inputs + node.outputs)
    return edge


class Step:
    """A step whose cells are written as tuples of axes, one for each value; a dict says more."""

    def __init__(self, f, *shapes):
        self.edge, self.cells = tie_of(f, *shapes), Cells(SIZES)

    def __call__(self, *given, forward=True, phase=ALL, twins=None):
        known = [cell if isinstance(cell, Cell) else Cell(cell) for cell in given]
        places = tuple(range(len(given))) if twins is None else twins
        lessons = self.cells.step(self.edge, forward, phase, places, tuple(map(self.cells.number, known)))
        return {at: str(self.cells.sharding(cell)) for at, cell, _ in lessons}


X, Y, XY, NO = ("x",), ("y",), ("x", "y"), ()
PRODUCT = jnp.matmul, (64, 8), (8, 16)


def test_a_product_has_the_rows_of_one_and_the_columns_of_the_other():
    assert Step(*PRODUCT)((X, NO), (NO, Y), (NO, NO)) == {2: "P('x', 'y')"}


def test_a_contracted_dim_is_split_on_both_sides():
    step = Step(*PRODUCT)
    assert step((NO, X), (NO, NO), (NO, NO), forward=False) == {1: "P('x', None)"}
    assert step((NO, X), (NO, NO), (NO, NO)) == {}


def test_of_a_conflict_the_dearest_to_move_keeps_its_axes():
    """The left operand has 512 elements, the right one 128: both want x for the result."""
    assert Step(*PRODUCT)((X, NO), (NO, X), (NO, NO)) == {2: "P('x', None)"}
    assert Step(jnp.matmul, (8, 16), (16, 64))((X, NO), (NO, X), (NO, NO)) == {2: "P(None, 'x')"}


def test_axes_are_added_to_those_that_are_there_and_never_taken():
    step = Step(jnp.sin, (64,))
    assert step((XY,), (X,)) == {1: "P(('x', 'y'))"}
    assert step((X,), (XY,)) == {}
    assert step((Y,), (XY,)) == {}


def test_an_axis_splits_one_dim_only():
    assert Step(jnp.sin, (64, 8))((X, NO), (NO, X)) == {}


def test_a_dim_of_fewer_rows_than_shards_is_not_split_unasked():
    taken_apart = Step(lambda x: x.reshape(8, 2), (16,))
    assert taken_apart((("y", "x"),), (NO, NO)) == {1: "P(('y', 'x'), None)"}
    assert Step(lambda x: lax.slice(x, (0,), (2,)), (16,))((X,), (NO,)) == {}


def test_of_a_compound_dim_the_minor_factor_counts_where_the_major_is_split_to_single_positions():
    merged = Step(lambda x: x.reshape(16), (2, 8))
    assert merged((Y, X), (NO,)) == {1: "P(('y', 'x'))"}
    assert merged((NO, X), (NO,)) == {}


def test_what_an_annotation_closes_learns_nothing():
    closed = Cell((NO, NO), (True, False))
    assert Step(jnp.sin, (64, 8))((X, Y), closed) == {1: "P(None, 'y')"}


def test_what_is_held_neither_tells_nor_learns_until_the_end():
    held, step = Cell((X,), (), held=True), Step(jnp.sin, (64,))
    assert [step(held, (NO,), phase=phase) for phase in (DATA, ALL)] == [{}, {1: "P('x')"}]
    assert step((X,), Cell((NO,), (), held=True), phase=DATA) == {}


def test_what_only_state_reached_is_held():
    step = Step(jnp.sin, (64,))
    ((at, number, learned),) = step.cells.step(
        step.edge, True, SPREAD_STATE, (0, 1), tuple(map(step.cells.number, (Cell((X,)), Cell((NO,)))))
    )
    assert (at, learned, step.cells.cells[number]) == (1, ((0, 0),), Cell((X,), (), held=True))
    assert step.cells.cells[step.cells.released(number)] == Cell((X,))


def test_one_value_at_two_positions_learns_once():
    step = Step(jnp.add, (64,), (64,))
    assert step((NO,), (NO,), (X,), forward=False, twins=(0, 0, 2)) == {0: "P('x')"}


def test_equal_cells_have_one_number_and_equal_steps_are_taken_once():
    cells = Cells(SIZES)
    assert cells.blank(2) == cells.number(Cell((NO, NO))) != cells.blank(1)
    assert cells.sharding(cells.number(Cell((X, NO)))) == Sharding((X, NO))
    edge, known = tie_of(jnp.sin, (64,)), (cells.number(Cell((X,))), cells.blank(1))
    assert cells.step(edge, True, ALL, (0, 1), known) is cells.step(edge, True, ALL, (0, 1), known)


def test_literals_never_learn():
    step = Step(jnp.sin, (64,))
    literal = step.cells.cells[0]
    assert step((X,), literal) == {}
    assert step.cells.released(0) == 0
