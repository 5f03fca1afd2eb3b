"""A variational autoencoder in Haiku: `hk.transform` makes pure functions, which `shard_jit` takes as they
are.

    python -m examples.haiku_vae

The noise is drawn inside the step, and is the same on every mesh.
"""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from examples.run import TrainStep, main

PIXELS, HIDDEN, LATENT, BATCH = 63, 50, 6, 10
TX = optax.adam(1e-2, eps=1e-4)


class State(NamedTuple):
    params: Any
    opt_state: Any
    key: Any


def autoencode(x):
    """The logits of the pixels, and the mean and log variance of the latent code."""
    h = jax.nn.relu(hk.Linear(HIDDEN, name="encoder")(x))
    mean, log_variance = hk.Linear(LATENT, name="mean")(h), hk.Linear(LATENT, name="log_variance")(h)
    z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(hk.next_rng_key(), mean.shape)
    h = jax.nn.relu(hk.Linear(HIDDEN, name="decoder")(z))
    return hk.Linear(PIXELS, name="pixels")(h), mean, log_variance


MODEL = hk.transform(autoencode)
SPECS = {
    "encoder": {"w": P(None, "model"), "b": P("model")},
    "decoder": {"w": P(None, "model"), "b": P("model")},
}


def init(key) -> State:
    key, own = jax.random.split(key)
    params = MODEL.init(own, jnp.zeros((1, PIXELS)))
    return State(params, TX.init(params), key)


def train_step(state: State, x):
    key, own = jax.random.split(state.key)

    def loss(params):
        logits, mean, log_variance = MODEL.apply(params, own, x)
        seen = optax.sigmoid_binary_cross_entropy(logits, x).sum(-1)
        divergence = 0.5 * (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(-1)
        return (seen + divergence).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    updates, opt_state = TX.update(grads, state.opt_state)
    return State(optax.apply_updates(state.params, updates), opt_state, key), value


def batches(steps: int):
    """Pictures of one of four patterns."""
    rng = np.random.default_rng(0)
    patterns = rng.random((4, PIXELS)) < 0.3
    for _ in range(steps):
        yield (patterns[rng.integers(0, 4, BATCH)] ^ (rng.random((BATCH, PIXELS)) < 0.05)).astype(np.float32)


def specs(shapes: State) -> State:
    return State({name: SPECS.get(name) for name in shapes.params}, None, None)


STEP = TrainStep(init, train_step, batches, specs)
train, plan = STEP.train, STEP.plan


if __name__ == "__main__":
    main(train)
