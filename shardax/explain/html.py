"""A plan as one HTML file that needs no network: the program with its costs, memory over it, tables that sort
and fold, a picture of any array.

All text is in the HTML, and folds are its own; `page.js` sorts, searches and draws, from the arrays that are
in the page as JSON.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

from shardax.cost.chips import CHIPS
from shardax.explain.analysis import Analysis
from shardax.explain.by_line import run_count
from shardax.explain.memory import Memory
from shardax.explain.page import Cell, Lines, Section, fold, nbytes, short, table, text
from shardax.explain.page_arrays import Arrays
from shardax.explain.page_memory import memory_sections
from shardax.explain.page_places import places
from shardax.explain.page_program import Program
from shardax.explain.reports import Report, reports
from shardax.explain.tables import WIDTH, Table
from shardax.explain.text import at_rest, meshes, untyped
from shardax.ledger.collectives import Collective, array_text, comm_bytes
from shardax.ledger.words import as_one, bytes_text, form, percent, seconds_text


def html_text(plan: Analysis) -> str:
    """The page."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    name = plan.program.partition(" at ")[0] or "a program"
    arrays = Arrays(plan)
    memory = plan.memory()
    sections = list(_sections(plan, memory, arrays))
    links = (f'<li><a href="#{s.name}">{escape(s.short or s.title)}</a></li>' for s in sections)
    parts = {
        "TITLE": escape(" ".join(filter(None, ("Plan of", name, f"on {mesh}")))),
        "STYLE": _asset("page.css"),
        "OVERVIEW": _overview(plan, memory),
        "CONTENTS": "\n".join(links),
        "SECTIONS": "\n".join(map(str, sections)),
        "DATA": json.dumps({"arrays": arrays.entries}, separators=(",", ":")).replace("<", "\\u003c"),
        "SCRIPT": _asset("page.js"),
    }
    return re.sub(r"@([A-Z]+)@", lambda m: parts[m[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("shardax.explain").joinpath(name).read_text(encoding="utf-8")


def _sections(plan: Analysis, memory: Memory, arrays: Arrays) -> Iterator[Section]:
    program = Program(plan, arrays)
    curve, *tensors = memory_sections(memory, program.lines)
    yield from (*program.sections(), curve, *_collectives(plan, program.lines), *places(plan, arrays))
    yield from _as_text("state", "State", (report(plan) for report in plan.reports))
    for found in reports(plan):
        yield Section(found.name, found.tables[0].title, _report(found), found.short)
    yield from _as_text("stored", "Stored otherwise", at_rest(plan))
    yield from _as_text("meshes", "Meshes", meshes(plan))
    yield from (*tensors, _estimates(plan))


def _as_text(name: str, short: str, tables: Iterator[Table]) -> Iterator[Section]:
    """The section of a table of the text, as it stands there."""
    for found in tables:
        yield Section(name, found.title, table(("", *found.heads), _rows(found)), short)


def _rows(found: Table) -> list[list[Cell]]:
    """A remark stands under the row before it."""
    rows: list[list[Cell]] = []
    for row in (row for group in found.groups for row in group.rows):
        if row.remark and rows:
            rows[-1][0] = Cell(f'{rows[-1][0].html}<div class="remark">{escape(row.text)}</div>')
        else:
            rows.append([text(row.text), *(Cell(escape(cell), kind="number") for cell in row.cells)])
    return rows


def _report(found: Report) -> str:
    """Its figure, and its tables but for what that draws."""
    first, *others = found.tables
    parts = [found.figure]
    for each in others:
        parts.append(f"<h3>{escape(each.title)}</h3>")
        drawn = f"<pre>{escape(each.drawing(WIDTH))}</pre>" if each.drawing else ""
        parts.append(drawn or table(("", *each.heads), _rows(each)))
    return "\n".join(parts)


def _overview(plan: Analysis, memory: Memory) -> str:
    facts = {
        "devices": f"{plan.mesh.size:,}",
        "sent per call": bytes_text(plan.comm_bytes),
        "collectives": f"{run_count(plan.collectives):,}",
        "peak memory": bytes_text(memory.peak),
        "saved for backward": bytes_text(sum(t.nbytes for t in memory.saved)),
    }
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items()
    )
    phases = ", ".join(f"{phase} {seconds_text(s)}" for phase, s in plan.phases.items())
    planned = escape(f"Planned: {phases}" if phases else "")
    refused = f'<p class="untyped">{escape(untyped(plan))}</p>' if plan.untyped else ""
    return f'<dl class="tiles">{tiles}</dl>{refused}<p class="phases">{planned}</p>'


def _collectives(plan: Analysis, lines: Lines) -> Iterator[Section]:
    """The table of collectives. Those that are alike, as in equal layers, share a row."""
    alike: dict[Any, list[Collective]] = defaultdict(list)
    for c in plan.collectives:
        alike[replace(c, reason=form(c.reason))].append(c)
    groups = sorted(alike.values(), key=lambda group: -comm_bytes(group))
    rows = [_collective(plan, group, lines) for group in groups]
    heads = ("kind", "axes", "operand", "times", "each", "per call", "share", "line", "reason")
    if rows:
        yield Section("collectives", "Collectives", table(heads, rows, "collectives"))


def _collective(plan: Analysis, group: Sequence[Collective], lines: Lines) -> list[Cell]:
    c, sent, total = group[0], comm_bytes(group), sum(c.trips for c in group)
    notes = [" (while: one iteration)"] * c.open_loop + [" (branch: not counted)"] * c.other_branch
    reason = as_one([c.reason for c in group]) + "".join(notes)
    return [
        short(c.kind),
        text(", ".join(c.axes)),
        text(", ".join(map(array_text, c.operands))),
        Cell(f"{total:,}", total),
        nbytes(c.nbytes),
        nbytes(sent),
        Cell(percent(sent, plan.comm_bytes) or "0 %", sent),
        lines.link(c.line),
        _reason(plan, group, reason),
    ]


def _reason(plan: Analysis, group: Sequence[Collective], reason: str) -> Cell:
    """The reason, which opens to show the facts."""
    alike: dict[str, list[str]] = defaultdict(list)
    for because in filter(None, map(plan.because, group)):
        alike[form(because)].append(because)
    facts = "".join(f"<div>{escape(as_one(texts, exact=True))}</div>" for texts in alike.values())
    return Cell(fold(reason, facts, "because")) if facts else text(reason)


def _estimates(plan: Analysis) -> Section:
    rows = []
    for chip in CHIPS.values():
        e = plan.estimate(chip)
        seconds = [Cell(seconds_text(s), s) for s in (e.seconds, e.compute, e.memory, e.links)]
        rows.append([text(chip.name), text(e.bound), *seconds])
    heads = ("chip", "bound by", "a call", "compute", "HBM", "links")
    title = "Estimate by roofline, nothing overlapped"
    return Section("estimate", title, table(heads, rows), "Estimate")
