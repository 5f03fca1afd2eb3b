"""Which integers in the body of a scan are its index, and which rows are read and written by it."""

import jax
import numpy as np
import pytest
from jax import lax

from shardax.graph.graph import Value
from shardax.graph.indices import (
    Index,
    Line,
    Place,
    holds,
    line_of_stack,
    number_behind,
    step_of_counter,
    whole_number,
)
from shardax.graph.operands import carries_of
from tests.graphs import graph, the

pytestmark = pytest.mark.quick

TRIPS = 5


@pytest.mark.parametrize("line", [Line(3), Line(3, -1)])
def test_the_numbers_of_a_line(line):
    numbers = [line.first + t * line.step for t in range(TRIPS)]
    assert list(line.within(TRIPS)) == sorted(numbers)
    turned = line.turned(TRIPS)
    assert [turned.first + t * turned.step for t in range(TRIPS)] == numbers[::-1]


def literal(number, dtype="int32") -> Value:
    return Value(jax.core.ShapedArray(np.shape(number), np.dtype(dtype)), np.asarray(number, dtype), True)


def test_whole_numbers():
    numbers = [literal(3), literal(-3, "int8"), literal(3.0, "float32"), literal([3])]
    assert [*map(whole_number, numbers), whole_number(Value(literal(3).aval))] == [3, -3, None, None, None]


def makers(program):
    return {v: node for node in program.walk() for v in node.outputs}


def test_a_number_behind_casts():
    node = the("convert_element_type", graph(lambda x: x.astype("int8"), ()))
    node.inputs = [literal(7)]
    assert number_behind(node.outputs[0], {node.outputs[0]: node}) == 7
    assert number_behind(node.outputs[0], {}) is None


@pytest.mark.parametrize(
    "f, step",
    [
        (lambda i: i + 2, 2),
        (lambda i: 2 + i, 2),
        (lambda i: i - 1, -1),
        (lambda i: 1 - i, None),
        (lambda i: i * 2, None),
        (lambda i: i + i, None),
    ],
)
def test_steps_of_counters(f, step):
    program = graph(f, (), dtype="int32")
    (node,) = program.nodes
    assert step_of_counter(program.inputs[0], node) == step
    assert step_of_counter(literal(0), node) is None


@pytest.mark.parametrize(
    "f, line",
    [
        (lambda: lax.iota("int32", TRIPS), Line(0)),
        (lambda: lax.rev(lax.iota("int32", TRIPS), (0,)), Line(4, -1)),
        (lambda: lax.iota("int32", TRIPS) + np.int32(3), Line(3)),
        (lambda: np.int32(3) - lax.iota("int32", TRIPS), Line(3, -1)),
        (lambda: lax.iota("int32", TRIPS).astype("int8"), Line(0)),
        (lambda: lax.iota("int32", 200).astype("int8"), None),  # it would wrap
        (lambda: lax.iota("int32", TRIPS) * np.int32(2), None),
        (lambda: lax.iota("float32", TRIPS), None),
        (lambda: lax.broadcasted_iota("int32", (TRIPS, 2), 0), None),
    ],
)
def test_what_a_stack_counts(f, line):
    program = graph(f)
    assert line_of_stack(program.outputs[0], makers(program)) == line


def test_a_dtype_holds_its_numbers():
    assert holds(literal(0, "int8"), range(-128, 128))
    assert not holds(literal(0, "int8"), range(129))
    assert not holds(literal(0, "uint8"), range(-1, 3))
    assert not holds(literal(0, "float32"), range(3))
    assert holds(literal(0, "int8"), range(1000, 1000))


def places(f, *shapes, first=0, reverse=False) -> dict[str, list[Place]]:
    """Where the nodes read and write that the body f(i, arrays) of a loop has; i counts up from `first`."""

    def run(*arrays):
        return lax.scan(lambda i, _: (i + 1, f(i, *arrays)), first, None, length=TRIPS, reverse=reverse)

    loop = the("scan", graph(run, *shapes))
    (body,) = loop.bodies
    index = Index(TRIPS, makers(body))
    (carry,) = carries_of(loop)
    index.note_counter(body.inputs[carry], body.outputs[0], whole_number(loop.inputs[carry]), reverse)
    for node in body.nodes:
        index.follow(node)
    found = {node.name: list(index.accesses(node)) for node in body.walk()}
    return {name: at for name, at in found.items() if at}


READ = {
    "a row": (lambda i, x: x[i], {"dynamic_slice": [Place(0, Line(0))]}),
    "a column": (lambda i, x: x[:, i], {"dynamic_slice": [Place(1, Line(0))]}),
    "both": (lambda i, x: x[i, i], {"dynamic_slice": [Place(0, Line(0)), Place(1, Line(0))]}),
    "the next row": (lambda i, x: x[i + 1], {"dynamic_slice": [Place(0, Line(1))]}),
    "from the end": (lambda i, x: x[7 - i], {"dynamic_slice": [Place(0, Line(7, -1))]}),
    "counted from the end": (lambda i, x: x[-1 - i], {"dynamic_slice": [Place(0, Line(7, -1))]}),
    "beyond the end": (lambda i, x: x[i + 4], {}),
    "two rows": (lambda i, x: lax.dynamic_slice_in_dim(x, i, 2, 0), {}),
    "by a branch": (
        lambda i, x: lax.cond(x[0, 0] > 0, lambda i: x[i], lambda i: 2 * x[i], i),
        {"dynamic_slice": [Place(0, Line(0))]},
    ),
    "clamped": (
        lambda i, x: x[lax.clamp(0, i, 6)],
        {"dynamic_slice": [Place(0, Line(0))]},
    ),
    "clamped for good": (lambda i, x: x[lax.clamp(0, i, 2)], {}),
    "doubled": (lambda i, x: x[2 * i], {}),
    "written": (
        lambda i, x: lax.dynamic_update_index_in_dim(x, x[0], i, 0),
        {"dynamic_update_slice": [Place(0, Line(0))]},
    ),
    "scattered": (lambda i, x: x.at[i].add(x[0]), {"scatter-add": [Place(0, Line(0))]}),
    "scattered in two dims": (
        lambda i, x: x.at[i, i + 1].add(1),
        {"scatter-add": [Place(0, Line(0)), Place(1, Line(1))]},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_places(name):
    f, expected = READ[name]
    assert places(f, (8, 8)) == expected


def test_a_counter_that_begins_elsewhere_and_backwards():
    assert places(lambda i, x: x[i], (8, 8), first=2) == {"dynamic_slice": [Place(0, Line(2))]}
    assert places(lambda i, x: x[i], (8, 8), first=2, reverse=True) == {
        "dynamic_slice": [Place(0, Line(6, -1))]
    }
    assert places(lambda i, x: x[i], (8, 8), first=4) == {}
    assert places(lambda i, x: x[i], (8, 8), first=-1) == {}


def test_an_index_that_wraps_is_none():
    small = lambda i, x: lax.dynamic_index_in_dim(x, i.astype("int8"), 0)  # noqa: E731
    assert places(small, (256, 8), first=100) == {"dynamic_slice": [Place(0, Line(100))]}
    assert places(small, (256, 8), first=126) == {}
