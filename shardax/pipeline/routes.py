"""Which ppermutes carry what stages send: as few as can be in each tick, and few kinds of ticks.

A stage makes one thing in a tick, so one ppermute can carry what all of them send, to the next stage or to
the previous one, where no two send to the same. Ticks whose ppermutes fit together are of one *kind*, and a
program has a ppermute for each kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardax.pipeline.slots import TO_NEXT, TO_PREVIOUS, TO_SELF, Tables

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Routes:
    """`kinds[n]`: the ppermutes, as (source, destination) pairs, of ticks of that kind, one for each *lane*;
    a tick of kind `kind[t]`. Kind 0 sends nothing.

    forward, cotangent: int32 [ticks, stages, lanes + 1]: the slot in which what arrives by each lane is
    stored, as
      an activation or a cotangent, -1 if nothing of that sort does. The last is what a stage sends to itself.
    """

    kinds: tuple[tuple[Pairs, ...], ...]
    kind: np.ndarray
    forward: np.ndarray
    cotangent: np.ndarray

    @property
    def sending(self) -> np.ndarray:
        """Of each tick, the number of its kind among those that send; 0, too, where nothing is sent."""
        return np.maximum(self.kind - 1, 0, dtype=np.int32)

    @property
    def lanes(self) -> int:
        return max(map(len, self.kinds))


def routes(tables: Tables) -> Routes:
    """See `Routes`.

    >>> from shardax.pipeline.schedules import make_schedule
    >>> from shardax.pipeline.slots import tables
    >>> routes(tables(make_schedule("gpipe", 3, 4))).kinds
    ((), (((0, 1), (1, 2)),), (((1, 0), (2, 1)),))
    """
    ticks, stages = tables.send.shape
    kinds: list[list[dict[int, int]]] = [[]]
    kind = np.zeros(ticks, np.int32)
    for t in range(ticks):
        mine = _lanes(_pairs(tables, t))
        if mine:
            kind[t] = next((n for n, other in enumerate(kinds) if n and _fits(mine, other)), len(kinds))
            if kind[t] == len(kinds):
                kinds.append([{} for _ in mine])
            for lane, pairs in zip(kinds[kind[t]], mine, strict=True):
                lane.update(pairs)
    lanes = max(map(len, kinds))
    arrivals = {}
    for name, arriving in (("forward", tables.arriving_forward), ("cotangent", tables.arriving_cotangent)):
        arrivals[name] = slots = np.full((ticks, stages, lanes + 1), -1, np.int32)
        slots[..., -1] = arriving[..., TO_SELF]
        for t in range(ticks):
            for lane, pairs in enumerate(_lanes(_pairs(tables, t))):
                for source, destination in pairs.items():
                    way = tables.send[t, source]
                    slots[t, destination, lane] = arriving[t, destination, way]
    found = tuple(tuple(tuple(sorted(lane.items())) for lane in each) for each in kinds)
    return Routes(found, kind, arrivals["forward"], arrivals["cotangent"])


def _pairs(tables: Tables, tick: int) -> list[tuple[int, int]]:
    stages = tables.send.shape[1]
    steps = {TO_NEXT: 1, TO_PREVIOUS: -1}
    return [
        (d, (d + steps[way]) % stages) for d, way in enumerate(map(int, tables.send[tick])) if way in steps
    ]


def _lanes(pairs: Sequence[tuple[int, int]]) -> list[dict[int, int]]:
    """The pairs, in lanes in none of which two sources have one destination."""
    lanes: list[dict[int, int]] = []
    for source, destination in pairs:
        free = next((lane for lane in lanes if destination not in lane.values()), None)
        if free is None:
            lanes.append(free := {})
        free[source] = destination
    return lanes


def _fits(mine: Sequence[dict[int, int]], other: Sequence[dict[int, int]]) -> bool:
    return len(mine) == len(other) and all(map(_are_one, mine, other))


def _are_one(a: dict[int, int], b: dict[int, int]) -> bool:
    """Whether two partial permutations are parts of one."""
    both = list((a | b).items())
    return all(a.get(s, d) == d and b.get(s, d) == d for s, d in both) and len({d for _, d in both}) == len(
        both
    )
