"""The Pallas kernels of `docs/flash_attention.py` under their rules: equal to plain attention, and what they
send.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from docs.flash_attention import flash_attention, plain_attention

MESH = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)


def _qkv(b, s, h, t=None):
    rng = np.random.RandomState(0)
    return tuple(rng.randn(b, n, h, 8).astype("float32") for n in (s, t or s, t or s))


def _loss(attention):
    return lambda q, k, v: jnp.sum(jnp.sin(attention(q * 2, k, v)))


def _with_gradients(attention):
    return jax.value_and_grad(_loss(attention), (0, 1, 2))


close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
BY_BATCH_AND_HEADS = (P("x", None, "y"),) * 3
BY_QUERIES = (P("x", "z", "y"), P("x", None, "y"), P("x", None, "y"))


@pytest.mark.promotes_ranks
@pytest.mark.parametrize("sizes", [(1, 128, 2), (2, 6, 2, 10)])
def test_equal(sizes):
    args = _qkv(*sizes)
    jax.tree.map(
        close,
        jax.jit(_with_gradients(flash_attention))(*args),
        jax.jit(_with_gradients(plain_attention))(*args),
    )


@pytest.mark.promotes_ranks
@pytest.mark.parametrize(
    "sizes, specs", [((2, 16, 2), BY_QUERIES), ((3, 5, 3), BY_BATCH_AND_HEADS), ((3, 5, 3), BY_QUERIES)]
)
def test_split(sizes, specs):
    args = _qkv(*sizes)
    step = sx.shard_jit(_with_gradients(flash_attention), mesh=MESH, in_shardings=specs)
    jax.tree.map(close, step(*args), jax.jit(_with_gradients(plain_attention))(*args))


@pytest.mark.promotes_ranks
def test_differentiated_from_outside():
    args, specs = _qkv(2, 4, 2), BY_QUERIES
    around = jax.value_and_grad(
        sx.shard_jit(_loss(flash_attention), mesh=MESH, in_shardings=specs), (0, 1, 2)
    )
    jax.tree.map(close, around(*args), jax.jit(_with_gradients(plain_attention))(*args))


def test_nothing_is_sent():
    args = _qkv(4, 16, 4)
    for specs in (BY_BATCH_AND_HEADS, BY_QUERIES):
        assert not sx.shard_jit(flash_attention, mesh=MESH, in_shardings=specs).plan(*args).collectives
    backward = sx.shard_jit(
        jax.grad(_loss(flash_attention), (0, 1, 2)), mesh=MESH, in_shardings=BY_BATCH_AND_HEADS
    )
    assert not backward.plan(*args).collectives


def test_gradients_of_keys_are_summed_over_the_queries():
    args = _qkv(4, 256, 4, 16)
    step = sx.shard_jit(jax.grad(_loss(flash_attention), (0, 1, 2)), mesh=MESH, in_shardings=BY_QUERIES)
    assert {(c.kind, c.axes) for c in step.plan(*args).collectives} == {("all_reduce", ("z",))}


def test_without_rules_it_runs_replicated_with_a_warning():
    from jax.experimental import pallas as pl

    double = pl.pallas_call(
        lambda x, o: o.__setitem__(..., x[...] * 2),
        out_shape=jax.ShapeDtypeStruct((8, 4), "float32"),
        interpret=True,
    )
    f = sx.shard_jit(lambda x: double(x), mesh=MESH, in_shardings=P("x"))
    with pytest.warns(
        UserWarning,
        match="pallas_call at .*test_flash_attention.py:.* has no sharding rule: it runs replicated",
    ):
        close(f(np.ones((8, 4), "float32")), np.full((8, 4), 2))
    strict = sx.shard_jit(
        lambda x: double(x), mesh=MESH, in_shardings=P("x"), options=sx.Options(strict=True)
    )
    with pytest.raises(
        ValueError, match=r"Put the function that calls it under shardax.partition_as\(rule\)"
    ):
        strict(np.ones((8, 4), "float32"))
