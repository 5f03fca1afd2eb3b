"""Every family of rules on every kind of dtype, ranks 0 to 8, empty dims, split unevenly: as the plain
function.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

MESHES = {
    "xy": (jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2), ("y", "x")),
    "xyz": (jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3), (("x", "z"), "y")),
}
SHAPES = [(), (10,), (6, 5), (5, 0, 3), (3, 2, 5, 2), (3, 1, 2, 1, 5), (2, 1, 3, 1, 2, 1, 2, 1)]
DTYPES = "bool int8 int32 uint16 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 complex64 key".split()


def _array(shape, dtype):
    if dtype == "key":
        return jax.random.split(jax.random.key(3), shape)
    values = (np.arange(math.prod(shape)) * 7 % 5).reshape(shape)
    return jnp.asarray(
        values % 2 == 0
        if dtype == "bool"
        else values + 1j * (values % 3)
        if dtype == "complex64"
        else values,
        dtype,
    )


def _is(x, *kinds):
    return any(jnp.issubdtype(x.dtype, kind) for kind in kinds)


def _elementwise(x):
    yield x == x[..., ::-1] if x.ndim else x == x
    if not _is(x, jax.dtypes.prng_key):
        yield from (jnp.where(x == 0, x, jnp.ones_like(x)), x != 2)
    if _is(x, jnp.inexact, jnp.integer):
        yield from (x + x, x * x, -x, jnp.square(x))
    if _is(x, np.bool_, jnp.integer):
        yield from (x & x, ~x, x ^ x)
    if _is(x, jnp.inexact):
        yield from (jnp.exp(-x), jnp.abs(x))


def _reductions(x):
    for axis in (0, x.ndim - 1) if x.ndim else (None,):
        if _is(x, np.bool_, jnp.integer):
            yield from (jnp.any(x, axis), jnp.all(x, axis), jnp.bitwise_count(x.astype("uint8")).sum(axis))
        if _is(x, jnp.inexact, jnp.integer):
            yield from (x.sum(axis), jnp.prod(x, axis))
        if _is(x, np.bool_, jnp.floating, jnp.integer) and x.size:
            yield from (x.max(axis), x.min(axis))
            yield jnp.argmax(x, axis) if x.ndim else jnp.argmin(x)


def _dots(x):
    if _is(x, jnp.inexact, jnp.integer):
        kind = (
            jnp.complex64
            if _is(x, jnp.complexfloating)
            else jnp.float32
            if _is(x, jnp.inexact)
            else jnp.int32
        )
        yield jnp.tensordot(x, x, x.ndim, preferred_element_type=kind)
        if x.ndim:
            yield jnp.tensordot(x, x, ((0,), (0,)), preferred_element_type=kind)
            yield jnp.einsum("a...,a...->...", x, x, preferred_element_type=kind)


def _indexing(x):
    if x.ndim and x.shape[0]:
        places = jnp.asarray([1, 0, 1, -1, 7]) % x.shape[0]
        yield x[places]
        yield lax.dynamic_slice_in_dim(x, places[0], 2)
        yield lax.dynamic_update_slice_in_dim(x, x[:1], places[0], 0)
        yield x.at[places].set(x[0])
        if _is(x, jnp.inexact, jnp.integer):
            yield from (x.at[places].add(x[0]), x.at[places[:2]].mul(x[:1]))
        if _is(x, jnp.floating, jnp.integer):
            yield x.at[places].max(x[0])


def _sorts(x):
    if x.ndim and not _is(x, jax.dtypes.prng_key):
        yield from (jnp.sort(x, 0), jnp.sort(x, -1), jnp.argsort(x, 0))
        if _is(x, jnp.floating, jnp.integer) and x.shape[-1]:
            yield from lax.top_k(x, 1)


def _cumulative(x):
    if x.ndim and _is(x, jnp.inexact, jnp.integer):
        yield from (lax.cumsum(x, 0), lax.cumprod(x, x.ndim - 1, reverse=True))
        if _is(x, jnp.floating, jnp.integer):
            yield from (lax.cummax(x, 0), lax.cummin(x, x.ndim - 1))


def _moves(x):
    if x.ndim:
        yield from (jnp.concatenate([x, x]), x[1:], x[::-1], x[::2], jnp.roll(x, 1, 0))
        if not _is(x, jax.dtypes.prng_key):
            yield lax.pad(x, x.dtype.type(1), [(1, 2, 1)] + [(0, 0, 0)] * (x.ndim - 1))
            if 0 not in x.shape:
                yield lax.pad(x, x.dtype.type(1), [(-1, 1, 0)] + [(0, 0, 0)] * (x.ndim - 1))


def _shapes(x):
    yield from (
        x.reshape(-1),
        x.T,
        jnp.stack([x, x], -1),
        jnp.broadcast_to(x, (3, *x.shape)),
        jnp.squeeze(x),
        x[None],
    )
    if x.ndim > 1:
        yield from (jnp.swapaxes(x, 0, -1), x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]))


def _selects(x):
    which = jnp.arange(math.prod(x.shape)).reshape(x.shape) % 3
    yield from (lax.select_n(which == 0, x, x[::-1] if x.ndim else x), lax.select_n(which, x, x, x))
    yield lax.optimization_barrier(x)
    yield lax.cond(which.sum() > 2, lambda x: x, lambda x: x[::-1] if x.ndim else x, x)
    yield lax.fori_loop(0, 2, lambda i, x: x[::-1] if x.ndim else x, x)


def _conversions(x):
    if _is(x, jax.dtypes.prng_key):
        yield jax.random.key_data(x)
        return
    yield from (
        x.astype(t)
        for t in ("complex64", "float32", "int32", "bool")
        if t == "complex64" or not _is(x, jnp.complexfloating)
    )
    if not _is(x, np.bool_, jnp.complexfloating):
        yield lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        yield lax.bitcast_convert_type(x, "uint8")
        yield x.astype("float8_e4m3fn" if x.dtype != jnp.float8_e4m3fn else "bfloat16")
    if _is(x, jnp.complexfloating):
        yield from (x.real, x.imag, x.conj())


def _random(x):
    """As many as x has elements, of its dtype."""
    key = jax.random.key(5)
    if _is(x, jax.dtypes.prng_key):
        yield from (
            jax.random.split(x[0], x.shape) if x.ndim and x.size else jax.random.fold_in(key, 1),
            jax.vmap(jax.random.bits)(x.reshape(-1)),
        )
    elif _is(x, np.bool_):
        yield jax.random.bernoulli(key, 0.5, x.shape) ^ x
    elif _is(x, jnp.integer):
        yield jax.random.randint(key, x.shape, 0, 100, "int32") + x.astype("int32")
        yield jax.random.bits(key, x.shape, "uint16") + x.astype("uint16")
    elif x.dtype.itemsize > 1:
        yield jax.random.normal(key, x.shape, x.dtype) + x


def _windows(x):
    if x.ndim == 2 and _is(x, jnp.floating, jnp.integer):
        least = x.dtype.type(-jnp.inf) if _is(x, jnp.floating) else jnp.iinfo(x.dtype).min
        if x.dtype.itemsize > 1:
            yield lax.reduce_window(x, np.asarray(least, x.dtype), lax.max, (3, 2), (1, 2), "SAME")
        yield lax.reduce_window(x, np.asarray(0, x.dtype), lax.add, (3, 2), (2, 1), "VALID")
        yield lax.conv_general_dilated(x[None, :, :].astype("float32"), jnp.ones((1, 6, 3)), (1,), "SAME")


FAMILIES = {
    f.__name__[1:]: f
    for f in (
        _elementwise,
        _reductions,
        _dots,
        _indexing,
        _sorts,
        _cumulative,
        _moves,
        _shapes,
        _selects,
        _conversions,
        _random,
        _windows,
    )  # fmt: skip
}


def _arguments(family, splits, all_shapes):
    """By name the arrays for which plain JAX takes this family, and their specs. All shapes, or for each
    dtype another one.
    """
    args, turn = {}, list(FAMILIES.values()).index(family)
    for i, dtype in enumerate(DTYPES):
        own = [(6, 5)] if family is _windows else [SHAPES[(i + turn) % 7]]
        for shape in own if not all_shapes else SHAPES if dtype == "float32" else {*own, SHAPES[i % 4]}:
            x = _array(shape, dtype)
            try:
                if jax.eval_shape(lambda x: list(family(x)), x):
                    args[f"{dtype}{list(shape)}"] = x
            except (TypeError, ValueError, NotImplementedError):
                continue  # JAX has no such thing
    return args, {name: P(*splits[: x.ndim]) for name, x in args.items()}


FEW = [(family, "xy", False) for family in FAMILIES]
ALL = [pytest.param(family, mesh, True, marks=pytest.mark.slow) for family in FAMILIES for mesh in MESHES]


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:overflow encountered|invalid value|divide by zero")
@pytest.mark.parametrize("family, mesh, all_shapes", [*FEW, *ALL])
def test_dtypes_ranks_and_empty_dims(family, mesh, all_shapes):
    mesh, splits = MESHES[mesh]
    args, specs = _arguments(FAMILIES[family], splits, all_shapes)
    assert len(args) >= (6 if all_shapes else 4), sorted(args)
    f = lambda xs: {name: list(FAMILIES[family](x)) for name, x in xs.items()}  # noqa: E731
    wanted = jax.jit(f)(args)
    got = sx.shard_jit(f, mesh=mesh, in_shardings=(specs,))(args)
    for name in wanted:
        for i, (a, b) in enumerate(zip(got[name], wanted[name], strict=True)):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), (name, i)
            _assert_equal(a, b, f"{family} {i} of {name}")


def _assert_equal(a, b, what):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    exact = not jnp.issubdtype(a.dtype, jnp.inexact)
    tolerance = 0.0 if exact else float(jnp.finfo(a.dtype).eps) * 4
    a, b = (np.asarray(x, None if exact or x.dtype == jnp.complex64 else "float32") for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=what)
