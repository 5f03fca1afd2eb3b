"""Reductions over whole dims: what is reduced over a split dim stays pending."""

from collections.abc import Callable

from shardax.graph import Node
from shardax.spmd_rules.registry import LINEAR, Passes, register_rule


def _reduction(mark: str) -> Callable[[Node], str]:
    """The rule that marks every reduced dim with `mark` and keeps the others."""

    def rule(node: Node) -> str:
        axes = node.params["axes"]
        operand = [f"r{d}{mark}" if d in axes else f"k{d}" for d in range(len(node.inputs[0].shape))]
        return f"{' '.join(operand)} -> {' '.join(f for f in operand if f[0] == 'k')}"

    return rule


register_rule("argmax", _reduction("!"))
register_rule("argmin", _reduction("!"))
register_rule("reduce_and", _reduction("!"))
register_rule("reduce_max", _reduction(":max"), passes=(Passes(("max",), (0,)),))
register_rule("reduce_min", _reduction(":min"), passes=(Passes(("min",), (0,)),))
register_rule("reduce_or", _reduction("!"))
register_rule("reduce_prod", _reduction("!"))
register_rule("reduce_sum", _reduction("+"), passes=(LINEAR(0),))
register_rule("reduce_xor", _reduction("!"))
