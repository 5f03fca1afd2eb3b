"""An LSTM reads a sum such as "12+34", another writes the answer, each token fed the one before it.

After Flax's sequence-to-sequence example: https://github.com/google/flax/tree/main/examples/seq2seq
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from examples.run import TrainStep

CHARACTERS = "0123456789+= "
HIDDEN, BATCH, READ, WRITTEN = 30, 10, 5, 4
TX = optax.adam(1e-2, eps=1e-4)
GATES = {f"{side}{gate}": P(None, "model") for side in "ih" for gate in "ifgo"}


class Seq2Seq(nn.Module):
    @nn.compact
    def __call__(self, read, written):
        carry, _ = nn.RNN(nn.OptimizedLSTMCell(HIDDEN, name="reader"), return_carry=True)(read)
        y = nn.RNN(nn.OptimizedLSTMCell(HIDDEN, name="writer"))(written, initial_carry=carry)
        return nn.Dense(len(CHARACTERS), name="out")(y)


def init(key):
    read, written = (jnp.zeros((1, n, len(CHARACTERS))) for n in (READ, WRITTEN - 1))
    params = Seq2Seq().init(key, read, written)["params"]
    return params, TX.init(params)


def step(state, batch):
    params, opt_state = state
    read, written = (jax.nn.one_hot(x, len(CHARACTERS)) for x in batch)

    def loss(params):
        logits: Any = Seq2Seq().apply({"params": params}, read, written[:, :-1])
        return optax.softmax_cross_entropy(logits, written[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def batches(steps: int):
    rng = np.random.default_rng(0)

    def tokens(text):
        return [CHARACTERS.index(c) for c in text]

    for _ in range(steps):
        pairs = rng.integers(0, 100, (BATCH, 2))
        read = [tokens(f"{a:02}+{b:02}") for a, b in pairs]
        yield np.array(read, np.int32), np.array([tokens(f"={a + b:<3}") for a, b in pairs], np.int32)


def specs(shapes):
    cell = {
        name: {"kernel": GATES[name], **({"bias": None} if "bias" in leaf else {})}
        for name, leaf in shapes[0]["reader"].items()
    }
    return {"reader": cell, "writer": cell, "out": None}, None


STEP = TrainStep(init, step, batches, specs)
