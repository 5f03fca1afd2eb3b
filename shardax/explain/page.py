"""What the page of a plan is made of: sections, tables that sort and fold, bars, links to lines."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from shardax.ledger.lines import line_text
from shardax.ledger.words import bytes_text

SHOWN = 40  # rows of a table, before it is unfolded


@dataclass(frozen=True)
class Section:
    """A part of the page that the contents list. `name`: its id; `short`: what the contents call it."""

    name: str
    title: str
    html: str
    short: str = ""

    def __str__(self):
        return (
            f'<section id="{self.name}" aria-labelledby="{self.name}-title">'
            f'<h2 id="{self.name}-title">{escape(self.title)}</h2>\n{self.html}</section>'
        )


@dataclass(frozen=True)
class Cell:
    """The inside of a table's cell, and the number by which its column is sorted."""

    html: str
    number: float | None = None
    kind: str = ""  # a class, for the style


class Lines:
    """Lines of the user's code as places of the page; `files` are numbered, since names may be alike."""

    def __init__(self, files: Iterable[str]):
        self.numbers = {file: i for i, file in enumerate(files)}

    def name(self, line: str) -> str | None:
        """The id of a line that the page shows."""
        file, _, number = line.rpartition(":")
        return f"line-{self.numbers[file]}-{number}" if file in self.numbers else None

    def link(self, line: str) -> Cell:
        name, text = self.name(line), escape(line_text(line))
        return Cell(f'<a href="#{name}">{text}</a>' if name else text)


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]], kind: str = "", shown: int = SHOWN) -> str:
    """A table whose first cells name the rows, of which the first `shown` are shown unasked."""
    numeric = [_is_number(cell) for cell in rows[0]] if rows else [False] * len(heads)
    head = "".join(
        f'<th scope="col"{_class("number" * is_number)}><button type="button">{escape(text)}</button></th>'
        for text, is_number in zip(heads, numeric, strict=True)
    )
    shown = shown if len(rows) > shown + 3 else len(rows)
    bodies = _body(rows[:shown])
    if tail := rows[shown:]:
        # between the two, so that the keyboard comes to it first
        more = f'<td colspan="{len(heads)}">{fold(f"{len(tail):,} more rows", "")}</td>'
        bodies += f'\n<tbody class="more"><tr>{more}</tr></tbody>\n' + _body(tail, "tail")
    return (
        f'<div class="wide"><table class="ledger {kind}"><thead><tr>{head}</tr></thead>\n'
        f"{bodies}</table></div>"
    )


def _is_number(cell: Cell) -> bool:
    return cell.number is not None or cell.kind == "number"


def _body(rows: Sequence[Sequence[Cell]], kind: str = "") -> str:
    inside = "\n".join(map(_row, rows))
    return f"<tbody{_class(kind)}>\n{inside}\n</tbody>"


def _row(row: Sequence[Cell]) -> str:
    first, *others = row
    return f"<tr>{_cell(first, 'th')}{''.join(map(_cell, others))}</tr>"


def _cell(cell: Cell, tag: str = "td") -> str:
    scope = ' scope="row"' * (tag == "th")
    if cell.number is None:
        return f"<{tag}{scope}{_class(cell.kind)}>{cell.html}</{tag}>"
    return (
        f'<{tag}{scope}{_class(f"number {cell.kind}".strip())} data-value="{cell.number}">{cell.html}</{tag}>'
    )


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def text(words: str) -> Cell:
    return Cell(escape(words))


def short(words: str) -> Cell:
    """Text that stays on one line."""
    return Cell(escape(words), None, "short")


def nbytes(number: int) -> Cell:
    return Cell(f'<span title="{number:,} bytes">{bytes_text(number)}</span>', number)


def bar(part: float, most: float) -> Cell:
    """A bar of its part of the longest; the number that it shows stands beside it."""
    return Cell(f'<span class="bar" style="--share: {100 * part / most if most else 0:.1f}%"></span>')


def fold(summary: str, inside: str, kind: str = "") -> str:
    """`summary` is text, `inside` HTML."""
    shown = escape(summary).replace("/", "/<wbr>")
    return f"<details{_class(kind)}><summary>{shown}</summary>{inside}</details>"
