"""The Conformer of GSPMD's Table 5, `models.conformer` at its size, its layers on stages, in two ways.

By a shifting buffer for `jax.jit`, what is outside of the layers data parallel over the stages, as the paper
has it; and by `sx.pipeline.value_and_grad`, where what is in front of them is so too, and the last stage has
the head. The buffer's program drops batch norm's statistics. An utterance has 512 frames after
subsampling, which the paper does not say.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks.gspmd_model import OPTIMIZER, annotate
from benchmarks.shifting_buffer import shifting_buffer
from models import conformer

FRAMES = 4 * 512


AGAIN = {
    "all": (),
    "less": ("down", "up"),
    "least": ("down", "gated", "out", "qkv", "up"),
}
"""Which products of a layer the backward pass does not compute again: none, the largest, all."""


def config(layers: int, again: str = "all") -> conformer.Config:
    return conformer.Config(
        layers=layers,
        model=3072,
        heads=16,
        kernel=32,
        channels=256,
        bands=80,
        phones=1024,
        dtype=jnp.bfloat16,
        remat=True,
        kept=AGAIN[again],
    )


def flops(c: conformer.Config, batch: int) -> int:
    """Model FLOPs of a train step on so many utterances, of the layers alone."""
    leaves = jax.tree.leaves(conformer.abstract_params(c)["layers"])
    frames = FRAMES // conformer.SUBSAMPLED
    weights = sum(leaf.size for leaf in leaves)
    return 3 * batch * (2 * weights * frames + 4 * c.layers * c.model * frames**2)


def abstract_args(c: conformer.Config, batch: int) -> tuple[Any, Any, Any]:
    params = conformer.abstract_params(c)
    features_BRF = jax.ShapeDtypeStruct((batch, FRAMES, c.bands), jnp.float32)
    labels_BS = jax.ShapeDtypeStruct((batch, FRAMES // conformer.SUBSAMPLED), jnp.int32)
    return params, jax.eval_shape(OPTIMIZER.init, params), (features_BRF, labels_BS)


def pipelined_step(c: conformer.Config, how: Mapping[str, Any], params, opt_state, batch):
    (value, statistics), grads = gradient(c, how)(params, *batch)
    running = jax.tree.map(lambda x: x.mean(0), statistics)
    return *update(params, opt_state, grads), (value, running)


def gradient(c: conformer.Config, how: Mapping[str, Any]):
    return sx.pipeline.value_and_grad(partial(conformer.loss, c), has_aux=True, **how)


def packed(mesh: Mesh, c: conformer.Config, how: Mapping[str, Any], params, batch) -> tuple[Any, Any]:
    """Shapes and specs of parameters that rest on the stages whose chunks read them."""
    packing = sx.pipeline.packing(gradient(c, how), params, *batch, mesh=mesh)
    return jax.eval_shape(lambda params: sx.pipeline.pack(params, packing), params), packing.specs


def buffered_step(mesh: Mesh, c: conformer.Config, repeats: int, params, opt_state, batch):
    value, grads = jax.value_and_grad(partial(buffered_loss, mesh, c, repeats))(params, *batch)
    return *update(params, opt_state, grads), value


def update(params, opt_state, grads):
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def buffered_loss(mesh: Mesh, c: conformer.Config, repeats: int, params, features_BRF, labels_BS) -> Array:
    """Of microbatches of one utterance."""

    policy = jax.checkpoint_policies.save_only_these_names(*c.kept)

    def layer(x_BSM: Array, w) -> Array:
        return conformer.layer(c, x_BSM, w, None)[0]

    run = shifting_buffer(
        layer if repeats > 1 else jax.checkpoint(layer, prevent_cse=False, policy=policy),
        mesh.shape["stage"],
        lambda x: annotate(mesh, x, P("stage")),
        repeats=repeats,
        axis="stage",
        remat=policy if repeats > 1 else None,
    )
    of_batch = partial(annotate, mesh, spec=P("stage"))
    x_BSM = of_batch(conformer.subsampled(c, params["front"], of_batch(features_BRF)))
    x_BSM = of_batch(run(params["layers"], annotate(mesh, x_BSM[:, None], P()))[:, 0])
    logits_BSP = (x_BSM @ params["head"].astype(c.dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSP, of_batch(labels_BS)).mean()
