"""The programs of the pages in this folder, and shapes to plan them with. Nothing here needs devices."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def loss(params, x_BM):
    h_BH = jax.nn.relu(x_BM @ params["up"])
    y_BM = h_BH @ params["down"]
    return jnp.mean((y_BM - x_BM) ** 2)


def summed(x_BM):
    h_BM = sx.annotate(x_BM * 2, P("data"))
    return h_BM.sum(axis=0)


def spectrum(x):
    return jnp.fft.rfft(x).real


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"up": floats(64, 256), "down": floats(256, 64)}
BATCH = floats(32, 64)
SPECS = ({"up": P(None, "model"), "down": None}, P("data"))  # `down` is left to completion
ROWS_257 = floats(257, 64)
