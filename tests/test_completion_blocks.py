"""Blocks of one pattern and one history share a state; what happens to the first need not be computed again."""

import jax.numpy as jnp
import pytest

from shardax.completion.blocks import Block, Pattern, Worklist
from shardax.completion.cells import ALL, Cell, Cells
from shardax.completion.node_classes import NodeClasses
from tests.graphs import graph

pytestmark = pytest.mark.quick

X, NO = ("x",), ()
CELLS = Cells({"x": 4, "y": 2})
SPLIT = CELLS.number(Cell((X, NO)))


def alike(count: int, *shared: int) -> list[Block]:
    """Blocks of tanh, then a sum with what it was of: values 0, 1 and 2, of which other blocks know those
    that are shared.
    """
    kinds, blocks, pattern = NodeClasses(), [], None
    for number in range(count):
        nodes = graph(lambda x: x + jnp.tanh(x), (64, 8)).nodes
        place: dict = {}
        rows = [[place.setdefault(v, len(place)) for v in kinds.of(node)[1]] for node in nodes]
        blanks = [CELLS.blank(2)] * len(place)
        pattern = pattern or Pattern(
            [kinds.of(node)[0] for node in nodes], rows, blanks, [p in shared for p in range(len(place))]
        )
        blocks.append(Block(pattern, [2 * number, 2 * number + 1], list(place), place, CELLS))
    return blocks


def shardings(block: Block) -> list[str]:
    return [str(CELLS.sharding(cell)) for cell in block.live().cells]


def finish(block: Block) -> None:
    while block.head() is not None:
        block.run(ALL, 9, 100)


def test_what_is_told_spreads_inside():
    (block,) = alike(1)
    assert block.head() is None
    block.happens("tell", 0, SPLIT, True)
    assert block.head() == (0, 0)
    finish(block)
    assert shardings(block) == ["P('x', None)"] * 3


def test_what_is_told_for_later_spreads_when_it_is_touched():
    (block,) = alike(1)
    block.happens("tell", 0, SPLIT, False)
    assert block.head() is None
    block.happens("tell", 0, SPLIT, True)
    assert block.head() == (0, 0)


def test_blocks_of_one_history_share_the_state():
    one, two, three = alike(3)
    for block in (one, two):
        block.happens("tell", 0, SPLIT, True)
        finish(block)
    assert one.state is two.state is not three.state
    assert two.work is None  # it was not computed again
    assert shardings(two) == shardings(one)
    assert shardings(three) == ["P(None, None)"] * 3


def test_a_history_of_another_order_is_another():
    one, two = alike(2)
    rows, columns = SPLIT, CELLS.number(Cell((NO, ("y",))))
    for block, order in ((one, (rows, columns)), (two, (columns, rows))):
        for place, cell in enumerate(order):
            block.happens("tell", place, cell, True)
    assert one.state is not two.state


def test_where_each_dim_was_learned():
    (block,) = alike(1)
    block.happens("tell", 2, SPLIT, True)
    finish(block)
    learned = block.live().learned
    assert {place for place, dim in learned} == {0, 1}
    assert {dim for place, dim in learned} == {0}


def test_what_is_held_is_released():
    (block,) = alike(1)
    block.happens("tell", 0, CELLS.number(Cell((X, NO), (), held=True)), True)
    finish(block)
    assert shardings(block) == ["P('x', None)"] * 3  # at the end what is held speaks
    block.happens("release")
    assert not any(CELLS.cells[cell].held for cell in block.live().cells)


def test_what_others_know_is_told_to_them():
    one, two = alike(2, 0, 2)
    bridge, start = one.values[2], one.values[0]
    homes = {bridge: [(one, 2), (two, 0)], start: [(one, 0)], two.values[2]: [(two, 2)]}
    worklist = Worklist([one, two], homes)
    worklist.tell(start, SPLIT)
    worklist.run(ALL)
    assert shardings(one) == shardings(two) == ["P('x', None)"] * 3
    assert one.head() is two.head() is None


def test_a_level_that_is_not_due_yet_waits():
    (block,) = alike(1)
    worklist = Worklist([block], {v: [(block, place)] for v, place in block.place.items()})
    worklist.tell(block.values[0], SPLIT)
    worklist.run(ALL, 0)
    assert shardings(block) == ["P('x', None)", "P(None, None)", "P(None, None)"]
    worklist.run(ALL, 1)
    assert shardings(block) == ["P('x', None)"] * 3
