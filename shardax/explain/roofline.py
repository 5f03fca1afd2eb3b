"""Estimates the seconds of a local program by roofline, from its FLOPs, its memory traffic, and the bytes
that it sends.

Each equation takes the longer of the times of its FLOPs and of its memory traffic (Williams et al. 2009). The
time of what is sent is added, at the prices by which programs are chosen (`shardax.cost.network`), as if
nothing were overlapped. The FLOPs are those that the registered rules say (`register_rule`, its argument
`flops`): of each equation that has such a rule, and of what stands in place of one. All else is bound by
memory. Where devices take different branches in a trip of a loop and wait for each other, as stages of a
pipeline do, the trip counts as long as the longest branch that one of them takes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from shardax import _jax
from shardax.cost import noted
from shardax.cost.network import PICO, Message, Network
from shardax.explain.live import between_memories, bodies, traffic
from shardax.spmd_rules.registry import RULES


@dataclass(frozen=True)
class Estimate:
    """A call on one chip, in seconds.

    `compute`: its products at the chip's peak. `memory`: what it reads and writes in HBM.
    `links`: what it sends. `host`: what it copies from and to the host's memory.
    `seconds`: in all, each operation at the slower of compute and memory, nothing overlapped with links and
      host.
    `flops`, `nbytes`: of the products, and moved in HBM, per device. `chip`: its name.
    """

    compute: float
    memory: float
    links: float
    seconds: float
    flops: float
    nbytes: int
    chip: str
    host: float = 0.0

    @property
    def bound(self) -> str:
        """What takes longest: "compute", "HBM", "links" or "host"."""
        parts = {"compute": self.compute, "HBM": self.memory, "links": self.links, "host": self.host}
        return max(parts, key=parts.__getitem__)

    def __str__(self):
        return (
            f"{self.seconds:.3g} s on {self.chip}, bound by {self.bound}: {self.compute:.3g} s compute "
            f"({self.flops:.3g} FLOPs), {self.memory:.3g} s HBM ({self.nbytes:.3g} bytes), {self.links:.3g} "
            "s links" + (f", {self.host:.3g} s to and from the host" if self.host else "")
        )


@dataclass(frozen=True)
class Work:
    """What one equation does, `trips` times. `hosted`: bytes that it copies from or to the host's memory."""

    flops: float
    nbytes: int
    trips: int = 1
    hosted: int = 0


def estimate(works: list[Work], sent: Iterable[tuple[int, Message]], network: Network) -> Estimate:
    """The seconds of a program's `work`, and of what one device sends, and how often, on the chips of a
    network.
    """
    chip = network.chip
    flops, nbytes = sum(w.trips * w.flops for w in works), sum(w.trips * w.nbytes for w in works)
    slower = sum(w.trips * max(w.flops / chip.flops, w.nbytes / chip.memory_rate) for w in works)
    links = sum(trips * network.collective(*message) for trips, message in sent) / PICO
    host = sum(w.trips * w.hosted for w in works) / chip.host_rate
    seconds = slower + links + host
    return Estimate(
        flops / chip.flops, nbytes / chip.memory_rate, links, seconds, flops, nbytes, chip.name, host
    )


def work(jaxpr, trips: int = 1) -> Iterator[Work]:
    """The work of a jaxpr; of a `while` that of one iteration, of a `cond` that of the dearest branch, or
    where it is noted which branches run side by side in a trip (`noted.Branches`), the dearest of those.

    Where a lowering has noted its FLOPs, these count, and not those of the equations that it consists of.
    """
    jaxpr = _jax.closed(jaxpr).jaxpr
    traffic_of = {id(eqn): nbytes for eqn, nbytes in traffic(jaxpr)}
    seen: set[int] = set()
    tabled = dict(_of_tables(jaxpr.eqns, trips))
    for eqn in jaxpr.eqns:
        note = noted.of(eqn.source_info.name_stack)
        flops = _flops(eqn) if note is None else 0 if id(note) in seen else note.flops
        seen.add(id(note))
        if flops or traffic_of.get(id(eqn)):
            yield Work(flops, traffic_of.get(id(eqn), 0), trips, between_memories(eqn))
        for inner in tabled[id(eqn)] if id(eqn) in tabled else _inside(eqn, trips):
            yield inner if note is None else replace(inner, flops=0)


def _flops(eqn) -> float:
    """What its rule says; of a Pallas kernel what it says itself, as `cost_estimate`."""
    entry, stated = RULES.get(eqn.primitive.name), eqn.params.get("cost_estimate")
    return entry and entry.flops_at(eqn) or getattr(stated, "flops", 0)


def _inside(eqn, trips: int) -> Iterator[Work]:
    inner = trips * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
    works = [list(work(body, inner)) for body in bodies(eqn)]
    if eqn.primitive.name == "cond":
        works = [max(works, key=_size)]
    for one in works:
        yield from one


def _size(works: Sequence[Work]) -> tuple[float, float]:
    return sum(w.flops for w in works), sum(w.nbytes for w in works)


def _of_tables(eqns: Sequence[Any], trips: int) -> Iterator[tuple[int, list[Work]]]:
    """The work of conds of which it is noted which branches run, by their ids."""
    for conds in noted.parts(eqns):
        notes = [note for note in map(noted.branches_of, conds) if note is not None]
        works = [[list(work(body, trips)) for body in bodies(cond)] for cond in conds]
        instructions = [
            [each[branch] for each, branch in zip(works, taken, strict=True)]
            for taken in zip(*(note.taken.tolist() for note in notes), strict=True)
        ]
        ranks = sorted(
            range(len(instructions)), key=lambda n: _size([w for some in instructions[n] for w in some])
        )
        shares = [(n, Fraction(count, len(notes[0].table))) for n, count in notes[0].dearest(ranks)]
        for i, cond in enumerate(conds):
            own = ((w, share) for n, share in shares for w in instructions[n][i])
            yield id(cond), [replace(w, trips=math.ceil(w.trips * share)) for w, share in own]
