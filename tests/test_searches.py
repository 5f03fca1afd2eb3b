"""Searches in split tables: one sum of counts, whatever the method, and what jnp.searchsorted gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
METHODS = ("scan", "scan_unrolled", "sort", "compare_all")


def table(n, dtype="float32"):
    values = np.sort(np.random.default_rng(n).integers(0, 2 * n, n))
    return jnp.asarray(values).astype(dtype)


def check(f, args, specs):
    sharded = sx.shard_jit(f, mesh=MESH, in_shardings=specs)
    for got, want in zip(jax.tree.leaves(sharded(*args)), jax.tree.leaves(jax.jit(f)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5 if got.dtype == np.float32 else 0)
        assert got.dtype == want.dtype
    return [(c.kind, c.nbytes, c.trips) for c in sharded.plan(*args).collectives]


@pytest.mark.parametrize("method", METHODS)
def test_counts_add_up(method):
    queries = jnp.asarray(np.linspace(-3, 140, 24), "float32")
    found = check(lambda t, q: jnp.searchsorted(t, q, method=method), [table(64), queries], (P("x"), P("y")))
    assert found == [("all_reduce", 12 * 4 * 2 * 3 // 4, 1)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "bfloat16"])
def test_what_pads_a_table_is_not_counted(method, side, dtype):
    """Neither where the query is the greatest that there is, nor where it is no number."""
    t, q = table(13, dtype), jnp.arange(30).reshape(10, 3).astype(dtype)
    if dtype == "float32":
        t, q = t.at[-1].set(jnp.nan), q.at[0, 1].set(jnp.inf).at[1, 2].set(jnp.nan)
    if dtype == "uint8":
        t, q = t.at[-2:].set(255), q.at[0, 0].set(255)

    def f(t, q):
        return jnp.searchsorted(
            lax.with_sharding_constraint(jnp.sort(t), P(("y", "x"))), q, side=side, method=method
        )

    with jax.set_mesh(MESH):
        check(f, [t, q], (P(), P("y")))


def test_searches_inside_of_others():
    """Interpolation and its gradient, and a search in each trip of a loop."""
    args = [jnp.asarray(np.linspace(0, 140, 12), "float32"), table(40), table(40)]
    found = check(jax.grad(lambda x, t, v: jnp.interp(x, t, v).sum(), 2), args, (P("y"), P("x"), P("x")))
    assert sum(nbytes * trips for _, nbytes, trips in found) <= 600
    found = check(
        lambda q, t: lax.map(lambda q: jnp.searchsorted(t, q), q),
        [args[0].reshape(3, 4), table(40)],
        (P(), P("x")),
    )
    assert found == [("all_reduce", 3 * 4 * 4 * 2 * 3 // 4, 1)]


def test_what_only_has_the_name_is_no_search():
    @jax.jit
    def searchsorted(t, q):
        return jnp.zeros(q.shape, "int32") + t.shape[0]

    assert check(searchsorted, [table(8), table(4)], (P("x"), P())) == []
