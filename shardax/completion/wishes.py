"""Wishes: what products would like of their operands and results where completion requests something else.

Experts are a dim of all operands and results of their products: where all are split over it alike, nothing is
sent. But the tokens that are dispatched to them come split by their groups, over axes that the weights have
along the experts, and completion settles on one of the two. The other is a wish: one more layout that the
search may take, which no operand would suggest to who makes the tokens.
"""

from collections.abc import Callable

from shardax.completion.node_classes import NodeClasses
from shardax.graph.graph import Graph, Value
from shardax.sharding import Axes, Sharding
from shardax.spmd_rules.registry import RULES
from shardax.spmd_rules.rule import Factors

Wish = list[Axes | None]
"""The axes of each dim of a value, None where nothing is wished."""


def wishes(graph: Graph, classes: NodeClasses, sharding: Callable[[Value], Sharding]) -> dict[Value, Wish]:
    """What each product wishes that has a batch: for its factors the axes that an operand has along them, of
    those that have others. First come, first served; dims of the batch come first."""
    found: dict[Value, Wish] = {}
    for node in graph.walk():
        entry = RULES.get(node.name)
        factors = classes.of(node)[0].factors if entry and entry.flops and not node.bodies else None
        if factors is not None and factors.shared and len(node.inputs) > 1:
            for factor in dict.fromkeys((*factors.shared, *factors.sizes)):
                _wish(found, factor, factors, [*node.inputs, *node.outputs], sharding)
    return {value: wish for value, wish in found.items() if any(wish)}


def _wish(
    found: dict[Value, Wish],
    factor: str,
    factors: Factors,
    values: list[Value],
    sharding: Callable[[Value], Sharding],
) -> None:
    """Adds what is wished along one factor."""
    dims = [tensor.index((factor,)) if (factor,) in tensor else None for tensor in factors.tensors]
    axes = [() if d is None else sharding(v).dims[d] for v, d in zip(values, dims, strict=True)]
    for value, d, have in zip(values, dims, axes, strict=True):
        wished = next((a for a in axes[: len(factors.operands)] if a and a != have), None)
        if d is None or wished is None or value.is_literal:
            continue
        wish = found.setdefault(value, [None] * len(value.shape))
        if wish[d] is None and all(set(wished).isdisjoint(other or ()) for other in wish):
            wish[d] = wished
