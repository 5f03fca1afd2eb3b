"""The Transformer of GSPMD's Tables 1 to 3 (Xu et al. 2021, arXiv 2105.04663): its train step, with seven
annotations a layer.

Layers are stacked, scanned, and recomputed in the backward pass. Parameters are float32, activations
bfloat16; Adafactor.

Shape suffixes: L layers, B batch, S sequence (T: the sequence attended to), M model, N heads, D head, H
hidden, V vocabulary; 3 stands for queries, keys and values.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Dims:
    """The sizes of a model and of its batch."""

    L: int
    B: int
    M: int
    N: int
    D: int
    H: int
    S: int = 1024
    V: int = 32000

    def shape(self, letters: str) -> tuple[int, ...]:
        return tuple(3 if name == "3" else getattr(self, name) for name in letters)


@dataclass(frozen=True)
class Activations:
    """A column of Table 1: how the activations of a layer are split."""

    bsm: P
    bsnd: P
    bsh: P


ATTEMPT_1 = Activations(bsm=P(None, None, "x"), bsnd=P(None, None, "y", None), bsh=P(None, None, "y"))
ATTEMPT_2 = Activations(bsm=P("x", None, None), bsnd=P("x", None, "y", None), bsh=P("x", None, "y"))
FINALIZED = Activations(bsm=P("x", None, "y"), bsnd=P("x", None, "y", None), bsh=P("x", None, "y"))

WEIGHTS = {  # the same in all three columns: name -> dims, split
    "qkv": ("LM3ND", P(None, "x", None, "y", None)),
    "out": ("LNDM", P(None, "y", None, "x")),
    "up": ("LMH", P(None, "x", "y")),
    "down": ("LHM", P(None, "y", "x")),
}
STAGED = {name: P("stage", *spec[1:]) for name, (_, spec) in WEIGHTS.items()}
EMBEDDING = ("VM", P("y", "x"))

OPTIMIZER = optax.adafactor(1e-3)


def param_shapes(dims: Dims):
    def array(letters: str, _: P):
        return jax.ShapeDtypeStruct(dims.shape(letters), jnp.float32)

    return {
        "embedding": array(*EMBEDDING),
        "layers": {name: array(*weight) for name, weight in WEIGHTS.items()},
    }


def param_specs():
    return {"embedding": EMBEDDING[1], "layers": {name: spec for name, (_, spec) in WEIGHTS.items()}}


def flops(dims: Dims) -> int:
    """Model FLOPs of a train step: three times those of the forward pass, nothing recomputed, masked scores
    included.
    """
    L, B, S, M, N, D, V = dims.shape("LBSMNDV")
    weights = sum(array.size for array in jax.tree.leaves(param_shapes(dims)["layers"])) + M * V
    return 3 * (2 * weights * B * S + 4 * L * B * N * D * S**2)


def train_step(mesh: Mesh, activations: Activations, params, opt_state, text_BS: Array):
    value, grads = jax.value_and_grad(partial(loss, mesh, activations))(params, text_BS)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def loss(mesh: Mesh, activations: Activations, params, text_BS: Array) -> Array:
    """The mean cross entropy of each token given those before it; the last one is read and not scored."""
    body = jax.checkpoint(partial(layer, mesh, activations), prevent_cse=False)
    x_BSM = annotate(mesh, params["embedding"].astype(jnp.bfloat16)[text_BS], activations.bsm)
    x_BSM, _ = lax.scan(lambda x_BSM, weights: (body(x_BSM, weights), None), x_BSM, params["layers"])
    logits_BSV = jnp.einsum("bsm,vm->bsv", norm(x_BSM), params["embedding"].astype(jnp.bfloat16)).astype(
        jnp.float32
    )
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSV[:, :-1], text_BS[:, 1:]).mean()


def layer(mesh: Mesh, activations: Activations, x_BSM: Array, weights) -> Array:
    weights = jax.tree.map(lambda w: w.astype(x_BSM.dtype), weights)
    x_BSM = annotate(mesh, x_BSM, activations.bsm)
    x_BSM = x_BSM + attention(mesh, activations, weights, norm(x_BSM))
    return x_BSM + feed_forward(mesh, activations, weights, norm(x_BSM))


def attention(mesh: Mesh, activations: Activations, weights, x_BSM: Array) -> Array:
    qkv_3BSND = checkpoint_name(jnp.einsum("bsm,mknd->kbsnd", x_BSM, weights["qkv"]), "qkv")
    q_BSND, k_BTND, v_BTND = qkv_3BSND
    scores_BNST = jnp.einsum("bsnd,btnd->bnst", q_BSND, k_BTND).astype(jnp.float32)
    scores_BNST = jax.nn.softmax(causal(scores_BNST)).astype(x_BSM.dtype)
    y_BSND = annotate(mesh, jnp.einsum("bnst,btnd->bsnd", scores_BNST, v_BTND), activations.bsnd)
    return checkpoint_name(jnp.einsum("bsnd,ndm->bsm", y_BSND, weights["out"]), "out")


def feed_forward(mesh: Mesh, activations: Activations, weights, x_BSM: Array) -> Array:
    h_BSH = checkpoint_name(jnp.einsum("bsm,mh->bsh", x_BSM, weights["up"]), "up")
    h_BSH = annotate(mesh, jax.nn.relu(h_BSH), activations.bsh)
    return jnp.einsum("bsh,hm->bsm", h_BSH, weights["down"])


def norm(x_BSM: Array) -> Array:
    x_BSM = x_BSM - x_BSM.mean(-1, keepdims=True)
    return x_BSM * lax.rsqrt((x_BSM**2).mean(-1, keepdims=True) + 1e-6)


def causal(scores_BNST: Array) -> Array:
    s, t = scores_BNST.shape[-2:]
    seen_ST = jnp.arange(s)[:, None] >= jnp.arange(t)
    return jnp.where(seen_ST, scores_BNST, jnp.finfo(scores_BNST.dtype).min)


def annotate(mesh: Mesh, x: Array, spec: P) -> Array:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def abstract_args(dims: Dims) -> tuple[Any, Any, Any]:
    params = param_shapes(dims)
    return params, jax.eval_shape(OPTIMIZER.init, params), jax.ShapeDtypeStruct(dims.shape("BS"), jnp.int32)
