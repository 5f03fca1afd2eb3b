"""A program for one device and a few sharding annotations in, one readable per-device program with explicit
collectives out.
"""

from shardax import pipeline, zero
from shardax.annotations.annotate import annotate, replicate
from shardax.annotations.systems import (
    Partial,
    Replicate,
    Shard,
    mark_sharding,
    mesh_split,
    redistribute,
    shard,
    split,
)
from shardax.api import shard_jit
from shardax.graph.equations import equations_like, map_equations
from shardax.jit.abstract_state import abstract_state
from shardax.options import Options, Refused
from shardax.passes.table import Pass, PassContext
from shardax.spmd_rules.partition_as import partition_as
from shardax.spmd_rules.registry import LINEAR, MOVES, register_rule
from shardax.transforms import Context, Retyping, Transform, annotations_of

__all__ = [
    "LINEAR",
    "MOVES",
    "Context",
    "Options",
    "Partial",
    "Pass",
    "PassContext",
    "Refused",
    "Replicate",
    "Retyping",
    "Shard",
    "Transform",
    "abstract_state",
    "annotate",
    "annotations_of",
    "equations_like",
    "map_equations",
    "mark_sharding",
    "mesh_split",
    "partition_as",
    "pipeline",
    "redistribute",
    "register_rule",
    "replicate",
    "shard",
    "shard_jit",
    "split",
    "zero",
]


def __dir__() -> list[str]:
    """Submodules are no public names; `shardax.flax`, `.testing` and `.check` are imported by name."""
    return __all__
