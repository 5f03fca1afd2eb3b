"""A plan as one HTML file that needs no network: tables that sort, the program with its costs, a picture of
any array.

The program has beside each line what it makes and sends; the picture shows how an array is laid out on the
mesh. All text is in the HTML; `page.js` sorts, searches and draws, from the arrays that are in the page as
JSON.
"""

import json
import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from importlib.resources import files
from typing import Any

from shardax.cost.chips import CHIPS
from shardax.explain.analysis import Analysis
from shardax.explain.memory import Tensor
from shardax.explain.picture import Picture, Pictures, picture_of
from shardax.explain.values import Story
from shardax.ledger.collectives import Collective, array_bytes, array_text, comm_bytes
from shardax.ledger.lines import code, line_text
from shardax.ledger.words import as_one, bytes_text, form, seconds_text, times
from shardax.sharding import Sharding

CONTEXT = 3  # lines shown around those of the program
COLUMNS = f"<colgroup>{4 * '<col>'}</colgroup>"
FEW = 4  # arrays that are shown beside a line at once


@dataclass(frozen=True)
class Cell:
    """The inside of a table's cell, and the number by which its column is sorted."""

    html: str
    number: float | None = None


def html_text(plan: Analysis) -> str:
    """The page."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    title = " ".join(
        filter(None, ("Plan of", plan.program.partition(" at ")[0] or "a program", f"on {mesh}"))
    )
    arrays = _Arrays(plan)
    sections = [
        _collectives(plan),
        _places(plan, arrays),
        *_memory(plan),
        _estimates(plan),
        *_files(plan, arrays),
    ]
    parts = {
        "TITLE": escape(title),
        "STYLE": _asset("page.css"),
        "OVERVIEW": _overview(plan),
        "SECTIONS": "\n".join(sections),
        "DATA": json.dumps({"arrays": arrays.entries}).replace("<", "\\u003c"),
        "SCRIPT": _asset("page.js"),
    }
    return re.sub(r"@([A-Z]+)@", lambda m: parts[m[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("shardax.explain").joinpath(name).read_text(encoding="utf-8")


@dataclass
class _Arrays:
    """The arrays that can be chosen, each once; what the picture is drawn from."""

    plan: Analysis
    entries: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[tuple[str, str, Picture], int] = field(default_factory=dict)

    def __post_init__(self):
        self.story = Story(self.plan) if self.plan.graph else None
        self.pictures = Pictures(self.plan) if self.plan.graph else None

    def button(self, name: str, aval, picture: Picture, text: str, why: str = "") -> str:
        """What chooses an array. `why`: the story that the panel tells of it."""
        key = (name, array_text(aval), picture)
        if key not in self.numbers:
            self.numbers[key] = len(self.entries)
            facts = {
                "name": name,
                "type": array_text(aval),
                "shape": aval.shape,
                "itemsize": aval.dtype.itemsize,
                "why": why,
            }
            self.entries.append(facts | asdict(picture))
        return f'<button class="array" data-array="{self.numbers[key]}">{escape(text)}</button>'

    def why(self, value, rests: Sharding | None = None) -> str:
        """The story of a value of the graph. An argument that `rests` so has the story of the value that the
        program computes with.
        """
        if self.story is None or value is None:
            return ""
        story = self.story.tell(value)
        if rests is None or self.plan.sharding(value) == rests:
            return story.split("\n", 1)[1]
        return f"It rests in the nearest sharding that divides it. In the program it is\n{story}"


def _overview(plan: Analysis) -> str:
    memory, count = plan.memory(), sum(c.trips for c in plan.collectives if not c.other_branch)
    facts = {
        "devices": f"{plan.mesh.size:,}",
        "sent per call": bytes_text(plan.comm_bytes),
        "collectives": f"{count:,}",
        "peak memory": bytes_text(memory.peak),
        "saved for backward": bytes_text(sum(t.nbytes for t in memory.saved)),
    }
    tiles = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts.items()
    )
    phases = ", ".join(f"{phase} {seconds_text(s)}" for phase, s in plan.phases.items())
    planned = escape(f"Planned: {phases}" if phases else "")
    return f'<div class="tiles">{tiles}</div><p class="phases">{planned}</p>'


def _collectives(plan: Analysis) -> str:
    """The table of collectives. Those that are alike, as in equal layers, share a row."""
    alike: dict[Any, list[Collective]] = defaultdict(list)
    for c in plan.collectives:
        alike[replace(c, reason=form(c.reason))].append(c)
    rows = [
        _collective(plan, group) for group in sorted(alike.values(), key=lambda group: -comm_bytes(group))
    ]
    heads = ("kind", "axes", "operand", "times", "each", "per call", "share", "line", "reason")
    return _table("Collectives", heads, rows)


def _collective(plan: Analysis, group: Sequence[Collective]) -> list[Cell]:
    c, sent, count, total = group[0], comm_bytes(group), sum(c.trips for c in group), plan.comm_bytes
    notes = [" (while: one iteration)"] * c.open_loop + [" (branch: not counted)"] * c.other_branch
    share = 100 * sent / total if total else 0.0
    return [
        _short(c.kind),
        _text(", ".join(c.axes)),
        _text(", ".join(map(array_text, c.operands))),
        Cell(f"{count:,}", count),
        _bytes(c.nbytes),
        _bytes(sent),
        Cell(f"{share:.1f} %", share),
        _line(c.line),
        _reason(plan, group, as_one([c.reason for c in group]) + "".join(notes)),
    ]


def _reason(plan: Analysis, group: Sequence[Collective], reason: str) -> Cell:
    """The reason, which opens to show the facts."""
    alike: dict[str, list[str]] = defaultdict(list)
    for text in filter(None, map(plan.because, group)):
        alike[form(text)].append(text)
    facts = "".join(f"<div>{escape(as_one(texts, exact=True))}</div>" for texts in alike.values())
    return (
        Cell(f'<details class="because"><summary>{escape(reason)}</summary>{facts}</details>')
        if facts
        else _text(reason)
    )


def _places(plan: Analysis, arrays: _Arrays) -> str:
    values = arrays.story.insides() if arrays.story else {}
    rows = []
    for i, p in enumerate(plan.arguments()):
        rows.append(("argument", p.named or p.path, p, values.get(i)))
    rows += [("result", p.path or "the value", p, None) for p in plan.results()]
    cells = [
        [
            _short(side),
            Cell(
                arrays.button(
                    f"{side} {name}", p.aval, picture_of(plan, p), name, arrays.why(value, p.sharding)
                )
            ),
            _short(array_text(p.aval)),
            _text(p.text),
            _bytes(array_bytes(p.aval) // p.shards),
        ]
        for side, name, p, value in rows
    ]
    return _table("Arguments and results at rest", ("", "path", "type", "sharding", "on each device"), cells)


def _memory(plan: Analysis) -> Iterator[str]:
    memory = plan.memory()
    for title, tensors in (
        (f"Alive at the peak: {bytes_text(memory.peak)} on each device", memory.tensors),
        ("Saved for the backward pass", memory.saved),
        (f"Replicated, {bytes_text(memory.threshold)} and more", memory.replicated),
    ):
        if tensors:
            name_column = ("checkpoint_name",) * any(t.name for t in tensors)
            rows = [_tensor(t, n, named=bool(name_column)) for t, n in Counter(tensors).items()]
            yield _table(
                title,
                ("array", "from", *name_column, "on each device", "code"),
                sorted(rows, key=lambda row: -(row[-2].number or 0)),
            )


def _tensor(t: Tensor, n: int, named: bool) -> list[Cell]:
    """A row of a table of arrays, for `n` arrays that are alike."""
    from_argument = t.origin.startswith("argument")
    where = _text(t.origin) if from_argument else _line(t.origin)
    name = [_short(t.name)] * named
    return [
        _short(times(n) + t.array),
        where,
        *name,
        _bytes(n * t.nbytes),
        _text("" if from_argument else code(t.origin)),
    ]


def _estimates(plan: Analysis) -> str:
    rows = []
    for chip in CHIPS.values():
        e = plan.estimate(chip)
        seconds = [Cell(seconds_text(s), s) for s in (e.seconds, e.compute, e.memory, e.links)]
        rows.append([_text(chip.name), _text(e.bound), *seconds])
    return _table(
        "Estimate by roofline, nothing overlapped",
        ("chip", "bound by", "a call", "compute", "HBM", "links"),
        rows,
    )


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    numeric = [cell.number is not None for cell in rows[0]] if rows else [False] * len(heads)
    right = [' class="number"' * n for n in numeric]
    head = "".join(f'<th tabindex="0"{side}>{escape(h)}</th>' for h, side in zip(heads, right, strict=True))
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    head = f'<table class="ledger"><thead><tr>{head}</tr></thead>'
    table = f'<div class="wide">{head}\n<tbody>\n{body}\n</tbody></table></div>'
    return f'<section id="{_name(title)}"><h2>{escape(title)}</h2>\n{table}</section>'


def _cell(cell: Cell) -> str:
    sort = "" if cell.number is None else f' class="number" data-value="{cell.number}"'
    return f"<td{sort}>{cell.html}</td>"


def _text(text: str) -> Cell:
    return Cell(escape(text))


def _short(text: str) -> Cell:
    """Text that stays on one line."""
    return Cell(f"<span>{escape(text)}</span>")


def _bytes(number: int) -> Cell:
    return Cell(f'<span title="{number:,} bytes">{bytes_text(number)}</span>', number)


def _line(line: str) -> Cell:
    """A line, which leads to its place in the program."""
    is_line = line.rpartition(":")[2].isdecimal()
    return Cell(f'<a href="#{_name(line)}">{escape(line_text(line))}</a>' if is_line else escape(line))


def _name(text: str) -> str:
    """A name for a place in the page: letters and digits of the text."""
    return "".join(c if c.isalnum() else "-" for c in text)


def _files(plan: Analysis, arrays: _Arrays) -> Iterator[str]:
    """Each source file of the program, the lines of the program and a few around them."""
    made = arrays.story.by_line() if arrays.story else {}
    sent: dict[str, list[Collective]] = defaultdict(list)
    for part in (part for c in plan.collectives for part in c.parts):
        sent[part.line].append(part)
    numbers: dict[str, set[int]] = defaultdict(set)
    for line in filter(None, (*made, *sent)):
        file, _, number = line.rpartition(":")
        numbers[file].add(int(number))
    most = max(map(comm_bytes, sent.values()), default=0)
    for file, of_program in sorted(
        numbers.items(), key=lambda item: -sum(comm_bytes(sent[f"{item[0]}:{n}"]) for n in item[1])
    ):
        rows = "\n".join(_rows(file, of_program, made, sent, most, arrays))
        head = "<thead><tr><th></th><th>code</th><th>what it makes</th><th>what it sends</th></tr></thead>"
        table = (
            f'<div class="wide"><table class="code">{COLUMNS}{head}\n<tbody>\n{rows}\n</tbody></table></div>'
        )
        yield f"<section><h2>{escape(file)}</h2>\n{table}</section>"


def _rows(file: str, of_program: set[int], made, sent, most: int, arrays: _Arrays) -> Iterator[str]:
    text = linecache.getlines(file)
    near = {
        n + d
        for n in of_program
        for d in range(-CONTEXT, CONTEXT + 1)
        if n + d in of_program or 1 <= n + d <= len(text)
    }
    last = 0
    for n in sorted(near):
        if last not in (0, n - 1):
            yield '<tr class="gap"><td></td><td>⋮</td><td></td><td></td></tr>'
        last, line = n, f"{file}:{n}"
        source = escape(text[n - 1].rstrip()) if n <= len(text) else ""
        share = 100 * comm_bytes(sent[line]) / most if line in sent and most else 0
        bar = f' style="--share: {share:.0f}%"' if share else ""
        yield (
            f'<tr id="{_name(line)}"><td class="number">{n}</td><td><pre>{source}</pre></td>'
            f"<td>{_makes(line, made.get(line, ()), arrays)}</td>"
            f"<td{bar}>{_costs(sent.get(line, ()))}</td></tr>"
        )


def _makes(line: str, values, arrays: _Arrays) -> str:
    """A button for all values that are of one type and sharding."""
    alike: dict[tuple[str, Picture], list] = {}
    for v in values:
        assert arrays.pictures
        alike.setdefault((array_text(v.aval), arrays.pictures.of(v)), []).append(v)
    largest = sorted(alike.items(), key=lambda item: -sum(v.nbytes for v in item[1]))
    buttons = [
        arrays.button(
            line_text(line),
            group[0].aval,
            picture,
            f"{times(len(group))}{array} {picture.sharding}",
            arrays.why(group[0]),
        )
        for (array, picture), group in largest
    ]
    more = "".join(buttons[FEW:])
    return "".join(buttons[:FEW]) + (
        f"<details><summary>{len(buttons) - FEW} more</summary>{more}</details>" if more else ""
    )


def _costs(sent: Sequence[Collective]) -> str:
    counts: dict[str, list] = defaultdict(list)
    for c in sent:
        counts[f"{c.kind} over {','.join(c.axes)}"].append(c)
    dearest = sorted(counts.items(), key=lambda item: -comm_bytes(item[1]))
    return "<br>".join(
        escape(f"{times(len(group))}{what}: {bytes_text(comm_bytes(group))}") for what, group in dearest
    )
