"""The program of a plan, for its page: the dearest lines, and each source file with what its lines make and
send.
"""

import linecache
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape

from shardax.explain.analysis import Analysis
from shardax.explain.by_line import run_count, sent_by_line
from shardax.explain.page import Cell, Lines, Section, bar, fold, nbytes, table, text
from shardax.explain.page_arrays import Arrays
from shardax.explain.picture import Picture
from shardax.graph.graph import Value
from shardax.ledger.collectives import Collective, array_text, comm_bytes
from shardax.ledger.lines import code, line_text
from shardax.ledger.words import bytes_text, percent, times

CONTEXT = 3  # lines shown around those of the program
OPEN = 120  # lines of source files that are shown before they are unfolded; the first file always is
DEAREST = 10  # lines, likewise
COLUMNS = f"<colgroup>{4 * '<col>'}</colgroup>"
HEADS = "".join(
    f'<th scope="col">{head}</th>'
    for head in ("line", "code", "what it sends, in how many collectives", "what it makes")
)


class Program:
    """What each line of the user's code makes and sends."""

    def __init__(self, plan: Analysis, arrays: Arrays):
        self.plan, self.arrays = plan, arrays
        self.made = arrays.story.by_line() if arrays.story else {}
        self.sent = sent_by_line(plan)
        numbers: dict[str, set[int]] = defaultdict(set)
        for line in filter(None, (*self.made, *self.sent)):
            file, _, number = line.rpartition(":")
            numbers[file].add(int(number))
        sent = {file: sum(comm_bytes(self.of(file, n)) for n in lines) for file, lines in numbers.items()}
        self.files = {file: numbers[file] for file in sorted(numbers, key=lambda file: -sent[file])}
        self.lines = Lines(self.files)
        self.most = max(map(comm_bytes, self.sent.values()), default=0)

    def of(self, file: str, number: int) -> Sequence[Collective]:
        return self.sent.get(f"{file}:{number}", ())

    def sections(self) -> Iterator[Section]:
        if self.most:
            yield Section("lines", "Bytes sent, by line", self._dearest(), "Bytes by line")
        if self.files:
            yield Section("program", "The program, with its costs", "\n".join(self._files()), "Program")

    def _dearest(self) -> str:
        rows = []
        for line, group in self.sent.items():
            sent = comm_bytes(group)
            share = percent(sent, self.plan.comm_bytes) or "0 %"
            rows.append(
                [
                    self.lines.link(line) if line else text("(unknown line)"),
                    bar(sent, self.most),
                    nbytes(sent),
                    Cell(share, sent),
                    Cell(f"{run_count(group):,}", run_count(group)),
                    Cell(f"<code>{escape(code(line))}</code>"),
                ]
            )
        return table(("line", "", "per call", "share", "collectives", "code"), rows, "bars", DEAREST)

    def _files(self) -> Iterator[str]:
        shown = 0
        for i, (file, numbers) in enumerate(self.files.items()):
            rows = list(self._rows(file, numbers))
            shown += len(rows)
            sent = sum(comm_bytes(self.of(file, n)) for n in numbers)
            is_open = " open" * (i == 0 or shown <= OPEN)
            heading = f"{escape(line_text(file))} <small>{bytes_text(sent)} per call</small>"
            yield (
                f'<details class="file"{is_open}><summary><h3>{heading}</h3></summary><div class="wide">'
                f'<table class="code">{COLUMNS}<thead><tr>{HEADS}</tr></thead>\n<tbody>\n'
                + "\n".join(rows)
                + "\n</tbody></table></div></details>"
            )

    def _rows(self, file: str, of_program: set[int]) -> Iterator[str]:
        source = linecache.getlines(file)
        near = {
            n + d
            for n in of_program
            for d in range(-CONTEXT, CONTEXT + 1)
            if n + d in of_program or 1 <= n + d <= len(source)
        }
        last = 0
        for n in sorted(near):
            if last not in (0, n - 1):
                yield '<tr class="gap"><td></td><td>⋮</td><td></td><td></td></tr>'
            last, line = n, f"{file}:{n}"
            words = escape(source[n - 1].rstrip()) if n <= len(source) else ""
            yield (
                f'<tr id="{self.lines.name(line)}"><th scope="row" class="number">{n}</th>'
                f"<td><pre>{words}</pre></td><td>{self._costs(self.of(file, n))}</td>"
                f"<td>{self._makes(line, self.made.get(line, ()))}</td></tr>"
            )

    def _costs(self, sent: Sequence[Collective]) -> str:
        """A bar, the bytes, and unfolded the kinds."""
        if not sent:
            return ""
        kinds: dict[str, list[Collective]] = defaultdict(list)
        for c in sent:
            kinds[f"{c.kind} over {','.join(c.axes)}"].append(c)
        dearest = sorted(kinds.items(), key=lambda item: -comm_bytes(item[1]))
        items = "".join(
            f"<li>{escape(f'{times(len(group))}{what}: {bytes_text(comm_bytes(group))}')}</li>"
            for what, group in dearest
        )
        total = comm_bytes(sent)
        summary = f"{bytes_text(total)} in {run_count(sent)}"
        shown = fold(summary, f"<ul>{items}</ul>")
        return f'<span class="track">{bar(total, self.most).html}</span>{shown}'

    def _makes(self, line: str, values: Sequence[Value]) -> str:
        """A button for all values that are of one type and sharding; those of several are unfolded."""
        alike: dict[tuple[str, Picture], list[Value]] = {}
        for v in values:
            assert self.arrays.pictures
            alike.setdefault((array_text(v.aval), self.arrays.pictures.of(v)), []).append(v)
        largest = sorted(alike.items(), key=lambda item: -sum(v.nbytes for v in item[1]))
        texts = [f"{times(len(group))}{array} {picture.sharding}" for (array, picture), group in largest]
        buttons = [
            self.arrays.button(line_text(line), group[0].aval, picture, words, self.arrays.why(group[0]))
            for words, ((_, picture), group) in zip(texts, largest, strict=True)
        ]
        if len(buttons) < 2:
            return "".join(buttons)
        return fold(f"{texts[0]}, and {len(buttons) - 1} more", "".join(buttons))
