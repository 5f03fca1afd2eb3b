"""Which functions are associative, and which gradients, as far as numbers tell."""

import jax.numpy as jnp
import numpy as np
import pytest

from shardax.rewrites.associativity import has_associative_gradient, is_associative
from tests.test_combines import A, M, linear, read

FUNCTIONS = {  # elements, whether it is associative, and its gradient
    "add": (lambda x, y: [x[0] + y[0]], [A], True, True),
    "linear": (linear, [A, A], True, True),
    "matrices": (lambda x, y: [y[0] @ x[0]], [M], True, True),
    "maximum": (lambda x, y: [jnp.maximum(x[0], y[0])], [A], True, False),
    "and": (lambda x, y: [x[0] & y[0]], [A > 0], True, True),
    "sum of bytes": (lambda x, y: [x[0] + y[0]], [A.astype("int8")], True, True),
    "subtract": (lambda x, y: [x[0] - y[0]], [A], False, False),
    "mean": (lambda x, y: [(x[0] + y[0]) / 2], [A], False, False),
    "almost": (lambda x, y: [x[0] + y[0] * 1.0001], [A], False, False),
    "saturated": (lambda x, y: [jnp.minimum(x[0] + y[0], 1)], [A], False, False),
}


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_associative(name):
    f, elements, associative, gradient = FUNCTIONS[name]
    combine, types = read(f, *elements), tuple((x.shape, x.dtype) for x in elements)
    assert combine is not None
    assert is_associative(combine, types, 0) == associative
    if associative:
        assert has_associative_gradient(combine, types, 0) == gradient


def test_16_bits_are_judged_as_32():
    """What rounding does is not taken for what the order does."""
    x = np.zeros((6, 3), jnp.bfloat16)
    assert is_associative(read(lambda x, y: [x[0] + y[0]], x), ((x.shape, x.dtype),), 0)
