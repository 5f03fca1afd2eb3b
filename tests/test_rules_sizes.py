"""Each family of primitives on the dtypes and sizes that are easily forgotten: empty dims, scalars, eight
dims, f8, keys.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
FAST = {"xla_backend_optimization_level": 0}  # compiles thrice as fast
DTYPES = "bool int8 bfloat16 float8_e5m2 complex64".split()
SHAPES = ((), (0,), (5, 0, 3), (1,), (7, 9), (1, 2, 1, 3, 1, 2, 1, 5))


def families(x):
    """Some primitive of each family that takes the dtype, over the first dim and the last."""
    if x.ndim == 0:
        return {"scalar": [x[None], jnp.broadcast_to(x, (5, 6)), lax.select(x == x, x, x)]}
    return {
        "elementwise": [x == x[::-1], lax.select(x == x, x, x[::-1])],
        "shape": [
            x.reshape(-1),
            jnp.swapaxes(x, 0, -1),
            jnp.concatenate([x, x]),
            jnp.pad(x, [(1, 2)] * x.ndim),
            x[1:],
            x[..., None],
        ],
        "moves": [jnp.roll(x, 1, 0), x[::-1], jnp.tile(x, (2,) * x.ndim), jnp.stack([x, x])],
        "reductions": [x.sum(0), x.prod(-1)],
        "extrema": [x.max(0, initial=0), x.min(-1, initial=0)] if _ordered(x) else [],
        "cumulative": [lax.cumsum(x), lax.cummax(x, x.ndim - 1)] if _ordered(x) else [],
        "sorting": [jnp.sort(x, 0), jnp.argsort(x, -1)] if _ordered(x) else [],
        "indexing": [x.at[:1].set(x[-1:]), jnp.take(x, jnp.arange(2) % max(len(x), 1), axis=0)]
        if x.size
        else [],
    }


def _ordered(x) -> bool:
    return jnp.issubdtype(x.dtype, np.floating) or x.dtype.kind in "iu"


def _value(shape, dtype):
    return (np.random.RandomState(0).permutation(int(np.prod(shape))).reshape(shape) % 11 - 5).astype(dtype)


def _split(x):
    """The first dim over x, the last over y."""
    dims = ["x"] * (x.ndim > 0) + [None] * (x.ndim - 2) + ["y"] * (x.ndim > 1)
    return sx.annotate(x, P(*dims))


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("dtype", DTYPES)
def test_families(dtype):
    args = [_value(shape, dtype) for shape in SHAPES]
    wanted = jax.jit(lambda args: [families(x) for x in args], compiler_options=FAST)(args)
    sharded = sx.shard_jit(lambda args: [families(_split(x)) for x in args], mesh=MESH)
    got = sharded.lower(args).compile(compiler_options=FAST)(args)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(got), strict=True
    ):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), path
        exact = not jnp.issubdtype(one.dtype, jnp.inexact)
        wide = "complex64" if one.dtype.kind == "c" else "float64"
        rtol = 0 if exact else float(jnp.finfo(one.dtype).eps)
        np.testing.assert_allclose(
            np.asarray(other).astype(wide), np.asarray(one).astype(wide), rtol=rtol, err_msg=str(path)
        )


def _moved_keys(keys):
    moved = [
        keys[1:],
        keys[::-1],
        jnp.roll(keys, 1),
        jnp.concatenate([keys, keys]),
        keys.reshape(5, 1),
        jnp.stack([keys] * 2),
    ]
    picked = [keys[3], keys[jnp.array([4, 0])], jnp.broadcast_to(keys, (2, 5))]
    put = [
        keys.at[jnp.array([4, 0])].set(keys[1:3]),
        jax.vmap(lambda k: k.at[1:3].set(k[:2]))(jnp.stack([keys] * 2)),
    ]
    return [jax.random.key_data(x) for x in (*moved, *picked, *put)]


def test_keys():
    keys = jax.random.split(jax.random.key(0), 5)
    got = sx.shard_jit(lambda keys: _moved_keys(sx.annotate(keys, P("x"))), mesh=MESH)(keys)
    for one, other in zip(jax.jit(_moved_keys)(keys), got, strict=True):
        np.testing.assert_array_equal(one, other)
