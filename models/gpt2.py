"""GPT-2 in Flax linen, written for one device: nothing but `program` knows of meshes (Radford et al. 2019).

Shape suffixes: B batch, S sequence (T: that attended to), M model, N heads, D head, H hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array

from models.gpt2_sharding import sharded_step
from models.steps import adamw, make_init, make_step


@dataclass(frozen=True)
class Config:
    vocab: int = 257  # 256 bytes and one end-of-file token: no mesh divides it, and nobody pads it
    seq: int = 128
    layers: int = 4
    heads: int = 8
    model: int = 192
    dtype: Any = jnp.float32  # of activations; parameters and softmax stay float32
    dropout: float = 0.0
    scan: bool = False  # one stacked layer under lax.scan
    remat: bool = False  # recompute each layer in the backward pass
    between_layers: Callable[[Array], Array] | None = None  # what to make of activations there

    def __post_init__(self):
        if self.model % self.heads:
            raise ValueError(f"model={self.model} must be a multiple of heads={self.heads}")

    @property
    def hidden(self) -> int:
        return 4 * self.model


SIZES = {
    "tiny": Config(layers=2, heads=2, model=32),
    "default": Config(),
    "gpt2": Config(vocab=50257, seq=1024, layers=12, heads=12, model=768),
    "gpt2-xl": Config(vocab=50257, seq=1024, layers=48, heads=25, model=1600),
}


class GPT2(nn.Module):
    """Tokens, int32[B, S], to logits, float32[B, S, V]."""

    config: Config

    @nn.compact
    def __call__(self, tokens_BS: Array) -> Array:
        c = self.config
        embed = nn.Embed(c.vocab, c.model, dtype=c.dtype, embedding_init=normal(), name="embed")
        position_SM = self.param("position", normal(), (c.seq, c.model))
        x_BSM = embed(tokens_BS) + position_SM[: tokens_BS.shape[1]].astype(c.dtype)
        x_BSM = layers(c, dropout(self, c, x_BSM))
        x_BSM = nn.LayerNorm(dtype=c.dtype, name="norm")(x_BSM)
        return embed.attend(x_BSM).astype(jnp.float32)


def layers(config: Config, x_BSM: Array) -> Array:
    block = nn.remat(Block, prevent_cse=not config.scan) if config.remat else Block
    if config.scan:
        rngs: dict[Any, bool] = {"params": True, "dropout": True}
        block = nn.scan(block, variable_axes={"params": 0}, split_rngs=rngs, length=config.layers)
        return block(config, name="layers")(x_BSM, None)[0]
    for i in range(config.layers):
        x_BSM, _ = block(config, name=f"layer_{i}")(x_BSM, None)
    return x_BSM


class Block(nn.Module):
    """One layer, in the form of a scan's body: a carry in and out, nothing scanned over."""

    config: Config

    @nn.compact
    def __call__(self, x_BSM: Array, _: None) -> tuple[Array, None]:
        c = self.config
        x_BSM = c.between_layers(x_BSM) if c.between_layers else x_BSM
        norms = [nn.LayerNorm(dtype=c.dtype, name=f"norm_{i}") for i in (1, 2)]
        x_BSM += dropout(self, c, Attention(c, name="attention")(norms[0](x_BSM)))
        x_BSM += dropout(self, c, FeedForward(c, name="mlp")(norms[1](x_BSM)))
        return x_BSM, None


class Attention(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x_BSM: Array) -> Array:
        c = self.config
        head = c.model // c.heads
        qkv = nn.DenseGeneral((3, c.heads, head), dtype=c.dtype, kernel_init=normal(), name="qkv")
        out = nn.DenseGeneral(c.model, axis=(-2, -1), dtype=c.dtype, kernel_init=residual(c), name="out")
        q_BSND, k_BTND, v_BTND = (y.squeeze(2) for y in jnp.split(qkv(x_BSM), 3, axis=2))
        logits_BNST = jnp.einsum("bsnd,btnd->bnst", q_BSND, k_BTND).astype(jnp.float32) * head**-0.5
        weights_BNST = jax.nn.softmax(causal(logits_BNST)).astype(c.dtype)
        y_BSND = jnp.einsum("bnst,btnd->bsnd", weights_BNST, v_BTND)
        return out(y_BSND)


class FeedForward(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x_BSM: Array) -> Array:
        c = self.config
        y_BSH = nn.gelu(nn.Dense(c.hidden, dtype=c.dtype, kernel_init=normal(), name="up")(x_BSM))
        return nn.Dense(c.model, dtype=c.dtype, kernel_init=residual(c), name="down")(y_BSH)


def causal(logits_BNST: Array) -> Array:
    """Sets what a position must not see, the later ones, to the lowest number."""
    s, t = logits_BNST.shape[-2:]
    seen_ST = jnp.arange(s)[:, None] >= jnp.arange(t)
    return jnp.where(seen_ST, logits_BNST, jnp.finfo(jnp.float32).min)


def dropout(module: nn.Module, config: Config, x: Array) -> Array:
    if config.dropout == 0.0 or not module.has_rng("dropout"):
        return x
    return nn.Dropout(config.dropout, deterministic=False)(x)


def normal() -> nn.initializers.Initializer:
    return nn.initializers.normal(0.02)


def residual(config: Config) -> nn.initializers.Initializer:
    """Smaller by the root of the number of layers' additions to the residual stream, as in GPT-2."""
    return nn.initializers.normal(0.02 * (2 * config.layers) ** -0.5)


def init_params(config: Config, key: Array):
    tokens_BS = jnp.zeros((1, config.seq), jnp.int32)
    return GPT2(config).init(key, tokens_BS)["params"]


def logits(config: Config, params, tokens_BS: Array, dropout_key: Array | None = None) -> Array:
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    return cast(Array, GPT2(config).apply({"params": params}, tokens_BS, rngs=rngs))


def loss(config: Config, params, text_BS: Array, dropout_key: Array | None = None) -> Array:
    """The mean cross entropy, in nats, of a token given those before it; `text_BS` has one token more."""
    logits_BSV = logits(config, params, text_BS[:, :-1], dropout_key)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, text_BS[:, 1:]).mean()


def program(mesh, size: str = "gpt2", batch: int = 64, seq: int = 1024):
    """Its train step on a mesh of data, fsdp and model, for `python -m shardax.explain models.gpt2`."""
    if size not in SIZES:
        raise ValueError(f"size={size!r}: there are {', '.join(SIZES)}")
    config, tx = replace(SIZES[size], seq=seq), adamw(peak=1e-3, warmup=20, steps=200)
    state = jax.eval_shape(make_init(partial(init_params, config), tx), jax.random.key(0))
    step = make_step(lambda params, text_BS, _: loss(config, params, text_BS), tx)
    return sharded_step(step, state, mesh), (state, jax.ShapeDtypeStruct((batch, seq + 1), "int32"))
