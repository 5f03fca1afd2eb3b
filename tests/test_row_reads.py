"""Bodies that read given rows of an array that does not change."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.graph.graph import Graph, Value
from shardax.graph.indices import Line, Place
from shardax.rewrites.row_reads import Reading, places_read
from tests.loop_bodies import loop_of, row

X, H = np.zeros((8, 2), "float32"), np.zeros((1, 2), "float32")


def reading(trip, length=8) -> tuple[list[Place], str]:
    """The places that are read at the index, and the body that reads these rows; array x is a constant of it."""
    scan, index = loop_of(lambda i, x, h: [x, trip(i, x, h)], X, H, length=length)
    (body,) = scan.bodies
    (x,) = (v for v in body.inputs if v.shape == X.shape)

    def place_of(node):
        return next(index.accesses(node), None)

    places = [*places_read(body.nodes, x, place_of)]
    rows = {place: Value(body.outputs[-1].aval) for place in places}
    nodes = Reading(index, place_of, {x: rows}).run(body.nodes, body.outputs)
    others = [v for v in body.inputs if v is not x]
    given = [x, *others, *rows.values()]
    lines = str(Graph(given, nodes, body.outputs[-1:])).split("\n")
    return places, "\n".join(line for line in lines if "= add b 1" not in line)


def test_reads_at_the_index():
    assert reading(lambda i, x, h: h * row(x, i)) == (
        [Place(0, Line(0))],
        """\
(a:f32[8,2] b:i32[] c:f32[1,2] d:f32[1,2])
f:f32[1,2] = dynamic_slice d 0 0
g:f32[1,2] = mul c f
-> g""",
    )


def test_several_places():
    """Each has a row; another read stays as it is."""
    places, body = reading(lambda i, x, h: h * row(x, i) * row(x, i + 1) + row(x, 3), length=7)
    assert places == [Place(0, Line(0)), Place(0, Line(1))]
    assert [line.split(" = ")[1] for line in body.split("\n") if "dynamic_slice" in line] == [
        "dynamic_slice d 0 0",
        "dynamic_slice e 0 0",
        "dynamic_slice a 3 0",
    ]


def test_reads_in_a_branch_and_behind_a_barrier():
    def trip(i, x, h):
        x = lax.optimization_barrier(x)
        return lax.cond(i > 3, lambda: h + row(x, i), lambda: h)

    places, body = reading(trip)
    assert places == [Place(0, Line(0))]
    assert "optimization_barrier d" in body and "[8,2]" not in body.split("\n", 1)[1]


def test_what_is_read_elsewhere():
    places, body = reading(lambda i, x, h: h + jnp.sin(x).sum(0, keepdims=True) + row(x, 0))
    assert places == [] and "sin a" in body
