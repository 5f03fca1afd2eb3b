"""Along which dims an update needs the state whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.graph import inline
from shardax.zero.mixed import mixed_dims

pytestmark = pytest.mark.quick

of = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")  # noqa: E731
MOMENT = of(2, 4, 6)


def elementwise(m, g):
    return 0.9 * m + g / (1e-6 + jnp.sqrt(jnp.sum(m * m)))


def orthogonalized(m, g):
    x = m + g
    return x + jnp.einsum("lmn,lkn,lko->lmo", x, x, x)


@sx.partition_as("l m n+, l k n+ -> l m k", flops=lambda ins, outs: 2 * ins[0][-1] * np.prod(outs[0]))
def products_of_users(x, y):
    return jnp.einsum("lmn,lkn->lmk", x, y)


@sx.partition_as("l m n+ -> l m")
def sum_of_users(x):
    return x.sum(-1)


def decomposed(m, g):
    """What it is made of is taken whole, and what is made of it is not."""
    return 0.9 * m + jnp.linalg.qr(g)[0] @ jnp.ones((2, 4, 6))


def under_cond(m, g):
    return jax.lax.cond(g.sum() > 0, lambda: orthogonalized(m, g), lambda: m)


def in_while(m, g):
    return jax.lax.while_loop(lambda x: x.sum() < 3, lambda x: orthogonalized(x, g), m)


def sorted_rows(m, g):
    return jnp.sort(m + g, axis=1)


def separate(m, g):
    return jnp.stack([orthogonalized(m[i : i + 1], g[i : i + 1])[0] for i in range(2)])


@pytest.mark.parametrize(
    "update, mixed",
    [
        (elementwise, set()),
        (orthogonalized, {1, 2}),
        (lambda m, g: jnp.linalg.norm(m) * products_of_users(g, m) @ g, {1, 2}),
        (lambda m, g: m * sum_of_users(m)[..., None], set()),
        (decomposed, {1}),
        (under_cond, {1, 2}),
        (in_while, {1, 2}),
        (sorted_rows, {1}),
        (separate, {1, 2}),
    ],
)
def test_mixed_dims(update, mixed):
    graph = inline.from_jaxpr(jax.make_jaxpr(update)(MOMENT, MOMENT))
    assert mixed_dims(graph, {0: 0}) == {0: mixed}


def test_differentiated():
    """What the loss computes with the new parameters, in the next step of a loop, is no update of them."""

    def steps(m, x):
        def step(w, row):
            return w - jax.grad(lambda w: (jnp.tanh(row @ w) ** 2).sum())(w), None

        return jax.lax.scan(step, m, x)[0]

    graph = inline.from_jaxpr(jax.make_jaxpr(steps)(of(4, 6), of(3, 5, 4)))
    assert mixed_dims(graph, {0: 0}) == {0: set()}
