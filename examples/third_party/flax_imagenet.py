"""A small residual network with batch norm: statistics in the train state, weight decay in the loss, a cosine
schedule.

After Flax's ImageNet example: https://github.com/google/flax/tree/main/examples/imagenet
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import PartitionSpec as P

from examples.run import TrainStep
from models.rules import specs_by_path

SIDE, CLASSES = 10, 5
TX = optax.sgd(optax.warmup_cosine_decay_schedule(0.01, 0.1, 3, 20), momentum=0.9, nesterov=True)
RULES = ((r"wide_\d/kernel", P(None, None, None, "model")), (r"narrow_\d/kernel", P(None, None, "model")))


class TrainState(train_state.TrainState):
    batch_stats: Any


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        def norm(x):
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)

        x = nn.relu(norm(nn.Conv(6, (3, 3), use_bias=False)(x)))
        for i in range(2):
            y = nn.relu(norm(nn.Conv(9, (3, 3), use_bias=False, name=f"wide_{i}")(x)))
            x = nn.relu(x + norm(nn.Conv(6, (3, 3), use_bias=False, name=f"narrow_{i}")(y)))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


MODEL = ResNet()


def init(key):
    variables = MODEL.init(key, jnp.zeros((1, SIDE, SIDE, 3)))
    return TrainState.create(
        apply_fn=MODEL.apply, params=variables["params"], tx=TX, batch_stats=variables["batch_stats"]
    )


def step(state, batch):
    x, labels = batch

    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, x, mutable=["batch_stats"])
        matrices = [p for p in jax.tree.leaves(params) if p.ndim > 1]
        decay = 0.5e-4 * sum(jnp.sum(p**2) for p in matrices)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean() + decay, new

    (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"]), value


def batches(steps: int):
    """A class's color in noise."""
    rng = np.random.default_rng(0)
    colors = rng.normal(size=(CLASSES, 1, 1, 3))
    for _ in range(steps):
        labels = rng.integers(0, CLASSES, 10, np.int32)
        yield (colors[labels] + rng.normal(size=(10, SIDE, SIDE, 3))).astype(np.float32), labels


def specs(shapes):
    nothing = jax.tree.map(lambda _: None, shapes)
    return nothing.replace(params=specs_by_path(RULES, shapes.params, ("data", "model")))


STEP = TrainStep(init, step, batches, specs)
