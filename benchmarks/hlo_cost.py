"""What one call of a program costs, read off what the TPU compiler made of it: cycles, and bytes that a
device sends.

The compiler writes its own estimate of cycles beside most instructions, loops and collectives excepted. Loops
are counted here with their trips, and collectives by the bytes of ring algorithms. Of a conditional the
dearest branch counts, but of one that runs a schedule: there each tick, a trip of its loop, counts with the
dearest of the branches that the stages run in it. An instruction of a schedule may have parts in several
conditionals; which branches they are, the names of their scopes say (`shardax.cost.noted`).
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardax.cost.chips import V3, Chip
from shardax.explain import hlo

CLOCKS = {"v3": 0.94e9, "v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
"""Cycles a second: the peak FLOP/s over those of the matrix units in one cycle."""


@dataclass(frozen=True)
class Cost:
    """Cycles of one device, and by kind of collective the bytes that it sends, and how often."""

    cycles: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    times: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.cycles + other.cycles, self.sent + other.sent, self.times + other.times)

    def __mul__(self, trip_count: int) -> "Cost":
        sent, times = (
            Counter({kind: trip_count * n for kind, n in counts.items()})
            for counts in (self.sent, self.times)
        )
        return Cost(self.cycles * trip_count, sent, times)

    def seconds(self, chip: Chip) -> float:
        """Nothing overlapped: the compiler's cycles, then each byte over the links of one axis."""
        return self.compute_seconds(chip) + self.sent.total() / chip.link_rate

    def compute_seconds(self, chip: Chip) -> float:
        return self.cycles / CLOCKS[chip.name]


def cost(text: str, table: np.ndarray | None = None, chip: Chip = V3) -> Cost:
    """The cost of `compiled.as_text()`, a scheduled module.

    Args:
      table: which branch of the conditional that runs a schedule each stage takes in each tick, [ticks,
        stages]; None where there is none.
      chip: by whose seconds branches are compared.

    Raises:
      ValueError: a loop does not count up to a constant, or no loop has so many ticks and branches.
    """
    module = _Module(text, table, chip)
    total = module.cost("ENTRY")
    if table is not None:
        module.scheduled()
    return total


def branches(text: str, table: np.ndarray, chip: Chip = V3) -> list[Cost]:
    """Of the instructions of a schedule, as the table numbers them. Raises ValueError as `cost` does."""
    module = _Module(text, table, chip)
    module.cost("ENTRY")
    return module.scheduled()


@dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%[\w.-]+", self.rest.split(")")[0])

    def called(self, attribute: str) -> str:
        return self.attribute(rf"{attribute}=(%[\w.-]+)")

    def attribute(self, pattern: str) -> str:
        match = re.search(pattern, self.rest)
        return match[1] if match else ""


@dataclass(frozen=True)
class _Computation:
    text: str

    @cached_property
    def instructions(self) -> dict[str, _Instruction]:
        matches = map(_INSTRUCTION.match, self.text.splitlines())
        return {m["name"]: _Instruction(m["name"], m["opcode"], m["rest"]) for m in matches if m}

    @cached_property
    def root(self) -> _Instruction:
        return self.instructions[re.findall(r"^  ROOT (%[\w.-]+)", self.text, re.M)[-1]]

    def source(self, name: str) -> _Instruction:
        """The instruction that makes a value, copies and casts looked through."""
        made = self.instructions[name]
        return self.source(made.operands[0]) if made.opcode in ("bitcast", "convert", "copy") else made

    def element(self, name: str, index: int) -> str:
        """What stands there in a tuple; the name itself where it is none that is made here."""
        made = self.source(name)
        return made.operands[index] if made.opcode == "tuple" else name

    def constant(self, name: str) -> int | None:
        made = self.source(name)
        return int(made.attribute(r"^(-?\d+)\)")) if made.opcode == "constant" else None


_INSTRUCTION = re.compile(r"  (?:ROOT )?(?P<name>%[\w.-]+) = .*? (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$")
_FOLLOWED = ("while", "conditional", "call")
_LATER = ("async-update", "async-done")  # of what an async-start has called


class _Module:
    """The computations of a module. Those of loops, branches and calls are followed; a fusion's belongs to
    its caller.
    """

    def __init__(self, text: str, table: np.ndarray | None = None, chip: Chip = V3):
        self.table, self.chip = table, chip
        self.found: list[list[Cost]] = []
        self.head = text.split("\n", 1)[0]
        bodies = re.findall(r"^(ENTRY|%[\w.-]+) .*?\{\n(.*?)^\}", text, re.M | re.S)
        self.computations = {name: _Computation(body) for name, body in bodies}

    def cost(self, name: str, trips: int = 1) -> Cost:
        """Of so many runs of a computation."""
        computation = self.computations[name]
        total = self.own(computation) * trips
        parts: list[list[Cost]] = []
        for instruction in computation.instructions.values():
            if own := self.scheduled_part(instruction, trips):
                parts.append(own)
            else:
                total += self.followed(computation, instruction) * trips
        if parts and self.table is not None:
            known = [sum(some, Cost()) for some in zip(*parts, strict=True)]
            self.found.append(known)
            ticks = ([known[i] for i in {*row}] for row in self.table.tolist())
            total = sum(map(self.dearest, ticks), total)
        return total

    def scheduled_part(self, instruction: _Instruction, trips: int) -> list[Cost]:
        """What a conditional costs, by instructions of the schedule; empty where it is no part of them."""
        if self.table is None or instruction.opcode != "conditional" or trips != len(self.table):
            return []
        count = self.table.max() + 1
        named = instruction.attribute(r'op_name="[^"]*/branches ([\d.]+) by table/cond"')
        taken = [*map(int, named.split("."))] if named else [*range(count)]
        known = self.branches(instruction)
        return [known[i] for i in taken] if (len(taken), max(taken)) == (count, len(known) - 1) else []

    def scheduled(self) -> list[Cost]:
        """The instructions of the one loop that runs the schedule."""
        assert self.table is not None
        if len(self.found) != 1:
            raise ValueError(
                f"{len(self.found)} conditionals have the schedule's {self.table.max() + 1} branches and "
                f"{len(self.table)} ticks; expected one"
            )
        return self.found[0]

    def branches(self, instruction: _Instruction) -> list[Cost]:
        """In the order of their numbers."""
        both = [instruction.called(f"{which}_computation") for which in ("false", "true")]
        names = re.findall(r"%[\w.-]+", instruction.attribute(r"branch_computations=(.*)$")) or both
        return [self.cost(name) for name in names if name in self.computations]

    def dearest(self, known: list[Cost]) -> Cost:
        return max(known, key=lambda branch: branch.seconds(self.chip))

    def own(self, computation: _Computation) -> Cost:
        """Without what its loops, branches and calls cost. An asynchronous collective stands in several
        fusions of one computation, by which the reader of collectives knows that it is one; so they are read
        together."""
        total = Cost(sum(int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', computation.text)))
        for c in hlo.compiled("\n".join([self.head, *self.fused(computation)])):
            total += Cost(0, Counter({c.kind: c.nbytes}), Counter({c.kind: 1}))
        return total

    def fused(self, computation: _Computation) -> Iterator[str]:
        """The text of a computation and of its fusions. To the compiler a reduce-scatter is an all-reduce in
        a fusion that slices it."""
        yield "{\n" + computation.text
        for instruction in computation.instructions.values():
            name = instruction.called("calls")
            if name and instruction.opcode not in _FOLLOWED + _LATER:
                for text in self.fused(self.computations[name]):
                    scatters = name.startswith("%all-reduce-scatter")
                    yield text.replace(" all-reduce(", " reduce-scatter(") if scatters else text

    def followed(self, computation: _Computation, instruction: _Instruction) -> Cost:
        match instruction.opcode:
            case "while":
                return self.cost(instruction.called("body"), self.trip_count(computation, instruction))
            case "conditional":
                return self.dearest(self.branches(instruction))
            case "call":
                return self.cost(instruction.called("to_apply"))
        return Cost()

    def trip_count(self, computation: _Computation, loop: _Instruction) -> int:
        """(bound - start) / step of a loop `while i < bound: i += step`."""
        condition, body = (self.computations[loop.called(name)] for name in ("condition", "body"))
        index, bound = self.bound(condition)
        start = computation.constant(computation.element(loop.operands[0], index))
        step = _added(body, body.element(body.root.name, index))
        if bound is None or start is None or not step:
            raise ValueError(f"the loop {loop.name} does not count from a constant by a constant up to one")
        return max(0, -(-(bound - start) // step))

    def bound(self, condition: _Computation) -> tuple[int, int | None]:
        """Where the counter stands in the loop's state, and what it stays below."""
        compared = condition.root
        assert compared.opcode == "compare" and "direction=LT" in compared.rest, compared
        counter, bound = compared.operands
        return int(condition.source(counter).attribute(r"index=(\d+)")), condition.constant(bound)


def _added(body: _Computation, name: str) -> int | None:
    """The constant that a loop's body adds to its counter."""
    made = body.source(name)
    if made.opcode != "add":
        return None
    return next((n for n in map(body.constant, made.operands) if n is not None), None)
