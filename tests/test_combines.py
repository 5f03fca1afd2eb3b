"""The function of an associative scan, read off the nodes of one application of it."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax.rewrites.combines import combine_of
from tests.graph_text import graph_of

pytestmark = pytest.mark.promotes_ranks

A, M = np.zeros((6, 3), "float32"), np.zeros((6, 2, 2), "float32")


def read(f, *elements, dim=0):
    """The function with as many elements on each side."""
    count = len(elements)
    graph = graph_of(lambda *xs: f(xs[:count], xs[count:]), *elements, *elements)
    return combine_of(graph.inputs[:count], graph.inputs[count:], graph.nodes, graph.outputs, dim)


def linear(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def row_sums(x):
    return lax.broadcast_in_dim(x.sum(1), x.shape, [0])


FOUND = {  # its steps, and the dims of its elements: those that may be split have no mark
    "add": (lambda x, y: [x[0] + y[0]], [A], "add", ("k0 k1",)),
    "linear": (linear, [A, A], "mul mul add", ("k0 k1", "k0 k1")),
    "matrices": (lambda x, y: [y[0] @ x[0]], [M], "dot_general", ("k0 w0_1! w0_2!",)),
    "a sum of each row": (
        lambda x, y: [x[0] + row_sums(y[0])],
        [A],
        "reduce_sum broadcast_in_dim add",
        ("k0 w0_1!",),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_read(name):
    f, elements, steps, words = FOUND[name]
    combine = read(f, *elements)
    assert combine is not None
    assert " ".join(primitive.name for primitive, _, _ in combine.steps) == steps
    assert combine.words == words


NOT_BY_ROW = {
    "rows turned around": lambda x, y: [x[0] + y[0][::-1]],
    "a sum over rows": lambda x, y: [x[0] + y[0].sum(0)],
    "the place of a row": lambda x, y: [x[0] + jnp.arange(6.0)[:, None]],
    "sorted": lambda x, y: [jnp.sort(x[0] + y[0], 0)],
    "sorted along the other dim": lambda x, y: [jnp.sort(x[0] + y[0], 1)],
    "one that is only moved": lambda x, y: [y[0].reshape(3, 6).reshape(6, 3)],
}


@pytest.mark.parametrize("name", NOT_BY_ROW)
def test_no_function_of_rows(name):
    assert read(NOT_BY_ROW[name], A) is None


def test_sizes_are_those_of_the_operands():
    """The function of 6 rows is that of any number of them."""
    combine = read(lambda x, y: [x[0] + row_sums(y[0])], A)
    (result,) = combine([jnp.ones((4, 3))], [jnp.ones((4, 3))])
    assert result.shape == (4, 3)


def test_other_nodes_among_them():
    graph = graph_of(lambda x, y: (x + y, jnp.sin(x)), A, A)
    combine = combine_of(graph.inputs[:1], graph.inputs[1:], graph.nodes, graph.outputs[:1], 0)
    assert [primitive.name for primitive, _, _ in combine.steps] == ["add"]
