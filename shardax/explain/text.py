"""A plan as plain aligned text, 110 columns wide at most."""

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shardax.explain.ledger import Collective, array_text, comm_bytes
from shardax.explain.lines import line_text
from shardax.explain.places import arguments, results
from shardax.explain.words import as_one, bytes_text, form, times

if TYPE_CHECKING:
    from shardax.explain.plan import Plan

WIDTH = 110
NUMBERS = 44  # columns of the numbers at the right: each, total, share


def plan_text(plan: "Plan") -> str:
    sections = [_heading(plan), arguments(plan), results(plan), _at_rest(plan), _collectives(plan), _totals(plan)]
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def _heading(plan: "Plan") -> Iterator[str]:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    count = sum(c.trips for c in plan.collectives if not c.other_branch)
    yield f"{plan.mesh.size} devices, mesh {mesh}. Each sends {bytes_text(plan.comm_bytes)} per call, in {count} collectives."


def _at_rest(plan: "Plan") -> Iterator[str]:
    alike = defaultdict(list)
    for moved in plan.at_rest:
        alike[form(moved.path), moved.shape, moved.wanted, moved.rests].append(moved)
    if alike:
        yield "At rest other than wanted, where the wanted sharding does not divide"
    for (_, shape, wanted, rests), group in alike.items():
        cost = bytes_text(sum(map(plan.cost_at_rest, group)))
        what = f"{as_one([moved.path for moved in group])} {times(len(group))}[{','.join(map(str, shape))}]"
        yield from _wrapped(f"{what}: wanted {wanted}, rests in {rests}, which costs {cost}", 2)


def _collectives(plan: "Plan") -> Iterator[str]:
    if plan.collectives:
        yield _row("Collectives, by the line that they serve", "each", "total", "share")
    reasons = defaultdict(list)
    for c in plan.collectives:
        reasons[c.line, form(c.reason)].append(c)
    for (line, _), group in sorted(reasons.items(), key=lambda item: -comm_bytes(item[1])):
        reason = as_one([c.reason for c in group])
        yield from _wrapped(": ".join(filter(None, (line_text(line), reason))) or "(unknown line)", 2)
        for c, count in Counter(replace(c, reason="") for c in group).items():
            yield from _collective(c, count, plan.comm_bytes)


def _collective(c: Collective, count: int, total: int) -> Iterator[str]:
    what = f"{times(count)}{c.kind} over {','.join(c.axes)} of {_operands(c)}"
    sent = count * c.total
    yield _row(f"    {what}", bytes_text(c.nbytes), bytes_text(sent), _share(sent, total))
    if c.trips > 1:
        yield f"        {c.trips} trips"
    if c.open_loop:
        yield "        in a while loop: counted for one iteration"
    if c.other_branch:
        yield "        in a branch of a cond that sends less than another: not counted"


def _operands(c: Collective) -> str:
    first, *others = map(array_text, c.operands)
    return f"{first} and {len(others)} more" if others else first


def _totals(plan: "Plan") -> Iterator[str]:
    kinds = defaultdict(list)
    for c in plan.collectives:
        kinds[c.kind, c.axes].append(c)
    if kinds:
        yield _row("Totals", "times", "total", "share")
    for (kind, axes), group in sorted(kinds.items(), key=lambda item: -comm_bytes(item[1])):
        sent = comm_bytes(group)
        count = sum(c.trips for c in group if not c.other_branch)
        yield _row(f"    {kind} over {','.join(axes)}", str(count), bytes_text(sent), _share(sent, plan.comm_bytes))


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _row(text: str, each: str, total: str, share: str) -> str:
    return f"{text:<{WIDTH - NUMBERS}} {each:>15} {total:>15} {share:>11}".rstrip()


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4))
