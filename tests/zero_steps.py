"""Train steps that tests of ZeRO share: an optimizer's of a loss, and losses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


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
