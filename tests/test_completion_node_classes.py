"""Nodes are of one kind where all that completion reads of them is equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax.completion.node_classes import NodeClasses
from tests.graphs import graph

pytestmark = pytest.mark.quick


def numbers(f, *shapes) -> list[int]:
    """The number of the kind of each node, the first being 0."""
    classes = NodeClasses()
    return [classes.of(node)[0].number for node in graph(f, *shapes).nodes]


SAME = {
    "equations of one type": lambda a, b: jnp.tanh(jnp.tanh(a)),
    "loops of one body": lambda a, b: lax.fori_loop(0, 3, _body, lax.fori_loop(0, 3, _body, a)),
    "a small literal": lambda a, b: (a * 2.0) * 2.0,
}
OTHER = {
    "another shape": lambda a, b: (jnp.tanh(a), jnp.tanh(b)),
    "another dtype": lambda a, b: (jnp.tanh(a), jnp.tanh(a.astype("bfloat16"))),
    "another parameter": lambda a, b: (a.sum(0), a.sum(1)),
    "another literal": lambda a, b: (a * 2.0, a * 3.0),
    "another body": lambda a, b: (lax.fori_loop(0, 3, _body, a), lax.fori_loop(0, 3, _other_body, a)),
    "another length": lambda a, b: (lax.fori_loop(0, 3, _body, a), lax.fori_loop(0, 4, _body, a)),
    "the same operand twice in a body": lambda a, b: (
        lax.scan(lambda c, _: (c * a, None), a, None, length=2)[0],
        lax.scan(lambda c, _: (c * c, None), a, None, length=2)[0],
    ),
}


def _body(_, x):
    return jnp.sin(x) * x


def _other_body(_, x):
    return jnp.cos(x) * x


def of_interest(f) -> list[int]:
    found = graph(f, (4, 4), (4, 8))
    classes = NodeClasses()
    return [classes.of(node)[0].number for node in found.nodes if node.name != "convert_element_type"]


@pytest.mark.parametrize("name", SAME)
def test_one_kind(name):
    assert of_interest(SAME[name]) == [0, 0]


@pytest.mark.parametrize("name", OTHER)
def test_two_classes(name):
    assert of_interest(OTHER[name]) == [0, 1]


def test_one_value_twice_is_two_operands():
    """Classes do not say which values are one; blocks do."""
    for first in (0, 1):
        classes, nodes = NodeClasses(), graph(lambda a, b: (a + b, a + a), (4,), (4,)).nodes
        classes.of(nodes[first])
        both = [classes.of(node) for node in nodes]
        assert both[0][0] is both[1][0] and both[0][0].edges[0].places == (0, 1, 2)
        assert both[1][1][0] is both[1][1][1]


def test_parameters_that_cannot_be_compared_are_of_one_node():
    class Table(dict):
        __hash__ = None

    classes = NodeClasses()
    nodes = graph(lambda a: jnp.tanh(jnp.tanh(a)), (4,)).nodes
    for node in nodes:
        node.params = {**node.params, "table": Table()}
    found = [classes.of(node)[0].number for node in (*nodes, *nodes)]
    assert found == [0, 1, 0, 1]


def test_tensors_are_what_has_dims_and_is_no_literal():
    table = np.ones(4, "float32")
    (node,) = graph(lambda a, b: lax.select_n(a, b, table), jax.ShapeDtypeStruct((), "bool"), (4,)).nodes
    node_class, values = NodeClasses().of(node)
    assert [v.shape for v in values] == [(), (4,), (4,), (4,)]
    assert list(node_class.tensors(values)) == [node.inputs[1], node.outputs[0]]


def test_of_a_loop_the_values_of_its_body_count():
    (node,) = graph(lambda a: lax.scan(lambda c, x: (c + x, c), a[0] * 0, a), (3, 4)).nodes[-1:]
    node_class, values = NodeClasses().of(node)
    assert {*node.inputs, *node.outputs, *node.bodies[0].inputs, *node.bodies[0].outputs} <= {*values}
    assert len(node_class.edges) == 4  # the carry, the stacks before and after, the sum inside
