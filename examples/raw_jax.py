"""A perceptron in JAX alone: lists of arrays, `jax.grad` and gradient descent by hand.

    python -m examples.raw_jax

Shape suffixes: B batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from examples.run import TrainStep, main

SIZES = (49, 70, 33, 10)  # uneven on every axis of 4
SPECS = [(P(None, "model"), P("model")), (P("model", None), P()), (P(), P())]
BATCH, RATE = 14, 0.5


def init(key):
    keys = jax.random.split(key, len(SIZES) - 1)
    shapes = zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    return [(jax.random.normal(k, (m, n)) / np.sqrt(m), jnp.zeros(n)) for k, m, n in shapes]


def loss(params, batch):
    x, labels_B = batch
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    log_probabilities = jax.nn.log_softmax(x @ w + b)
    return -jnp.take_along_axis(log_probabilities, labels_B[:, None], axis=1).mean()


def train_step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value


def batches(steps: int):
    """The brightest tenth of a picture is to be found."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        labels_B = rng.integers(0, 10, BATCH, np.int32)
        bright = np.arange(SIZES[0]) * 10 // SIZES[0] == labels_B[:, None]
        yield (rng.normal(size=(BATCH, SIZES[0])) * 0.5 + 2 * bright).astype(np.float32), labels_B


STEP = TrainStep(init, train_step, batches, lambda shapes: SPECS)
train, plan = STEP.train, STEP.plan


if __name__ == "__main__":
    main(train)
