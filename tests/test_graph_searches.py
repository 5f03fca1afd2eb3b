"""Which calls are searches, and with which parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardax.graph.searches import search_params
from tests.graphs import graph, primitives

pytestmark = pytest.mark.quick

TABLE, QUERIES = np.arange(8, dtype="float32"), np.ones((3, 2), "float32")


def params(f, *args):
    """Of the first call in a function."""
    eqns = jax.make_jaxpr(f)(*args).eqns
    return search_params(next(eqn for eqn in eqns if eqn.primitive.name in ("jit", "pjit")))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", ["scan", "scan_unrolled", "sort", "compare_all"])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_searches(side, method, dtype):
    f = lambda t, q: jnp.searchsorted(t, q, side=side, method=method)  # noqa: E731
    expected = {"side": side, "method": method}
    assert params(f, TABLE.astype(dtype), QUERIES.astype(dtype)) == expected


def test_nothing_else_is_one():
    def searchsorted(table, queries):
        return (table[0] > queries).astype("int32")

    assert params(jax.jit(searchsorted), TABLE, QUERIES) is None
    assert params(jax.jit(lambda t, q: jnp.searchsorted(t, q)), TABLE, QUERIES) is None
    tables = jax.vmap(jnp.searchsorted)
    assert params(tables, np.stack([TABLE] * 3), QUERIES) is None


def test_a_search_on_a_mesh_is_the_same():
    """JAX then notes where values lie."""
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        found = params(lambda t, q: jnp.searchsorted(t, q), TABLE, QUERIES)
    assert found == {"side": "left", "method": "scan"}


def test_each_is_one_node():
    assert primitives(graph(jnp.searchsorted, (8,), (3, 2))) == "search"
    assert primitives(graph(lambda q: jnp.digitize(q, TABLE), (3, 2))).split().count("search") == 2
