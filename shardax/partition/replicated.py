"""What has no rule runs replicated: said once for each user's line, with its price; refused in strict mode."""

import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from shardax import reshard
from shardax.graph import Node
from shardax.partition.decisions import Decision, Decisions
from shardax.sharding import AxisSizes
from shardax.spmd_rules.registry import RULES


def report_replicated(decisions: Decisions, sizes: AxisSizes, strict: bool, allow: Sequence[str] = ()) -> None:
    """Warns of every primitive that has no rule, unless a pattern of `allow` names it or its line.

    Raises:
      ValueError: there is one, and `strict`.
    """
    if all(n == 1 for n in sizes.values()):
        return
    said = set()
    for node, decision in _without_rule(decisions):
        where = (node.name, node.line)
        if where not in said and not any(fnmatchcase(name, pattern) for name in where for pattern in allow):
            said.add(where)
            _report(node, _bytes_sent(node, decision, sizes), strict)


def _without_rule(decisions: Decisions) -> Iterator[tuple[Node, Decision]]:
    for node, decision in decisions.pairs():
        for body in decision.bodies:
            yield from _without_rule(body)
        if not decision.bodies and node.name not in RULES:
            yield node, decision


def _bytes_sent(node: Node, decision: Decision, sizes: AxisSizes) -> float:
    """The bytes that one device sends so that every device holds the operands whole."""
    paths = (
        reshard.plan(move.source, move.target, value.shape, value.itemsize, sizes)
        for value, move in zip(node.inputs, decision.moves, strict=True)
    )
    return sum(path.nbytes for path in paths)


def _report(node: Node, nbytes: float, strict: bool) -> None:
    text = (
        f"{node.name} at {node.line or 'an unknown line'} has no sharding rule: it runs replicated, "
        f"each device sends {nbytes:,.0f} bytes to gather its operands. "
        f"Register one, shardax.register_rule({node.name!r}, ...), or allow it: Options(allow=({node.name!r},))"
    )
    if strict:
        raise ValueError(f"Options(strict=True): {text}")
    warnings.warn(text, stacklevel=2)
