"""Callbacks in a step on stages are called as often as under `jax.jit`, with the same values; in a loss that is
called with each microbatch, once for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.pipeline.printed import called_back, without_callbacks

pytestmark = pytest.mark.promotes_ranks

B, M = 16, 4
SPECS = P("stage"), P("data"), P("data")


def mesh():
    return jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)


def values():
    random = np.random.RandomState(0)
    return [random.randn(*shape).astype("float32") for shape in ((4, M, M), (B, M), (B, M))]


def noting(calls):
    """A loss that notes the sum of the batch, the mean of its activations, and a number."""

    def loss(params, x_BM, y_BM):
        jax.debug.callback(lambda x: calls.append(("batch", float(x))), x_BM.sum())
        h_BM, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x_BM, params)
        jax.debug.callback(lambda h, n: calls.append((int(n), float(h))), h_BM.mean(), 3)
        return ((h_BM - y_BM) ** 2).mean()

    return loss


def noted(function, calls, *args):
    """What a function returns, and what it notes."""
    found = jax.block_until_ready(function(*args))
    jax.effects_barrier()
    noted, calls[:] = sorted(calls, key=str), []
    return found, noted


def same(found, wanted):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("microbatches", [4, 3])
def test_a_step_calls_with_values_of_the_whole_batch(microbatches):
    calls: list[tuple] = []
    loss = noting(calls)

    def step(params, x_BM, y_BM):
        value, gradient = jax.value_and_grad(loss)(params, x_BM, y_BM)
        jax.debug.callback(lambda g: calls.append(("gradient", float(g))), (gradient**2).sum())
        return params - 0.1 * gradient, value

    pipeline = sx.pipeline.Pipeline(microbatches=microbatches)
    train = sx.shard_jit(step, mesh=mesh(), in_shardings=SPECS, transforms=[pipeline])
    found, called = noted(train, calls, *values())
    wanted, expected = noted(jax.jit(step), calls, *values())
    same(found, wanted)
    assert [name for name, _ in called] == [name for name, _ in expected] == ["batch", "gradient", 3]
    same([x for _, x in called], [x for _, x in expected])


def test_a_loss_calls_for_each_microbatch():
    calls: list[tuple] = []
    loss, count = noting(calls), 4
    grad = sx.pipeline.value_and_grad(loss, microbatches=count)
    found, called = noted(sx.shard_jit(grad, mesh=mesh(), in_shardings=SPECS), calls, *values())
    wanted, _ = noted(jax.jit(jax.value_and_grad(loss)), calls, *values())
    same(found, wanted)
    params, x, y = values()
    _, expected = noted(lambda: [loss(params, x[i::count], y[i::count]) for i in range(count)], calls)
    assert [name for name, _ in called] == [name for name, _ in expected]
    np.testing.assert_allclose([x for _, x in called], [x for _, x in expected], rtol=1e-4, atol=1e-5)


def test_forward_alone_calls_too():
    calls: list[tuple] = []

    def scores(params, x_BM):
        jax.debug.callback(lambda x: calls.append(("batch", float(x))), x_BM.sum())
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x_BM, params)[0]

    apply = sx.pipeline.apply(scores, microbatches=4)
    found, called = noted(sx.shard_jit(apply, mesh=mesh(), in_shardings=SPECS[:2]), calls, *values()[:2])
    wanted, _ = noted(jax.jit(scores), calls, *values()[:2])
    same(found, wanted)
    x = values()[1]
    np.testing.assert_allclose(
        sorted(v for _, v in called), sorted(x[i::4].sum() for i in range(4)), rtol=1e-5
    )


@pytest.mark.parametrize("call", [jax.pure_callback, io_callback])
@pytest.mark.parametrize("microbatches", [4, 3])
def test_what_callbacks_return_is_made_once(call, microbatches):
    """Of the state, the loss, and gradients, also in a branch; and of what nobody reads."""
    calls: list[tuple] = []

    def halved(name, x):
        def python(x):
            calls.append((name, float(np.sum(x))))
            return np.asarray(x / 2, x.dtype)

        return call(python, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def step(params, x_BM, y_BM):
        rate = halved("rate", jnp.abs(params[0, 0, 0]))
        loss = noting([])
        value, gradient = jax.value_and_grad(loss)(params, x_BM, y_BM)
        if call is io_callback:
            halved("unread", value)
        gradient = lax.cond(value > 0, lambda g: halved("gradient", g), lambda g: g, gradient)
        return params - rate * gradient, halved("value", value)

    pipeline = sx.pipeline.Pipeline(microbatches=microbatches)
    train = sx.shard_jit(step, mesh=mesh(), in_shardings=SPECS, transforms=[pipeline])
    found, called = noted(train, calls, *values())
    wanted, expected = noted(jax.jit(step), calls, *values())
    same(found, wanted)
    assert [name for name, _ in called] == [name for name, _ in expected]
    same([x for _, x in called], [x for _, x in expected])


@pytest.mark.quick
def test_callbacks_are_taken_out_with_what_they_read():
    """Also out of calls of `jit`; numbers stay with them."""

    def function(x):
        jax.jit(lambda x: jax.debug.print("{} {}", x.sum(), 3))(x)
        return 2 * x

    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((M,), "float32"))
    quiet, called = without_callbacks(closed)
    assert not quiet.effects and [v.str_short() for v in quiet.out_avals] == ["float32[4]", "float32[]"]
    assert without_callbacks(quiet) == (quiet, [])
    again = jax.make_jaxpr(lambda x, total: called_back(called, [x, total]))(*quiet.out_avals)
    assert again.effects == closed.effects and len(again.out_avals) == 1
