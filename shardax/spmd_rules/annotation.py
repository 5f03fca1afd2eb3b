"""Annotations pass a value on; completion fixes its sharding, and partition lays it out so.

A `reshard` that names no axes (gradients have them) says nothing: it is no annotation, only the value again.
"""

from shardax.spmd_rules.registry import MOVES, register_rule

for _name in ("annotate", "reshard", "sharding_constraint"):
    register_rule(_name, "... -> ...", lambda local, shard: [shard], passes=(MOVES(0),))
