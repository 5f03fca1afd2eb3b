"""The driver: rewrites run everywhere in a program, and leave the graph that they are given as it is."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from shardax.graph.graph import Graph
from shardax.rewrites.driver import REWRITES, rewritten
from shardax.rewrites.rewrite import Context, Replacements
from tests.graph_text import after, graph_of

X = jax.ShapeDtypeStruct((8, 6), "float32")
INDICES = jax.ShapeDtypeStruct((8,), "int32")

double_p = Primitive("double_of_a_library")
double_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(double_p, mlir.lower_fun(lambda x: x * 2, multiple_results=False))

PROGRAMS = {  # for each rewrite something that it finds
    "opened": lambda x, i: double_p.bind(x),
    "associative_scans": lambda x, i: lax.associative_scan(jnp.add, x),
    "reversed_scans": lambda x, i: lax.associative_scan(jnp.multiply, x, reverse=True),
    "rotations": lambda x, i: jnp.roll(x, 3, 0),
    "counted_whiles": lambda x, i: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2), (0, x)),
    "scanned_rows": lambda x, i: lax.fori_loop(0, 8, lambda i, y: y.at[i].set(x[i] + 1), x),
    "batched_indices": lambda x, i: x[jnp.arange(8), i],
    "unmerged_contractions": lambda x, i: jnp.vdot(x, x),
    "unread_parts": lambda x, i: jnp.split(x, (1, 4))[1],
    "shifts": lambda x, i: jnp.pad(x[1:], ((0, 1), (0, 0))),
}


def in_a_body(f):
    return lambda x, i: lax.scan(lambda c, _: (c, f(x, i)), 0, length=3)


def in_a_branch(f):
    return lambda x, i: lax.cond(i[0] > 0, lambda: f(x, i), lambda: f(x + 1, i))


def structure(graph: Graph):
    """All that a graph is made of: the very values, nodes and lists."""
    nodes = [
        (node, node.primitive, [*node.params.items()], [*node.inputs], [*node.outputs], bodies)
        for node in graph.nodes
        for bodies in [[structure(body) for body in node.bodies]]
    ]
    return graph, [*graph.inputs], nodes, [*graph.outputs]


def test_each_rewrite_has_a_program():
    assert [rewrite.__name__ for rewrite in REWRITES] == [*PROGRAMS]


@pytest.mark.parametrize("around", [lambda f: f, in_a_body, in_a_branch], ids=["top", "body", "branch"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_graph_that_is_given_stays_as_it_is(name, around):
    graph = graph_of(around(PROGRAMS[name]), X, INDICES)
    before, words = structure(graph), str(graph)
    new = rewritten(graph)
    assert structure(graph) == before and str(graph) == words
    assert str(new) != words
    assert [*map(id, new.inputs)] == [*map(id, graph.inputs)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_left_to_find(name):
    once = rewritten(graph_of(in_a_body(PROGRAMS[name]), X, INDICES))
    assert rewritten(once) is once


def test_a_graph_in_which_nothing_is_found_is_not_copied():
    graph = graph_of(lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x), x), X)
    assert rewritten(graph) is graph


def test_rewrites_see_each_body_once_and_outer_ones_first():
    seen = []

    def note(graph, context: Context) -> Replacements:
        seen.append((context.node and context.node.name, context.in_loop))
        assert graph is context.graph
        return Replacements()

    def f(x):
        return lax.scan(lambda c, _: (lax.cond(c[0, 0] > 0, jnp.sin, jnp.cos, c), None), x, length=3)[0]

    rewritten(graph_of(f, X), [note])
    assert seen == [(None, False), ("scan", True), ("cond", True), ("cond", True)]


def test_what_nothing_reads_is_dropped():
    """Also what only that read which is replaced."""

    def sine_of_argument(graph, context):
        (negated, sine) = graph.nodes
        return Replacements(values={sine.outputs[0]: graph.inputs[0]})

    def f(x):
        return jnp.sin(-x)

    assert after([sine_of_argument], f, X) == "(a:f32[8,6])\n-> a"


def test_again():
    """A rewrite that says so is asked again, of the graph with what it found in its place."""

    def one_sine_less(graph, context):
        sines = [node for node in graph.nodes if node.name == "sin"]
        values = {node.outputs[0]: node.inputs[0] for node in sines[:1]}
        return Replacements(values=values, again=bool(sines))

    assert after([one_sine_less], lambda x: jnp.sin(jnp.cos(jnp.sin(x))), X) == (
        "(a:f32[8,6])\nb:f32[8,6] = cos a\n-> b"
    )
