"""Several meshes in one program: results as under plain jax.jit, and what is sent between annotations on them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

DEVICES = np.array(jax.devices())


def make(shape, names, devices=DEVICES, kind=AxisType.Auto):
    return Mesh(devices[: int(np.prod(shape))].reshape(shape), names, axis_types=(kind,) * len(shape))


A, B = make((2, 4), ("x", "y")), make((4, 2), ("x", "y"))
FLAT, THREE = make((8,), ("z",)), make((2, 2, 2), ("a", "b", "c"))
TRANSPOSED = Mesh(A.devices.T, ("p", "q"))
REVERSED = Mesh(A.devices.ravel()[::-1].reshape(2, 4), ("x", "y"))
SIX, OTHER_SIX = make((2, 3), ("x", "y")), make((3, 2), ("x", "y"))
X = np.random.RandomState(0).randn(64, 48).astype("float32")
W = np.random.RandomState(1).randn(48, 48).astype("float32")

MESHES = {
    "4x2 in 2x4": (A, B),
    "2x4 in 4x2": (B, A),
    "flat in 2x4": (A, FLAT),
    "2x4 in flat": (FLAT, A),
    "three axes": (A, THREE),
    "2x4 in three": (THREE, A),
    "transposed": (A, TRANSPOSED),
    "reversed": (A, REVERSED),
    "3x2 in 2x3": (SIX, OTHER_SIX),
    "abstract": (A, AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)),
}


def program(one, other, wsc=jax.lax.with_sharding_constraint):
    """A chain of annotations on two meshes, over products, sums and slices."""
    first, last = NamedSharding(one, P(one.axis_names[0])), NamedSharding(other, P(None, other.axis_names[-1]))

    def run(x, w):
        y = wsc(jnp.tanh(x), first) @ w
        y = sx.annotate(y, last) - wsc(x, NamedSharding(other, P(other.axis_names[0]))).sum(1, keepdims=True)
        return y[: y.shape[0] // 2], sx.annotate(y.sum(0), NamedSharding(one, P(one.axis_names)))

    return run


def same(got, want, rtol=1e-5):
    compare = partial(np.testing.assert_allclose, rtol=rtol, atol=rtol)
    jax.tree.map(lambda a, b: compare(np.asarray(a, "float32"), np.asarray(b, "float32")), got, want)


def plain(x, w):
    y = jnp.tanh(x) @ w - x.sum(1, keepdims=True)
    return y[: y.shape[0] // 2], y.sum(0)


def check(name, rows, dtype, tolerance):
    one, other = MESHES[name]
    x, w, f = X[:rows].astype(dtype), W.astype(dtype), sx.shard_jit(program(one, other), mesh=one)
    same(f(x, w), jax.jit(plain)(x, w), tolerance)


@pytest.mark.parametrize("name", MESHES)
def test_uneven(name):
    check(name, 37, "float32", 1e-4)


@pytest.mark.parametrize("name", ["4x2 in 2x4", "3x2 in 2x3"])
def test_bfloat16(name):
    check(name, 64, "bfloat16", 0.1)


@pytest.mark.parametrize("name", ["4x2 in 2x4", "3x2 in 2x3"])
def test_gradient(name):
    one, other = MESHES[name]
    f = sx.shard_jit(program(one, other), mesh=one)

    def loss(f, x, w):
        half, total = f(x, w)
        return (half**2).sum() + jnp.sin(total).sum()

    want = jax.grad(partial(loss, plain), (0, 1))(X, W)
    same(jax.grad(partial(loss, f), (0, 1))(X, W), want, 1e-3)
    same(sx.shard_jit(jax.grad(partial(loss, program(one, other)), (0, 1)), mesh=one)(X, W), want, 1e-3)


SENT = {
    "a finer split": (NamedSharding(A, P("x")), NamedSharding(B, P("x")), {}),
    "a coarser split": (NamedSharding(B, P("x")), NamedSharding(A, P("x")), {"all_gather": 3072}),
    "another dim": (NamedSharding(A, P("x")), NamedSharding(B, P(None, "x")), {"all_to_all": 2304}),
    "a minor part": (NamedSharding(A, P("y")), NamedSharding(B, P("y")), {"ppermute": 3072, "all_gather": 3072}),
    "one axis moves": (NamedSharding(B, P("x", "y")), NamedSharding(FLAT, P("z")), {"all_to_all": 768}),
    "transposed": (NamedSharding(A, P("x", "y")), NamedSharding(TRANSPOSED, P("q", "p")), {}),
    "reversed": (NamedSharding(A, P("x", "y")), NamedSharding(REVERSED, P("x", "y")), {}),
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name):
    """Of 12 KiB: what a device wants and lacks, never the whole array."""
    source, target, sent = SENT[name]
    f = sx.shard_jit(lambda x: sx.annotate(jnp.sin(x), target), mesh=A, in_shardings=source)
    assert {c.kind: c.total for c in f.plan(X).collectives} == sent
    np.testing.assert_allclose(f(X), np.sin(X), rtol=1e-6)
