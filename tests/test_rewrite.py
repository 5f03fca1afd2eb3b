"""What takes the place of nodes and values, and what a rewrite knows about where a graph stands."""

import jax.numpy as jnp
from jax import lax

from shardax.rewrites.rewrite import Context, Replacements, replaced
from tests.graph_text import graph_of


def graph():
    return graph_of(lambda x: jnp.cos(jnp.sin(x)) + jnp.tanh(x), jnp.zeros(3))


def test_nothing_found():
    before = graph()
    assert replaced(before, Replacements()) is before


def test_nodes_in_the_place_of_a_node():
    """Those that nothing reads then are dropped, the one that is replaced among them."""
    before = graph()
    sine, cosine, tanh, _ = before.nodes
    assert str(replaced(before, Replacements({cosine: [cosine, tanh], tanh: []}))) == "\n".join(
        [
            "(a:f32[3])",
            "b:f32[3] = sin a",
            "c:f32[3] = cos b",
            "d:f32[3] = tanh a",
            "e:f32[3] = add c d",
            "-> e",
        ]
    )


def test_values_in_the_place_of_values():
    before = graph()
    sine, cosine, tanh, total = before.nodes
    values = {cosine.outputs[0]: tanh.outputs[0]}
    assert str(replaced(before, Replacements({sine: [tanh], tanh: []}, values))) == "\n".join(
        ["(a:f32[3])", "b:f32[3] = tanh a", "c:f32[3] = add b b", "-> c"]
    )
    assert replaced(before, Replacements(values={total.outputs[0]: before.inputs[0]})).nodes == []


def test_what_is_affine_around_a_body_is_so_in_it():
    def f(x):
        rows = jnp.arange(8)
        return lax.fori_loop(0, 3, lambda i, x: x + rows, x)

    whole = graph_of(f, jnp.zeros(8, int))
    outer = Context(whole)
    (scan,) = (node for node in whole.nodes if node.name == "scan")
    inner = Context(scan.bodies[0], scan, outer)
    assert inner.affines is outer.affines and inner.in_loop and not outer.in_loop
    (rows, *_) = inner.graph.inputs
    changed = replaced(inner.graph, Replacements(values={inner.graph.outputs[-1]: rows}))
    affines = Context(changed, scan, outer).affines
    assert affines is not outer.affines and str(affines.of(rows)) == "0 + 1*i0"
