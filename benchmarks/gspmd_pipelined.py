"""The Transformer of GSPMD's Table 4: that of Tables 1 to 3, its layers on stages, in two ways.

By a shifting buffer, as GSPMD does it, for `jax.jit`; and by `sx.pipeline.value_and_grad`. Both have the same
annotations and the same layers. What is outside of the layers the buffer's program splits over the stages,
along the sequence; in the other the first and the last stage do it.

Shape suffixes as in `gspmd_model`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks.gspmd_model import (
    EMBEDDING,
    FINALIZED,
    OPTIMIZER,
    STAGED,
    WEIGHTS,
    annotate,
    layer,
    norm,
)
from benchmarks.shifting_buffer import shifting_buffer

POLICIES = {
    "all": None,
    "less": jax.checkpoint_policies.save_only_these_names("out", "up"),
    "least": jax.checkpoint_policies.save_only_these_names("out", "qkv", "up"),
}
"""What of a layer is computed again in the backward pass: less where two of its products are kept, least
where all are that the backward pass reads."""


def param_specs():
    return {"embedding": EMBEDDING[1], "layers": STAGED}


def pipelined_step(mesh: Mesh, how: Mapping[str, Any], again: str, params, opt_state, text_BS: Array):
    """The step by `sx.pipeline`; `how`: its microbatches, schedule and chunks."""
    return update(params, opt_state, *gradient(mesh, how, again)(params, text_BS))


def gradient(mesh: Mesh, how: Mapping[str, Any], again: str):
    return sx.pipeline.value_and_grad(partial(loss, mesh, again), **how)


def packed(mesh: Mesh, how: Mapping[str, Any], again: str, params, text_BS) -> tuple[Any, Any]:
    """Shapes and specs of parameters that rest on the stages whose chunks read them."""
    specs = {"embedding": EMBEDDING[1], "layers": {name: spec for name, (_, spec) in WEIGHTS.items()}}
    packing = sx.pipeline.packing(gradient(mesh, how, again), params, text_BS, mesh=mesh, specs=specs)
    return jax.eval_shape(lambda params: sx.pipeline.pack(params, packing), params), packing.specs


def buffered_step(mesh: Mesh, microbatches: int, repeats: int, again: str, params, opt_state, text_BS: Array):
    """The step by a shifting buffer; circular where layers go round the stages several times."""
    grad = jax.value_and_grad(partial(buffered_loss, mesh, microbatches, repeats, again))
    return update(params, opt_state, *grad(params, text_BS))


def update(params, opt_state, value, grads):
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def loss(mesh: Mesh, again: str, params, text_BS: Array) -> Array:
    body = remat(mesh, again)
    x_BSM = embedded(mesh, params, text_BS)
    x_BSM, _ = lax.scan(lambda x_BSM, weights: (body(x_BSM, weights), None), x_BSM, params["layers"])
    return cross_entropy(mesh, None, params, x_BSM, text_BS)


def buffered_loss(mesh: Mesh, microbatches: int, repeats: int, again: str, params, text_BS: Array) -> Array:
    """The layers by a buffer; the logits of one microbatch at a time."""
    split = P("stage", *FINALIZED.bsm)
    run = shifting_buffer(
        remat(mesh, again),
        mesh.shape["stage"],
        lambda x: annotate(mesh, x, split),
        repeats=repeats,
        axis="stage",
        remat=None,
    )
    text_ABS = jnp.swapaxes(text_BS.reshape(-1, microbatches, text_BS.shape[1]), 0, 1)
    text_ABS = annotate(mesh, text_ABS, P(None, "x"))
    x_ABSM = annotate(mesh, run(params["layers"], embedded(mesh, params, text_ABS)), P(None, *FINALIZED.bsm))

    def scored(total, x_text):
        return total + cross_entropy(mesh, "stage", params, *x_text), None

    return lax.scan(scored, jnp.float32(0), (x_ABSM, text_ABS))[0] / microbatches


def remat(mesh: Mesh, again: str):
    """A layer that keeps little for its backward pass, and keeps it split."""
    body = jax.checkpoint(partial(layer, mesh, FINALIZED), prevent_cse=False, policy=POLICIES[again])
    return lambda x_BSM, weights: annotate(mesh, body(x_BSM, weights), FINALIZED.bsm)


def embedded(mesh: Mesh, params, text: Array) -> Array:
    """Of [B, S], or of several microbatches [A, B, S]."""
    split = P(*[None] * (text.ndim - 2), *FINALIZED.bsm)
    return annotate(mesh, params["embedding"].astype(jnp.bfloat16)[text], split)


@partial(jax.checkpoint, static_argnums=(0, 1))
def cross_entropy(mesh: Mesh, sequence: str | None, params, x_BSM: Array, text_BS: Array) -> Array:
    """The logits, of which there are many, are made again in the backward pass. `sequence`: the axis that
    splits it."""
    x_BSM = annotate(mesh, x_BSM, P("x", sequence, "y"))
    weights_VM = params["embedding"].astype(jnp.bfloat16)
    logits_BSV = jnp.einsum("bsm,vm->bsv", norm(x_BSM), weights_VM).astype(jnp.float32)
    logits_BSV = annotate(mesh, logits_BSV, P("x", sequence, "y"))
    losses_BS = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, jnp.roll(text_BS, -1, 1))
    return losses_BS[:, :-1].mean()
