"""Equal computations have equal numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters.ad import add_jaxvals

from shardax.rewrites.numbering import Numbers, params_key
from tests.graphs import graph

pytestmark = pytest.mark.quick

M = (4, 8)


def equal(f, *shapes, dtype="float32") -> bool:
    """Whether the two results of a function are found to be the same."""
    program = graph(f, *shapes, dtype=dtype)
    numbers = Numbers(program)
    one, two = map(numbers.number, program.outputs)
    return one == two


SAME = {
    "in another order": lambda a, b: (jnp.sin(a) + jnp.cos(b), jnp.cos(b) + jnp.sin(a)),
    "a commutative product": lambda a, b: (a * b, b * a),
    "dims of size one": lambda a, b: (jnp.sin(a), jnp.sin(a)[None, :, None]),
    "a row transposed": lambda a, b: (jnp.sin(a[:1]), jnp.sin(a[:1]).T),
    "sums of gradients": lambda a, b: (
        add_jaxvals(add_jaxvals(a, b), jnp.sin(a)),
        add_jaxvals(a, add_jaxvals(jnp.sin(a), b)),
    ),
    "a gradient and zeros": lambda a, b: (add_jaxvals(a, jnp.zeros(M, "float32")), a),
    "no elements": lambda a, b: (jnp.sin(a[:0]), jnp.cos(b[:0])),
    "a product of rows": lambda a, b: (
        lax.dot_general(a[:1], b, (((1,), (1,)), ((), ()))),
        lax.dot_general(a[0], b, (((0,), (1,)), ((), ()))),
    ),
}
OTHER = {
    "another argument": lambda a, b: (jnp.sin(a), jnp.sin(b)),
    "another function": lambda a, b: (jnp.sin(a), jnp.cos(a)),
    "a difference": lambda a, b: (a - b, b - a),
    "another parameter": lambda a, b: (a.sum(0), (a * 1.0).max(0)),
    "another dim": lambda a, b: (a[:, :4].sum(0), a[:, :4].sum(1)),
    "another literal": lambda a, b: (a * 2, a * 3),
    "transposed": lambda a, b: (a[:, :4], a[:, :4].T),
    "a gradient twice": lambda a, b: (add_jaxvals(a, a), a),
    "loops, which only equal themselves": lambda a, b: (
        lax.fori_loop(0, 3, _twice, a),
        lax.fori_loop(0, 3, _twice, a),
    ),
}


def _twice(_, x):
    return x * 2


@pytest.mark.parametrize("name", SAME)
def test_equal(name):
    assert equal(SAME[name], M, M)


@pytest.mark.parametrize("name", OTHER)
def test_different(name):
    assert not equal(OTHER[name], M, M)


def test_a_known_program_is_found_among_other_things():
    program = graph(lambda a, b: jnp.exp(jnp.cos(b) * jnp.sin(a) * 3) + jnp.tanh(a), M, M)
    known = graph(lambda x, y: jnp.sin(x) * jnp.cos(y), M, M)
    numbers = Numbers(program)
    found = numbers.find(known, [numbers.number(v) for v in program.inputs])
    (same,) = numbers.same(found[known.outputs[0]], M)
    assert next(node.name for node in program.nodes if same in node.outputs) == "mul"
    assert numbers.same(found[known.outputs[0]], (8, 4)) == []


def test_what_the_graph_has_not_gets_new_numbers():
    program, known = graph(jnp.sin, M), graph(lambda x: jnp.cos(jnp.sin(x)), M)
    numbers = Numbers(program)
    before = len(numbers.values)
    found = numbers.find(known, [numbers.number(program.inputs[0])])
    assert found[known.nodes[0].outputs[0]] == numbers.number(program.outputs[0])
    assert found[known.outputs[0]] == before
    assert numbers.values[before] == []


def test_with_other_inputs_it_is_another():
    program = graph(lambda a, b: jnp.sin(a), M, M)
    numbers, known = Numbers(program), graph(jnp.sin, M)
    of = [numbers.find(known, [numbers.number(v)])[known.outputs[0]] for v in program.inputs]
    assert of[0] == numbers.number(program.outputs[0]) != of[1]


def test_parameters_in_any_order():
    assert params_key({"a": 1, "b": 2}) == params_key({"b": 2, "a": 1}) != params_key({"a": 1, "b": 3})
    assert params_key({"a": np.zeros(3)}) is None
    assert params_key({"a": 1, "out_sharding": object()}) == params_key({"a": 1})
