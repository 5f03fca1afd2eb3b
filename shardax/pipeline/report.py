"""What a plan shows of a pipeline: its timeline in seconds, where stages begin and why, and their memory.

The seconds are those of the program that each device runs: of each branch, by roofline, with what it sends
over other axes. Bytes are those of its buffers.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardax import _jax
from shardax.cost import noted
from shardax.cost.network import PICO, Network
from shardax.explain.facts import Facts
from shardax.explain.live import nbytes
from shardax.explain.reports import Report
from shardax.explain.roofline import work
from shardax.explain.tables import Group, Row, Table
from shardax.ledger.collectives import KINDS, Collective, collectives, comm_bytes, read
from shardax.ledger.lines import line_text
from shardax.ledger.words import bytes_text, seconds_text
from shardax.pipeline.begins import Begin, Place
from shardax.pipeline.simulate import Costs, Simulation, simulate
from shardax.pipeline.table import Schedule
from shardax.pipeline.timeline import timeline, timeline_svg

WEIGHTS = "shardax.pipeline.weights:"  # the name of an operand, with its number


@dataclass(frozen=True)
class Ran:
    """What is known of a pipeline when it is traced.

    Args:
      name: of the function.
      axis: along which its stages lie.
      schedule: by which it runs.
      numbers: [ticks, stages], the branch that a stage takes in a tick.
      lines: of each virtual stage, the first.
      begins: of each virtual stage but the first, why it begins there.
      sources: of each virtual stage, the numbers of the operands that it reads.
      buffers: how many of each kind the loop carries, in its order: "forward" and "cotangent" of what
        arrives, "saved" of what F keeps, "held" of what B keeps for W, "sums" of gradients, "results" and
        others.
      kept, sums: of each virtual stage, the numbers of those of which it uses slots, or to which it adds.
      slots: of "forward", "cotangent" and "saved", how many each stage uses.
      chosen: how the schedule was chosen, as text; "" where it was given.
      held: as `kept`, of what B keeps for W.
    """

    name: str
    axis: str
    schedule: Schedule
    numbers: np.ndarray
    lines: tuple[str, ...]
    begins: tuple[Begin, ...]
    sources: tuple[tuple[int, ...], ...]
    buffers: dict[str, int]
    kept: tuple[tuple[int, ...], ...]
    sums: tuple[tuple[int, ...], ...]
    slots: dict[str, tuple[int, ...]]
    chosen: str = ""
    held: tuple[tuple[int, ...], ...] = ()

    def __call__(self, plan: Facts, eqns: Sequence[Any]) -> Report:
        found = next(_loops(eqns, self.numbers), None)
        short = f"Pipeline over {self.axis}"
        name = "pipeline-" + "".join(c if c.isalnum() else "-" for c in self.name)
        if found is None:  # all of it is dead, or runs otherwise
            table = Table(f"Pipeline of {self.name} over {self.axis}: {self.schedule.sizes}", ())
            return Report(name, short, (table,))
        ran = _Local(self, plan, eqns, found)
        simulated = ran.simulated()
        tables = [_timeline(ran, simulated), _stages(ran, simulated), _memory(ran)]
        if self.chosen:
            tables.insert(1, _drawn("Schedules, the chosen one marked", self.chosen))
        return Report(name, short, tuple(tables), timeline_svg(simulated), _data(ran, simulated))


class _Local:
    """The loop of a pipeline in the program that each device runs."""

    def __init__(self, ran: Ran, plan: Facts, eqns: Sequence[Any], found: tuple[Any, list[Any]]):
        self.ran, self.network = ran, plan.network
        self.loop, self.conds = found
        self.weights = {
            int(e.params["name"].removeprefix(WEIGHTS)): nbytes(e.outvars[0])
            for e in eqns
            if e.primitive.name == "name" and e.params["name"].startswith(WEIGHTS)
        }

    def branch_seconds(self) -> list[float]:
        return self.of_branches(lambda branch: _seconds(branch, self.network))

    def of_branches(self, seconds: Callable[[Any], float]) -> list[float]:
        """Of each instruction, which may have parts in several conds."""
        total = np.zeros(self.ran.numbers.max() + 1)
        for cond in self.conds:
            note = noted.branches_of(cond)
            assert note is not None
            total += np.array(list(map(seconds, cond.params["branches"])))[note.taken]
        return total.tolist()

    def buffers(self) -> dict[str, list[int]] | None:
        """Bytes of each buffer of the loop: of all slots. None where the loop has not those that were
        traced."""
        r = self.ran
        consts, carries = _jax.scan_counts(self.loop.params)
        sizes = list(map(nbytes, self.loop.invars[consts:][:carries]))
        counts = dict(r.buffers)
        if carries != sum(counts.values()):  # what nobody reads is gone
            counts.pop("results", None)
        if carries != sum(counts.values()):
            return None
        found, at = {}, 0
        for name, count in counts.items():
            found[name], at = sizes[at : at + count], at + count
        return found

    def slot(self, name: str, numbers: Sequence[int]) -> int:
        """Bytes of one slot of these buffers."""
        buffers = self.buffers()
        count = max(self.ran.slots["saved" if name == "held" else name], default=0) + 1
        return sum(buffers[name][n] for n in numbers) // count if buffers else 0

    def saved(self, k: int) -> int:
        """Bytes that virtual stage k keeps of one microbatch."""
        held = self.slot("held", self.ran.held[k]) if self.ran.held else 0
        return self.slot("saved", self.ran.kept[k]) + held

    def simulated(self) -> Simulation:
        r, each = self.ran, self.branch_seconds()
        s = r.schedule
        seconds = {s.key(d, i): each[r.numbers[t, d]] for t, d, i in s.instructions()}
        count = s.virtual_stages

        def of(kind: str) -> list[float]:
            return [seconds.get((kind, 0, k), 0.0) for k in range(count)]

        boundary = self.slot("forward", range(r.buffers["forward"]))
        saved = [max(0, self.saved(k) - boundary) for k in range(count)]
        costs = Costs(of("F"), of("B"), of("W"), of("B"), saved, self.send_seconds(), boundary)
        return simulate(s, costs)

    @cached_property
    def sends(self) -> list[Collective]:
        """What stages send to each other in a tick: of those that send by several ways, the dearest."""
        kinds = [[]]
        for eqn in _jax.closed(self.loop.params["jaxpr"]).jaxpr.eqns:
            if eqn.primitive.name == "cond" and not any(eqn is cond for cond in self.conds):
                kinds += [list(collectives(branch, self.network)) for branch in eqn.params["branches"]]
            elif KINDS.get(eqn.primitive.name) == "ppermute":
                kinds[0] += read(eqn, self.network)
        return max(kinds, key=comm_bytes)

    def send_seconds(self) -> float:
        return sum(self.network.collective(*c.message) for c in self.sends) / PICO

    def sent(self) -> int:
        """Bytes that a stage sends in a tick."""
        return sum(c.nbytes for c in self.sends)

    def beside(self) -> float:
        """Seconds of a tick besides the instruction and sends: what is kept is stored, gradients are
        added."""
        ticks = len(self.ran.schedule.ticks)
        whole = _priced(work(self.loop.params["jaxpr"], ticks), self.network) / ticks
        each = self.of_branches(lambda branch: _priced(work(branch), self.network))
        return max(0.0, whole - float(np.array(each)[self.ran.numbers].max(1).mean()))


def _loops(eqns: Sequence[Any], numbers: np.ndarray) -> Iterator[tuple[Any, list[Any]]]:
    """The loop over ticks, and the conds in it that run the instructions."""
    for loop in eqns:
        if loop.primitive.name == "scan":
            for conds in noted.parts(_jax.closed(loop.params["jaxpr"]).jaxpr.eqns):
                note = noted.branches_of(conds[0])
                if note is not None and np.array_equal(note.table, numbers):
                    yield loop, conds


def _seconds(jaxpr, network: Network) -> float:
    sent = (c for c in collectives(jaxpr, network) if not c.other_branch)
    links = sum(c.trips * network.collective(*c.message) for c in sent)
    return _priced(work(jaxpr), network) + links / PICO


def _priced(works, network: Network) -> float:
    return sum(w.trips * network.compute(w.flops, w.nbytes) for w in works) / PICO


# As tables


def _drawn(title: str, text: str) -> Table:
    return Table(title, (), drawing=lambda width: text)


def _timeline(ran: _Local, done: Simulation) -> Table:
    r, ticks = ran.ran, len(done.schedule.ticks)
    beside = ran.beside() * ticks
    title = (
        f"Pipeline of {r.name} over {r.axis}, on chip {ran.network.chip.name}: "
        f"{seconds_text(done.seconds + beside)}, of it {seconds_text(done.costs.send * ticks)} to send "
        f"{bytes_text(ran.sent())} in each of {ticks} ticks, and {seconds_text(beside)} to store and add up"
    )
    if ran.buffers() is None:  # a rewrite has changed the loop
        title += "; what is kept is not known"
    return Table(title, (), drawing=lambda width: _wrapped(timeline(done, width), width))


def _wrapped(drawn: str, width: int) -> str:
    """With its first line, which is text, in as many as it takes."""
    first, *others = drawn.splitlines()
    return "\n".join([*textwrap.wrap(first, width, subsequent_indent="    "), *others])


def _stages(ran: _Local, done: Simulation) -> Table:
    r, s = ran.ran, done.schedule
    rows = []
    split = any(i.kind == "W" for _, _, i in s.instructions())
    for k, line in enumerate(r.lines):
        begin = r.begins[k - 1] if k else None
        d, chunk = s.homes[k]
        what = f"stage {d}" + f" chunk {chunk}" * (s.chunks > 1)
        here = _place(begin.here) if begin else line_text(line or "")
        numbers = [done.costs.of(n)[k] for n in ("forward", "inputs", "weights") if n != "weights" or split]
        crossing = bytes_text(begin.here.crossing) if begin else ""
        rows.append(Row(f"{what} from {here}", (*map(seconds_text, numbers), crossing)))
        if begin:
            rows.append(Row(why(begin), remark=True))
    heads = ("forward", "backward", *("weights",) * split, "received")
    title = "Where its stages begin: a microbatch on each device, bytes received in all"
    return Table(title, (Group("", tuple(rows)),), heads)


def _place(place: Place) -> str:
    layer = f", layer {place.layer[0]} of {place.layer[1]}" if place.layer else ""
    return f"{line_text(place.line) or 'an unknown line'}{layer}"


def why(begin: Begin) -> str:
    """Why a stage begins where it does, in words."""
    here, other = begin.here, begin.other
    if other is None:
        return "the only place" + " that is marked" * begin.marked + " between those of its neighbours"
    return (
        f"next best, from {_place(other)}: the slower of the two stages {seconds_text(other.slower)} and not "
        f"{seconds_text(here.slower)}, {bytes_text(other.crossing)} received"
    )


def _memory(ran: _Local) -> Table:
    rows = [
        Row(name, tuple(bytes_text(n) if n is not None else "?" for n in cells))
        for name, cells in _memory_rows(ran)
    ]
    title = "Memory of its stages on each device"
    heads = ("weights", "kept", "waiting", "gradients")
    return Table(title, (Group("", tuple(rows)),), heads)


def _memory_rows(ran: _Local) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """Bytes of weights, of what is kept, of what waits, and of sums; None where it is not known."""
    r, s, buffers = ran.ran, ran.ran.schedule, ran.buffers()
    wire = ran.slot("forward", range(r.buffers["forward"]))
    for d in range(s.stages):
        mine = [k for k in range(s.virtual_stages) if s.homes[k][0] == d]
        weights = sum(ran.weights.get(n, 0) for n in {n for k in mine for n in r.sources[k]})
        kept = r.slots["saved"][d] * max(map(ran.saved, mine))
        waiting = (r.slots["forward"][d] + r.slots["cotangent"][d]) * wire
        added = {n for k in mine for n in r.sums[k]}
        known = (kept, waiting, sum(buffers["sums"][n] for n in added)) if buffers else (None,) * 3
        yield f"stage {d}, {r.slots['saved'][d]} microbatches kept for the backward pass", (weights, *known)
    if buffers:
        size = {name: sum(each) for name, each in buffers.items()}
        kept, waiting = size["saved"] + size.get("held", 0), size["forward"] + size["cotangent"]
        held = sum(ran.weights.values()), kept, waiting, size["sums"]
        yield "each holds, one program being for all", held


# As data


def _data(ran: _Local, done: Simulation) -> dict[str, Any]:
    r, s = ran.ran, done.schedule
    names = ("stage", "weights", "saved", "waiting", "gradients")
    memory = [dict(zip(names, (name, *cells), strict=True)) for name, cells in _memory_rows(ran)]
    return {
        "name": r.name,
        "axis": r.axis,
        "chip": ran.network.chip.name,
        "schedule": {"name": s.name, "stages": s.stages, "chunks": s.chunks, "ticks": len(s.ticks)},
        "seconds": done.seconds,
        "beside": ran.beside() * len(s.ticks),
        "bubble": done.bubble,
        "chosen": r.chosen,
        "sent_per_tick": ran.sent(),
        "send_seconds": done.costs.send,
        "runs": [[run.stage, str(run.instruction), run.start, run.end] for run in done.runs],
        "stages": [
            {
                "stage": s.homes[k][0],
                "chunk": s.homes[k][1],
                "line": line,
                **{n: done.costs.of(n)[k] for n in ("forward", "inputs", "weights", "backward", "saved")},
                "begins": _begin_data(r.begins[k - 1]) if k else None,
            }
            for k, line in enumerate(r.lines)
        ],
        "memory": memory,
    }


def _begin_data(begin: Begin) -> dict[str, Any]:
    def of(place: Place | None):
        return place and {
            "line": place.line,
            "layer": place.layer,
            "crossing": place.crossing,
            "slower": place.slower,
        }

    return {"here": of(begin.here), "other": of(begin.other), "marked": begin.marked}
