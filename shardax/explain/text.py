"""A plan as plain aligned text, 110 columns wide at most."""

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from shardax.explain.ledger import Collective, array_bytes, array_text, comm_bytes
from shardax.sharding import AxisSizes, Sharding, shard_count

if TYPE_CHECKING:
    from shardax.explain.plan import Placed, Plan

WIDTH = 110
NUMBERS = 44  # columns of the numbers at the right: each, total, share


def plan_text(plan: "Plan") -> str:
    sections = [_heading(plan), _arguments(plan), _results(plan), _at_rest(plan), _collectives(plan), _totals(plan)]
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def bytes_text(nbytes: float) -> str:
    """
    >>> bytes_text(12), bytes_text(1536), bytes_text(3 << 20), bytes_text(1023.99 * 1024)
    ('12 B', '1.5 KiB', '3.0 MiB', '1.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(nbytes, 1) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"


def spec_text(sharding: Sharding) -> str:
    """
    >>> spec_text(Sharding((("x",), ()))), spec_text(Sharding(((), ())))
    ("P('x')", 'replicated')
    """
    dims = sharding.dims
    while dims and not dims[-1]:
        dims = dims[:-1]
    return str(Sharding(dims)) if dims else "replicated"


def line_text(line: str) -> str:
    """
    >>> line_text("/home/me/models/gpt2.py:12")
    'models/gpt2.py:12'
    """
    return "/".join(line.split("/")[-2:])


def _heading(plan: "Plan") -> Iterator[str]:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    times = sum(c.trips for c in plan.collectives if not c.other_branch)
    yield f"{plan.mesh.size} devices, mesh {mesh}. Each sends {bytes_text(plan.comm_bytes)} per call, in {times} collectives."


def _arguments(plan: "Plan") -> Iterator[str]:
    places = list(plan.arguments())
    if places:
        yield f"Arguments at rest: {bytes_text(_resident(places, plan.mesh.shape))} on each device"
        yield from _by_sharding(places, plan.mesh.shape)


def _results(plan: "Plan") -> Iterator[str]:
    """Those that lie as the argument of the same path, as a state does that is passed on, are only counted."""
    arguments = {(p.path, p.aval.shape, p.aval.dtype, p.sharding) for p in plan.arguments()}
    places = list(plan.results())
    other = [p for p in places if (p.path, p.aval.shape, p.aval.dtype, p.sharding) not in arguments]
    if places:
        yield f"Results at rest: {bytes_text(_resident(places, plan.mesh.shape))} on each device"
    if len(other) < len(places):
        yield f"  {len(places) - len(other)} lie as the arguments of the same paths"
    yield from _by_sharding(other, plan.mesh.shape)


def _by_sharding(places: Iterable["Placed"], sizes: AxisSizes) -> Iterator[str]:
    groups = defaultdict(list)
    for place in places:
        groups[spec_text(place.sharding)].append(place)
    for spec, group in groups.items():
        yield f"  {spec}"
        yield from _alike(group, sizes)


def _alike(places: Iterable["Placed"], sizes: AxisSizes) -> Iterator[str]:
    """One line for all places whose paths differ in their numbers only, as those of equal layers do."""
    groups = defaultdict(list)
    for place in places:
        groups[re.sub(r"\d+", "0", place.path), array_text(place.aval)].append(place)
    for (_, array), group in groups.items():
        what = f"{_times(len(group))}{array}"
        path = path_range([p.path for p in group]) or "-"
        yield f"    {path:<60.60}  {what:<30} {bytes_text(_resident(group, sizes)):>12}"


def path_range(paths: Sequence[str]) -> str:
    """Paths that differ in their numbers only, as one.

    >>> path_range(["0/layer_0/w", "0/layer_1/w", "0/layer_2/w"])
    '0/layer_{0..2}/w'
    """
    words, *_ = (re.split(r"\d+", path) for path in paths)
    columns = zip(*(map(int, re.findall(r"\d+", path)) for path in paths), strict=True)
    ranges = [f"{min(c)}" if min(c) == max(c) else f"{{{min(c)}..{max(c)}}}" for c in columns]
    return "".join(word + number for word, number in zip(words, [*ranges, ""], strict=True))


def _resident(places: Iterable["Placed"], sizes: AxisSizes) -> int:
    return sum(array_bytes(p.aval) // shard_count(p.sharding.axes, sizes) for p in places)


def _at_rest(plan: "Plan") -> Iterator[str]:
    if plan.at_rest:
        yield "At rest other than wanted, where the wanted sharding does not divide"
    for moved in plan.at_rest:
        shape = ",".join(map(str, moved.shape))
        cost = bytes_text(plan.cost_at_rest(moved))
        text = f"{moved.path} [{shape}]: wanted {moved.wanted}, rests in {moved.rests}, which costs {cost}"
        yield from _wrapped(text, 2)


def _collectives(plan: "Plan") -> Iterator[str]:
    if plan.collectives:
        yield _row("Collectives, by the line that they serve", "each", "total", "share")
    reasons = defaultdict(list)
    for c in plan.collectives:
        reasons[c.line, c.reason].append(c)
    for (line, reason), group in sorted(reasons.items(), key=lambda item: -comm_bytes(item[1])):
        yield from _wrapped(": ".join(filter(None, (line_text(line), reason))) or "(unknown line)", 2)
        for c, count in Counter(group).items():
            yield from _collective(c, count, plan.comm_bytes)


def _collective(c: Collective, count: int, total: int) -> Iterator[str]:
    what = f"{_times(count)}{c.kind} over {','.join(c.axes)} of {_operands(c)}"
    sent = count * c.total
    yield _row(f"    {what}", bytes_text(c.nbytes), bytes_text(sent), _share(sent, total))
    if c.trips > 1:
        yield f"        {c.trips} trips"
    if c.open_loop:
        yield "        in a while loop: counted for one iteration"
    if c.other_branch:
        yield "        in a branch of a cond that sends less than another: not counted"


def _operands(c: Collective) -> str:
    first, *others = map(array_text, c.operands)
    return f"{first} and {len(others)} more" if others else first


def _totals(plan: "Plan") -> Iterator[str]:
    kinds = defaultdict(list)
    for c in plan.collectives:
        kinds[c.kind, c.axes].append(c)
    if kinds:
        yield _row("Totals", "times", "total", "share")
    for (kind, axes), group in sorted(kinds.items(), key=lambda item: -comm_bytes(item[1])):
        sent = comm_bytes(group)
        times = sum(c.trips for c in group if not c.other_branch)
        yield _row(f"    {kind} over {','.join(axes)}", str(times), bytes_text(sent), _share(sent, plan.comm_bytes))


def _times(count: int) -> str:
    return f"{count} x " if count > 1 else ""


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _row(text: str, each: str, total: str, share: str) -> str:
    return f"{text:<{WIDTH - NUMBERS}} {each:>15} {total:>15} {share:>11}".rstrip()


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4))
