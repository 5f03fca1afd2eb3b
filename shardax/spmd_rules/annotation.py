"""Annotations pass a value on. Completion fixes the sharding of the value, and partition brings it to that
sharding.

A `reshard` that names no axes, as gradients have them, requests nothing: it is not an annotation, but only
passes its value on.
"""

from shardax.spmd_rules.registry import MOVES, register_rule

for _name in ("annotate", "reshard", "sharding_constraint"):
    register_rule(_name, "... -> ...", lambda local, shard: [shard], passes=(MOVES(0),), fuses="all")
