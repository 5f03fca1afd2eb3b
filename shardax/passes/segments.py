"""Segments: which equations of a program compute with some values element by element, one array's together.

The update of one parameter is elementwise in its moments, mostly. Such equations can be run apart from all
others, on the device for one array after the other, or for one row of it after the other. Whatever else reads
these values, such as the norm of an update, divides them: what depends on that comes in a later segment.

    m' = b m + (1 - b) g          segment 0: reads m, g; makes m', u
    u  = m' / sqrt(v')
    r  = |u|                      outside
    w' = w - r u                  segment 1: reads w, r, u; makes w'
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardax import _jax
from shardax.spmd_rules import equations

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Segment:
    """Equations, in program order, on arrays of one shape and on scalars. Segments of one `depth` do not
    depend on each other.
    """

    shape: Shape
    eqns: Sequence[Any]
    depth: int = 0

    @property
    def made(self) -> list[Any]:
        return [v for eqn in self.eqns for v in eqn.outvars]

    def reads(self) -> list[Any]:
        """The variables that come from outside, in the order in which they are read."""
        made = set(self.made)
        read = (v for eqn in self.eqns for v in eqn.invars if not _jax.is_literal(v))
        return [v for v in dict.fromkeys(read) if v not in made]


def segments(eqns: Sequence[Any], roots: Collection[Any], results: Collection[Any]) -> list[Segment]:
    """The segments of equations that depend on the variables `roots`, with those besides that make what one
    segment alone reads. `results`: the variables that the program gives.
    """
    found = _Members(roots)
    for number, eqn in enumerate(eqns):
        found.see(number, eqn)
    group = {number: found.find(v) for number, v in found.members.items()}
    depth = {group[number]: found.depth[v] for number, v in found.members.items()}
    _pulled(eqns, group, roots, results)
    numbers = defaultdict(list)
    for number in sorted(group):
        numbers[group[number]].append(number)
    return [
        Segment(eqns[ns[-1]].outvars[0].aval.shape, [eqns[n] for n in ns], depth[key])
        for key, ns in numbers.items()
    ]


def in_order(eqns: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """The parts, each some of the equations together, such as segments, and all other equations, each after
    those that make what it reads.
    """
    inside = {id(eqn) for part in parts for eqn in part.eqns}
    every = [*parts, *(eqn for eqn in eqns if id(eqn) not in inside)]
    place = {id(eqn): n for n, eqn in enumerate(eqns)}

    def task(part):
        if id(part) in place:
            return place[id(part)], [v for v in part.invars if not _jax.is_literal(v)], part.outvars
        return max(place[id(eqn)] for eqn in part.eqns), part.reads(), part.made

    order = topological_order(list(map(task, every)))
    assert len(order) == len(every), "parts depend on each other"
    return [every[n] for n in order]


class _Members:
    """The equations that belong to segments, by their numbers, each with its result; results of one segment
    have one representative (`find`).

    The depth of a value counts how often what it depends on leaves segments. A path from a segment to itself
    that leaves it would make it deeper than it is: so segments can be run one after the other.
    """

    def __init__(self, roots: Collection[Any]):
        self.roots = roots
        self.members: dict[int, Any] = {}
        self.depth: dict[Any, int] = {}
        self._parent: dict[Any, Any] = {}

    def see(self, number: int, eqn) -> None:
        read = [v for v in eqn.invars if not _jax.is_literal(v)]
        depth = max((self.depth.get(v, 0) for v in read), default=0)
        if is_elementwise(eqn) and any(v in self.roots or v in self._parent for v in read):
            (made,) = eqn.outvars
            self.members[number], self.depth[made], self._parent[made] = made, depth, made
            for v in read:
                if v in self._parent and self.depth[v] == depth or v in self.roots:
                    self._join((v, depth) if v in self.roots else v, made)
        else:
            left = max((self.depth[v] + 1 for v in read if v in self._parent), default=0)
            self.depth.update(dict.fromkeys(eqn.outvars, max(depth, left)))

    def find(self, v) -> Any:
        while self._parent.setdefault(v, v) is not v:
            v = self._parent[v]
        return v

    def _join(self, a, b) -> None:
        self._parent[self.find(a)] = self.find(b)


def _pulled(
    eqns: Sequence[Any], group: dict[int, Any], roots: Collection[Any], results: Collection[Any]
) -> None:
    """Adds what one segment alone reads, so that it is made there too: what no segment has, and what another
    one makes of roots alone, such as the decay of weights, which the forward pass reads too.
    """
    readers = defaultdict(set)
    for number, eqn in enumerate(eqns):
        for v in eqn.invars:
            if not _jax.is_literal(v):
                readers[v].add(number)
    given = {v for v in results if not _jax.is_literal(v)}
    of_roots = _made_of(roots, eqns, group)
    for number in range(len(eqns) - 1, -1, -1):
        eqn = eqns[number]
        movable = number in of_roots or number not in group and (is_elementwise(eqn) or is_made(eqn))
        if movable and eqn.outvars[0] not in given:
            reading = {group.get(n) for n in readers[eqn.outvars[0]]}
            if len(reading) == 1 and None not in reading:
                (group[number],) = reading


def _made_of(roots: Collection[Any], eqns: Sequence[Any], numbers: Collection[int]) -> set[int]:
    """Which of these equations, by their numbers, compute of roots and scalars alone."""
    known, found = set(roots), set()
    for number in sorted(numbers):
        eqn = eqns[number]
        if all(_jax.is_literal(v) or v in known or v.aval.shape == () for v in eqn.invars):
            known.add(eqn.outvars[0])
            found.add(number)
    return found


def is_elementwise(eqn) -> bool:
    """Whether an equation has one result, an array, and its operands are of that shape, or scalars."""
    return equations.is_elementwise(eqn) and bool(eqn.outvars[0].aval.shape)


def is_made(eqn) -> bool:
    """Whether an equation makes an array of any size of nothing but one scalar, or of places along a dim."""
    return is_fill(eqn) or eqn.primitive.name == "iota" and not eqn.invars


def is_fill(eqn) -> bool:
    """Whether an equation makes an array of one scalar."""
    filled = eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1
    return filled and eqn.invars[0].aval.shape == () != eqn.outvars[0].aval.shape


def topological_order(tasks: Sequence[tuple[int, Iterable[Any], Iterable[Any]]]) -> list[int]:
    """The numbers of tasks (place, variables read, variables made), each after those that make what it reads,
    else by their places; fewer, where some depend on each other.
    """
    maker = {v: number for number, (_, _, made) in enumerate(tasks) for v in made}
    before = [{maker[v] for v in read if v in maker} - {n} for n, (_, read, _) in enumerate(tasks)]
    after = defaultdict(list)
    for number, needed in enumerate(before):
        for n in needed:
            after[n].append(number)
    waiting = [len(needed) for needed in before]
    ready = [(tasks[n][0], n) for n, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for n in after[number]:
            waiting[n] -= 1
            if not waiting[n]:
                heapq.heappush(ready, (tasks[n][0], n))
    return order
