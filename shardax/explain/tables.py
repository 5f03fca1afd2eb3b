"""The tables that a plan is made of, and how they look as plain text."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

WIDTH = 110  # columns, where there is no terminal
MOST = 140  # columns of a table whose rows need no more: numbers far from their text are hard to follow
LEAST = 24  # columns of a row's own text


@dataclass(frozen=True)
class Row:
    """A line of a table: its text, the cells at its right, and a piece of code, of which as much is shown as
    fits.

    `remark`: the text is about the rows below, and is as wide as the whole table.
    """

    text: str
    cells: tuple[str, ...] = ()
    code: str = ""
    remark: bool = False


@dataclass(frozen=True)
class Group:
    """Rows under a heading; "" has none."""

    heading: str
    rows: tuple[Row, ...] = ()
    code: str = ""


@dataclass(frozen=True)
class Table:
    """Groups of rows under a title.

    `heads`: of the columns at the right. `texts`: how many of them, the first, hold text; the others hold
    numbers. `drawing`: what makes text of at most so many columns, as it is to stand under the title.
    """

    title: str
    groups: tuple[Group, ...]
    heads: tuple[str, ...] = ()
    texts: int = 0
    drawing: Callable[[int], str] | None = None

    def sizes(self) -> tuple[int, ...]:
        """Columns that each column at the right takes."""
        rows = [row.cells for group in self.groups for row in group.rows if row.cells]
        return tuple(max(map(len, column)) for column in zip(self.heads, *rows, strict=True))

    def left(self, width: int) -> int:
        """Columns of `width` for the text of a row; of more than `MOST` only as many as the longest needs."""
        cells = sum(self.sizes()) + 2 * len(self.sizes())
        rows = (row for group in self.groups for row in group.rows if not row.remark)
        longest = max((4 + len(cut(row.text, row.code)) for row in rows), default=0)
        return max(LEAST, min(width - cells, max(MOST - cells, longest)))


def plain(tables: Sequence[Table], width: int = WIDTH) -> str:
    """The tables as text of at most so many columns."""
    return "\n\n".join("\n".join(_lines(table, width)) for table in tables)


def _lines(table: Table, width: int) -> Iterator[str]:
    sizes, left = table.sizes(), table.left(width)
    yield from _row(table.title, table.heads if any(table.heads) else (), sizes, table.texts, left)
    if table.drawing:
        yield from table.drawing(width).splitlines()
    for group in table.groups:
        if group.heading:
            heading = f"  {group.heading}"
            yield from [cut(heading, group.code, width)] if group.code else _wrapped(heading, width)
        for row in group.rows:
            text = f"    {row.text}"
            if row.remark:
                yield from _wrapped(text, width)
            else:
                yield from _row(
                    cut(text, row.code, left) if row.code else text, row.cells, sizes, table.texts, left
                )


def _row(text: str, cells: Sequence[str], sizes: Sequence[int], texts: int, left: int) -> Iterator[str]:
    """Text that is too long goes on under itself, the cells stand beside its first line."""
    first, *more = _wrapped(text, left if cells else left + sum(sizes) + 2 * len(sizes)) or [""]
    columns = [
        f"  {c:<{n}}" if i < texts else f"  {c:>{n}}"
        for i, (c, n) in enumerate(zip(cells, sizes, strict=False))
    ]
    yield f"{first:<{left}}{''.join(columns)}".rstrip()
    yield from more


def _wrapped(text: str, width: int) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text.strip(), width, initial_indent=indent, subsequent_indent=indent + "    ")


def cut(text: str, code: str, width: int | None = None) -> str:
    """A text and as much of the code as fits.

    >>> cut("model.py:1", "loss = jnp.mean(x)", 20), cut("model.py:1", "x = 1", 20)
    ('model.py:1  loss = …', 'model.py:1  x = 1')
    """
    both = f"{text}  {code}" if code else text
    return both if width is None or len(both) <= width else both[: width - 1] + "…"
