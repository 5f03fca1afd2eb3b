"""A DeepSeek (DeepSeek-AI 2024, arXiv 2412.19437) that writes text: latent attention over an int8 cache
that is donated, experts in int8 that work in a `shard_map`, a mesh of Explicit axes.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m examples.deepseek

The batch lies over x, heads and experts over y, the hidden dims over z. The router is a compiled function
of its own inside that of the step.

Shape suffixes: B batch, S tokens of this call, T places of the cache, M model, N heads, C latent of keys and
values, D head, R its rotary part, H hidden, E experts, A experts of each token, F tokens, or tokens times A,
V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import auto_axes, reshard

from examples import inference
from examples.inference import Array, Cache, Int8, Model, norm, product, rotated, written

RULES = {"batch": "x", "vocabulary": "z", "model": None, "heads": "y", "hidden": "z", "experts": "y"}


@dataclass(frozen=True)
class Config(inference.Config):
    M: int = 32
    N: int = 4
    C: int = 16
    D: int = 16
    R: int = 8
    H: int = 32
    E: int = 8
    A: int = 2
    rules: tuple = tuple(RULES.items())


def weights(c: Config):
    int8, scale = partial(Array, int8=True), Array((c.M,), (None,))
    heads = Array((c.C, c.N, c.D), (None, "heads", None), (0,))
    attention = {
        "norm": scale,
        "query": int8((c.M, c.N, c.D + c.R), ("model", "heads", None), (0,)),
        "latent": int8((c.M, c.C + c.R), ("model", None), (0,)),
        "latent_norm": Array((c.C,), (None,)),
        "key": heads,
        "value": heads,
        "out": int8((c.N, c.D, c.M), ("heads", None, "model"), (0, 1)),
    }
    dense = {
        "norm": scale,
        "gate": int8((c.M, c.H), ("model", "hidden"), (0,)),
        "up": int8((c.M, c.H), ("model", "hidden"), (0,)),
        "down": int8((c.H, c.M), ("hidden", "model"), (0,)),
    }
    experts = {
        "router": Array((c.M, c.E), (None, None), (0,)),
        "bias": Array((c.E,), (None,), random=False),
        "gates": int8((c.E, c.M, c.H), ("experts", None, "hidden"), (1,)),
        "ups": int8((c.E, c.M, c.H), ("experts", None, "hidden"), (1,)),
        "downs": int8((c.E, c.H, c.M), ("experts", "hidden", None), (1,)),
    }
    first, later = {**dense, "attention": attention}, {**dense, **experts, "attention": attention}
    return {
        "embedding": Array((c.vocabulary, c.M), ("vocabulary", "model")),
        "layers": [first, *[later] * (c.layers - 1)],
        "norm": scale,
        "logits": Array((c.M, c.vocabulary), ("model", "vocabulary"), (0,)),
    }


def cache(c: Config):
    latent = Array((c.batch, c.places, c.C), ("batch", None, None), (2,), int8=True, random=False)
    return {"latent": latent, "rotary": Array((c.batch, c.places, c.R), ("batch", None, None), random=False)}


def forward(c: Config, tokens_BS: jax.Array, weights, cache: Cache):
    tokens_BS = reshard(tokens_BS, c.spec("batch", None))
    positions_BS, mask_BST = cache.positions(tokens_BS), cache.mask(tokens_BS, c.places)
    x_BSM = weights["embedding"].at[tokens_BS].get(out_sharding=c.spec("batch", None, None))
    layers = []
    for layer, kept in zip(weights["layers"], cache.layers, strict=True):
        y_BSM, kept = attention(c, x_BSM, positions_BS, mask_BST, layer["attention"], kept, cache.filled)
        x_BSM = x_BSM + y_BSM
        y_BSM = norm(x_BSM, layer["norm"])
        x_BSM = x_BSM + feed_forward(c, y_BSM, layer)
        if "router" in layer:
            x_BSM = x_BSM + mixture(c, y_BSM, layer)
        layers.append(kept)
    x_BM = norm(x_BSM[:, -1], weights["norm"])
    logits_BV = product("bm,mv->bv", x_BM, weights["logits"], c.spec("batch", "vocabulary"))
    return logits_BV, cache.followed(layers, tokens_BS.shape[1])


def attention(c: Config, x_BSM, positions_BS, mask_BST, layer, kept, place):
    """Keys and values are read off one latent, which alone is cached: their weights go to queries and
    results.
    """
    x_BSM, BSND = norm(x_BSM, layer["norm"]), c.spec("batch", None, "heads", None)
    q_BSND, r_BSNR = jnp.split(product("bsm,mnd->bsnd", x_BSM, layer["query"], BSND), [c.D], -1)
    latent_BSC, r_BSR = jnp.split(
        product("bsm,mc->bsc", x_BSM, layer["latent"], c.spec("batch", None, None)), [c.C], -1
    )
    kept = {
        "latent": written(kept["latent"], norm(latent_BSC, layer["latent_norm"]), place),
        "rotary": written(kept["rotary"], rotated(r_BSR, positions_BS), place),
    }
    q_BSNC = jnp.einsum("bsnd,cnd->bsnc", q_BSND, layer["key"], out_sharding=BSND)
    read: Any = auto_axes(partial(attend, (c.D + c.R) ** -0.5), out_sharding=BSND)
    y_BSNC = read(q_BSNC, rotated(r_BSNR, positions_BS), kept["latent"], kept["rotary"], mask_BST)
    y_BSND = jnp.einsum("bsnc,cnd->bsnd", y_BSNC, layer["value"], out_sharding=BSND)
    return product("bsnd,ndm->bsm", y_BSND, layer["out"], c.spec("batch", None, None)), kept


def attend(scale, q_BSNC, r_BSNR, latent: Int8, rotary_BTR, mask_BST):
    latent_BTC = latent.values.astype(q_BSNC.dtype)
    scores_BNST = (
        jnp.einsum("bsnc,btc->bnst", q_BSNC, latent_BTC).astype("float32") * latent.scales[:, None, None]
    )
    scores_BNST += jnp.einsum("bsnr,btr->bnst", r_BSNR, rotary_BTR).astype("float32")
    weights_BNST = (
        jax.nn.softmax(jnp.where(mask_BST[:, None], scores_BNST * scale, -1e30))
        * latent.scales[:, None, None]
    )
    return jnp.einsum("bnst,btc->bsnc", weights_BNST.astype(q_BSNC.dtype), latent_BTC)


def feed_forward(c: Config, x_BSM, layer):
    into = partial(product, "bsm,mh->bsh", x_BSM, out=c.spec("batch", None, "hidden"))
    h_BSH = jax.nn.silu(into(layer["gate"])) * into(layer["up"])
    return product("bsh,hm->bsm", h_BSH, layer["down"], c.spec("batch", None, None))


def mixture(c: Config, x_BSM, layer):
    """What the experts make of their tokens. Each device has a block of experts and of their hidden dim."""
    experts_BSA, shares_BSA = c.jit(route, static_argnums=0)(c, x_BSM, layer["router"], layer["bias"])
    tokens = c.spec("batch", None, None)
    up = Int8(c.spec("experts", None, "hidden"), c.spec("experts", "hidden"))
    down = Int8(c.spec("experts", "hidden", None), c.spec("experts", None))
    work = jax.shard_map(
        partial(of_my_experts, c),
        mesh=c.mesh,
        in_specs=(tokens, tokens, tokens, up, up, down),
        out_specs=tokens,
        check_vma=False,
    )
    return work(x_BSM, experts_BSA, shares_BSA, layer["gates"], layer["ups"], layer["downs"])


def route(c: Config, x_BSM, router_ME, bias_E):
    """The experts of each token, and their shares in its result."""
    B, S, M = x_BSM.shape
    x_FM = jnp.reshape(x_BSM, (B * S, M), out_sharding=c.spec("batch", None))
    scores_FE = jax.nn.sigmoid((x_FM @ router_ME).astype("float32"))
    _, experts_FA = lax.top_k(scores_FE + bias_E, c.A)
    shares_FA = jnp.take_along_axis(scores_FE, experts_FA, 1)
    shares_FA /= shares_FA.sum(1, keepdims=True)
    BSA = c.spec("batch", None, None)
    return [jnp.reshape(x_FA, (B, S, c.A), out_sharding=BSA) for x_FA in (experts_FA, shares_FA)]


def of_my_experts(c: Config, x_BSM, experts_BSA, shares_BSA, gates: Int8, ups: Int8, downs: Int8):
    """On one device: its tokens sorted by expert, those of experts elsewhere last and not counted."""
    mine = len(gates.values)
    expert_F = experts_BSA.reshape(-1) - lax.axis_index("y") * mine
    expert_F = jnp.where((expert_F >= 0) & (expert_F < mine), expert_F, mine)
    order_F = jnp.argsort(expert_F)
    sizes = jnp.bincount(expert_F, length=mine)
    scale_of_F = jnp.minimum(expert_F[order_F], mine - 1)

    def worked(x, weight: Int8):
        return lax.ragged_dot(x, weight.values.astype(x.dtype), sizes) * weight.scales[scale_of_F]

    x_FM = x_BSM.reshape(-1, c.M)[order_F // c.A]
    y_FM = worked(jax.nn.silu(worked(x_FM, gates)) * worked(x_FM, ups), downs)
    y_FM = jnp.where((expert_F[order_F] < mine)[:, None], y_FM, 0)[jnp.argsort(order_F)]
    y_BSAM = y_FM.reshape(*experts_BSA.shape, c.M)
    return lax.psum((y_BSAM * shares_BSA[..., None].astype(y_BSAM.dtype)).sum(2), ("y", "z"))


MODEL = Model(Config, weights, cache, forward)

if __name__ == "__main__":
    inference.main(MODEL)
