"""Contractions over dims that were merged for that: of the dims themselves."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax.rewrites.contractions import unmerged_contractions
from tests.graph_text import after

X, Y = np.zeros((4, 3, 2), "float32"), np.zeros((12, 2), "float32")


def contracted(f, *args, rewrites=(unmerged_contractions,)) -> str:
    """The contraction that is left, and what is reshaped before."""
    lines = after(rewrites, f, *args, shows=("dimension_numbers",)).split("\n")
    return "; ".join(line.split(" = ")[1] for line in lines if "reshape" in line or "dot" in line)


def product(x, y, dims, batch=((), ())):
    return lax.dot_general(x, y, (dims, batch))


UNMERGED = {
    "all dims": (
        lambda x: product(x.reshape(-1), (x + 1).reshape(-1), ((0,), (0,))),
        "dot_general[dimension_numbers=(((0, 1, 2), (0, 1, 2)), ((), ()))] a b",
    ),
    "some dims": (
        lambda x: product(x.reshape(12, 2), (x + 1).reshape(12, 2), ((0,), (0,))),
        "dot_general[dimension_numbers=(((0, 1), (0, 1)), ((), ()))] a b",
    ),
    "behind a batch dim": (
        lambda x: product(x.reshape(4, 6), (x + 1).reshape(4, 6), ((1,), (1,)), ((0,), (0,))),
        "dot_general[dimension_numbers=(((1, 2), (1, 2)), ((0,), (0,)))] a b",
    ),
    "before a batch dim": (
        lambda x: product(x.reshape(12, 2), (x + 1).reshape(12, 2), ((0,), (0,)), ((1,), (1,))),
        "dot_general[dimension_numbers=(((0, 1), (0, 1)), ((2,), (2,)))] a b",
    ),
}


@pytest.mark.parametrize("name", UNMERGED)
def test_unmerged(name):
    f, wanted = UNMERGED[name]
    assert contracted(f, X) == wanted


LEFT = {
    "only one is merged": lambda x, y: product(x.reshape(12, 2), y, ((0,), (0,))),
    "of other sizes": lambda x, y: product(x.reshape(12, 2), y.reshape(2, 6, 2).reshape(12, 2), ((0,), (0,))),
    "taken apart": lambda x, y: product(y.reshape(4, 3, 2), x, ((0, 1), (0, 1))),
    "another dim is contracted": lambda x, y: product(x.reshape(12, 2), (x + 1).reshape(12, 2), ((1,), (1,))),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_they_are(name):
    assert contracted(LEFT[name], X, Y) == contracted(LEFT[name], X, Y, rewrites=())


def test_vdot():
    assert "reshape" not in contracted(jnp.vdot, X, X + 1)
