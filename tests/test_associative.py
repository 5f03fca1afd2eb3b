"""Associative scans along a split dim: found in what JAX expands them into, run on blocks, the totals exchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_program import mesh_of

import shardax as sx
from shardax import _jax
from shardax.associative import with_associative_scans
from shardax.graph import from_jaxpr
from tests.test_random_programs import poisoned_padding

MESH = mesh_of(4, 2)


def array(*shape):
    return np.random.default_rng(0).choice([-1.0, -0.5, 0.5, 1.0], shape).astype("float32")


def linear(left, right):
    """h = a h + b, as in S5, Mamba and RG-LRU."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def latest(left, right):
    """The latest that is large, else the first: not commutative."""
    return jnp.where(right > 0.6, right, left)


SCANS = {
    "add": lambda a, b, **how: lax.associative_scan(jnp.add, a, **how),
    "linear": lambda a, b, **how: lax.associative_scan(linear, (a, b), **how),
    "one of two": lambda a, b, **how: lax.associative_scan(linear, (a, b), **how)[1],
    "latest": lambda a, b, **how: lax.associative_scan(latest, a, **how),
    "or": lambda a, b, **how: lax.associative_scan(jnp.logical_or, a > 0.7, **how),
}


def found(f, *args):
    graph = with_associative_scans(from_jaxpr(_jax.dce(jax.make_jaxpr(f)(*args))))
    return [(node.params["dim"], node.params["reverse"]) for node in graph.nodes if node.name == "associative_scan"]


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("n", [8, 31])
def test_found(name, n):
    x = array(3, n)
    assert found(lambda a, b: SCANS[name](a, b, axis=1), x, x) == [(1, False)]
    assert found(lambda a, b: SCANS[name](a, b, axis=1, reverse=True), x, x) == [(1, True)]


NOT_SCANS = {
    "a product of matrices": lambda a: lax.associative_scan(jnp.matmul, a),
    "depends on the place": lambda a: lax.associative_scan(lambda x, y: x + y * jnp.arange(len(x))[:, None, None], a),
    "depends on the size": lambda a: lax.associative_scan(lambda x, y: x + y * len(x), a),
    "between is read": lambda a: jax.grad(lambda a: (lax.associative_scan(jnp.multiply, a) ** 2).sum())(a),
    "other slices": lambda a: a[0:-1:2] + a[1::2],
}


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("name", NOT_SCANS)
def test_not_found(name):
    assert found(NOT_SCANS[name], array(9, 3, 3)[: 8 if name == "other" else 9]) == []


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("n, spec", [(16, P("y", "x")), (13, P("x")), (9, P(("x", "y")))])
def test_same(name, n, spec):
    """Blocks of one row, padded ones, such as hold nothing but padding; both ways."""
    args = array(n, 4), array(n, 4)

    def both(constrain):
        def f(a, b):
            a, b = constrain(a), constrain(b)
            results = SCANS[name](a, b), SCANS[name](a, b, reverse=True)
            return jax.tree.map(lambda x: ~constrain(x) if x.dtype == bool else constrain(x) * 3, jax.tree.leaves(results))

        return f

    wanted = jax.jit(both(lambda x: x))(*args)
    with poisoned_padding():
        got = sx.shard_jit(both(lambda x: sx.annotate(x, NamedSharding(MESH, spec))), mesh=MESH)(*args)
    for have, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_sends_the_totals(reverse):
    args = [array(2, 1024, 8)] * 2
    f = lambda a, b: lax.associative_scan(linear, (a, b), axis=1, reverse=reverse)[1]  # noqa: E731
    plan = sx.shard_jit(f, mesh=MESH, in_shardings=P(None, "x"), out_shardings=P(None, "x")).plan(*args)
    assert [(c.kind, c.nbytes, c.reason) for c in plan.collectives] == [
        ("all_gather", 3 * 2 * 8 * 4, "totals of associative_scan")
    ] * 2
