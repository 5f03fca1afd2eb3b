"""How long a schedule takes, what waits and what is kept: seconds and bytes, before anything is compiled.

Two clocks. *Locked*, as one SPMD program runs: the sends of a tick join all stages, so a tick lasts as long
as its longest instruction. Else each stage goes on as soon as its inputs are there, as papers and MPMD
runtimes count. Of schedules with latency 1 sends take their own time, after the instruction; with more they
overlap with the next.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardax.ledger.words import bytes_text, seconds_text
from shardax.pipeline.schedules import NAMES, make_schedule
from shardax.pipeline.slots import lifetimes, sends, slot_counts
from shardax.pipeline.table import Instruction, Key, Schedule, positive

EACH = "forward", "inputs", "weights", "backward", "saved", "held"
Numbers = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Of one microbatch, on each layer or virtual stage: a number for all alike, or one for each.

    `forward`, `inputs`, `weights`: seconds of F, B (for the inputs alone) and W. `backward`: seconds of a
    whole B; None is `inputs + weights`. `saved`: bytes that F keeps until B, or until W where it is split.
    `held`: bytes that such a B keeps for W besides.
    `send`: seconds in which an activation or cotangent gets to the neighbour. `boundary`: its bytes, which
    are kept as input of each virtual stage, too, and while they wait.
    """

    forward: Numbers = 1.0
    inputs: Numbers = 1.0
    weights: Numbers = 1.0
    backward: Numbers | None = None
    saved: Numbers = 1.0
    send: float = 0.0
    boundary: float = 0.0
    held: Numbers = 0.0

    def spread(self, count: int) -> "Costs":
        """A tuple of `count` numbers for each; raises ValueError where there are others."""
        found = {name: self._tuple(name, count) for name in EACH if getattr(self, name) is not None}
        pairs = zip(found["inputs"], found["weights"], strict=True)
        return replace(self, **{"backward": tuple(b + w for b, w in pairs), **found})

    def grouped(self, layers: int, groups: int) -> "Costs":
        """Those of `groups` virtual stages that share `layers` layers, one run of layers each."""
        each, ends = self.spread(layers), [layers * n // groups for n in range(groups + 1)]
        runs = list(zip(ends, ends[1:], strict=False))
        return replace(each, **{name: tuple(sum(each.of(name)[a:b]) for a, b in runs) for name in EACH})

    def of(self, name: str) -> tuple[float, ...]:
        """The numbers of one cost, after `spread`."""
        found = getattr(self, name)
        assert isinstance(found, tuple)
        return found

    def _tuple(self, name: str, count: int) -> tuple[float, ...]:
        found = getattr(self, name)
        found = tuple(found) if isinstance(found, Sequence) else (found,) * count
        if len(found) != count:
            raise ValueError(f"Costs.{name} has {len(found)} numbers; expected one, or {count}")
        if min(found) < 0:
            raise ValueError(f"Costs.{name} has {min(found)}; expected seconds or bytes of 0 or more")
        return found


@dataclass(frozen=True)
class Span:
    """An instruction, or the send of what it made, from `start` to `end` seconds. `destination`: a stage, of
    a send.
    """

    stage: int
    instruction: Instruction
    start: float
    end: float
    destination: int | None = None


@dataclass(frozen=True)
class Simulation:
    """What `simulate` found. `runs`: the instructions, tick by tick. `sent`: what passed between stages."""

    schedule: Schedule
    costs: Costs
    locked: bool
    runs: tuple[Span, ...]
    sent: tuple[Span, ...]
    seconds: float

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each stage runs an instruction."""
        return self._by_stage(lambda runs: sum(run.end - run.start for run in runs))

    @cached_property
    def waits(self) -> tuple[float, ...]:
        """Seconds in which each stage does not, between its first instruction and its last."""
        spans = self._by_stage(lambda runs: runs[-1].end - runs[0].start)
        return tuple(span - busy for span, busy in zip(spans, self.busy, strict=True))

    @property
    def bubble(self) -> float:
        """The part of all stages' time in which nothing is computed, sends among it."""
        return 1 - sum(self.busy) / (self.seconds * self.schedule.stages) if self.seconds else 0.0

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """The most bytes that each stage keeps: for backward passes, and of what has arrived and waits."""
        return tuple(max(held for _, held in self.memory(d)) for d in range(self.schedule.stages))

    @cached_property
    def kept(self) -> float:
        """The bytes that each stage needs for that: locked, those of the buffers of one program for all,
        else the highest of `peaks`.
        """
        if not self.locked:
            return max(self.peaks)
        held = max(self.costs.of("held")) if self.schedule.splits else 0.0
        sizes = {"saved": max(self.costs.of("saved")) + held + self.costs.boundary}
        slots = slot_counts(self.schedule)
        return sum(max(slots[name]) * sizes.get(name, self.costs.boundary) for name in slots)

    def memory(self, stage: int) -> list[tuple[float, float]]:
        """(seconds, bytes from then on): what a stage keeps, over time."""
        found, level = [], 0.0
        # what is freed goes before what is stored in the same moment
        for moment, change in sorted([(0.0, 0.0), *self._changes[stage]]):
            level += change
            found.append((moment, level))
        return found

    @cached_property
    def _changes(self) -> Mapping[int, list[tuple[float, float]]]:
        """When how many bytes are stored on each stage, or, negative, freed."""
        ends = {self.schedule.key(run.stage, run.instruction): run.end for run in self.runs}
        starts = {self.schedule.key(run.stage, run.instruction): run.start for run in self.runs}
        arrived = ends | {self.schedule.key(s.stage, s.instruction): s.end for s in self.sent}
        saved, held, boundary = self.costs.of("saved"), self.costs.of("held"), self.costs.boundary
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for name, lives in lifetimes(self.schedule).items():
            for j, virtual in lives:
                first, size = {
                    "saved": (starts["F", j, virtual], saved[virtual] + boundary),
                    "forward": (arrived.get(("F", j, virtual - 1)), boundary),
                    "cotangent": (arrived.get(("B", j, virtual + 1)), boundary),
                }[name]
                last = max(ends.get((kind, j, virtual), 0.0) for kind in ("F" if name == "forward" else "BW"))
                assert first is not None
                changes = found[self.schedule.homes[virtual][0]]
                changes += [(first, size), (last, -size)]
                if name == "saved" and self.schedule.splits:
                    changes += [(starts["B", j, virtual], held[virtual]), (last, -held[virtual])]
        return found

    def _by_stage(self, of) -> tuple[float, ...]:
        return tuple(of([run for run in self.runs if run.stage == d]) for d in range(self.schedule.stages))


def simulate(schedule: Schedule, costs: Costs = Costs(), *, locked: bool = True) -> Simulation:  # noqa: B008
    """The seconds of a schedule, `costs` being those of its virtual stages.

    >>> schedule = make_schedule("1f1b", 4, 8)
    >>> [simulate(schedule, Costs(1, 1, 1), locked=locked).seconds for locked in (False, True)]
    [33.0, 40.0]
    """
    costs = costs.spread(schedule.virtual_stages)
    runs, sent = (_locked if locked else _free)(schedule, costs)
    seconds = max([run.end for run in runs] + [s.end for s in sent])
    return Simulation(schedule, costs, locked, tuple(runs), tuple(sent), float(seconds))


def _seconds(schedule: Schedule, costs: Costs, key: Key) -> float:
    kind, microbatch, virtual = key
    split = kind == "B" and ("W", microbatch, virtual) in schedule.where
    name = {"F": "forward", "W": "weights", "B": "inputs" if split else "backward"}[kind]
    return costs.of(name)[virtual]


def _locked(schedule: Schedule, costs: Costs) -> tuple[list[Span], list[Span]]:
    receivers = _receivers(schedule)
    runs, sent, now = [], [], 0.0
    overlap, send = schedule.latency > 1, costs.send if receivers else 0.0
    for row in schedule.ticks:
        ends = now
        for d, i in enumerate(row):
            if i is not None:
                runs.append(Span(d, i, now, now + _seconds(schedule, costs, schedule.key(d, i))))
                ends = max(ends, runs[-1].end)
        if overlap:
            ends = max(ends, now + send)
        for d, i in enumerate(row):
            if i is not None and (to := receivers.get(schedule.key(d, i))) is not None:
                sent.append(Span(d, i, ends, ends + send, to))
        now = ends + (0.0 if overlap else send)
    return runs, sent


def _free(schedule: Schedule, costs: Costs) -> tuple[list[Span], list[Span]]:
    receivers = _receivers(schedule)
    runs, sent = [], []
    free = [0.0] * schedule.stages
    links: dict[tuple[int, int], float] = {}  # when a link is free again
    ready: dict[tuple[Key, int], float] = {}  # when an output is on a stage
    for _, d, i in schedule.instructions():
        key = schedule.key(d, i)
        start = max([free[d]] + [ready[need, d] for need in schedule.needs(key)])
        end = free[d] = start + _seconds(schedule, costs, key)
        runs.append(Span(d, i, start, end))
        ready[key, d] = end
        to = receivers.get(key)
        if to is not None:
            begin = max(end, links.get((d, to), 0.0))
            ready[key, to] = links[d, to] = begin + costs.send
            sent.append(Span(d, i, begin, begin + costs.send, to))
            if schedule.latency == 1:
                free[d] = begin + costs.send
    return runs, sent


def _receivers(schedule: Schedule) -> dict[Key, int]:
    """The other stage to which the output of an instruction goes, if it goes to another one."""
    return {
        (kind, microbatch, virtual + (-1 if kind == "F" else 1)): destination
        for kind, microbatch, virtual, source, destination in sends(schedule)
        if source != destination
    }


@dataclass(frozen=True)
class Candidate:
    """A schedule that `choose` looked at."""

    simulation: Simulation
    fits: bool

    @property
    def schedule(self) -> Schedule:
        return self.simulation.schedule


@dataclass(frozen=True)
class Choice:
    """The schedule of `choose`, and all candidates, the fastest first; `str` is a table of them."""

    schedule: Schedule
    candidates: tuple[Candidate, ...]
    limit: float | None

    def __str__(self):
        table = comparison(self.candidates, self.schedule)
        if self.limit is None:
            return table
        return f"{table}\nAt most {bytes_text(self.limit)} may be kept on a stage."


def comparison(candidates: Sequence[Candidate], chosen: Schedule | None = None) -> str:
    """A table of candidates, with the `chosen` one marked."""
    rows = [("", "schedule", "chunks", "seconds", "bubble", "kept on a stage")]
    for c in candidates:
        done = c.simulation
        mark = "->" if c.schedule is chosen else ""
        kept = bytes_text(done.kept) + " (over the limit)" * (not c.fits)
        name, chunks = c.schedule.name, str(c.schedule.chunks)
        rows.append((mark, name, chunks, seconds_text(done.seconds), f"{100 * done.bubble:.1f} %", kept))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{row[0]:2} {row[1]:{widths[1]}}"
        + "".join(f"  {text:>{width}}" for text, width in zip(row[2:5], widths[2:5], strict=True))
        + f"  {row[5]}"
        for row in rows
    )


def choose(
    stages: int,
    microbatches: int,
    layers: int,
    costs: Costs = Costs(),  # noqa: B008
    *,
    limit: float | None = None,
    locked: bool = True,
    backward: bool = True,
    latency: int = 1,
    chunks: int | None = None,
    names: Sequence[str] = tuple(NAMES),
) -> Choice:
    """The schedule that takes the fewest seconds, of those with names, with each number of chunks that
    divides the layers; among equals the one that keeps less, then the one with fewer chunks, then the first
    in `names`.

    `costs`: those of the layers. `limit`: bytes that a stage may keep between forward and backward passes
    (`Simulation.kept`). Not `backward`: forward passes alone. `latency`: that of the schedules. `chunks`: no
    other number of them.

    Raises ValueError if there are fewer layers than stages, or no schedule keeps within the limit (what the
    most sparing one needs).

    >>> print(choose(2, 4, 2, Costs(0.1, 0.1, 0.1, saved=100), limit=200, names=("gpipe", "1f1b", "zb-h1")))
       schedule  chunks  seconds  bubble  kept on a stage
    -> zb-h1          1    1.3 s   7.7 %  200 B
       gpipe          1    1.5 s  20.0 %  400 B (over the limit)
       1f1b           1    1.8 s  33.3 %  200 B
    At most 200 B may be kept on a stage.
    """
    for what, number in (("stages", stages), ("microbatches", microbatches), ("layers", layers)):
        positive(what, number)
    if layers < stages:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages; use {layers} stages or fewer")
    found = []
    for name in names:
        for v in _chunks(name, stages, layers) if (name == "forward") != backward else ():
            if chunks in (None, v):
                schedule = make_schedule(name, stages, microbatches, v, latency=latency)
                done = simulate(schedule, costs.grouped(layers, stages * v), locked=locked)
                found.append(Candidate(done, limit is None or done.kept <= limit))
    if not found:
        raise ValueError(
            f"none of {', '.join(names)} runs {layers} layers on {stages} stages with chunks={chunks}; "
            "expected chunks that divide the layers of each stage"
        )
    found.sort(key=_rank)
    best = next((c for c in found if c.fits), None)
    if best is None:
        least = min(found, key=lambda c: c.simulation.kept)
        raise ValueError(
            f"no schedule of {stages} stages and {microbatches} microbatches keeps within {limit:,.0f} bytes "
            f"on a stage; {least.schedule.name} needs the fewest, {least.simulation.kept:,.0f}. Use more "
            "microbatches, each smaller, more stages, or keep less for the backward pass (jax.checkpoint)"
        )
    return Choice(best.schedule, tuple(found), limit)


def _rank(candidate: Candidate) -> tuple[float, float, int]:
    """Seconds that differ by rounding alone are equal."""
    done = candidate.simulation
    return float(f"{done.seconds:.9g}"), done.kept, candidate.schedule.chunks


def _chunks(name: str, stages: int, layers: int) -> list[int]:
    kind = NAMES[name]
    if not kind.any_chunks:
        return [kind.chunks] if kind.chunks == 1 or layers % (stages * kind.chunks) == 0 else []
    most = layers // stages
    return [v for v in range(kind.chunks, most + 1) if v == 1 or layers % (stages * v) == 0]
