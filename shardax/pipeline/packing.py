"""Orders of instructions, one per stage, packed into the ticks of a schedule; orders as text."""

import re
from collections.abc import Mapping, Sequence

from shardax.pipeline.table import (
    KINDS,
    Instruction,
    Key,
    Placement,
    Schedule,
    check_placement,
    homes,
    loop,
    needs,
)

Order = Sequence[Instruction | None]
IDLE = "-", "."
WORD = re.compile(rf"([{KINDS}])(\d+)(?:\.(\d+))?")


def parse(
    text: str,
    name: str = "schedule",
    chunks: int | None = None,
    placement: Placement = (),
    latency: int = 1,
) -> Schedule:
    """The schedule of a text with one line per stage: `F0` the forward pass of microbatch 0, `F0.1` that of
    its chunk 1, `B0` backward, `W0` for the weights alone, `-` or `.` an idle tick. Instructions run in this
    order, each as early as its inputs allow.

    Raises ValueError for words that are none, and as `pack` does.

    >>> print(parse("F0 F1 B0 B1\\nF0 B0 F1 B1").text())
    F0 F1 - B0 - B1
    - F0 B0 F1 B1
    """
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    orders = [
        [_word(word, f"{name}, stage {d}, word {n}") for n, word in enumerate(line.split())]
        for d, line in enumerate(lines)
    ]
    return pack(name, orders, chunks, placement, latency)


def is_word(word: str) -> bool:
    """Whether it could stand in a text: an instruction, or an idle tick."""
    return word in IDLE or bool(WORD.fullmatch(word))


def _word(word: str, where: str) -> Instruction | None:
    if word in IDLE:
        return None
    found = WORD.fullmatch(word)
    if not found:
        raise ValueError(
            f"{where}: {word!r} is no instruction; expected F, B or W with the number of a microbatch and, "
            "if it is not 0, that of a chunk (F3, B0.1), or - for an idle tick"
        )
    kind, microbatch, chunk = found.groups()
    return Instruction(kind, int(microbatch), int(chunk or 0))


def pack(
    name: str,
    orders: Sequence[Order],
    chunks: int | None = None,
    placement: Placement = (),
    latency: int = 1,
    aligned: bool = False,
) -> Schedule:
    """The schedule in which each stage runs its instructions in the given order, each in the earliest tick in
    which its inputs are there. None in an order is an idle tick.

    `aligned`: in each tick all stages run the same kind, in turn those that could run. A tick lasts as
    long as its longest instruction, so that none of its time is lost.

    Raises ValueError where the orders deadlock (which instruction waits for which), and as `Schedule` does.
    """
    every = [i for order in orders for i in order if i]
    if not every:
        raise ValueError(f"{name}: no stage has an instruction; expected F, B, W of microbatches")
    chunks = chunks or 1 + max(i.chunk for i in every)
    packing = _Packing(name, orders, placement or loop(len(orders), chunks), chunks, latency)
    ticks: list[tuple[Instruction | None, ...]] = []
    since = 0  # ticks in which nothing ran
    while packing.heads:
        ready = packing.ready(len(ticks))
        ready = packing.of_one_kind(ready) if aligned else ready
        ticks.append(packing.run(ready, len(ticks)))
        since = 0 if ready else since + 1
        if since > latency:
            raise ValueError(packing.deadlock(len(ticks) - since))
    microbatches = 1 + max(i.microbatch for i in every)
    return Schedule(name, len(orders), chunks, microbatches, tuple(ticks), packing.placement, latency)


class _Packing:
    """How far each stage has come in its order, and what has run."""

    def __init__(self, name: str, orders: Sequence[Order], placement: Placement, chunks: int, latency: int):
        check_placement(placement, len(orders), chunks)
        for d, order in enumerate(orders):
            for i in filter(None, order):
                if i.chunk >= chunks:
                    raise ValueError(
                        f"{name}: {i} on stage {d} is of chunk {i.chunk}; each stage has {chunks}, counted "
                        "from 0"
                    )
        self.name, self.placement, self.latency = name, placement, latency
        self.homes = homes(placement)
        self.waiting = [list(order)[::-1] for order in orders]
        self.done: dict[Key, tuple[int, int]] = {}  # tick and stage
        self.newest = dict.fromkeys(KINDS, -1)  # in which tick each kind has run

    @property
    def heads(self) -> dict[int, Instruction | None]:
        """What each stage that is not done runs next."""
        return {d: order[-1] for d, order in enumerate(self.waiting) if order}

    def key(self, d: int, i: Instruction) -> Key:
        return i.kind, i.microbatch, self.placement[i.chunk][d]

    def ready(self, tick: int) -> dict[int, Instruction | None]:
        return {d: i for d, i in self.heads.items() if i is None or self._has_arrived(d, i, tick)}

    def _has_arrived(self, d: int, i: Instruction, tick: int) -> bool:
        found = (self.done.get(need) for need in needs(self.key(d, i), len(self.homes)))
        return all(at and tick >= at[0] + (1 if at[1] == d else self.latency) for at in found)

    def of_one_kind(self, ready: Mapping[int, Instruction | None]) -> dict[int, Instruction | None]:
        """Of the kind that has not run for longest."""
        kinds = {i.kind for i in ready.values() if i}
        kind = min(kinds, key=lambda kind: (self.newest[kind], KINDS.index(kind)), default="")
        return {d: i for d, i in ready.items() if i is None or i.kind == kind}

    def run(self, ready: Mapping[int, Instruction | None], tick: int) -> tuple[Instruction | None, ...]:
        for d, i in ready.items():
            self.waiting[d].pop()
            if i is not None:
                self.done[self.key(d, i)] = tick, d
                self.newest[i.kind] = tick
        return tuple(ready.get(d) for d in range(len(self.waiting)))

    def deadlock(self, tick: int) -> str:
        """Which instruction waits for which: for one that is not there, or in a circle."""
        waits = []
        for d, i in self.heads.items():
            assert i is not None
            need = next(need for need in needs(self.key(d, i), len(self.homes)) if need not in self.done)
            stage, chunk = self.homes[need[2]]
            awaited = Instruction(need[0], need[1], chunk)
            told = f"{i} on stage {d} waits for {awaited} on stage {stage}"
            if awaited not in self.waiting[stage]:
                return (
                    f"{self.name} stops at tick {tick}: {told}, which is not there. Add {awaited} to the "
                    f"line of stage {stage}."
                )
            first = self.waiting[stage][-1]
            waits.append(told + f", where {first} comes before it" * (first != awaited))
        return (
            f"{self.name} deadlocks at tick {tick}: {'; '.join(waits)}. Move an instruction behind what it "
            "waits for: a stage runs its instructions in the order given."
        )
