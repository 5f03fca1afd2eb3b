"""What of a program has nothing to do with the rest."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax.graph.connected import connected, connected_nodes, parts
from tests.graphs import graph

pytestmark = pytest.mark.quick


def test_groups_that_share_a_number_are_connected():
    assert connected(6, [(4, 2), (2, 0), (), (5,)]) == [0, 1, 0, 3, 0, 5]
    assert connected(3, [(2, 1), (1, 0)]) == [0, 0, 0]
    assert connected(2, []) == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_each_number_has_the_least_that_it_is_connected_with(seed):
    """As passing the least number on within each group, until nothing changes, has it."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    groups = [rng.integers(count, size=rng.integers(0, 5)).tolist() for _ in range(rng.integers(0, 30))]
    least, before = list(range(count)), None
    while least != before:
        before = list(least)
        for group in groups:
            for v in group:
                least[v] = min(least[w] for w in group)
    assert connected(count, groups) == least


def numbered(fun, *shapes):
    """The parts of a program, inputs and outputs by number."""
    program = graph(fun, *shapes)
    return [
        ([program.inputs.index(v) for v in inputs], [program.outputs.index(v) for v in outputs])
        for inputs, outputs in parts(program)
    ]


def test_parts_have_no_value_in_common():
    assert numbered(lambda x, y, z: (x + 1, y @ z), (3,), (2, 3), (3, 4)) == [([0], [0]), ([1, 2], [1])]
    assert numbered(lambda x, y: (jnp.sin(x), x * y), (3,), (3,)) == [([0, 1], [0, 1])]


def test_what_is_passed_through_or_read_by_nobody_is_a_part():
    assert numbered(lambda x, y: x, (3,), (2,)) == [([0], [0]), ([1], [])]


def test_what_has_no_inputs_is_in_no_part():
    assert numbered(lambda x: (x * 2, jnp.arange(5)), (3,)) == [([0], [0])]


def connected_names(fun, *shapes):
    return [[node.name for node in nodes] for nodes in connected_nodes(graph(fun, *shapes))]


def test_nodes_of_a_part_share_values_in_program_order():
    """Those that meet only at the end are of one part; so is what has no inputs, by itself."""

    def f(x, y, z):
        u = jnp.sin(x)
        v = jnp.cos(y)
        w = jnp.tanh(z)
        return u + 1.0, v * w, lax.iota("int32", 3)

    assert connected_names(f, (3,), (3,), (3,)) == [["sin", "add"], ["cos", "tanh", "mul"], ["iota"]]
    assert connected_names(lambda x, y: (jnp.sin(x), jnp.cos(x)), (3,), (3,)) == [["sin", "cos"]]
    assert connected_names(lambda x: x, (3,)) == []


def test_each_node_is_of_one_part_and_one_literal_connects_nothing():
    program = graph(lambda x, y: (jnp.sin(x) * 2.0, jnp.sin(y) * 2.0), (3,), (3,))
    found = connected_nodes(program)
    assert len(found) == 2 and sorted(sum(found, []), key=program.nodes.index) == list(program.nodes)
