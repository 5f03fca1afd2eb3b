"""A Llama 3 (Grattafiori et al. 2024, arXiv 2407.21783): its train step, sharded, and the same over several
microbatches.

`fsdp` splits the batch and stores the parameters split; `model` splits heads and the hidden dim, and the
sequence between them (Korthikanti et al. 2022); `data` splits the batch alone. Any of them may be missing
from the mesh, and without a mesh the step is that for one device. Layers are stacked, scanned, and recomputed
in the backward pass. Parameters are float32, activations bfloat16; AdamW.

Shape suffixes: L layers, A accumulated microbatches, B batch, S sequence (T: the sequence attended to), M
model, K heads of keys and values, G heads of queries for each of them, D head, H hidden, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks import gspmd_model
from models.rules import on_axes


@dataclass(frozen=True)
class Dims:
    """The sizes of a model and of its batch, of which each of the `A` microbatches has `B`."""

    L: int
    B: int
    M: int
    K: int
    G: int
    D: int
    H: int
    A: int = 1
    S: int = 4096
    V: int = 128256

    def shape(self, letters: str) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in letters)


LAYERS = {  # name -> dims, split
    "norm_1": ("LM", P()),
    "query": ("LMKGD", P(None, "fsdp", "model", None, None)),
    "key": ("LMKD", P(None, "fsdp", "model", None)),
    "value": ("LMKD", P(None, "fsdp", "model", None)),
    "out": ("LKGDM", P(None, "model", None, None, "fsdp")),
    "norm_2": ("LM", P()),
    "gate": ("LMH", P(None, "fsdp", "model")),
    "up": ("LMH", P(None, "fsdp", "model")),
    "down": ("LHM", P(None, "model", "fsdp")),
}
ENDS = {"embedding": ("VM", P("model", "fsdp")), "norm": ("M", P()), "logits": ("MV", P("fsdp", "model"))}

BATCH = P(("data", "fsdp"))
BSM = P(("data", "fsdp"), "model", None)
BSH = P(("data", "fsdp"), None, "model")
BSKD = P(("data", "fsdp"), None, "model", None)
BSKGD = P(("data", "fsdp"), None, "model", None, None)

OPTIMIZER = optax.adamw(1e-3)


def param_shapes(dims: Dims):
    def array(letters: str, _: P):
        return jax.ShapeDtypeStruct(dims.shape(letters), jnp.float32)

    ends = {name: array(*end) for name, end in ENDS.items()}
    return {**ends, "layers": {name: array(*weight) for name, weight in LAYERS.items()}}


def param_specs(axes):
    ends = {name: on_axes(spec, axes) for name, (_, spec) in ENDS.items()}
    return {**ends, "layers": {name: on_axes(spec, axes) for name, (_, spec) in LAYERS.items()}}


def flops(dims: Dims) -> int:
    """Model FLOPs of a train step: three times those of the forward pass, nothing recomputed, masked scores
    included.
    """
    A, B, S, L, K, G, D = dims.shape("ABSLKGD")
    shapes = param_shapes(dims)
    weights = sum(
        array.size
        for name, array in {**shapes["layers"], "logits": shapes["logits"]}.items()
        if "norm" not in name
    )
    return 3 * A * B * (2 * weights * S + 4 * L * K * G * D * S**2)


def train_step(mesh: Mesh | None, params, opt_state, text_BS: Array):
    value, grads = jax.value_and_grad(partial(loss, mesh))(params, text_BS)
    return (*update(params, opt_state, grads), value)


def accumulated_step(mesh: Mesh | None, params, opt_state, text_ABS: Array):
    """The step of the mean loss of all microbatches, one after the other."""

    def accumulate(total, text_BS):
        loss_and_grads = jax.value_and_grad(partial(loss, mesh))(params, annotate(mesh, text_BS, BATCH))
        return jax.tree.map(jnp.add, total, loss_and_grads), None

    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    total, _ = lax.scan(accumulate, zeros, text_ABS)
    value, grads = jax.tree.map(lambda x: x / len(text_ABS), total)
    return (*update(params, opt_state, grads), value)


def update(params, opt_state, grads):
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def loss(mesh: Mesh | None, params, text_BS: Array) -> Array:
    """The mean cross entropy of each token given those before it; the last one is read and not scored."""
    body = jax.checkpoint(partial(layer, mesh), prevent_cse=False)
    x_BSM = annotate(mesh, params["embedding"].astype(jnp.bfloat16)[text_BS], BSM)
    x_BSM, _ = lax.scan(lambda x_BSM, weights: (body(x_BSM, weights), None), x_BSM, params["layers"])
    logits_BSV = norm(x_BSM, params["norm"]) @ params["logits"].astype(jnp.bfloat16)
    losses_BS = optax.softmax_cross_entropy_with_integer_labels(
        logits_BSV[:, :-1].astype(jnp.float32), text_BS[:, 1:]
    )
    return losses_BS.mean()


def layer(mesh: Mesh | None, x_BSM: Array, weights) -> Array:
    weights = jax.tree.map(lambda w: w.astype(x_BSM.dtype), weights)
    x_BSM = annotate(mesh, x_BSM, BSM)
    x_BSM = annotate(mesh, x_BSM + attention(mesh, weights, norm(x_BSM, weights["norm_1"])), BSM)
    return annotate(mesh, x_BSM + feed_forward(mesh, weights, norm(x_BSM, weights["norm_2"])), BSM)


def attention(mesh: Mesh | None, weights, x_BSM: Array) -> Array:
    q_BSKGD = rotated(annotate(mesh, jnp.einsum("bsm,mkgd->bskgd", x_BSM, weights["query"]), BSKGD))
    k_BTKD = rotated(annotate(mesh, jnp.einsum("btm,mkd->btkd", x_BSM, weights["key"]), BSKD))
    v_BTKD = annotate(mesh, jnp.einsum("btm,mkd->btkd", x_BSM, weights["value"]), BSKD)
    scores_BKGST = (
        jnp.einsum("bskgd,btkd->bkgst", q_BSKGD, k_BTKD).astype(jnp.float32) * q_BSKGD.shape[-1] ** -0.5
    )
    scores_BKGST = jax.nn.softmax(gspmd_model.causal(scores_BKGST)).astype(x_BSM.dtype)
    y_BSKGD = annotate(mesh, jnp.einsum("bkgst,btkd->bskgd", scores_BKGST, v_BTKD), BSKGD)
    return jnp.einsum("bskgd,kgdm->bsm", y_BSKGD, weights["out"])


def feed_forward(mesh: Mesh | None, weights, x_BSM: Array) -> Array:
    h_BSH = annotate(mesh, jax.nn.silu(x_BSM @ weights["gate"]) * (x_BSM @ weights["up"]), BSH)
    return h_BSH @ weights["down"]


def norm(x_BSM: Array, scale_M: Array) -> Array:
    x32_BSM = x_BSM.astype(jnp.float32)
    scaled_BSM = (
        x32_BSM * lax.rsqrt((x32_BSM**2).mean(-1, keepdims=True) + 1e-5) * scale_M.astype(jnp.float32)
    )
    return scaled_BSM.astype(x_BSM.dtype)


def rotated(x: Array) -> Array:
    """Rotary positions (Su et al. 2021): dim 1 is the sequence, the last one the head."""
    sequence, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(sequence)[:, None] * 500_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = angles.reshape(sequence, *[1] * (x.ndim - 3), half)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def annotate(mesh: Mesh | None, x: Array, spec: P) -> Array:
    if mesh is None:
        return x
    return gspmd_model.annotate(mesh, x, on_axes(spec, mesh.shape))
