"""What of a program has nothing to do with the rest."""

import jax.numpy as jnp
import pytest

from shardax.graph.connected import connected, parts
from tests.graphs import graph

pytestmark = pytest.mark.quick


def test_groups_that_share_a_number_are_connected():
    assert connected(6, [(4, 2), (2, 0), (), (5,)]) == [0, 1, 0, 3, 0, 5]
    assert connected(3, [(2, 1), (1, 0)]) == [0, 0, 0]
    assert connected(2, []) == [0, 1]


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
