"""The shardings of a GPT-2: parameters and batch. Optimizer state, gradients and activations follow by
completion.

`model` splits attention by heads, the feed-forward by its hidden dim (Megatron, Shoeybi et al. 2019) and the
embedding by vocabulary; `data` splits the batch; `fsdp` splits both the batch and what `model` leaves of the
large parameters; `stage` splits stacked layers by their number. Any of them may be missing from the mesh.
"""

from collections.abc import Collection
from functools import partial
from typing import Literal

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.rules import on_axes, path_name, specs_by_path
from models.steps import State, Step

AXES = ("stage", "data", "fsdp", "model")
BATCH = P(("data", "fsdp"))

PARAMS = (
    (r"embed/embedding", P("model", "fsdp")),
    (r"position", P(None, "fsdp")),
    (r"attention/qkv/kernel", P("fsdp", None, "model", None)),
    (r"attention/qkv/bias", P(None, "model", None)),
    (r"attention/out/kernel", P("model", None, "fsdp")),
    (r"mlp/up/kernel", P("fsdp", "model")),
    (r"mlp/up/bias", P("model")),
    (r"mlp/down/kernel", P("model", "fsdp")),
)


def param_specs(params, axes: Collection[str]):
    """The PartitionSpec of each parameter, on a mesh with these axes. What no rule names (norms, biases) is
    replicated.
    """
    specs = specs_by_path(PARAMS, params, axes)
    return (
        jax.tree_util.tree_map_with_path(partial(_on_stages, axes), specs, params)
        if "stage" in axes
        else specs
    )


def _on_stages(axes: Collection[str], path, spec: P, leaf) -> P:
    """The spec of a leaf; where it is a stack of layers, its first dim is that."""
    stacked = "/layers/" in f"/{path_name(path)}/"
    return P("stage", *(tuple(spec) or (None,) * leaf.ndim)[1:]) if stacked else spec


Offload = tuple[Literal["optimizer", "parameters"], ...]


def sharded_step(step: Step, state: State, mesh: Mesh | AbstractMesh, zero: int = 0, offload: Offload = ()):
    """A GPT-2's train step by shardax: parameters and batch are annotated, the rest follows. `state` may be
    of shapes. `zero`: the stage of ZeRO over the first axis of the batch, 0 for none; `offload`: what of the
    state rests at the host then.
    """
    unknown = [axis for axis in mesh.axis_names if axis not in AXES]
    if unknown:
        raise ValueError(f"unknown axis {unknown[0]!r}: the shardings of models.gpt2 know {', '.join(AXES)}")
    specs = State(param_specs(state.params, mesh.axis_names), None, None), on_axes(BATCH, mesh.axis_names)
    axis = next((axis for axis in ("data", "fsdp") if axis in mesh.axis_names), "data")
    transforms = [sx.zero.Zero(axis, zero, offload=offload)] if zero else []
    return sx.shard_jit(step, mesh=mesh, in_shardings=specs, donate_argnums=0, transforms=transforms)
