"""Searches in a sorted table: in a split one each device counts what of its block is before each query.

table  1 3 | 4 7 | 8 9        of each block before 5:       2 | 1 | 0        their sum is the place:  3
"""

import jax.numpy as jnp
import numpy as np

from shardax.graph.graph import Node
from shardax.graph.searches import search
from shardax.reshard.run import identity
from shardax.spmd_rules.registry import Local, register_rule


def rule(node: Node) -> str:
    """ "n+, q0 q1 -> q0 q1": what the blocks count adds up."""
    queries = " ".join(f"q{d}" for d in range(len(node.in_shapes[1])))
    return f"n+, {queries} -> {queries}"


def _search_local(local: Local, table, queries):
    """What pads the last block is the greatest there is, and not counted."""
    dtype = local.node.outputs[0].aval.dtype
    if not local.operands[0].dims[0]:
        return [search(table, queries, **local.params).astype(dtype)]
    greatest = np.nan if jnp.issubdtype(table.dtype, jnp.inexact) else identity("min", table.dtype)
    positions = search(local.mask(0, table, greatest, [0]), queries, **local.params).astype(dtype)
    rows = local.node.in_shapes[0][0] - local.start(local.operands[0], 0)
    return [jnp.minimum(positions, jnp.clip(rows, 0, table.shape[0]).astype(dtype))]


register_rule("search", rule, _search_local)
