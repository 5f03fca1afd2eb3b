"""Whole: products that every device along the axes computes alike, as optimizers of matrices have them."""

from collections.abc import Iterator

from shardax.explain.facts import Facts
from shardax.explain.tables import Group, Row
from shardax.ledger.lines import code, line_text
from shardax.partition.decisions import Decisions
from shardax.sharding import Axes, AxisSizes

LEAST = 0.01  # of the FLOPs of a device: products that take less are not shown
SHOWN = 8  # lines


def repeated_products(plan: Facts, axes: Axes) -> dict[str, float]:
    """FLOPs of each line, on one device, of the products that no axis of these splits, though it could have
    split the work: every device along them computes the same. Lines of little work are left out.
    """
    if plan.decisions is None or plan.refinement is None:
        return {}
    total, repeated = 0.0, dict[str, float]()
    for line, flops, split in _products(plan.decisions, plan.refinement.sizes, 1, ()):
        total += flops
        if not set(axes) & set(plan.refinement.folded(split)):
            repeated[line] = repeated.get(line, 0.0) + flops
    ordered = sorted(repeated.items(), key=lambda item: -item[1])
    return {line: flops for line, flops in ordered if flops >= LEAST * total}


def _products(
    decisions: Decisions, sizes: AxisSizes, trips: int, manual: Axes
) -> Iterator[tuple[str, float, Axes]]:
    """The line, the FLOPs and the axes of each product, those among them along which an island is `manual`:
    there each device computes what is its own. Of a `while`, those of one iteration.
    """
    for node, decision in decisions.pairs():
        inner = trips * (node.params["length"] if node.name == "scan" else 1)
        within = (*manual, *node.params.get("newly_manual_axes", ()))
        for body in decision.bodies:
            yield from _products(body, sizes, inner, within)
        if decision.entry is not None and not decision.bodies:
            flops = trips * decision.entry.flops_of(decision.local(node, sizes))
            if flops:
                axes = (a for split in decision.splits.values() for a in split.axes)
                yield node.line, flops, (*manual, *axes)


def repeated_group(plan: Facts, axes: Axes) -> Iterator[Group]:
    """What a plan shows of them, nothing where there are none."""
    found = repeated_products(plan, axes)
    rows = [Row(line_text(x) or "(unknown line)", ("", f"{n:.3g}"), code(x)) for x, n in found.items()]
    if rows:
        heading = f"computed alike on all devices along {','.join(axes)}: {sum(found.values()):.3g} FLOPs"
        yield Group(heading, tuple(rows[:SHOWN]))
