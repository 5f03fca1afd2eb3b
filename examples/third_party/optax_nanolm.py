"""A transformer that continues text, character by character.

After optax's "Character-level transformer":
https://optax.readthedocs.io/en/latest/_collections/examples/nanolm.html
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from examples.run import TrainStep
from models.rules import specs_by_path

TEXT = "a program for one device goes in, and one program for all devices comes out. " * 5
CHARACTERS = sorted(set(TEXT))
SEQ, EMBED, HEADS, LAYERS = 22, 36, 3, 2
TX = optax.adamw(5e-3, eps=1e-4)
RULES = (
    (r"(query|key|value)/kernel", P(None, "model")),
    (r"attention_\d/out/kernel", P("model")),
    (r"up_\d/kernel", P(None, "model")),
    (r"down_\d/kernel", P("model")),
    (r"tokens/embedding", P("model")),
)


class NanoLM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(len(CHARACTERS), EMBED, name="tokens")(tokens) + nn.Embed(SEQ, EMBED, name="positions")(
            jnp.arange(SEQ)
        )
        for i in range(LAYERS):
            mask = nn.make_causal_mask(tokens)
            x += nn.MultiHeadDotProductAttention(HEADS, name=f"attention_{i}")(nn.LayerNorm()(x), mask=mask)
            h = nn.gelu(nn.Dense(4 * EMBED, name=f"up_{i}")(nn.LayerNorm()(x)))
            x += nn.Dense(EMBED, name=f"down_{i}")(h)
        return nn.Dense(len(CHARACTERS), name="out")(nn.LayerNorm()(x))


def init(key):
    params = NanoLM().init(key, jnp.zeros((1, SEQ), jnp.int32))["params"]
    return params, TX.init(params)


def step(state, batch):
    params, opt_state = state
    tokens, following = batch

    def loss(params):
        logits: Any = NanoLM().apply({"params": params}, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def batches(steps: int):
    rng = np.random.default_rng(0)
    text = np.array([CHARACTERS.index(c) for c in TEXT], np.int32)
    for _ in range(steps):
        windows = np.stack([text[i : i + SEQ + 1] for i in rng.integers(0, len(text) - SEQ - 1, 7)])
        yield windows[:, :-1], windows[:, 1:]


STEP = TrainStep(
    init, step, batches, lambda shapes: (specs_by_path(RULES, shapes[0], ("data", "model")), None)
)
