"""Training state and train step: pure functions for one device, the same for every model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array


class State(NamedTuple):
    params: Any
    opt_state: Any
    step: Any


Init = Callable[[Array], State]
Step = Callable[[State, Any], tuple[State, Array]]


def make_init(init_params: Callable[[Array], Any], tx: optax.GradientTransformation) -> Init:
    """The function from a random key to the state before the first step."""

    def init(key: Array) -> State:
        params = init_params(key)
        return State(params, tx.init(params), jnp.zeros((), jnp.int32))

    return init


def make_step(
    loss: Callable[[Any, Any, Array], Array],
    tx: optax.GradientTransformation,
    value_and_grad: Callable[..., Any] = jax.value_and_grad,
) -> Step:
    """The function (state, batch) -> (next state, loss), for a scalar `loss(params, batch, step)`."""

    def train_step(state: State, batch) -> tuple[State, Array]:
        value, grads = value_and_grad(loss)(state.params, batch, state.step)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state, state.step + 1), value

    return train_step


def adamw(peak: float, warmup: int, steps: int, clip: float = 1.0) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm; the rate climbs to its peak over `warmup` steps, then falls to
    a tenth.
    """
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1), end_value=peak / 10)
    return optax.chain(optax.clip_by_global_norm(clip), optax.adamw(rate, b2=0.95, weight_decay=0.1))
