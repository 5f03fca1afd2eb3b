"""What each primitive permits, one file per family. Importing this package registers the built-in rules."""

from shardax.spmd_rules import (
    annotation,
    contraction,
    effects,
    elementwise,
    indexing,
    islands,
    linalg,
    ragged,
    random,
    reductions,
    reshape,
    rotation,
    scans,
    shape,
    sorting,
    windows,
)

__all__ = [
    "annotation",
    "contraction",
    "effects",
    "elementwise",
    "indexing",
    "islands",
    "linalg",
    "ragged",
    "random",
    "reductions",
    "reshape",
    "rotation",
    "scans",
    "shape",
    "sorting",
    "windows",
]
