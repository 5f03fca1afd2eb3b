"""The shardings of a GPT-2: parameters and batch. Optimizer state, gradients and activations follow by
completion.

`model` splits attention by heads, the feed-forward by its hidden dim (Megatron, Shoeybi et al. 2019) and the
embedding by vocabulary; `data` splits the batch; `fsdp` splits both the batch and what `model` leaves of the
large parameters. Any of them may be missing from the mesh.
"""

from collections.abc import Collection

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.rules import on_axes, specs_by_path
from models.steps import State, Step

AXES = ("data", "fsdp", "model")
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
    return specs_by_path(PARAMS, params, axes)


def sharded_step(step: Step, state: State, mesh: Mesh | AbstractMesh, zero: int = 0):
    """A GPT-2's train step by shardax: parameters and batch are annotated, the rest follows. `state` may be
    of shapes. `zero`: the stage of ZeRO over the first axis of the batch, 0 for none.
    """
    unknown = [axis for axis in mesh.axis_names if axis not in AXES]
    if unknown:
        raise ValueError(f"unknown axis {unknown[0]!r}: the shardings of models.gpt2 know {', '.join(AXES)}")
    specs = State(param_specs(state.params, mesh.axis_names), None, None), on_axes(BATCH, mesh.axis_names)
    axis = next((axis for axis in ("data", "fsdp") if axis in mesh.axis_names), "data")
    transforms = [sx.zero.Zero(axis, zero)] if zero else []
    return sx.shard_jit(step, mesh=mesh, in_shardings=specs, donate_argnums=0, transforms=transforms)
