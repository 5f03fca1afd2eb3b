"""A simulated schedule as a timeline in seconds: text as wide as a terminal, and SVG for a page."""

import shutil
from collections.abc import Iterator
from html import escape

from shardax.ledger.words import bytes_text, seconds_text
from shardax.pipeline.simulate import Simulation, Span
from shardax.pipeline.table import Instruction

IDLE, SENDING = "·", "»"
COLORS = {"F": "#4e8fd0", "B": "#e08a2c", "W": "#58a55c"}
WORDS = {"F": "forward", "B": "backward", "W": "weights' gradients"}
ROW, GAP, WIDTH = 26, 4, 1000  # of the drawing, in its own units


def timeline(simulation: Simulation, width: int | None = None) -> str:
    """Stages as lines, seconds as columns.

    `F3` begins where the forward pass of microbatch 3 does (`F3.1`: through chunk 1; `F` alone where there is
    no room for more) and lasts as long as the dashes after it; `»`: the stage waits for a send; `·`: for
    others.

    `width`: of the lines, in columns; None: that of the terminal.

    >>> from shardax.pipeline.schedules import make_schedule
    >>> from shardax.pipeline.simulate import Costs, simulate
    >>> print(timeline(simulate(make_schedule("gpipe", 2, 2), Costs(1e-3, 1e-3, 1e-3, saved=1024)), 60))
    gpipe: 2 stages, 2 microbatches: 9 ms in ticks of all stages, bubbles 33.3 %
            |0 s     |2.25 ms |4.5 ms      9 ms|  busy  kept
    stage 0 F0--F1--············B1------B0------   67 %  2.0 KiB
    stage 1 ····F0--F1--B1------B0------········   67 %  2.0 KiB
    """
    width = width or shutil.get_terminal_size().columns
    schedule, busy = simulation.schedule, simulation.busy
    kept = [bytes_text(peak) for peak in simulation.peaks]
    ends = [
        f"  {100 * each / simulation.seconds:3.0f} %  {bytes_:>{max(map(len, kept))}}"
        for each, bytes_ in zip(busy, kept, strict=True)
    ]
    heads = [f"stage {d} " for d in range(schedule.stages)]
    columns = max(20, width - max(map(len, heads)) - max(map(len, ends)))
    scale = columns / simulation.seconds
    lines = [summary(simulation), _axis(simulation, columns, max(map(len, heads))) + "  busy  kept"]
    for d, (head, end) in enumerate(zip(heads, ends, strict=True)):
        cells = [IDLE] * columns
        for span in _of_stage(simulation, d):
            first, last = round(span.start * scale), round(span.end * scale)
            cells[first:last] = _cells(span, last - first)
        lines.append(head.ljust(max(map(len, heads))) + "".join(cells) + end)
    return "\n".join(lines)


def _cells(span: Span, count: int) -> str:
    if span.destination is not None:
        return SENDING * count
    label = repr(span.instruction)
    return (label if len(label) <= count else label[0]).ljust(count, "-")[:count]


def summary(simulation: Simulation) -> str:
    """One line: how long, of it bubbles, how much is sent."""
    sent, send = len(simulation.sent), simulation.costs.send
    clock = "in ticks of all stages" if simulation.locked else "each stage on its own"
    sends = f", {sent:,} send{'s' * (sent > 1)} of {seconds_text(send)}" if sent and send else ""
    return (
        f"{simulation.schedule.sizes}: {seconds_text(simulation.seconds)} {clock}, "
        f"bubbles {100 * simulation.bubble:.1f} %{sends}"
    )


def _of_stage(simulation: Simulation, d: int) -> Iterator[Span]:
    """The instructions of a stage, and the sends for which it waits."""
    if simulation.schedule.latency == 1:
        yield from (span for span in simulation.sent if span.stage == d)
    yield from (span for span in simulation.runs if span.stage == d)


def _axis(simulation: Simulation, columns: int, indent: int) -> str:
    """Seconds at the left end, at quarters where there is room, and at the right end."""
    text, last = [" "] * columns, seconds_text(simulation.seconds) + "|"
    for quarter in range(4):
        label = "|" + seconds_text(simulation.seconds * quarter / 4)
        at = columns * quarter // 4
        if at + len(label) < columns - len(last):
            text[at : at + len(label)] = label
    text[columns - len(last) :] = last
    return " " * indent + "".join(text)


def timeline_svg(simulation: Simulation) -> str:
    """The same as an HTML fragment: a figure that fits its page's width, light or dark. Each box says on
    hover what it is; sends are thin bars beneath. It needs no style or script of the page.
    """
    stages, scale = simulation.schedule.stages, WIDTH / simulation.seconds
    height = stages * (ROW + GAP)
    drawn = [_rect(0, d * (ROW + GAP), WIDTH, ROW, "currentColor", 0.07) for d in range(stages)]
    drawn += [_box(run, scale) for run in simulation.runs]
    drawn += [_send(sent, scale) for sent in simulation.sent if sent.end > sent.start]
    drawn += [_text(-8, d * (ROW + GAP) + ROW / 2 + 4, f"stage {d}", "end") for d in range(stages)]
    for quarter, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        label = seconds_text(simulation.seconds * quarter / 4)
        drawn.append(_text(WIDTH * quarter / 4, height + 12, label, anchor))
    told = escape(summary(simulation))
    return (
        '<figure class="timeline" style="margin:0">'
        f'<svg viewBox="-60 0 {WIDTH + 60} {height + 18}" role="img" '
        f'aria-label="{told}" style="width:100%;height:auto;font:11px system-ui,sans-serif">'
        f"{''.join(drawn)}</svg><figcaption>{told}. {_legend(simulation)}</figcaption></figure>"
    )


def _legend(simulation: Simulation) -> str:
    used = {run.instruction.kind for run in simulation.runs}
    marks = [f'<span style="color:{COLORS[kind]}">■</span> {WORDS[kind]}' for kind in COLORS if kind in used]
    return " ".join(marks) + ", paler: later chunks" * (simulation.schedule.chunks > 1)


def _box(run: Span, scale: float) -> str:
    i, x, y = run.instruction, run.start * scale, run.stage * (ROW + GAP)
    width = (run.end - run.start) * scale
    title = f"{WORDS[i.kind]} of microbatch {i.microbatch}" + f", chunk {i.chunk}" * (i.chunk > 0)
    label = str(i.microbatch) if width > 7 * len(str(i.microbatch)) else ""
    shape = _rect(x, y, max(width - 0.6, 0.3), ROW, color(i), 1, _told(title, run))
    return shape + _text(x + width / 2, y + ROW / 2 + 4, label, "middle", ink(i)) * bool(label)


def _send(sent: Span, scale: float) -> str:
    title = f"{sent.instruction} sent to stage {sent.destination}"
    y = sent.stage * (ROW + GAP) + ROW
    return _rect(
        sent.start * scale,
        y,
        (sent.end - sent.start) * scale,
        GAP - 1,
        "currentColor",
        0.6,
        _told(title, sent),
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, opacity: float, title: str = "") -> str:
    inside = f"><title>{title}</title></rect>" if title else "/>"
    place = f'x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}"'
    return f'<rect {place} fill="{fill}" opacity="{opacity:g}"{inside}'


def _text(x: float, y: float, text: str, anchor: str, fill: str = "currentColor") -> str:
    place = f'x="{x:.2f}" y="{y:g}" text-anchor="{anchor}"'
    # hovers go to the box beneath
    return f'<text {place} fill="{fill}" pointer-events="none">{escape(text)}</text>'


def color(i: Instruction) -> str:
    """That of its kind, paler for each further chunk."""
    share = max(0.35, 1 - 0.3 * i.chunk)
    parts = (int(COLORS[i.kind][n : n + 2], 16) for n in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (part - 255) * share):02x}" for part in parts)


def ink(i: Instruction) -> str:
    """Of the number on it."""
    return "#1c2330" if i.chunk else "#ffffff"


def _told(title: str, span: Span) -> str:
    return escape(f"{title}: {seconds_text(span.end - span.start)} from {seconds_text(span.start)}")
