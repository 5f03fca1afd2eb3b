"""A convolutional network in Equinox: the model is a pytree with functions in it, which `eqx.partition` sets
apart.

    python -m examples.equinox_cnn

`eqx.filter_jit` does so by itself, and calls `jax.jit`; here both steps are written out, so that `shard_jit`
can stand there.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from examples.run import TrainStep, main

SIDE, CLASSES, BATCH = 11, 6, 10
TX = optax.adamw(3e-3, eps=1e-4)


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        conv, hidden, out = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 5, kernel_size=4, key=conv),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(245, 62, key=hidden),
            jax.nn.sigmoid,
            eqx.nn.Linear(62, CLASSES, key=out),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return jax.nn.log_softmax(x)


def loss(model, batch):
    x, labels = batch
    predicted = jax.vmap(model)(x)
    return -jnp.take_along_axis(predicted, labels[:, None], axis=1).mean()


_, FUNCTIONS = eqx.partition(CNN(jax.random.key(0)), eqx.is_array)


def init(key):
    arrays, _ = eqx.partition(CNN(key), eqx.is_array)
    return arrays, TX.init(arrays)


def train_step(state, batch):
    arrays, opt_state = state
    value, grads = eqx.filter_value_and_grad(loss)(eqx.combine(arrays, FUNCTIONS), batch)
    updates, opt_state = TX.update(grads, opt_state, arrays)
    return (eqx.apply_updates(arrays, updates), opt_state), value


def specs(shapes):
    """The hidden layer is split over its 62 features, which 4 does not divide; the rest follows, or is
    whole.
    """
    nothing = jax.tree.map(lambda _: None, shapes[0])
    return eqx.tree_at(
        lambda m: m.layers[4].weight, nothing, P("model", None), is_leaf=lambda x: x is None
    ), None


def batches(steps: int):
    """One of six bars in noise."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        labels = rng.integers(0, CLASSES, BATCH, np.int32)
        bars = np.arange(SIDE)[None, :, None] // 2 == labels[:, None, None]
        yield (rng.normal(size=(BATCH, 1, SIDE, SIDE)) * 0.3 + 2 * bars[:, None]).astype(np.float32), labels


STEP = TrainStep(init, train_step, batches, specs)
train, plan = STEP.train, STEP.plan


if __name__ == "__main__":
    main(train)
