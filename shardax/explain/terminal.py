"""Where a plan is printed: tables of rich on a terminal, if it is installed, else plain text."""

import importlib.util
import io
import itertools
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from shardax.explain.tables import WIDTH, Group, Row, Table, cut, plain

LEAST = 60  # columns


def shown(tables: Sequence[Table]) -> str:
    """The tables as `print` is to show them on standard output: as wide as the terminal, in colors, or as
    plain text.
    """
    if not sys.stdout.isatty():
        return plain(tables)
    width = max(LEAST, shutil.get_terminal_size((WIDTH, 24)).columns)
    return rich_text(tables, width) if importlib.util.find_spec("rich") else plain(tables, width)


def rich_text(tables: Sequence[Table], width: int) -> str:
    """The tables as rich draws them on a terminal of so many columns."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, highlight=False, legacy_windows=False)
    for i, table in enumerate(tables):
        if i:
            console.print()
        for part in _parts(table, width):
            console.print(part)
    return out.getvalue().rstrip("\n")


def _parts(table: Table, width: int) -> list[Any]:
    from rich.rule import Rule
    from rich.text import Text

    title = Text(table.title, style="bold")
    if table.drawing:
        return [title, Rule(style="dim"), Text(table.drawing(width), no_wrap=True)]
    if not table.groups:
        return [title]
    sizes, left = table.sizes(), table.left(width)
    heads = tuple(f"[bold]{head}" if head else "" for head in table.heads)
    parts: list[Any] = [
        _grid(table, sizes, left, [(title, heads)]) if any(heads) else title,
        Rule(style="dim"),
    ]
    for group in table.groups:
        if group.heading:
            parts.append(_heading(group, width))
        for is_remark, rows in itertools.groupby(group.rows, lambda row: row.remark):
            if is_remark:
                parts += [_remark(row, width) for row in rows]
            else:
                cells = [(_text(row, left), row.cells or ("",) * len(sizes)) for row in rows]
                parts.append(_grid(table, sizes, left, cells))
    return parts


def _remark(row: Row, width: int):
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(row.text, style="dim"), (0, 0, 0, 4))


def _grid(table: Table, sizes: Sequence[int], left: int, rows: Sequence[tuple[Any, Sequence[Any]]]):
    """Rows of fixed columns, so that all groups of a table stand under the same heads."""
    from rich.table import Table as Grid

    grid = Grid.grid()
    grid.add_column(width=left, overflow="fold")
    for i, size in enumerate(sizes):
        grid.add_column(width=size + 2, no_wrap=True, justify="left" if i < table.texts else "right")
    for text, cells in rows:
        grid.add_row(text, *("  " + cell if i < table.texts else cell for i, cell in enumerate(cells)))
    return grid


def _heading(group: Group, width: int):
    from rich.padding import Padding
    from rich.text import Text

    if group.code:
        line = Text(cut(group.heading, group.code, width - 2), style="dim", no_wrap=True)
        line.stylize("not dim cyan", 0, min(len(group.heading), len(line)))
        return Padding(line, (0, 0, 0, 2))
    return Padding(Text(group.heading, style="cyan"), (0, 0, 0, 2))


def _text(row: Row, left: int):
    from rich.padding import Padding
    from rich.text import Text

    text = Text(cut(row.text, row.code, left - 4) if row.code else row.text, overflow="fold")
    text.stylize("dim", len(row.text))
    return Padding(text, (0, 0, 0, 4))
