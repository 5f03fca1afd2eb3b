"""A Llama (Grattafiori et al. 2024, arXiv 2407.21783) that writes text: int8 weights, an int8 cache that is
donated, a mesh of Explicit axes.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m examples.llama

The batch lies over x, heads and the hidden dim over y, and weights are stored over z besides. Attention runs
under `auto_axes`: what happens inside is left to the partitioner.

Shape suffixes: B batch, S tokens of this call, T places of the cache, M model, K heads of keys and values,
G heads of queries for each of them, D head, H hidden, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import auto_axes, reshard

from examples import inference
from examples.inference import Array, Cache, Int8, Model, norm, product, rotated, written

RULES = {
    "batch": "x",
    "vocabulary": "y",
    "model": "z",  # of weights: those of activations are whole
    "heads": "y",
    "hidden": "y",
}


@dataclass(frozen=True)
class Config(inference.Config):
    M: int = 32
    K: int = 2
    G: int = 2
    D: int = 16
    H: int = 64
    rules: tuple = tuple(RULES.items())


def weights(c: Config):
    int8, scale = partial(Array, int8=True), Array((c.M,), (None,))

    layer = {
        "norm_1": scale,
        "query": int8((c.M, c.K, c.G, c.D), ("model", "heads", None, None), (0,)),
        "key": int8((c.M, c.K, c.D), ("model", "heads", None), (0,)),
        "value": int8((c.M, c.K, c.D), ("model", "heads", None), (0,)),
        "out": int8((c.K, c.G, c.D, c.M), ("heads", None, None, "model"), (0, 1, 2)),
        "norm_2": scale,
        "gate": int8((c.M, c.H), ("model", "hidden"), (0,)),
        "up": int8((c.M, c.H), ("model", "hidden"), (0,)),
        "down": int8((c.H, c.M), ("hidden", "model"), (0,)),
    }
    return {
        "embedding": Array((c.vocabulary, c.M), ("vocabulary", "model")),
        "layers": [layer for _ in range(c.layers)],
        "norm": scale,
        "logits": Array((c.M, c.vocabulary), ("model", "vocabulary"), (0,)),
    }


def cache(c: Config):
    rows = Array((c.batch, c.places, c.K, c.D), ("batch", None, "heads", None), (3,), int8=True, random=False)
    return {"key": rows, "value": rows}


def forward(c: Config, tokens_BS: jax.Array, weights, cache: Cache):
    tokens_BS = reshard(tokens_BS, c.spec("batch", None))
    positions_BS, mask_BST = cache.positions(tokens_BS), cache.mask(tokens_BS, c.places)
    x_BSM = weights["embedding"].at[tokens_BS].get(out_sharding=c.spec("batch", None, None))
    layers = []
    for layer, kept in zip(weights["layers"], cache.layers, strict=True):
        y_BSM, kept = attention(
            c, norm(x_BSM, layer["norm_1"]), positions_BS, mask_BST, layer, kept, cache.filled
        )
        x_BSM = x_BSM + y_BSM
        x_BSM = x_BSM + feed_forward(c, norm(x_BSM, layer["norm_2"]), layer)
        layers.append(kept)
    x_BM = norm(x_BSM[:, -1], weights["norm"])
    logits_BV = product("bm,mv->bv", x_BM, weights["logits"], c.spec("batch", "vocabulary"))
    return logits_BV, cache.followed(layers, tokens_BS.shape[1])


def attention(c: Config, x_BSM, positions_BS, mask_BST, layer, kept, place):
    BSKGD, BSKD = c.spec("batch", None, "heads", None, None), c.spec("batch", None, "heads", None)
    q_BSKGD = rotated(product("bsm,mkgd->bskgd", x_BSM, layer["query"], BSKGD), positions_BS)
    k_BSKD = rotated(product("bsm,mkd->bskd", x_BSM, layer["key"], BSKD), positions_BS)
    v_BSKD = product("bsm,mkd->bskd", x_BSM, layer["value"], BSKD)
    kept = {"key": written(kept["key"], k_BSKD, place), "value": written(kept["value"], v_BSKD, place)}
    read: Any = auto_axes(attend, out_sharding=BSKGD)
    y_BSKGD = read(q_BSKGD, kept["key"], kept["value"], mask_BST)
    return product("bskgd,kgdm->bsm", y_BSKGD, layer["out"], c.spec("batch", None, None)), kept


def attend(q_BSKGD, keys: Int8, values: Int8, mask_BST):
    """What queries read. The int8 cache is never multiplied out: its scales go with the scores."""
    scores_BKGST = jnp.einsum("bskgd,btkd->bkgst", q_BSKGD, keys.values.astype(q_BSKGD.dtype)).astype(
        "float32"
    )
    scores_BKGST *= keys.scales.transpose(0, 2, 1)[:, :, None, None] * q_BSKGD.shape[-1] ** -0.5
    weights_BKGST = jax.nn.softmax(jnp.where(mask_BST[:, None, None], scores_BKGST, -1e30))
    weights_BKGST *= values.scales.transpose(0, 2, 1)[:, :, None, None]
    return jnp.einsum(
        "bkgst,btkd->bskgd", weights_BKGST.astype(q_BSKGD.dtype), values.values.astype(q_BSKGD.dtype)
    )


def feed_forward(c: Config, x_BSM, layer):
    into = partial(product, "bsm,mh->bsh", x_BSM, out=c.spec("batch", None, "hidden"))
    h_BSH = jax.nn.silu(into(layer["gate"])) * into(layer["up"])
    return product("bsh,hm->bsm", h_BSH, layer["down"], c.spec("batch", None, None))


MODEL = Model(Config, weights, cache, forward)

if __name__ == "__main__":
    inference.main(MODEL)
