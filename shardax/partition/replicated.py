"""What runs replicated. What has no rule is reported once for each user's line, with its price, and refused
in strict mode.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardax.cost.network import network_of
from shardax.graph import annotations
from shardax.graph.graph import Node, Value
from shardax.options import Refused
from shardax.partition.decisions import Decision, Decisions
from shardax.reshard import paths
from shardax.sharding import Axes, AxisSizes, Layout, shard_count
from shardax.spmd_rules.registry import RULES

FEW = 4  # collectives: axes resharded away and back, or pieces of a halo


def report_replicated(
    decisions: Decisions, sizes: AxisSizes, strict: bool, allow: Sequence[str] = ()
) -> None:
    """Warns of every primitive that has no rule, unless a pattern of `allow` names it or its line.

    Raises:
      ValueError: there is one, and `strict`.
    """
    if all(n == 1 for n in sizes.values()):
        return
    reported = set()
    for node, decision in _without_rule(decisions):
        where = (node.name, node.line)
        if where not in reported and not any(
            fnmatchcase(name, pattern) for name in where for pattern in allow
        ):
            reported.add(where)
            _report(node, _bytes_sent(node, decision, sizes), strict)


def _without_rule(decisions: Decisions) -> Iterator[tuple[Node, Decision]]:
    for node, decision in decisions.pairs():
        for body in decision.bodies:
            yield from _without_rule(body)
        if not decision.bodies and node.name not in RULES:
            yield node, decision


def _bytes_sent(node: Node, decision: Decision, sizes: AxisSizes) -> float:
    """The bytes that one device sends so that the operands are replicated."""
    gathers = (
        paths.plan(reshard.source, reshard.target, value.shape, value.itemsize, sizes)
        for value, reshard in zip(node.inputs, decision.reshards, strict=True)
    )
    return sum(path.nbytes for path in gathers)


def _report(node: Node, nbytes: float, strict: bool) -> None:
    text = (
        f"{node.name} at {node.line or 'an unknown line'} has no sharding rule: it runs replicated, "
        f"each device sends {nbytes:,.0f} bytes to gather its operands. "
        f"{_way_out(node.name)}, or allow it: Options(allow=({node.name!r},))"
    )
    if strict:
        raise Refused(f"Options(strict=True): {text}")
    warnings.warn(text, stacklevel=2)


def _way_out(name: str) -> str:
    """A kernel's equation holds the sizes of its operands, so it is the function around it that can have a
    rule.
    """
    if name in ("ffi_call", "pallas_call"):
        return "Put the function that calls it under shardax.partition_as(rule)"
    return f"Register one, shardax.register_rule({name!r}, ...)"


@dataclass(frozen=True)
class Replicated:
    """A node that runs replicated over some axes, and the bytes that one device sends for that.

    `small`: less than the starts of the few collectives cost that would have to reshard it instead.
    """

    node: Node
    axes: Axes
    nbytes: float
    small: bool


def replicated(decisions: Decisions, sizes: AxisSizes) -> Iterator[Replicated]:
    """The nodes that run replicated over some axis.

    Operands are gathered over the axis, and no factor is split over it, so that its devices all do the same.
    It is no replication to gather no more than the results come to, where whoever reads them reads them so on
    all these devices.
    """
    read: dict[Value, set[str]] = {}  # the axes that split each value where it is read
    reshards = [
        (v, m)
        for node, decision in decisions.pairs()
        for v, m in zip(node.inputs, decision.reshards, strict=True)
    ]
    for value, reshard in [*reshards, *zip(decisions.graph.outputs, decisions.outputs, strict=True)]:
        if not value.is_literal:
            read.setdefault(value, set()).update(reshard.target.sharding.axes)
    for node, decision in decisions.pairs():
        for body in decision.bodies:
            yield from replicated(body, sizes)
        if not decision.bodies and not annotations.of_node(node):
            yield from _of_node(node, decision, sizes, read)


def _of_node(
    node: Node, decision: Decision, sizes: AxisSizes, read: Mapping[Value, set[str]]
) -> Iterator[Replicated]:
    """The same of one node, if it is one."""
    split_axes = {a for layout in (*decision.operands, *decision.results) for a in layout.sharding.axes}
    used = {a for split in decision.splits.values() for a in split.axes} & split_axes
    gathers = [step for step in _gathers(node, decision, sizes) if not used.issuperset(step.axes)]
    nbytes = sum(step.nbytes for step in gathers)
    axes = tuple(dict.fromkeys(a for step in gathers for a in step.axes if a not in used))
    made = zip(node.outputs, decision.results, strict=True)
    wasted = nbytes - sum(_gathered_anyway(v, layout, read.get(v, set()), axes, sizes) for v, layout in made)
    if wasted > 0:
        least = network_of(sizes).least
        yield Replicated(node, axes, nbytes, least((), wasted) <= (1 + FEW) * least((), 0))


def _gathers(node: Node, decision: Decision, sizes: AxisSizes) -> Iterator[paths.Step]:
    """The gathers of a node's operands. What several operands of a node share is gathered once."""
    for value, reshard in dict.fromkeys(zip(node.inputs, decision.reshards, strict=True)):
        path = paths.plan(reshard.source, reshard.target, value.shape, value.itemsize, sizes)
        yield from (step for step in path.steps if step.kind == "all_gather")


def _gathered_anyway(value: Value, layout: Layout, read: set[str], axes: Axes, sizes: AxisSizes) -> float:
    """The bytes that one device would send to gather a result, padded as it is, over those of `axes` over
    which nobody reads it split. `read`: the axes over which somebody does."""
    over = tuple(a for a in axes if a not in read)
    nbytes = math.prod(layout.padded) * value.itemsize
    return nbytes / shard_count(layout.sharding.axes, sizes) * (1 - 1 / shard_count(over, sizes))
