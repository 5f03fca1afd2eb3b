"""A plan as one HTML file that needs no network: the program by source file, what each line costs, ledgers.

All is in the HTML; the script only sorts a table by the column that is clicked, and hides what a search leaves out.
"""

import linecache
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from shardax.explain.ledger import array_text, comm_bytes
from shardax.explain.lines import line_text
from shardax.explain.values import Intermediate, intermediates
from shardax.explain.words import bytes_text, spec_text, times

if TYPE_CHECKING:
    from shardax.explain.plan import Plan

CONTEXT = 3  # lines shown around those of the program


def html_text(plan: "Plan") -> str:
    """The page."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    title = f"Plan on {plan.mesh.size} devices, mesh {mesh}"
    sections = [_overview(plan), _collectives(plan), _places(plan), _memory(plan), *_files(plan)]
    return _PAGE.format(title=escape(title), style=_STYLE, script=_SCRIPT, body="\n".join(sections))


def _overview(plan: "Plan") -> str:
    count = sum(c.trips for c in plan.collectives if not c.other_branch)
    seconds = ", ".join(f"{phase} {s:.2f} s" for phase, s in plan.phases.items())
    words = f"Each device sends {bytes_text(plan.comm_bytes)} per call, in {count} collectives. Planned in: {seconds or '-'}."
    return f"<p>{escape(words)}</p>"


def _collectives(plan: "Plan") -> str:
    rows = [
        (
            c.kind,
            ",".join(c.axes),
            ", ".join(map(array_text, c.operands)),
            c.nbytes,
            c.trips,
            c.total,
            line_text(c.line),
            c.reason,
        )
        for c in plan.collectives
    ]
    return _table("Collectives", ("kind", "axes", "operand", "bytes each", "trips", "bytes per call", "line", "reason"), rows)


def _places(plan: "Plan") -> str:
    rows = [("argument", p.named, array_text(p.aval), spec_text(p.sharding)) for p in plan.arguments()]
    rows += [("result", p.path, array_text(p.aval), spec_text(p.sharding)) for p in plan.results()]
    return _table("Arguments and results at rest", ("", "path", "type", "sharding"), rows)


def _memory(plan: "Plan") -> str:
    memory = plan.memory()
    rows = [("alive at the peak", _origin(t.origin), t.array, t.nbytes) for t in memory.tensors]
    rows += [("replicated", _origin(t.origin), t.array, t.nbytes) for t in memory.replicated]
    title = f"Memory: {bytes_text(memory.peak)} on each device at most"
    return _table(title, ("", "from", "type", "bytes on each device"), rows)


def _origin(origin: str) -> str:
    return origin if origin.startswith("argument") else line_text(origin)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<h2>{escape(title)}</h2>\n<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def _cell(x: Any) -> str:
    """A number keeps its value, by which its column is sorted."""
    return f'<td class="number" data-value="{x}">{x:,}</td>' if isinstance(x, int) else f"<td>{escape(str(x))}</td>"


def _files(plan: "Plan") -> Iterable[str]:
    """Each source file of the program, the lines of the program and a few around them."""
    made: dict[str, list[Intermediate]] = defaultdict(list)
    for x in intermediates(plan) if plan.graph else ():
        made[x.line].append(x)
    sent: dict[str, list] = defaultdict(list)
    for c in plan.collectives:
        sent[c.line].append(c)
    numbers: dict[str, set[int]] = defaultdict(set)
    for line in filter(None, (*made, *sent)):
        file, _, number = line.rpartition(":")
        numbers[file].add(int(number))
    for file, of_program in numbers.items():
        yield _file(file, of_program, made, sent)


def _file(file: str, of_program: set[int], made, sent) -> str:
    code = linecache.getlines(file)
    near = {n + d for n in of_program for d in range(-CONTEXT, CONTEXT + 1) if n + d in of_program or 1 <= n + d <= len(code)}
    rows, last = [], 0
    for n in sorted(near):
        rows += ['<tr class="gap"><td colspan="4">⋮</td></tr>'] * (last not in (0, n - 1))
        last, line = n, f"{file}:{n}"
        text = code[n - 1].rstrip() if n <= len(code) else ""
        cells = f'<td class="number">{n}</td><td><pre>{escape(text)}</pre></td><td>{_shardings(made[line])}</td>'
        rows.append(f"<tr>{cells}<td>{_costs(sent[line])}</td></tr>")
    head = "<thead><tr><th></th><th>code</th><th>what it makes</th><th>what it sends</th></tr></thead>"
    return f'<h2>{escape(file)}</h2>\n<table class="code">{head}\n<tbody>\n' + "\n".join(rows) + "\n</tbody></table>"


def _shardings(made: Iterable[Intermediate]) -> str:
    counted = Counter((x.array, spec_text(x.sharding)) for x in made)
    return "<br>".join(escape(f"{times(n)}{array} {spec}") for (array, spec), n in counted.items())


def _costs(sent: Sequence[Any]) -> str:
    counted: dict[str, list] = defaultdict(list)
    for c in sent:
        counted[f"{c.kind} over {','.join(c.axes)}"].append(c)
    return "<br>".join(escape(f"{times(len(group))}{what}: {bytes_text(comm_bytes(group))}") for what, group in counted.items())


_PAGE = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>
<body>
<h1>{title}</h1>
<input id="search" type="search" placeholder="search: a path, a line, a kind, a sharding" autofocus>
{body}
<script>{script}</script>
</body>
</html>
"""

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1400px; padding: 0 1em; color: #222; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; cursor: pointer; position: sticky; top: 0; background: #fff; border-bottom: 1px solid #888; }
.code th { cursor: default; }
td { padding: 1px 12px 1px 0; vertical-align: top; font-family: ui-monospace, monospace; font-size: 12px; }
tbody tr:hover { background: #f2f6ff; }
pre { margin: 0; white-space: pre-wrap; }
.number { text-align: right; }
.gap { color: #999; }
#search { width: 30em; padding: 4px; font: inherit; }
"""

_SCRIPT = """
for (const th of document.querySelectorAll("table:not(.code) th")) {
  th.addEventListener("click", () => {
    const column = th.cellIndex, body = th.closest("table").tBodies[0];
    const sign = th.dataset.order === "down" ? 1 : -1;
    th.dataset.order = sign < 0 ? "down" : "up";
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (a, b) => a.localeCompare(b, "en", { numeric: true });
    body.append(...[...body.rows].sort((a, b) => sign * compare(key(a), key(b))));
  });
}
document.getElementById("search").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const row of document.querySelectorAll("tbody tr")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
});
"""
