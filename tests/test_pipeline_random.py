"""Random decoders, of any sizes: whatever the number of rows, microbatches, heads and features, a loss that uses each row
on its own is pipelined, and its gradients are those of plain JAX.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

NORMS = {
    "layer": lambda x: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
    "root mean square": lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5),
    "none": lambda x: x,
}
MESHES = (
    {"stage": 2},
    {"stage": 2, "data": 2},
    {"stage": 3, "data": 2},
    {"stage": 4, "model": 2},
    {"stage": 2, "data": 2, "model": 2},
)
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved", "eager-1f1b", "zbv")


@dataclass(frozen=True)
class Decoder:
    """What is random. `heads`: 0 for layers without attention; `scan`: whether layers are scanned."""

    axes: dict[str, int]
    schedule: str
    rows: int
    microbatches: int
    seq: int
    vocab: int
    layers: int
    heads: int
    model: int
    hidden: int
    norm: str
    scan: bool

    def loss(self, params, text_BS):
        x_BSM = params["embedding"][text_BS[:, :-1]]
        if self.scan:
            x_BSM, _ = jax.lax.scan(lambda x, layer: (self.layer(x, layer), None), x_BSM, params["layers"])
        else:
            for i in range(self.layers):
                x_BSM = self.layer(x_BSM, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
        logprobs_BSV = jax.nn.log_softmax(x_BSM @ params["embedding"].T)
        return -jnp.take_along_axis(logprobs_BSV, text_BS[:, 1:, None], axis=-1).mean()

    def layer(self, x_BSM, layer):
        normed_BSM = NORMS[self.norm](x_BSM)
        if self.heads:
            q, k, v = jnp.einsum("bsm,kmnd->kbsnd", normed_BSM, layer["qkv"])
            weights = jax.nn.softmax(jnp.einsum("bsnd,btnd->bnst", q, k))
            x_BSM += jnp.einsum("bnst,btnd,ndm->bsm", weights, v, layer["out"])
        return x_BSM + jnp.tanh(normed_BSM @ layer["up"]) @ layer["down"]

    def shapes(self) -> Any:
        layer = {"up": (self.model, self.hidden), "down": (self.hidden, self.model)}
        if self.heads:
            head = self.model // self.heads
            layer |= {"qkv": (3, self.model, self.heads, head), "out": (self.heads, head, self.model)}
        shapes = {name: (self.layers, *shape) for name, shape in layer.items()}
        return {"embedding": (self.vocab, self.model), "layers": shapes}

    def gradient(self, mesh):
        """Of the loss, by microbatches, under `shard_jit`."""
        how = {"microbatches": self.microbatches, "schedule": self.schedule, "batch_argnames": "text_BS"}
        of_rows = P("data") if "data" in self.axes else P()
        by_microbatches = sx.pipeline.value_and_grad(self.loss, axis="stage", **how)
        return sx.shard_jit(by_microbatches, mesh=mesh, in_shardings=(None, of_rows))


def random_decoder(seed: int) -> Decoder:
    rng = random.Random(seed)
    heads = rng.choice([0, 2, 3, 4])
    model = (heads or 2) * rng.choice([4, 7, 8])
    rows = rng.choice([8, 12, 14, 16, 24, 26, 30])
    return Decoder(
        axes=rng.choice(MESHES),
        schedule=rng.choice(SCHEDULES),
        rows=rows,
        microbatches=rng.choice([n for n in (2, 3, 4, 5, 7, 8) if n <= rows]),
        seq=rng.choice([5, 6, 8, 13]),
        vocab=rng.choice([64, 67, 100]),
        layers=rng.choice([2, 4, 5, 6]),
        heads=heads,
        model=model,
        hidden=rng.choice([2, 3, 4]) * model + rng.choice([0, 1]),
        norm=rng.choice(list(NORMS)),
        scan=rng.choice([False, True]),
    )


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(8))
def test_any_sizes_are_planned(seed):
    decoder = random_decoder(seed)
    mesh = AbstractMesh(
        tuple(decoder.axes.values()), tuple(decoder.axes), axis_types=(AxisType.Auto,) * len(decoder.axes)
    )
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, "float32"), decoder.shapes(), is_leaf=lambda s: isinstance(s, tuple)
    )
    text_BS = jax.ShapeDtypeStruct((decoder.rows, decoder.seq + 1), "int32")
    assert decoder.gradient(mesh).plan(shapes, text_BS).collectives


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_gradients(seed):
    """In float64: layers without norms amplify what float32 rounds."""
    decoder, rng = random_decoder(seed), np.random.default_rng(seed)
    devices = np.array(jax.devices()[: math.prod(decoder.axes.values())]).reshape(*decoder.axes.values())
    mesh = jax.sharding.Mesh(devices, tuple(decoder.axes), axis_types=(AxisType.Auto,) * len(decoder.axes))
    params = jax.tree.map(
        lambda s: rng.standard_normal(s) / math.sqrt(s[-1]),
        decoder.shapes(),
        is_leaf=lambda s: isinstance(s, tuple),
    )
    text_BS = rng.integers(0, decoder.vocab, (decoder.rows, decoder.seq + 1)).astype("int32")
    with jax.enable_x64(True):
        found = decoder.gradient(mesh)(params, text_BS)
        wanted = jax.jit(jax.value_and_grad(decoder.loss))(params, text_BS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, wanted)
