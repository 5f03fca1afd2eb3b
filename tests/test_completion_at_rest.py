"""What takes the sharding of a state that rests otherwise than it is annotated: its elementwise neighbourhood."""

import jax.numpy as jnp
import pytest

from shardax.completion.at_rest import successors, updated_at_rest
from shardax.completion.complete import complete
from shardax.graph.annotations import Annotation
from shardax.sharding import Sharding
from tests.graphs import graph, names

pytestmark = pytest.mark.quick

REST = Sharding(((), ("x",)))


def updated(f, *shapes, moved=1, fixed=()) -> set[str]:
    """The values, by name, that are updated at rest where the first result or results are `moved`."""
    program = graph(f, *shapes)
    blocks = complete(program, [None] * len(program.inputs), {"x": 4}).blocks
    home = {v: block for block in blocks for v in block.values}
    called = names(program)
    closed = {v for v, name in called.items() if name in fixed}
    taken = updated_at_rest([(v, REST) for v in program.outputs[:moved]], blocks, home, closed)
    assert set(taken.values()) <= {REST}
    return {called[v] for v in taken}


def test_the_elementwise_neighbourhood():
    step = lambda w, m, g: (w - jnp.sin(m + g), m + g)  # noqa: E731
    assert updated(step, *[(257, 64)] * 3) == {"a", "b", "c", "add", "sin", "sub"}


def test_up_to_what_annotations_fix():
    step = lambda w, m, g: (w - jnp.sin(m * g), m)  # noqa: E731
    assert updated(step, *[(257, 64)] * 3, fixed={"mul"}) == {"a", "sub", "sin"}


@pytest.mark.promotes_ranks
def test_not_across_products_transposes_or_sums():
    step = lambda w, x: (w - x.T @ x - w.T.T.sum(0), w)  # noqa: E731
    assert updated(step, (64, 64), (8, 64)) == {"a", "dot_general", "sub"}


def test_nothing_moves_where_all_rests_as_annotated():
    assert updated(lambda w, g: w - g, (64, 64), (64, 64), moved=0) == set()


def test_alike_layers_each_for_itself():
    def step(weights, grads):
        return [w - jnp.sin(g) * jnp.cos(w) for w, g in zip(weights, grads, strict=True)]

    program = graph(lambda *args: step(args[:6], args[6:]), *[(257, 64)] * 12)
    blocks = complete(program, [None] * 12, {"x": 4}).blocks
    home = {v: block for block in blocks for v in block.values}
    moved = [(v, REST) for v in program.outputs[:2]]
    taken = set(updated_at_rest(moved, blocks, home, set()))
    expected = {v for i in (0, 1) for v in (program.inputs[i], program.inputs[6 + i], program.outputs[i])}
    assert expected <= taken
    assert not taken & {v for i in range(2, 6) for v in (program.inputs[i], program.outputs[i])}


def test_the_successor_of_an_argument():
    program = graph(lambda w, g: (w - g, jnp.sin(g)), (4,), (4,))
    first, second = program.nodes
    notes = [(first, Annotation((None,), "", "implied", like=0)), (second, Annotation((None,), "", "inside"))]
    assert successors(program, notes) == [(program.inputs[0], first.outputs[0])]
