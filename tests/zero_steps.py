"""Train steps that tests of ZeRO share: an optimizer's of a loss, and losses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.zero import Zero


def step_of(loss: Callable[[Any, Any], Any], tx: optax.GradientTransformation):
    """step((params, opt_state), batch) -> (the same, updated), loss."""

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def two_products(params, x_BM):
    return ((jnp.tanh(x_BM @ params["w"]) @ params["v"]) ** 2).mean()


def layers(state, x_BM):
    """A step of unrolled layers, computed in bfloat16, by gradients with momentum."""

    def loss(params):
        h_BM = x_BM.astype(jnp.bfloat16)
        for w in params:
            h_BM = jnp.tanh(h_BM @ w.astype(jnp.bfloat16))
        return (h_BM.astype(jnp.float32) ** 2).mean()

    params, moments = state
    value, grads = jax.value_and_grad(loss)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return (jax.tree.map(lambda w, m: w - 0.1 * m, params, moments), moments), value


def trained(step, state):
    """The state after five steps on 40 rows of six, in true shapes."""
    dtype = jax.tree.leaves(state)[0].dtype
    for n in range(5):
        state, _ = step(state, np.random.default_rng(n).normal(size=(40, 6)).astype(dtype))
    return sx.zero.unpad(jax.device_get(state))


def assert_equal(found, wanted):
    """To rounding, of which bases and powers of a matrix amplify a little."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        error = 1e-9 if np.asarray(y).dtype == np.float64 else 2e-5
        np.testing.assert_allclose(x, y, rtol=10 * error, atol=error * max(1, np.abs(y).max()))


def assert_trained_as_alone(loss, tx, params, mesh, stage: int, dealt, specs, at_rest: bool):
    """The whole state under `Zero(dealt=)`, that comes as the optimizer makes it, or rests in stacks. Gives
    the plan."""
    axis = ("data", "fsdp") if "fsdp" in mesh.shape else "data"
    how = {"mesh": mesh, "in_shardings": ((specs, None), P(axis)), "donate_argnums": 0}
    how["options"] = sx.Options(chip="slow")  # or all of so small a step would be computed alike
    step = sx.shard_jit(step_of(loss, tx), transforms=[Zero(axis, stage, dealt=dealt)], **how)
    state = params, jax.jit(tx.init)(params)
    wanted = trained(jax.jit(step_of(loss, tx)), state)
    if at_rest:
        state = sx.zero.init(tx, params, mesh, axis, stage, dealt=True)
    plan = step.plan(state, np.zeros((40, 6), jax.tree.leaves(params)[0].dtype))
    assert_equal(trained(step, state), wanted)
    return plan
