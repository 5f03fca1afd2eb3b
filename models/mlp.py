"""A multilayer perceptron for regression, its shardings and its train step.

Shape suffixes: B batch, I input features, H hidden, O outputs.
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
    (r"up_\d+/kernel", P(None, "model")),
    (r"up_\d+/bias", P("model")),
    (r"down_\d+/kernel", P("model", None)),
)


@dataclass(frozen=True)
class Config:
    inputs: int = 16
    hidden: int = 64
    outputs: int = 8
    layers: int = 2


class MLP(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x_BI: Array) -> Array:
        c = self.config
        for i in range(c.layers):
            h_BH = nn.relu(nn.Dense(c.hidden, name=f"up_{i}")(x_BI))
            x_BI = x_BI + nn.Dense(c.inputs, name=f"down_{i}")(h_BH)
        return nn.Dense(c.outputs, name="out")(x_BI)


def init_params(config: Config, key: Array):
    return MLP(config).init(key, jnp.zeros((1, config.inputs)))["params"]


def loss(config: Config, params, batch: tuple[Array, Array]) -> Array:
    """The mean squared error over a batch (x_BI, y_BO)."""
    x_BI, y_BO = batch
    predicted_BO = cast(Array, MLP(config).apply({"params": params}, x_BI))
    return jnp.square(predicted_BO - y_BO).mean()


def train(config: Config, tx: optax.GradientTransformation) -> tuple[Init, Step]:
    init = make_init(lambda key: init_params(config, key), tx)
    return init, make_step(lambda params, batch, step: loss(config, params, batch), tx)


def param_specs(params, axes: Collection[str]):
    return specs_by_path(PARAMS, params, axes)
