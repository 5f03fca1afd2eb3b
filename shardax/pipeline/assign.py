"""On which stage each part of a step runs, forward and backward, and how values get from one to another.

The forward parts are cut in program order. A backward part runs on the last stage that no backward part
before it has left and on which the forward values and the weights that it reads are there:

    forward value   made on stage s, sent up to the last stage that reads it, kept there for the backward pass
    backward value  made on stage s, sent down to the first stage that reads it

Any assignment works in which stages of backward parts fall along what they read. A forward value that is read
further down than it is made goes down beside the cotangents.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardax.pipeline.cut import Part, merged, rows_of
from shardax.pipeline.flow import Flow, Rows

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, eq=False)
class Assignment:
    """`forward[k]`, `backward[k]`: the parts of virtual stage k, in order. `places`: where among the forward
    parts all stages but the first begin.
    """

    flow: Flow
    places: Sequence[int]
    forward: Sequence[Sequence[Part]]
    backward: Sequence[Sequence[Part]]

    @staticmethod
    def of(
        flow: Flow, places: Sequence[int], pinned: Mapping[Any, Collection[int]] | None = None
    ) -> "Assignment":
        """`pinned`: variables that are to be made on one of these stages, if they can."""
        bounds = [0, *places, len(flow.parts)]
        forward = [merged(flow.parts[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
        found = _Backward(flow, Assignment(flow, places, forward, [[] for _ in forward]), pinned or {})
        return Assignment(flow, places, forward, found.parts())

    @property
    def stages(self) -> int:
        return len(self.forward)

    @cached_property
    def made(self) -> dict[Any, tuple[str, int]]:
        """In which pass and on which stage each key is made."""
        passes = (FORWARD, self.forward), (BACKWARD, self.backward)
        return {
            key: (name, k)
            for name, stages in passes
            for k, parts in enumerate(stages)
            for part in parts
            for key in self.flow.writes(part)
        }

    @cached_property
    def stretches(self) -> dict[tuple[int, int], list[Any]]:
        """The ("rows", ...) keys, by equation and result."""
        found = defaultdict(list)
        for key in self.made:
            if isinstance(key, tuple) and key[0] == "rows":
                found[key[1:3]].append(key)
        return found

    def keys(self, v, rows: Rows | None = None) -> list[Any]:
        """Of a variable, or of some of its rows."""
        if isinstance(v, tuple) or not self.flow.is_stacked(v):
            return [v]
        number = self.flow.maker[v]
        each = self.stretches[number, self.flow.jaxpr.eqns[number].outvars.index(v)]
        return [key for key in each if rows is None or key[3] < rows[1] and rows[0] < key[4]]

    def reads(self, parts: Iterable[Part]) -> Iterator[Any]:
        """The keys that parts read."""
        for part in parts:
            for operand in self.flow.operands(part):
                yield from self.keys(operand.key, operand.rows)

    @cached_property
    def top(self) -> dict[Any, int]:
        """The last stage whose forward pass has a value of the forward pass."""
        last = {key: k for key, (name, k) in self.made.items() if name == FORWARD}
        for k, parts in enumerate(self.forward):
            for key in self.reads(parts):
                last[key] = max(last[key], k)
        return last

    def split(self, k: int) -> tuple[list[Part], list[Part]]:
        """The backward parts of a stage: those that what it sends down waits for, and the others."""
        wanted = {key for key in self.ways.returned[k] if self.made[key] == (BACKWARD, k)}
        first: list[Part] = []
        for part in reversed(self.backward[k]):
            if wanted & set(self.flow.writes(part)):
                first.append(part)
                wanted.update(self.reads([part]))
        return first[::-1], [part for part in self.backward[k] if part not in first]

    @cached_property
    def ways(self) -> "Ways":
        return Ways.of(self)


@dataclass(frozen=True)
class Ways:
    """Keys of each virtual stage: received from the stage before, returned to it, kept from the forward to
    the backward pass.
    """

    received: list[list[Any]]
    returned: list[list[Any]]
    kept: list[list[Any]]

    @staticmethod
    def of(found: Assignment) -> "Ways":
        received, returned, kept = ([[] for _ in found.forward] for _ in range(3))
        readers: defaultdict[Any, set[int]] = defaultdict(set)
        for k, parts in enumerate(found.backward):
            for key in found.reads(parts):
                readers[key].add(k)
        for key, (name, made) in found.made.items():
            read = readers[key]
            if name == FORWARD:
                for k in range(made + 1, max([found.top[key], *read]) + 1):
                    received[k].append(key)
                for k in {max(k, made) for k in read}:
                    kept[k].append(key)
            for k in range(min(read, default=made) + 1, made + 1):
                returned[k].append(key)
        return Ways(received, returned, kept)


@dataclass
class _Backward:
    """Assigns the backward parts, in program order, one trip at a time."""

    flow: Flow
    forward: Assignment
    pinned: Mapping[Any, Collection[int]]
    stage: dict[Part, int] = field(default_factory=dict)

    def parts(self) -> list[list[Part]]:
        stages: list[list[Part]] = [[] for _ in self.forward.forward]
        for part in self.flow.returning:
            read = [k for operand in self.flow.operands(part) for k in self._there(operand.key, operand.rows)]
            read += map(self._reader, self.flow.pieces([part]))
            last = min(read, default=len(stages) - 1)
            wanted = {k for v in self.flow.jaxpr.eqns[part.number].outvars for k in self.pinned.get(v, ())}
            self.stage[part] = max((k for k in wanted if k <= last), default=last)
            stages[self.stage[part]].append(part)
        return [merged(parts) for parts in stages]

    def _reader(self, piece: tuple[Any, Rows | None]) -> int:
        """The last stage whose forward pass reads a piece of the parameters, or one that it is in: the last
        stage, where there is none."""
        v, rows = piece
        last = len(self.forward.forward) - 1
        found = self.pieces.get(v, [])
        return max(
            (k for k, own in found if own == rows or own and rows and own[0] <= rows[0] < own[1]),
            default=last,
        )

    @cached_property
    def pieces(self) -> dict[Any, list[tuple[int, Rows | None]]]:
        """Where forward passes read each: stages and rows."""
        found: defaultdict[Any, list[tuple[int, Rows | None]]] = defaultdict(list)
        for k, parts in enumerate(self.forward.forward):
            for v, rows in self.flow.pieces(parts):
                found[v].append((k, rows))
        return found

    def _there(self, key, rows: Rows | None) -> Iterator[int]:
        """The stages of which the part can be on none further up."""
        number = key[1] if isinstance(key, tuple) else self.flow.maker[key]
        if number not in self.flow.backward:
            yield from (self.forward.top[k] for k in self.forward.keys(key, rows))
            return
        trips = self.flow.trips(number)
        for part in self._trips(key, number, trips, rows):
            yield self.stage[part]

    def _trips(self, key, number: int, trips: int, rows: Rows | None) -> Iterator[Part]:
        if isinstance(key, tuple):
            yield Part(number, key[4] - 1, key[4])
        elif not self.flow.is_stacked(key):
            yield Part(number, trips - 1, trips)
        else:
            eqn = self.flow.jaxpr.eqns[number]
            for trip in range(trips):
                mine = rows_of(eqn, trip, trip + 1)
                if rows is None or rows[0] <= mine[0] < rows[1]:
                    yield Part(number, trip, trip + 1)
