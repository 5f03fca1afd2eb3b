"""`jax.experimental.shard_alike`: both results rest as under `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

alike = pytest.importorskip("jax.experimental.shard_alike").shard_alike  # JAX 0.12 has it no more
MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def constant(x, w):
    return [*alike(jnp.zeros_like(x), x), w]


def elementwise(x, w):
    return alike(x * 2.0, w + 1.0)


def tree(x, w):
    return alike({"a": x, "b": x.sum(1)}, {"a": w * 2.0, "b": w[:, 0]})


PROGRAMS = {
    "a constant": (constant, P("x", "y"), P()),
    "a conflict": (elementwise, P("x"), P("y")),
    "one is whole": (elementwise, P(), P(None, "y")),
    "of each one dim": (elementwise, P("x"), P(None, "y")),
    "trees": (tree, P("x"), P()),
    "a gradient": (jax.grad(lambda x, w: (elementwise(x, w)[0] ** 2).sum(), (0, 1)), P("x"), P(None, "y")),
    "batched": (jax.vmap(elementwise, in_axes=(0, None)), P(None, "x"), P()),
}


@pytest.mark.parametrize("chip", ["slow", None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_rests_as_under_jit(name, dtype, chip):
    f, *specs = PROGRAMS[name]
    x, w = (
        jax.device_put(np.arange(96).reshape(8, 12).astype(dtype), NamedSharding(MESH, spec))
        for spec in specs
    )
    w = w[0] if name == "batched" else w
    want, got = jax.jit(f)(x, w), sx.shard_jit(f, mesh=MESH, options=sx.Options(chip=chip))(x, w)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_allclose(np.asarray(a, "float32"), np.asarray(b, "float32"), rtol=1e-5)


def test_uneven():
    """Both are of 7 rows: they rest where these are whole, and alike."""
    x = np.arange(84, dtype="float32").reshape(7, 12)
    f = sx.shard_jit(elementwise, mesh=MESH, in_shardings=(P("x"), None))
    a, b = f(x, x + 1.0)
    assert a.sharding == b.sharding and not a.sharding.is_fully_replicated
    np.testing.assert_allclose(a, x * 2.0)
    np.testing.assert_allclose(b, x + 2.0)
