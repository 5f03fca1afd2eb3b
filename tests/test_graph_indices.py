"""Which integers in the body of a scan are its index, and which rows are read and written by it."""

import pytest
from jax import lax

from shardax.graph.affine import Affines
from shardax.graph.indices import Index, Line, Place
from tests.graphs import graph, the

pytestmark = pytest.mark.quick

TRIPS = 5


@pytest.mark.parametrize("line", [Line(3), Line(3, -1)])
def test_the_numbers_of_a_line(line):
    numbers = [line.first + t * line.step for t in range(TRIPS)]
    assert list(line.within(TRIPS)) == sorted(numbers)
    turned = line.reversed(TRIPS)
    assert [turned.first + t * turned.step for t in range(TRIPS)] == numbers[::-1]


def places(f, *shapes, first=0, reverse=False) -> dict[str, list[Place]]:
    """Where the nodes read and write that the body f(i, arrays) of a loop has; i counts up from `first`."""

    def run(*arrays):
        return lax.scan(lambda i, _: (i + 1, f(i, *arrays)), first, None, length=TRIPS, reverse=reverse)

    program = graph(run, *shapes)
    loop = the("scan", program)
    (body,), affines = loop.bodies, Affines(program)
    index = Index(affines, affines.iterations[loop])
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
