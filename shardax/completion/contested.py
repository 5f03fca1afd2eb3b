"""Tells whether what is looked up lies as a table does although its indices ask for the same axes.

    embedding P(None, 'x'), tokens P('x')      what is looked up: P(None, None, 'x') or P('x', None, None)

No weight decides that: one way all that follows is split by the embedding's features, the other way by the batch.
"""

from shardax.completion.complete import Completion
from shardax.graph import Graph, Node
from shardax.spmd_rules.registry import RULES


def contested(graph: Graph, completion: Completion) -> bool:
    """Whether some table got an axis of what is looked up in it that its indices asked for too."""
    return any(_contested(node, completion) for node in graph.walk() if node.name in RULES and RULES[node.name].looks_up)


def _contested(node: Node, completion: Completion) -> bool:
    factors = RULES[node.name].factors(node)
    sides = zip((*node.inputs, *node.outputs), factors.tensors, strict=True)
    table, *indices, result = [
        {(axis, f) for axes, dim in zip(completion.sharding(v).dims, dims, strict=True) for axis in axes for f in dim}
        for v, dims in sides
    ]
    asked = {axis for tensor in indices for axis, _ in tensor}
    return any(axis in asked for axis, _ in result & table - set().union(*indices))
