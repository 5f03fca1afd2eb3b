"""A convolutional network that is trained on pictures which gradient ascent has made hard for it.

After optax's "Adversarial training":
https://optax.readthedocs.io/en/latest/_collections/examples/adversarial_training.html
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from examples.run import TrainStep

SIDE, CLASSES, RADIUS = 9, 5, 0.1
TX = optax.sgd(0.05, momentum=0.9)


class CNN(nn.Module):
    """Smooth, so that what is rounded otherwise on several devices stays small over many steps of ascent."""

    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.gelu(nn.Conv(7, (3, 3), name="first")(x)), (2, 2), strides=(2, 2))
        x = nn.gelu(nn.Conv(6, (3, 3), name="second")(x))
        return nn.Dense(CLASSES, name="out")(x.reshape(len(x), -1))


def init(key):
    params = CNN().init(key, jnp.zeros((1, SIDE, SIDE, 1)))["params"]
    return params, TX.init(params)


def loss(params, x, labels):
    logits: Any = CNN().apply({"params": params}, x)
    size = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean() + 1e-3 * size


def attacked(params, x, labels):
    """Projected gradient ascent, three steps."""

    def up(delta, _):
        grads = jax.grad(lambda delta: loss(params, x + delta, labels))(delta)
        return jnp.clip(delta + 20.0 * grads, -RADIUS, RADIUS), None

    delta, _ = jax.lax.scan(up, jnp.zeros_like(x), length=3)
    return x + jax.lax.stop_gradient(delta)


def step(state, batch):
    params, opt_state = state
    x, labels = batch
    value, grads = jax.value_and_grad(loss)(params, attacked(params, x, labels), labels)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def batches(steps: int):
    """Which row is bright."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        labels = rng.integers(0, CLASSES, 10, np.int32)
        rows = np.arange(SIDE)[None, :, None, None] // 2 == labels[:, None, None, None]
        yield (0.3 * rng.normal(size=(10, SIDE, SIDE, 1)) + rows).astype(np.float32), labels


def specs(shapes):
    features = {"kernel": P(None, None, None, "model"), "bias": P("model")}
    return {"first": features, "second": {"kernel": P(None, None, "model"), "bias": None}, "out": None}, None


STEP = TrainStep(init, step, batches, specs)
