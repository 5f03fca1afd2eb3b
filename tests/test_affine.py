"""Which integers are affine, and that it is only said where nothing wraps."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax.graph.affine import Affine, Affines, Iteration, step_of_counter
from tests.graph_text import graph_of


def iota(*shape, dim=0, dtype="int32"):
    return lax.broadcasted_iota(dtype, shape, dim)


def forms(f, *args) -> list[str]:
    """What the results of a function are."""
    graph = graph_of(f, *args)
    affines = Affines(graph)
    return [str(affines.of(v)) for v in graph.outputs]


ARRAYS = {
    "0 + 1*i1": lambda: iota(3, 4, dim=1),
    "5 + 1*i0": lambda: iota(8) + 5,
    "7 - 1*i0": lambda: lax.rev(iota(8), [0]),
    "2 - 1*i0": lambda: 2 - iota(8),
    "0 - 3*i0": lambda: -iota(8) * 3,
    "1 + 1*i0 + 1*i1": lambda: iota(3, 4) + iota(3, 4, dim=1) + 1,
    "1": lambda: iota(8) - iota(8) + 1,
    "0 + 2*i1": lambda: lax.broadcast_in_dim(iota(8) + iota(8), (3, 8), [1]),
    "0 + 1*i2": lambda: lax.reshape(iota(3, 4, dim=1), (1, 3, 4, 1)),
    "1 + 1*i0": lambda: lax.squeeze(iota(1, 4, dim=1) + 1, [0]),
    "4": lambda: lax.broadcast_in_dim(iota(1) + 4, (1, 5), [0]),
    "3 + 1*i0": lambda: lax.optimization_barrier(jnp.copy(iota(8).astype("int16")) + np.int16(3)),
    "0 + 1*i0": lambda: lax.select(iota(8) < 0, iota(8) + 8, iota(8)),
    "8 - 1*i0": lambda: lax.clamp(0, 8 - iota(8), 8),
}


@pytest.mark.parametrize("form", ARRAYS)
def test_arrays(form):
    assert forms(ARRAYS[form]) == [form]


NOT_AFFINE = {
    "wraps": lambda: iota(8, dtype="int8") + np.int8(124),
    "a smaller dtype": lambda: iota(300).astype("int8"),
    "below zero": lambda: iota(8, dtype="uint8") - np.uint8(1),
    "a float": lambda: iota(8).astype("float32"),
    "a product": lambda: iota(8) * iota(8),
    "merged dims": lambda: lax.reshape(iota(3, 4), (12,)),
    "turned while merged": lambda: lax.reshape(iota(3, 4), (4, 3), (1, 0)),
    "clamped": lambda: lax.clamp(1, iota(8), 8),
    "now this, now that": lambda: lax.select(iota(8) < 4, iota(8) + 8, iota(8)),
}


@pytest.mark.parametrize("name", NOT_AFFINE)
def test_what_is_not_affine(name):
    assert forms(NOT_AFFINE[name]) == ["None"]


def test_arguments_are_unknown():
    assert forms(lambda i: (i, i + 1, i - i), 3) == ["None"] * 3


def counted(trip, length=5, reverse=False, start=3):
    """What is scanned by a body that gets the counter and a row of an iota."""

    def body(i, row):
        return i + 1, trip(i, row)

    return lambda: lax.scan(body, start, iota(length, dtype="int32"), reverse=reverse)


def test_loops():
    """The trip is where what is stacked stands, from whichever end the scan begins."""
    assert forms(counted(lambda i, row: (i, row, 2 * i - row))) == [
        "8",
        "3 + 1*i0",
        "0 + 1*i0",
        "6 + 1*i0",
    ]
    assert forms(counted(lambda i, row: (i, row, i + row), reverse=True)) == [
        "8",
        "7 - 1*i0",
        "0 + 1*i0",
        "7",
    ]


def test_vectors_are_stacked():
    assert forms(counted(lambda i, row: jnp.arange(4, dtype="int32") + i))[1] == "3 + 1*i0 + 1*i1"


def test_a_counter_that_wraps():
    assert forms(counted(lambda i, row: i, length=127, start=np.int32(2**31 - 100))) == ["None"] * 2


def test_inner_loops_know_what_is_around_them():
    """An inner trip, an outer one, and a carry that nothing changes."""

    def trip(i, _):
        def body(c, _):
            j, same = c
            return (j - 1, same), (j, same, i)

        (_, same), stacks = lax.scan(body, (i, i + 1), length=3)
        return i + 1, (same, *stacks)

    graph = graph_of(lambda: lax.scan(trip, 0, length=5))
    assert [str(Affines(graph).of(v)) for v in graph.outputs[1:]] == [
        "1 + 1*i0",
        "0 + 1*i0 - 1*i1",
        "1 + 1*i0",
        "0 + 1*i0",
    ]


def test_trips_of_different_loops_are_different():
    graph = graph_of(
        lambda: lax.scan(lambda i, _: (i + 1, lax.scan(lambda j, _: (j + 1, i), 0, length=2)), 0, length=3)
    )
    affines = Affines(graph)
    outer, inner = (
        affines.iterations[node]
        for node in (graph.nodes[0], *graph.nodes[0].bodies[0].nodes)
        if node.name == "scan"
    )
    assert (outer.length, inner.length) == (3, 2)
    assert Affine(0, {outer: 1}) != Affine(0, {inner: 1})


def test_branches():
    """What all branches give is known."""

    def f(p):
        i = iota(8)
        return lax.cond(p, lambda: (i, i, i + 1), lambda: (i, i + 1, i + 1))

    assert forms(f, True) == ["0 + 1*i0", "None", "1 + 1*i0"]


def test_a_body_by_itself_knows_what_its_inputs_are():
    def f(x):
        rows = iota(8)
        return lax.scan(lambda x, _: (x + rows, rows + 1), x, length=2)

    graph = graph_of(f, np.zeros(8, "int32"))
    outer, scan = Affines(graph), graph.nodes[-1]
    (body,) = scan.bodies
    assert body in outer.graphs
    assert str(Affines(body, outer).of(body.outputs[1])) == "1 + 1*i0"
    assert Affines(body).of(body.outputs[1]) is None


def test_numbers():
    """The smallest and the largest, from one end or the other."""
    trip = Iteration(5)
    form = Affine(2, {0: 3, trip: -1})
    assert form.range((4,)) == range(-2, 12)
    assert form.range((0,)) == range(0)
    assert str(form.reversed({trip: 5})) == "-2 + 3*i0 + 1*t"
    assert form - form == Affine(0) and (form * 0).number == 0 and form.number is None


def test_steps_of_counters():
    def steps(f):
        graph = graph_of(f, np.int32(0))
        return step_of_counter(graph.inputs[0], graph.nodes[-1])

    assert [steps(f) for f in (lambda i: i + 2, lambda i: 3 + i, lambda i: i - 2)] == [2, 3, -2]
    assert [steps(f) for f in (lambda i: 2 - i, lambda i: i + i, lambda i: i * 2)] == [None] * 3
