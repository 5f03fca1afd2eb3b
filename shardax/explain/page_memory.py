"""The memory of a plan, for its page: a curve over the program with its peak, and what lives then."""

from collections.abc import Iterator, Sequence
from html import escape

from shardax.explain.memory import Memory, Moment, Tensor, alike
from shardax.explain.page import Cell, Lines, Section, fold, nbytes, short, table, text
from shardax.ledger.lines import code, line_text
from shardax.ledger.words import as_one, bytes_text, times

SHOWN = 12  # rows of each table
NAMED = 3  # arrays at the peak, beneath the curve
STRETCHES = 20  # rows of the curve as a table
WIDTH, HEIGHT = 1000, 100  # of the drawing, in units of its own


def memory_sections(memory: Memory, lines: Lines) -> Iterator[Section]:
    yield Section("memory", "Memory on each device, over the program", _curve(memory, lines), "Memory")
    for name, title, contents, tensors in (
        (
            "peak",
            f"Alive at the peak: {bytes_text(memory.peak)} on each device",
            "At the peak",
            memory.tensors,
        ),
        ("saved", "Saved for the backward pass", "Saved for backward", memory.saved),
        (
            "replicated",
            f"Replicated, {bytes_text(memory.threshold)} and more",
            "Replicated",
            memory.replicated,
        ),
    ):
        if tensors:
            yield Section(name, title, _tensors(tensors, lines), contents)


def _tensors(tensors: Sequence[Tensor], lines: Lines) -> str:
    named = any(t.name for t in tensors)
    heads = ("array", "from", *("checkpoint_name",) * named, "on each device", "code")
    return table(heads, [_row(group, named, lines) for group in alike(tensors)], "tensors", SHOWN)


def _row(group: Sequence[Tensor], named: bool, lines: Lines) -> list[Cell]:
    t = group[0]
    of_argument = t.origin.startswith("argument")
    return [
        short(times(len(group)) + t.array),
        text(as_one([t.origin for t in group])) if of_argument else lines.link(t.origin),
        *[short(t.name)] * named,
        nbytes(sum(t.nbytes for t in group)),
        Cell("" if of_argument else f"<code>{escape(code(t.origin))}</code>"),
    ]


def _curve(memory: Memory, lines: Lines) -> str:
    """A drawing, its peak in words, and the same as a table."""
    curve, peak = memory.curve, max(memory.curve, key=lambda moment: moment.nbytes)
    at = (curve.index(peak) + 0.5) / len(curve)
    where = f" at {line_text(memory.line)}" if memory.line else ""
    told = (
        f"Memory over the program: {bytes_text(curve[0].nbytes)} at its beginning, "
        f"{bytes_text(peak.nbytes)} at its peak{where}, {bytes_text(curve[-1].nbytes)} at its end"
    )
    step, top = WIDTH / len(curve), 0.92 * HEIGHT / max(1, peak.nbytes)
    ends = (
        f"L{i * step:.1f} {y:.1f}L{(i + 1) * step:.1f} {y:.1f}"
        for i, y in enumerate(HEIGHT - top * moment.nbytes for moment in curve)
    )
    side = "right" if at > 0.5 else "left"
    offset = 100 * (1 - at) if side == "right" else 100 * at
    return (
        f'<figure class="curve"><div role="img" aria-label="{escape(told)}">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="area" d="M0 {HEIGHT}{"".join(ends)}L{WIDTH} {HEIGHT}Z"/>'
        f'<path class="mark" d="M{WIDTH * at:.1f} 0V{HEIGHT}"/></svg>'
        f'<b class="{side}" style="{side}: {offset:.1f}%">{bytes_text(peak.nbytes)}{escape(where)}</b></div>'
        f"<figcaption>{_peak(memory, lines)}</figcaption></figure>"
        + fold("The curve as a table", _stretches(curve, lines), "numbers")
    )


def _peak(memory: Memory, lines: Lines) -> str:
    largest = ", ".join(
        f"{times(len(group))}{group[0].array} ({bytes_text(sum(t.nbytes for t in group))}; {_from(group)})"
        for group in alike(memory.tensors)[:NAMED]
    )
    at = f" at {lines.link(memory.line).html}" if memory.line else ""
    return (
        f"From the program's first equation to its last; of a loop one iteration. The peak is "
        f"{bytes_text(memory.peak)}{at}. The largest that live then: {escape(largest)}; "
        f'<a href="#peak">all of them</a>.'
    )


def _from(group: Sequence[Tensor]) -> str:
    origins = [t.origin for t in group]
    return as_one(origins) if origins[0].startswith("argument") else line_text(origins[0])


def _stretches(curve: Sequence[Moment], lines: Lines) -> str:
    step = -(-len(curve) // STRETCHES)
    parts = [curve[i : i + step] for i in range(0, len(curve), step)]
    moments = [max(part, key=lambda moment: moment.nbytes) for part in parts]
    rows = [[Cell(f"{m.equation:,}", m.equation), nbytes(m.nbytes), lines.link(m.line)] for m in moments]
    return table(("after equation", "alive", "line"), rows, "stretches", len(rows))
