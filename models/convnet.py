"""A small convolutional classifier, its shardings and its train step: batch over `data`, features over
`model`.

Shape suffixes: B batch, H height, W width, C channels, K classes.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

import flax.linen as nn
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec as P

from models.rules import specs_by_path
from models.steps import Init, Step, make_init, make_step

BATCH = P("data")
PARAMS = (
    (r"conv_\d+/kernel", P(None, None, None, "model")),
    (r"conv_\d+/bias", P("model")),
)


@dataclass(frozen=True)
class Config:
    side: int = 16
    channels: int = 3
    features: tuple[int, ...] = (16, 32)
    classes: int = 10
    pool: bool = False  # max pools in place of strides


class ConvNet(nn.Module):
    """Images, float32[B, H, W, C], to logits, float32[B, K]."""

    config: Config

    @nn.compact
    def __call__(self, x_BHWC: Array) -> Array:
        pool = self.config.pool
        for i, features in enumerate(self.config.features):
            x_BHWC = nn.relu(nn.Conv(features, (3, 3), 1 if pool else 2, name=f"conv_{i}")(x_BHWC))
            x_BHWC = nn.max_pool(x_BHWC, (2, 2), strides=(2, 2)) if pool else x_BHWC
        x_BC = x_BHWC.mean(axis=(1, 2))
        return nn.Dense(self.config.classes, name="out")(x_BC)


def init_params(config: Config, key: Array):
    c = config
    return ConvNet(c).init(key, jnp.zeros((1, c.side, c.side, c.channels)))["params"]


def loss(config: Config, params, batch: tuple[Array, Array]) -> Array:
    """The mean cross entropy over a batch (images_BHWC, labels_B)."""
    images_BHWC, labels_B = batch
    logits_BK = cast(Array, ConvNet(config).apply({"params": params}, images_BHWC))
    return optax.softmax_cross_entropy_with_integer_labels(logits_BK, labels_B).mean()


def train(config: Config, tx: optax.GradientTransformation) -> tuple[Init, Step]:
    init = make_init(lambda key: init_params(config, key), tx)
    return init, make_step(lambda params, batch, step: loss(config, params, batch), tx)


def param_specs(params, axes: Collection[str]):
    return specs_by_path(PARAMS, params, axes)
