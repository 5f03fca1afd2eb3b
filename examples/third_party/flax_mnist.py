"""Two convolutions, two dense layers, momentum, in a TrainState.

After Flax's MNIST example: https://github.com/google/flax/tree/main/examples/mnist
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from examples.run import TrainStep
from models.rules import specs_by_path

SIDE, CLASSES = 14, 10
TX = optax.sgd(0.1, momentum=0.9)
RULES = ((r"hidden/kernel", P(None, "model")), (r"hidden/bias", P("model")), (r"out/kernel", P("model")))


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.relu(nn.Conv(6, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.avg_pool(nn.relu(nn.Conv(11, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(34, name="hidden")(x.reshape(len(x), -1)))
        return nn.Dense(CLASSES, name="out")(x)


MODEL = CNN()


def init(key):
    params = MODEL.init(key, jnp.zeros((1, SIDE, SIDE, 1)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=TX)


def step(state, batch):
    x, labels = batch

    def loss(params):
        logits = state.apply_fn({"params": params}, x)
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES)).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def batches(steps: int):
    """Which of ten patches is bright."""
    rng = np.random.default_rng(0)
    patch = np.arange(SIDE * SIDE).reshape(1, SIDE, SIDE, 1) * CLASSES // (SIDE * SIDE)
    for _ in range(steps):
        labels = rng.integers(0, CLASSES, 13, np.int32)
        yield (
            (0.3 * rng.normal(size=(13, SIDE, SIDE, 1)) + 2 * (patch == labels[:, None, None, None])).astype(
                np.float32
            ),
            labels,
        )


def specs(shapes):
    nothing = jax.tree.map(lambda _: None, shapes)
    return nothing.replace(params=specs_by_path(RULES, shapes.params, ("data", "model")))


STEP = TrainStep(init, step, batches, specs)
