"""What XLA's CPU compiler gets wrong. For arrays into which parts of themselves are written, wanted is what
the operations give one by one: `jax.jit` has the fault."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from tests.test_program import mesh_of

X = np.random.default_rng(0).normal(size=(11, 8)).astype("float32")
ONE = np.int32(1)


def of_one_row(x, i):
    return lax.dynamic_update_slice(x, jnp.sin(x[:1]), (i, 0)).reshape(1, 11, 8)


def beside_fft(x, i):
    y = jnp.fft.rfft(x[..., None] * x[:, None], axis=2).real
    z = lax.dynamic_update_slice(y, y[:10], (i, 0, 0))
    return z / (1 + z**2)


def twice(x, i):
    y = lax.dynamic_update_slice(x, x[:6], (4 * i, 0))
    return lax.dynamic_update_slice(y, y[:6], (i + 1, 0)).reshape(1, 88)


def with_two_arguments(x, i):
    inner = sx.shard_jit(lambda y, part: lax.dynamic_update_slice(y, part, (i, 0)).reshape(1, 11, 8))
    return inner(x, x[:10])


CASES = {
    "known": lambda x, i: x.at[1:].set(x[:-1]).reshape(1, 11, 8),
    "position": lambda x, i: lax.dynamic_update_slice(x, x[:10], (i, 0)).reshape(1, 11, 8),
    "reversed": lambda x, i: lax.dynamic_update_slice(x, x[9::-1], (i, 0)).reshape(1, 11, 8),
    "rows": of_one_row,
    "fft": beside_fft,
    "twice": twice,
    "max": lambda x, i: x.at[2:8].max(x[:6]).reshape(1, 11, 8),
    "multiply": lambda x, i: x.at[2:8].multiply(x[:6]).reshape(1, 11, 8),
    "loop": lambda x, i: lax.fori_loop(
        0, 1, lambda t, y: lax.dynamic_update_slice(y, y[:10], (i + t, 0)), x
    ).reshape(1, 88),
    "branch": lambda x, i: lax.cond(
        i > 0, lambda y: lax.dynamic_update_slice(y, y[:10], (i, 0)).reshape(88), jnp.ravel, x
    ),
    "arguments": with_two_arguments,
}


@pytest.mark.parametrize("spec", [P(), P(None, "x")], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_not_overwritten_yet(name, spec):
    def of_reshaped(x, i):
        return CASES[name](lax.optimization_barrier(x.reshape(-1)).reshape(11, 8), i)

    with jax.disable_jit():
        wanted = of_reshaped(jnp.asarray(X), ONE)
    step = sx.shard_jit(of_reshaped, mesh=mesh_of(4), in_shardings=(spec, P()))
    np.testing.assert_allclose(step(X, ONE), wanted, rtol=1e-5, atol=1e-5)


def shifted(x):
    """A loop whose trips each write a row that is made of the one before."""
    return lax.fori_loop(
        1, len(x), lambda i, y: lax.dynamic_update_slice(y, jnp.sin(y[i - 1])[None], (i, 0)), x
    )


def test_updates_stay_in_place():
    x = jnp.ones((4096, 8))
    steps = (jax.jit(shifted), sx.shard_jit(shifted, mesh=mesh_of(1)))
    memory = [step.lower(x).compile().memory_analysis() for step in steps]
    plain, ours = (m.temp_size_in_bytes for m in memory if m)
    assert ours < plain + 4096, (ours, plain)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_only_what_runs_on_cpus_calls_updates(platform):
    step = sx.shard_jit(shifted, mesh=mesh_of(4), in_shardings=P(None, "x"))
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    assert "dynamic_update_slice" in str(step.plan(x).local_jaxpr) and "jit[" not in str(
        step.plan(x).local_jaxpr
    )
    text = step.trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert ("inlineable" in text) == (platform == "cpu")


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_only_what_runs_on_cpus_has_barriers(platform):
    step = sx.shard_jit(lambda x: sx.annotate(x.swapaxes(0, 1), P("x")), mesh=mesh_of(4), in_shardings=P("x"))
    x = jax.ShapeDtypeStruct((8, 8, 3), "float32")
    plan = str(step.plan(x).local_jaxpr)
    assert "all_to_all" in plan and "optimization_barrier" not in plan
    text = step.trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert ("optimization_barrier" in text) == (platform == "cpu")
