"""A plan as tables: what rests how, what is sent and why, how every value is laid out, memory, seconds."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardax.cost.chips import CHIPS
from shardax.explain.analysis import Analysis
from shardax.explain.by_line import dearest_lines, run_count
from shardax.explain.places import arguments, results
from shardax.explain.reports import reports
from shardax.explain.tables import Group, Row, Table
from shardax.explain.values import shardings
from shardax.ledger.collectives import Collective, array_text, comm_bytes
from shardax.ledger.lines import line_text
from shardax.ledger.words import as_one, bytes_text, form, percent, seconds_text, spec_text, times

MONEY = ("each", "total", "share")


def tables(plan: Analysis) -> list[Table]:
    """All that `print(plan)` shows, the plan's size and price first."""
    memory = [plan.memory().table()] if plan.collectives or plan.graph else []
    sections = (
        _heading(plan),
        meshes(plan),
        arguments(plan),
        results(plan),
        _reports(plan),
        at_rest(plan),
        _collectives(plan),
        _totals(plan),
    )
    return [
        table
        for section in (*sections, shardings(plan), memory, _estimates(plan), _untyped(plan), _phases(plan))
        for table in section
    ]


def summary(plan: Analysis, lines: int) -> list[Table]:
    """The plan's size and price, its memory, what is sent by kind, and the dearest lines."""
    return [*_heading(plan), *_peak(plan), *_reports(plan), *_totals(plan), *dearest_lines(plan, lines)]


def _peak(plan: Analysis) -> Iterator[Table]:
    memory = plan.memory()
    at = f", at {line_text(memory.line)}" if memory.line else ""
    yield Table(f"Memory on each device: {memory.text}{at}", ())


def _reports(plan: Analysis) -> Iterator[Table]:
    """What transforms have to say of the plan, and functions inside."""
    yield from (report(plan) for report in plan.reports)
    for found in reports(plan):
        yield from found.tables


def _heading(plan: Analysis) -> Iterator[Table]:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    yield Table(
        f"{plan.mesh.size} devices, mesh {mesh}. Each sends {bytes_text(plan.comm_bytes)} per call, in "
        f"{run_count(plan.collectives)} collectives.",
        (),
    )


def _untyped(plan: Analysis) -> Iterator[Table]:
    if plan.untyped:
        yield Table(untyped(plan), ())


def untyped(plan: Analysis) -> str:
    """Why JAX gave no Explicit types, and where; "" if it did."""
    return f"No Explicit types, so completion decides. JAX: {plan.untyped}" if plan.untyped else ""


def meshes(plan: Analysis) -> Iterator[Table]:
    """How axes were refined, and what other meshes say; nothing where there is one mesh, as the user named
    it.
    """
    refined = plan.refinement
    if refined is None or refined.is_trivial:
        return
    rows = []
    for mesh in refined.meshes:
        axes = "; ".join(f"{axis} is {' '.join(subs) or '1'}" for axis, subs in refined.axes[mesh].items())
        rows.append(Row(f"{mesh}: {axes}{_BOUNDARY if mesh in refined.boundaries else ''}"))
    sizes = ", ".join(f"{axis}={size}" for axis, size in refined.sizes.items())
    yield Table(f"It runs on the common refinement, {sizes}", (Group("", tuple(rows)),))


_BOUNDARY = (
    ". A boundary: inside, shards of these sizes lie on other devices than it says; arguments and results "
    "cross it"
)


def at_rest(plan: Analysis) -> Iterator[Table]:
    """What is stored otherwise than requested, and what that costs."""
    alike = defaultdict(list)
    for entry in plan.at_rest:
        alike[form(entry.path), entry.shape, entry.requested, entry.stored].append(entry)
    groups = [(sum(map(plan.cost_at_rest, group)), *key[1:], group) for key, group in alike.items()]
    rows = []
    for cost, shape, requested, stored, group in sorted(groups, key=lambda group: -group[0]):
        what = f"{as_one([entry.path for entry in group])} {times(len(group))}[{','.join(map(str, shape))}]"
        how = f"requested {spec_text(requested)}, stored {'as ' * bool(stored.axes)}{spec_text(stored)}"
        rows.append(Row(f"{what}: {how}", (bytes_text(cost),)))
    if rows:
        title = "Stored otherwise than requested, where the requested sharding does not divide"
        yield Table(title, (Group("", tuple(rows)),), ("sent for it",))


def _collectives(plan: Analysis) -> Iterator[Table]:
    reasons = defaultdict(list)
    for c in plan.collectives:
        reasons[c.line, form(c.reason)].append(c)
    groups = []
    for (line, _), group in sorted(reasons.items(), key=lambda item: -comm_bytes(item[1])):
        heading = (
            ": ".join(filter(None, (line_text(line), as_one([c.reason for c in group])))) or "(unknown line)"
        )
        groups.append(Group(heading, tuple(_of_reason(plan, group))))
    if groups:
        yield Table("Collectives, by the line that they serve", tuple(groups), MONEY)


def _of_reason(plan: Analysis, group: Sequence[Collective]) -> Iterator[Row]:
    """The facts, of which equal layers differ in numbers only; under each what is sent because of it."""
    facts = defaultdict(list)
    for c in group:
        facts[form(plan.because(c))].append(c)
    for because, alike in sorted(facts.items(), key=lambda item: -comm_bytes(item[1])):
        if because:
            for fact in as_one([plan.because(c) for c in alike], exact=True).splitlines():
                yield Row(fact, remark=True)
        counts = Counter(replace(c, reason="") for c in alike)
        for c, count in sorted(counts.items(), key=lambda item: -item[0].total * item[1]):
            yield from _rows(c, count, plan.comm_bytes)


def _rows(c: Collective, count: int, total: int) -> Iterator[Row]:
    first, *others = map(array_text, c.operands)
    operands = f"{first} and {len(others)} more" if others else first
    what = f"{times(count)}{c.kind} over {','.join(c.axes)} of {operands}"
    sent = count * c.total
    yield Row(what, (bytes_text(c.nbytes), bytes_text(sent), percent(sent, total)))
    if c.trips > 1:
        yield Row(f"    {c.trips} trips")
    if c.open_loop:
        yield Row("    in a while loop: counted for one iteration")
    if c.other_branch:
        yield Row("    in a branch of a cond that sends less than another: not counted")


def _totals(plan: Analysis) -> Iterator[Table]:
    by_kind = defaultdict(list)
    for c in plan.collectives:
        by_kind[c.kind, c.axes].append(c)
    rows = []
    for (kind, axes), group in sorted(by_kind.items(), key=lambda item: -comm_bytes(item[1])):
        sent = comm_bytes(group)
        rows.append(
            Row(
                f"{kind} over {','.join(axes)}",
                (str(run_count(group)), bytes_text(sent), percent(sent, plan.comm_bytes)),
            )
        )
    if rows:
        yield Table("Totals", (Group("", tuple(rows)),), ("times", "total", "share"))


def _estimates(plan: Analysis) -> Iterator[Table]:
    peak = plan.memory().peak
    found = [(chip, plan.estimate(chip)) for chip in CHIPS.values()]
    host, rows = any(e.host for _, e in found), []
    for chip, e in found:
        seconds = map(seconds_text, (e.seconds, e.compute, e.memory, e.links, *[e.host] * host))
        rows.append(Row(chip.name, (e.bound, *seconds, f"{100 * peak / chip.memory:,.0f} %")))
    heads = ("bound by", "a call", "compute", "HBM", "links", *["host"] * host, "memory")
    yield Table("Estimate by roofline, nothing overlapped", (Group("", tuple(rows)),), heads, 1)


def _phases(plan: Analysis) -> Iterator[Table]:
    if plan.phases:
        text = ", ".join(f"{phase} {seconds_text(seconds)}" for phase, seconds in plan.phases.items())
        yield Table(f"Planned in {seconds_text(sum(plan.phases.values()))}: {text}", ())
