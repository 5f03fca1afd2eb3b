"""The shardings of a GPT-2: parameters and batch. Optimizer state, gradients and activations follow by completion.

`model` splits attention by heads, the feed-forward by its hidden dim (Megatron, Shoeybi et al. 2019) and the embedding by
vocabulary; `data` splits the batch; `fsdp` splits both the batch and what `model` leaves of the large parameters. Any of
them may be missing from the mesh.
"""

from collections.abc import Collection

from jax.sharding import PartitionSpec as P

from models.rules import specs_by_path

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
    """The PartitionSpec of each parameter, on a mesh with these axes. What no rule names (norms, biases) is replicated."""
    return specs_by_path(PARAMS, params, axes)
