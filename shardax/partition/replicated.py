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
from shardax.rewrites.opened import why_closed
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
            gathers = (
                paths.plan(reshard.source, reshard.target, value.shape, value.itemsize, sizes)
                for value, reshard in zip(node.inputs, decision.reshards, strict=True)
            )
            _report(node, sum(path.nbytes for path in gathers), strict)


def _without_rule(decisions: Decisions) -> Iterator[tuple[Node, Decision]]:
    for node, decision in decisions.pairs():
        for body in decision.bodies:
            yield from _without_rule(body)
        if not decision.bodies and node.name not in RULES:
            yield node, decision


def _report(node: Node, nbytes: float, strict: bool) -> None:
    way_out = f"Register one, shardax.register_rule({node.name!r}, ...)"
    if node.name in ("ffi_call", "pallas_call"):
        # Their equations hold the sizes of operands, so it is the function around them that can have a rule.
        way_out = "Put the function that calls it under shardax.partition_as(rule)"
    why = why_closed(node)
    text = (
        f"{node.name} at {node.line or 'an unknown line'} has no sharding rule{why and f', and {why}'}: "
        f"it runs replicated, "
        f"each device sends {nbytes:,.0f} bytes to gather its operands. "
        f"{way_out}, or allow it: Options(allow=({node.name!r},))"
    )
    if strict:
        raise Refused(f"Options(strict=True): {text}")
    warnings.warn(text, stacklevel=2)


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
    # What several operands share is gathered once.
    pairs = dict.fromkeys(zip(node.inputs, decision.reshards, strict=True))
    plans = (paths.plan(r.source, r.target, v.shape, v.itemsize, sizes) for v, r in pairs)
    gathers = [s for p in plans for s in p.steps if s.kind == "all_gather" and not used.issuperset(s.axes)]
    nbytes = sum(step.nbytes for step in gathers)
    axes = tuple(dict.fromkeys(a for step in gathers for a in step.axes if a not in used))
    made = zip(node.outputs, decision.results, strict=True)
    wasted = nbytes - sum(_gathered_anyway(v, layout, read.get(v, set()), axes, sizes) for v, layout in made)
    if wasted > 0:
        least = network_of(sizes).least
        yield Replicated(node, axes, nbytes, least((), wasted) <= (1 + FEW) * least((), 0))


def _gathered_anyway(value: Value, layout: Layout, read: set[str], axes: Axes, sizes: AxisSizes) -> float:
    """The bytes that one device would send to gather a result, padded as it is, over those of `axes` over
    which nobody reads it split. `read`: the axes over which somebody does."""
    over = tuple(a for a in axes if a not in read)
    nbytes = math.prod(layout.padded) * value.itemsize
    return nbytes / shard_count(layout.sharding.axes, sizes) * (1 - 1 / shard_count(over, sizes))
