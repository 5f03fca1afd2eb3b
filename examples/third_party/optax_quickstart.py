"""A perceptron that learns whether a byte is odd from its bits, in batches of five.

After optax's "Getting started": https://optax.readthedocs.io/en/latest/getting_started.html
"""

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from examples.run import TrainStep

TX = optax.adam(1e-2, eps=1e-4)


def init(key):
    hidden, output = jax.random.split(key)
    params = {
        "hidden": jax.random.normal(hidden, (8, 30)),
        "output": 0.1 * jax.random.normal(output, (30, 2)),
    }
    return params, TX.init(params)


def step(state, batch):
    params, opt_state = state
    bits, odd = batch

    def loss(params):
        logits = jax.nn.relu(bits @ params["hidden"]) @ params["output"]
        return optax.sigmoid_binary_cross_entropy(logits, odd).sum(-1).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def batches(steps: int):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        bytes_B = rng.integers(0, 256, (5, 1), np.uint8)
        yield (
            np.unpackbits(bytes_B, axis=1).astype(np.float32),
            np.asarray(jax.nn.one_hot(bytes_B[:, 0] % 2, 2)),
        )


STEP = TrainStep(
    init, step, batches, lambda shapes: ({"hidden": P(None, "model"), "output": P("model", None)}, None)
)
