"""Bodies that have a row of an array where they had the array."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax.graph.graph import Graph
from shardax.graph.indices import Line, Place
from shardax.rewrites.narrowing import Narrowing
from tests.loop_bodies import loop_of, row, with_row

Y = np.zeros((8, 2), "float32")
AT_INDEX = Place(0, Line(0))


def narrowed(trip, place=AT_INDEX, length=8) -> str | None:
    """A body that carries an array, with a row of it in its place; None where it needs the array."""
    scan, index = loop_of(lambda i, y: [trip(i, y)], Y, length=length)
    (body,) = scan.bodies
    narrowing = Narrowing(index, place, body.inputs[1].aval)
    start = narrowing.new_row()
    narrowing.add(body.inputs[1], start, "y")
    nodes = narrowing.run(body.nodes)
    if nodes is None or narrowing.background(body.outputs[1]) != "y":
        return None
    rows = Graph([body.inputs[0], start], nodes, [narrowing.row(body.outputs[1])])
    return "\n".join(line for line in str(rows).split("\n") if "= add a 1" not in line)


def test_what_is_written_is_the_row():
    assert (
        narrowed(lambda i, y: with_row(y, jnp.sin(row(y, i)), i))
        == """\
(a:i32[] b:f32[1,2])
d:f32[1,2] = dynamic_slice b 0 0
e:f32[1,2] = sin d
-> e"""
    )


def test_a_part_of_a_row():
    def trip(i, y):
        return lax.dynamic_update_slice(y, jnp.ones((1, 1)), (i, 1), allow_negative_indices=False)

    assert (
        narrowed(trip)
        == """\
(a:i32[] b:f32[1,2])
d:f32[1,1] = broadcast_in_dim 1.0
e:f32[1,2] = dynamic_update_slice b d 0 1
-> e"""
    )


def test_branches():
    """One writes the row, the other leaves it."""

    def trip(i, y):
        return lax.cond(i > 3, lambda y: with_row(y, -row(y, i), i), lambda y: y, y)

    assert (
        narrowed(trip)
        == """\
(a:i32[] b:f32[1,2])
d:bool[] = gt a 3
e:i32[] = convert_element_type d
f:f32[1,2] = cond e a b
    (g:i32[] h:f32[1,2])
    -> h
    (i:i32[] j:f32[1,2])
    k:f32[1,2] = dynamic_slice j 0 0
    l:f32[1,2] = neg k
    -> l
-> f"""
    )


def test_an_inner_loop_carries_the_row():
    def trip(i, y):
        return lax.fori_loop(0, 3, lambda j, y: with_row(y, 2 * row(y, i), i), y)

    lines = (narrowed(trip) or "").split("\n")
    assert lines[0] == "(a:i32[] b:f32[1,2])" and not [line for line in lines if "[8,2]" in line]


def test_what_is_zero_elsewhere_is_added():
    def trip(i, y):
        return y + with_row(jnp.zeros_like(y), row(y, i), i)

    lines = (narrowed(trip) or "").split("\n")
    assert "= add b " in lines[-2] and not [line for line in lines if "[8,2] = add" in line]


NEEDS_THE_ARRAY = {
    "another row": lambda i, y: with_row(y, row(y, 0), i),
    "all of it": lambda i, y: with_row(y, y.sum(0, keepdims=True), i),
    "all of it changes": lambda i, y: jnp.sin(with_row(y, row(y, i), i)),
    "at two places": lambda i, y: with_row(with_row(y, row(y, i), i), row(y, i), i + 1),
    "one branch makes another": lambda i, y: lax.cond(i > 3, lambda y: y, jnp.cos, y),
    "a condition reads it": lambda i, y: lax.while_loop(
        lambda y: y.sum() > 1, lambda y: with_row(y, row(y, i), i), y
    ),
}


@pytest.mark.parametrize("name", NEEDS_THE_ARRAY)
def test_what_needs_the_array(name):
    assert narrowed(NEEDS_THE_ARRAY[name]) is None


def test_another_place():
    """Row i + 1, and not past the end."""
    trip = lambda i, y: with_row(y, 2 * row(y, i + 1), i + 1)  # noqa: E731
    assert narrowed(trip, Place(0, Line(1)), length=7) is not None
    assert narrowed(trip, Place(0, Line(1)), length=8) is None
    assert narrowed(trip, AT_INDEX, length=7) is None
