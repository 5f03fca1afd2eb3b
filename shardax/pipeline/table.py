"""A schedule as data: a table tick × stage of instructions, checked, and printed.

A *stage* is a place on the mesh's stage axis. Each holds `chunks` pieces of the model, so that the program
has `stages * chunks` *virtual stages*, which a microbatch passes in order. In one *tick* a stage runs one
instruction:

    F   the forward pass of a microbatch through a chunk
    B   its backward pass; where a W of the same microbatch and chunk follows, for the inputs alone
    W   its backward pass for the weights

What an instruction makes in tick t, its own stage has in tick t + 1, another in tick t + `latency`.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardax.validation import is_integer

KINDS = "FBW"
Placement = tuple[tuple[int, ...], ...]
Key = tuple[str, int, int]  # kind, microbatch, virtual stage


@dataclass(frozen=True, order=True)
class Instruction:
    """One instruction of a stage, as text `F3` or, of another chunk than 0, `F3.1`.

    >>> Instruction("B", 3, 1)
    B3.1
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __post_init__(self):
        if self.kind not in tuple(KINDS) or self.microbatch < 0 or self.chunk < 0:
            raise ValueError(
                f"Instruction({self.kind!r}, {self.microbatch}, {self.chunk}): kind is one of F, B, W; "
                "microbatch and chunk count from 0"
            )

    def __repr__(self):
        return f"{self.kind}{self.microbatch}" + f".{self.chunk}" * (self.chunk > 0)


def loop(stages: int, chunks: int) -> Placement:
    """Virtual stage `c * stages + d` is chunk c of stage d: microbatches go round the ring `chunks` times."""
    return tuple(tuple(c * stages + d for d in range(stages)) for c in range(chunks))


def zigzag(stages: int, chunks: int) -> Placement:
    """A V where `chunks` is 2: every other chunk is passed backwards, and the turns stay on their stage."""
    return tuple(row if c % 2 == 0 else row[::-1] for c, row in enumerate(loop(stages, chunks)))


@dataclass(frozen=True)
class Schedule:
    """What each stage does in each tick. Checked when it is made; `packing.pack` makes one of orders.

    `ticks[t][d]` is the instruction of stage d in tick t, None where it is idle. `placement[c][d]` is the
    virtual stage that is chunk c of stage d (`loop` unless given). `latency` is in how many ticks an output
    is at its neighbour: 1 if sends end with their tick, 2 if they overlap with the next one.

    Raises ValueError if a microbatch does not pass each virtual stage exactly once, forward and (unless
    nothing runs backward) backward, if an instruction runs before what it needs has arrived, or if virtual
    stages that follow each other are not neighbours on the ring of stages. The message names instruction,
    stage and tick.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    ticks: tuple[tuple[Instruction | None, ...], ...]
    placement: Placement = ()
    latency: int = 1

    def __post_init__(self):
        for what in ("stages", "chunks", "microbatches", "latency"):
            positive(f"{self.name}: {what}", getattr(self, what))
        object.__setattr__(self, "placement", self.placement or loop(self.stages, self.chunks))
        check_placement(self.placement, self.stages, self.chunks)
        _check(self)

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    @cached_property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """The stage and the chunk of each virtual stage."""
        return homes(self.placement)

    def virtual_on(self, stage: int) -> list[int]:
        """The virtual stages that a stage has."""
        return [k for k, (d, _) in enumerate(self.homes) if d == stage]

    @cached_property
    def backward(self) -> bool:
        """Whether it has backward passes."""
        return any(kind != "F" for kind, _, _ in self.where)

    @cached_property
    def splits(self) -> bool:
        """Whether backward passes are split into B, for the inputs, and W, for the weights."""
        return any(kind == "W" for kind, _, _ in self.where)

    @cached_property
    def where(self) -> Mapping[Key, int]:
        """The tick of each (kind, microbatch, virtual stage)."""
        return {self.key(d, i): t for t, d, i in self.instructions()}

    def instructions(self) -> Iterator[tuple[int, int, Instruction]]:
        """(tick, stage, instruction) of all that is not idle, tick by tick."""
        for t, row in enumerate(self.ticks):
            for d, instruction in enumerate(row):
                if instruction is not None:
                    yield t, d, instruction

    def key(self, stage: int, instruction: Instruction) -> Key:
        return instruction.kind, instruction.microbatch, self.placement[instruction.chunk][stage]

    def needs(self, key: Key) -> Iterator[Key]:
        return needs(key, self.virtual_stages)

    def last_use(self, microbatch: int, virtual: int) -> int | None:
        """The tick after which nothing of this forward pass is needed: that of its W, else of its B."""
        ticks = (self.where.get((kind, microbatch, virtual)) for kind in "WB")
        return next((t for t in ticks if t is not None), None)

    @property
    def orders(self) -> tuple[tuple[Instruction | None, ...], ...]:
        """What each stage does, in order; None where it is idle, but for the end."""
        columns = [list(column) for column in zip(*self.ticks, strict=True)]
        for column in columns:
            while column and column[-1] is None:
                column.pop()
        return tuple(map(tuple, columns))

    def text(self) -> str:
        """One line per stage, `-` where it is idle; `packing.parse` reads it.

        >>> f = Instruction("F", 0)
        >>> print(Schedule("mine", 2, 1, 1, ((f, None), (None, f))).text())
        F0
        - F0
        """
        return "\n".join(" ".join("-" if i is None else repr(i) for i in order) for order in self.orders)

    @property
    def sizes(self) -> str:
        """Its name and sizes, for people."""
        chunks = f" × {self.chunks} chunks" if self.chunks > 1 else ""
        stages = f"{self.stages} stage" + "s" * (self.stages > 1)
        return f"{self.name}: {stages}{chunks}, {self.microbatches} microbatch" + "es" * (
            self.microbatches > 1
        )

    @property
    def idle(self) -> tuple[int, ...]:
        """Idle ticks of each stage, of the whole table."""
        return tuple(column.count(None) for column in zip(*self.ticks, strict=True))

    @property
    def bubble(self) -> float:
        """The idle part of all ticks of all stages."""
        return sum(self.idle) / (len(self.ticks) * self.stages)

    @property
    def waits(self) -> tuple[int, ...]:
        """Idle ticks of each stage between its first and its last instruction, as zero-bubble papers count
        them (a stage that is done may begin with the next step).
        """
        found = []
        for column in zip(*self.ticks, strict=True):
            busy = [t for t, i in enumerate(column) if i is not None]
            found.append(busy[-1] - busy[0] + 1 - len(busy))
        return tuple(found)

    def __str__(self):
        return grid(self, shutil.get_terminal_size().columns)


def grid(schedule: Schedule, width: int) -> str:
    """A table of ticks × stages as text whose lines have at most `width` columns, where there is room for
    one.
    """
    cell = 1 + max(len(repr(i)) for _, _, i in schedule.instructions())
    cell = max(cell, 1 + len(str(len(schedule.ticks) - 1)))
    head = len(f"stage {schedule.stages - 1}")
    step = max(1, (width - head) // cell)
    blocks = []
    for start in range(0, len(schedule.ticks), step):
        rows = schedule.ticks[start : start + step]
        lines = ["tick".ljust(head) + "".join(str(start + n).rjust(cell) for n in range(len(rows)))]
        for d in range(schedule.stages):
            cells = ("." if row[d] is None else repr(row[d]) for row in rows)
            lines.append(f"stage {d}".ljust(head) + "".join(text.rjust(cell) for text in cells))
        blocks.append("\n".join(lines))
    head = f"{schedule.sizes}, {len(schedule.ticks)} ticks, {100 * schedule.bubble:.1f} % idle"
    return head + "\n" + "\n\n".join(blocks)


def positive(what: str, number: int) -> None:
    if not is_integer(number, 1):
        raise ValueError(f"{what} is {number!r}; expected an int of 1 or more")


def homes(placement: Placement) -> tuple[tuple[int, int], ...]:
    """The stage and the chunk of each virtual stage."""
    found = {virtual: (d, c) for c, row in enumerate(placement) for d, virtual in enumerate(row)}
    return tuple(found[virtual] for virtual in range(len(found)))


def check_placement(placement: Placement, stages: int, chunks: int) -> None:
    """Raises ValueError unless each virtual stage is there once, next to the one before it."""
    sizes = [len(row) for row in placement]
    numbers = sorted(virtual for row in placement for virtual in row)
    if sizes != [stages] * chunks or numbers != list(range(stages * chunks)):
        raise ValueError(
            f"placement is {placement}; expected {chunks} tuples (one per chunk) of {stages} numbers (one "
            f"per stage), in which each virtual stage from 0 to {stages * chunks - 1} stands once"
        )
    at = homes(placement)
    for virtual, ((d, _), (e, _)) in enumerate(zip(at, at[1:], strict=False)):
        if (e - d) % stages not in (0, 1, stages - 1):
            raise ValueError(
                f"placement puts virtual stage {virtual} on stage {d} and {virtual + 1} on stage {e}, which "
                f"are no neighbours on the ring of {stages} stages; expected the same stage or the one "
                "before or after it"
            )


def needs(key: Key, virtual_stages: int) -> Iterator[Key]:
    """What must have run before, as keys."""
    kind, microbatch, virtual = key
    if kind == "F" and virtual > 0:
        yield "F", microbatch, virtual - 1
    if kind == "B":
        yield "F", microbatch, virtual
        if virtual < virtual_stages - 1:
            yield "B", microbatch, virtual + 1
    if kind == "W":
        yield "B", microbatch, virtual


def _check(schedule: Schedule) -> None:
    name, seen = schedule.name, {}
    for t, row in enumerate(schedule.ticks):
        if len(row) != schedule.stages:
            raise ValueError(
                f"{name}: tick {t} has {len(row)} entries; expected {schedule.stages}, one per stage (None: "
                "idle)"
            )
    for t, d, i in schedule.instructions():
        if i.chunk >= schedule.chunks or i.microbatch >= schedule.microbatches:
            raise ValueError(
                f"{name}: {i} on stage {d} in tick {t}: expected microbatches below {schedule.microbatches} "
                f"and chunks below {schedule.chunks}"
            )
        key = schedule.key(d, i)
        if key in seen:
            raise ValueError(
                f"{name}: {i} on stage {d} runs in tick {seen[key]} and again in tick {t}; remove one of them"
            )
        seen[key] = t
    _check_complete(schedule, seen)
    at = schedule.homes
    for (kind, microbatch, virtual), t in seen.items():
        d, chunk = at[virtual]
        for need in schedule.needs((kind, microbatch, virtual)):
            stage, c = at[need[2]]
            delay = 1 if stage == d else schedule.latency
            if seen[need] + delay > t:
                raise ValueError(
                    f"{name}: {Instruction(kind, microbatch, chunk)} on stage {d} runs in tick {t}, but "
                    f"needs {Instruction(need[0], microbatch, c)} of stage {stage}, which runs in tick "
                    f"{seen[need]} and is there in tick {seen[need] + delay}; run it then or later"
                )


def _check_complete(schedule: Schedule, seen: Mapping[Key, int]) -> None:
    backward = any(kind != "F" for kind, _, _ in seen)
    for kind in "FB" if backward else "F":
        for microbatch in range(schedule.microbatches):
            for virtual, (d, chunk) in enumerate(schedule.homes):
                if (kind, microbatch, virtual) not in seen:
                    raise ValueError(
                        f"{schedule.name}: {Instruction(kind, microbatch, chunk)} is missing on stage {d}; "
                        "each microbatch runs once on each chunk of each stage, forward and, unless none "
                        "does, backward"
                    )
    for kind, microbatch, virtual in seen:
        if kind == "W" and ("B", microbatch, virtual) not in seen:
            d, chunk = schedule.homes[virtual]
            raise ValueError(
                f"{schedule.name}: {Instruction('W', microbatch, chunk)} on stage {d} has no "
                f"{Instruction('B', microbatch, chunk)}; add it before"
            )
