"""What each primitive permits, one file per family. Importing this package registers the built-in rules."""

from shardax.spmd_rules import contraction, elementwise, reductions

__all__ = ["contraction", "elementwise", "reductions"]
