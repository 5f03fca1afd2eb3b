"""Boxes of Flax's linen as annotations. Flax is an extra: this is imported only where one of its boxes is at
hand.
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import linen
from flax.core import meta
from flax.linen.spmd import logical_to_mesh_axes as to_axes
from jax.sharding import PartitionSpec

Rules = Sequence[tuple[str, Any]]  # (name of a dim, mesh axis or axes or None), as flax has them


def box_spec(
    box: meta.Partitioned, rules: Rules | None = None
) -> PartitionSpec | jax.sharding.Sharding | None:
    """The sharding that a box of linen's requests; None where an optimizer has put an array of fewer dims
    into it.

    An abstract array that has a sharding, as in what `abstract_state` gives, counts before the names of its
    box.
    """
    if isinstance(box.value, jax.ShapeDtypeStruct) and box.value.sharding is not None:
        return box.value.sharding
    if len(box.names) > len(box.value.shape):
        return None
    if isinstance(box, linen.LogicallyPartitioned):
        return to_axes(box.names, _rules(box, rules))
    return PartitionSpec(*box.names) if rules is None else to_axes(box.names, rules)


def _rules(box: linen.LogicallyPartitioned, rules: Rules | None) -> Rules:
    rules = rules or box.rules or linen.get_logical_axis_rules()
    if not rules:
        raise ValueError(
            f"the dims of a LogicallyPartitioned value of shape {box.value.shape} are named {box.names}, "
            "and there are no rules from names to mesh axes: give shardax.flax.specs(tree, rules), or "
            "enter nn.logical_axis_rules(rules)"
        )
    return rules
