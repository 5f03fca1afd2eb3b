"""Reductions over whole dims: what is reduced over a split dim stays pending."""

from collections.abc import Callable

from shardax.graph import Node
from shardax.spmd_rules.registry import LINEAR, Local, Passes, register_rule


def _reduction(mark: str) -> Callable[[Node], str]:
    """The rule that marks every reduced dim with `mark` and keeps the others."""

    def rule(node: Node) -> str:
        axes = node.params["axes"]
        operand = [f"r{d}{mark}" if d in axes else f"k{d}" for d in range(len(node.inputs[0].shape))]
        return f"{' '.join(operand)} -> {' '.join(f for f in operand if f[0] == 'k')}"

    return rule


def _reduce_local(local: Local, shard):
    return local.bind(shard, **({"out_sharding": None} if "out_sharding" in local.params else {}))


register_rule("argmax", _reduction("!"))
register_rule("argmin", _reduction("!"))
register_rule("reduce_and", _reduction("!"))
register_rule("reduce_max", _reduction(":max"), _reduce_local, passes=(Passes(("max",), (0,)),))
register_rule("reduce_min", _reduction(":min"), _reduce_local, passes=(Passes(("min",), (0,)),))
register_rule("reduce_or", _reduction("!"))
register_rule("reduce_prod", _reduction("!"))
register_rule("reduce_sum", _reduction("+"), _reduce_local, passes=(LINEAR(0),))
register_rule("reduce_xor", _reduction("!"))
