"""Microbatches that are computed at once make what each makes alone, and sums over them are one product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.random import threefry2x32_p

from shardax.pipeline.together import Together, group_size
from tests.test_pipeline import rand

COUNT, B, S, M = 3, 2, 8, 4


def gradient(loss):
    """Of a loss of parameters and rows; the value is a row of results."""

    def run(params, *rows):
        value, grads = jax.value_and_grad(loss)(params, *rows)
        return [*jax.tree.leaves(grads), value]

    return run


def made(function, params, rows, counts=None):
    """What is made at once, its sums and rows, and the jaxpr."""
    one = jax.make_jaxpr(function)(params, *(x[0] for x in rows))
    leaves = jax.tree.leaves(params)

    def run(leaves, rows, counts):
        whole = dict(zip(one.jaxpr.invars, leaves, strict=False))
        whole |= dict(zip(one.jaxpr.constvars, one.consts, strict=True))
        own = dict(zip(one.jaxpr.invars[len(leaves) :], rows, strict=True))
        together = Together(one.jaxpr.eqns, whole, own, counts)
        return together.run(one.jaxpr.outvars, len(one.jaxpr.outvars) - 1)

    return jax.jit(run)(leaves, rows, counts), jax.make_jaxpr(run)(leaves, rows, counts)


def assert_as_alone(function, params, rows, counts=None):
    (sums, (values,)), jaxpr = made(function, params, rows, counts)
    own = [function(params, *(x[i] for x in rows)) for i in range(COUNT)]
    counted = [each for i, each in enumerate(own) if counts is None or counts[i]]
    for n, total in enumerate(sums):
        wanted = sum(np.asarray(each[n], total.dtype) for each in counted)
        np.testing.assert_allclose(total, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(values, np.stack([each[-1] for each in own]), rtol=2e-5)
    return jaxpr


def batch_norm(x):
    mean, variance = (f((0, 1), keepdims=True) for f in (x.mean, x.var))
    return (x - mean) * lax.rsqrt(variance + 1e-5)


def dense(params, x_BSM):
    return (batch_norm(jnp.tanh(jnp.einsum("bsm,nm->bsn", x_BSM, params))) ** 3).mean()


def convolved(params, x_BSM):
    dims = "NWC", "WIO", "NWC"
    y_BSM = lax.conv_general_dilated(x_BSM, params["full"], (2,), "SAME", dimension_numbers=dims)
    y_BSM = lax.conv_general_dilated(
        batch_norm(y_BSM), params["each"], (1,), "SAME", dimension_numbers=dims, feature_group_count=M
    )
    return (y_BSM**2).mean()


def embedded(params, text_BS):
    return (jnp.tanh(params[text_BS]) ** 2).mean()


ROWS = rand(0, COUNT, B, S, M)
KERNELS = {"full": rand(1, 3, M, M), "each": rand(2, 3, 1, M)}
TEXT = jnp.asarray(np.random.RandomState(0).randint(0, 16, (COUNT, B, S)), "int32")
CASES = {
    "dense": (dense, rand(1, M, M), ROWS),
    "convolved": (convolved, KERNELS, ROWS),
    "embedded": (embedded, rand(1, 16, M), TEXT),
}


@pytest.mark.parametrize("counts", [None, (True, True, False)])
@pytest.mark.parametrize("name", CASES)
def test_as_each_alone(name, counts):
    """Statistics are those of a microbatch; what is not counted adds nothing; no array of gradients of each
    microbatch is made."""
    loss, params, rows = CASES[name]
    jaxpr = assert_as_alone(gradient(loss), params, [rows], None if counts is None else jnp.array(counts))
    stacked = {(COUNT, *x.shape) for x in jax.tree.leaves(params)}
    assert stacked.isdisjoint(v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars)


@pytest.mark.parametrize("name", CASES)
def test_sums_of_half_precision_are_added_in_float32(name):
    loss, params, rows = CASES[name]
    halved = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    own = rows if name == "embedded" else rows.astype("bfloat16")
    (sums, _), _ = made(gradient(loss), halved, [own])
    assert {x.dtype for x in sums} == {jnp.dtype("float32")}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_bits_are_those_of_each(impl):
    """Under vmap rbg would draw for all keys from the first."""

    def function(params, number):
        key = jax.random.fold_in(jax.random.key(0, impl=impl), number)
        return [params + number, jax.random.bits(key, (4,))]

    (_, (bits,)), _ = made(function, jnp.int32(1), [jnp.arange(COUNT, dtype="int32")])
    wanted = [function(jnp.int32(1), jnp.int32(i))[-1] for i in range(COUNT)]
    np.testing.assert_array_equal(bits, np.stack(wanted))


@pytest.mark.parametrize("shape", [(4,), ()])
def test_words_of_keys_that_all_share(shape):
    """JAX's own batching gives threefry operands of size one, of which its lowering makes a wrong loop."""

    def function(params, number):
        words = jnp.broadcast_to(params, shape)
        return [number, threefry2x32_p.bind(words, words, *[jnp.full(4, number)] * 2)[0]]

    (_, (bits,)), _ = made(function, jnp.uint32(1), [jnp.arange(COUNT, dtype="uint32")])
    wanted = [function(jnp.uint32(1), jnp.uint32(i))[-1] for i in range(COUNT)]
    np.testing.assert_array_equal(bits, np.stack(wanted))


def test_what_vmap_cannot_do_runs_one_by_one():
    unbatched = custom_partitioning(lambda x: x * x.sum())
    unbatched.def_partition(
        partition=lambda *_: None, infer_sharding_from_operands=lambda *_: None, sharding_rule="i -> i"
    )

    def function(params, x):
        return [params * x.sum(), unbatched(x)]

    with pytest.raises(NotImplementedError, match="atching rule"):
        jax.vmap(unbatched)(rand(0, COUNT, M))
    _, (rows,) = jax.eval_shape(lambda x: made(function, jnp.float32(2), [x])[0], rand(0, COUNT, M))
    assert rows.shape == (COUNT, M)


def test_groups_fit_into_a_sixteenth_of_memory():
    jaxpr = jax.make_jaxpr(jnp.sin)(jnp.zeros(250))
    assert [group_size(jaxpr, 8, 16 * 1000 * n) for n in (0.5, 1, 3, 4.5, 100)] == [1, 1, 2, 4, 8]
