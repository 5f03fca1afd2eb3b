"""A little transformer in Flax linen, its dims named by the model, its layers one `nn.scan` under `nn.remat`.

    python -m examples.flax_linen

Rules say which names lie on which mesh axes. No size needs to divide: 3 heads, 257 tokens, batches of 10.
Shape suffixes: B batch, S sequence (T: the sequence attended to), E embedding, N heads, D head, V vocabulary.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import shardax as sx
from examples.run import main
from shardax.flax import specs

VOCAB, EMBED, HEADS, HIDDEN, LAYERS, SEQ, BATCH = 257, 48, 3, 90, 2, 24, 10
RULES = (("vocab", "model"), ("embed", None), ("heads", "model"), ("hidden", "model"), ("layers", None))


def named(*names, init=nn.initializers.lecun_normal()):  # noqa: B008  (a function)
    return nn.with_logical_partitioning(init, names)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x_BSE, _):
        h_BSE = nn.LayerNorm()(x_BSE)
        qkv = nn.DenseGeneral((3, HEADS, EMBED // HEADS), kernel_init=named("embed", None, "heads", None))(
            h_BSE
        )
        q_BSND, k_BTND, v_BTND = (qkv[:, :, i] for i in range(3))
        seen_ST = jnp.tril(jnp.ones((x_BSE.shape[1],) * 2, bool))
        y_BSND = jax.nn.dot_product_attention(q_BSND, k_BTND, v_BTND, mask=seen_ST)
        x_BSE += nn.DenseGeneral(EMBED, axis=(-2, -1), kernel_init=named("heads", None, "embed"))(y_BSND)
        h_BSH = nn.gelu(nn.Dense(HIDDEN, kernel_init=named("embed", "hidden"))(nn.LayerNorm()(x_BSE)))
        return x_BSE + nn.Dense(EMBED, kernel_init=named("hidden", "embed"))(h_BSH), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens_BS):
        embed = nn.Embed(
            VOCAB, EMBED, embedding_init=named("vocab", "embed", init=nn.initializers.normal(0.1))
        )
        position_SE = self.param("position", nn.initializers.normal(0.1), (SEQ, EMBED))
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x_BSE, _ = layers(name="layers")(embed(tokens_BS) + position_SE, None)
        return embed.attend(nn.LayerNorm()(x_BSE))


MODEL = Transformer()  # both are part of a TrainState's type, so there is one of each
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-4))


def init(key) -> TrainState:
    params = MODEL.init(key, jnp.zeros((1, SEQ), jnp.int32))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=TX)


def train_step(state: TrainState, text_BS):
    def loss(params):
        logits_BSV = state.apply_fn({"params": params}, text_BS[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, text_BS[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def batches(steps: int):
    """Texts that count upwards by a step of their own: soon learned."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        start, stride = rng.integers(0, VOCAB, (BATCH, 1)), rng.integers(1, 4, (BATCH, 1))
        yield ((start + stride * np.arange(SEQ + 1)) % VOCAB).astype(np.int32)


def train(mesh, steps: int = 20) -> list[float]:
    """The losses; on one device, under plain `jax.jit`, where there is no mesh."""
    key = jax.random.key(0)
    if mesh is None:
        make_state, step = jax.jit(init), jax.jit(train_step)
    else:
        shapes = jax.eval_shape(init, key)
        shardings = specs(shapes, RULES)
        step = sx.shard_jit(train_step, mesh=mesh, in_shardings=(shardings, P("data")), donate_argnums=0)
        make_state = sx.shard_jit(init, out_shardings=sx.abstract_state(step, shapes, next(batches(1))))
    state, losses = make_state(key), []
    for text_BS in batches(steps):
        state, loss = step(state, text_BS)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    main(train)
