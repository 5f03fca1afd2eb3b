"""The memory of a plan, in bytes on each device: arguments by kind, what is saved, the peak, and what is
replicated.

This is an estimate, read off the local jaxpr in program order (see `shardax.explain.live`). The
`memory_analysis()` of the compiled program says what it really takes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardax import _jax
from shardax.explain.facts import Facts
from shardax.explain.live import DEVICE, HOST, live, nbytes
from shardax.explain.saved import saved
from shardax.explain.tables import Group, Row, Table
from shardax.explain.terminal import shown
from shardax.explain.values import intermediates
from shardax.ledger.collectives import array_bytes, array_text
from shardax.ledger.lines import code, line_text
from shardax.ledger.words import as_one, bytes_text, form, times

TOP = 12  # rows that the text shows
STRETCHES = 200  # of the curve
FEW = 8  # parts of an argument that are shown each


@dataclass(frozen=True)
class Tensor:
    """An array on one device: its type, its bytes, the user's line or argument that it comes from, its
    `checkpoint_name`.
    """

    array: str
    nbytes: int
    origin: str
    name: str = ""


@dataclass(frozen=True)
class Moment:
    """Bytes alive on one device after an equation of the local program, and the user's line of it."""

    equation: int
    nbytes: int
    line: str


@dataclass(frozen=True)
class Memory:
    """Bytes on each device, and `host` of those that it has in its host's memory: at the peak, of the
    arguments `hosted` and of results.

    `arguments`: by the first two keys of their paths. `saved`: for the backward pass, the largest first.
    `peak`: of the live set, at the user's `line`; `tensors` live then, the largest first. `replicated`:
    arrays of at least `threshold` bytes that no axis splits, the largest first. `curve`: the program in at
    most `STRETCHES` equal stretches, and of each the moment of most bytes; bodies count one iteration.
    """

    arguments: dict[str, int]
    results: int
    saved: tuple[Tensor, ...]
    peak: int
    line: str
    tensors: tuple[Tensor, ...]
    replicated: tuple[Tensor, ...]
    threshold: int
    curve: tuple[Moment, ...] = ()
    hosted: dict[str, int] = field(default_factory=dict)
    host: int = 0

    def __str__(self):
        return shown([self.table()])

    def table(self) -> Table:
        at = f", at {line_text(self.line)}" if self.line else ""
        title = f"Replicated, arrays of {bytes_text(self.threshold)} and more"
        groups = (
            Group("Arguments", tuple(Row(path, ("", bytes_text(n))) for path, n in _alike(self.arguments))),
            *self._at_host(),
            *_groups(
                f"Saved for the backward pass: {bytes_text(sum(t.nbytes for t in self.saved))}", self.saved
            ),
            *_groups("Alive at the peak", self.tensors),
            *_groups(title, self.replicated),
        )
        return Table(f"Memory on each device: {self.text}{at}", groups, ("", ""), 1)

    @property
    def text(self) -> str:
        """ "3.0 MiB at most", "3.0 MiB at most, and 12.0 MiB of the host's"."""
        host = f", and {bytes_text(self.host)} of the host's" if self.host else ""
        return f"{bytes_text(self.peak)} at most{host}"

    def _at_host(self) -> Iterator[Group]:
        if self.hosted:
            rows = (Row(path, ("", bytes_text(n))) for path, n in _alike(self.hosted))
            yield Group(
                f"Arguments in the host's memory: {bytes_text(sum(self.hosted.values()))}", tuple(rows)
            )


def memory(plan: Facts, threshold: int) -> Memory:
    """The memory of a plan; what is replicated counts from `threshold` bytes on."""
    (eqn,) = (e for e in plan.local_jaxpr.jaxpr.eqns if e.primitive.name == "shard_map")
    jaxpr = _jax.closed(eqn.params["jaxpr"]).jaxpr
    paths = [place.named for place in plan.arguments()]
    parameters = dict(zip(eqn.invars, jaxpr.invars, strict=True))
    inputs = [parameters[v] for v in plan.local_jaxpr.jaxpr.invars if v in parameters]
    origins = {v: f"argument {name}" for v, name in zip(inputs, paths, strict=False)}
    kept = [v for i, v in enumerate(inputs) if i not in plan.donated]
    found = live(jaxpr, kept, jaxpr.invars)
    came = [
        Tensor(array_text(c.operands[0]), c.nbytes, c.reason) for c in plan.crossed("argument")
    ]  # and stay where they were

    def tensor(v, origin: str, name: str = "") -> Tensor:
        return Tensor(array_text(v.aval), nbytes(v), origin or plan.line, name)

    tensors = [*came, *(tensor(v, origins.get(v, where)) for v, where in found.alive)]
    beside = sum(t.nbytes for t in came)
    sizes = [
        [(path, nbytes(v, memory)) for path, v in zip(paths, inputs, strict=False)]
        for memory in (DEVICE, HOST)
    ]
    return Memory(
        _by_group(sizes[0]),
        sum(nbytes(v, DEVICE) for v in jaxpr.outvars),
        _largest(tensor(v, line, name) for v, name, line in saved(jaxpr)),
        found.peak + beside,
        found.line or plan.line,
        _largest(tensors),
        _largest(_replicated(plan, threshold)),
        threshold,
        tuple(_curve(found.curve, beside, plan.line)),
        {name: n for name, n in _by_group(sizes[1]).items() if n},
        live(jaxpr, kept, jaxpr.invars, HOST).peak,
    )


def _curve(points: Sequence[tuple[int, Sequence[Any]]], beside: int, line: str) -> Iterator[Moment]:
    """The dearest point of each stretch, with `beside` more bytes; those without a line have this one."""
    step = math.ceil(len(points) / STRETCHES)
    for start in range(0, len(points), step):
        at = max(range(start, min(start + step, len(points))), key=lambda i: points[i][0])
        found = (_jax.user_line(eqn.source_info) for eqn in reversed(points[at][1]))
        yield Moment(at, points[at][0] + beside, next(filter(None, found), line))


def _largest(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(sorted(tensors, key=lambda t: -t.nbytes))


def _alike(sizes: dict[str, int]) -> list[tuple[str, int]]:
    """The arguments, the dearest first. Those whose names differ only in numbers are one row."""
    alike: dict[str, list[str]] = {}
    for path in sizes:
        alike.setdefault(form(path), []).append(path)
    summed = [(as_one(paths), sum(map(sizes.__getitem__, paths))) for paths in alike.values()]
    return sorted(summed, key=lambda row: -row[1])


def _by_group(sizes: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Bytes by the argument and the key in it, as in "state/params"; of an argument of many keys in one."""
    keys: dict[str, set[str]] = {}
    for path, _ in sizes:
        keys.setdefault(path.split("/")[0], set()).update(path.split("/")[1:2])
    groups: Counter = Counter()
    for path, n in sizes:
        first = path.split("/")[0]
        groups["/".join(path.split("/")[:2]) if len(keys[first]) <= FEW else first] += n
    return dict(groups)


def _replicated(plan: Facts, threshold: int) -> Iterator[Tensor]:
    """Arguments and intermediates that no axis of more than one device splits."""
    arguments = [
        (array_text(p.aval), array_bytes(p.aval), f"argument {p.named}", p.shards) for p in plan.arguments()
    ]
    made = [(x.array, x.nbytes, x.line, x.shards) for x in (intermediates(plan) if plan.graph else ())]
    for array, n, origin, shards in [*arguments, *made]:
        if n >= threshold and plan.mesh.size > 1 and shards == 1:
            yield Tensor(array, n, origin)


def _groups(heading: str, tensors: Sequence[Tensor]) -> Iterator[Group]:
    """Rows of arrays, one for all that are alike."""
    totals = alike(tensors)
    rows = [_row(group) for group in totals[:TOP]]
    others = [t for group in totals[TOP:] for t in group]
    if others:
        rows.append(Row("other", (f"{len(others)} arrays", bytes_text(_bytes(others)))))
    if rows:
        yield Group(heading, tuple(rows))


def alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The arrays of one type that share a name or line, or come from arguments whose paths differ only in
    numbers; the dearest first.
    """
    groups: dict[tuple[str, str], list[Tensor]] = {}
    for t in tensors:
        origin = form(t.origin) if t.origin.startswith("argument") else t.origin
        groups.setdefault((t.array, t.name or origin), []).append(t)
    return sorted(groups.values(), key=lambda group: -_bytes(group))


def _row(group: Sequence[Tensor]) -> Row:
    origin, cells = group[0].origin, (times(len(group)) + group[0].array, bytes_text(_bytes(group)))
    if origin.startswith("argument"):
        return Row(as_one([t.origin for t in group]), cells)
    named = f"'{group[0].name}' " if group[0].name else ""
    return Row(f"{named}{line_text(origin) or '(unknown line)'}", cells, code(origin))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)
