"""Cells, which hold what is known of a value's sharding, and the one step of completion: what an edge teaches
its values.

Cells are numbered, and a step is a function from numbers to numbers. Equal steps, of which a program with
alike layers has many, are taken once.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardax.completion.node_classes import EdgePattern
from shardax.sharding import Axes, AxisSizes, Sharding, round_up, shard_count
from shardax.spmd_rules.localize import project
from shardax.spmd_rules.rule import UNSPLIT, DimFactors, Factors


@dataclass(frozen=True, slots=True)
class Cell:
    """What is known of a value: the axes of each dim; which dims an annotation closes; whether it is held, so
    that it neither propagates nor learns anything for now.
    """

    dims: tuple[Axes, ...]
    closed: tuple[bool, ...] = ()
    held: bool = False


SPREAD_DATA, SPREAD_STATE, DATA, ALL = range(4)
"""The phases. First data and the annotations inside spread among what is elementwise. Then the annotated
state does, to its copies, its gradient and its successor; what it alone reached is held. Then the data
spreads to everything that is not held, as if there were no state. Last, everything spreads."""

Lesson = tuple[int, int, tuple[tuple[int, int], ...]]
"""A position of an edge, its new cell, and for each dim that grew the position that it was learned from."""

Claims = dict[str, tuple[Axes, int]]


class Cells:
    """The cells of a program on a mesh, by number, and the steps that were already taken. Cell 0 is that of
    literals; it never changes."""

    def __init__(self, sizes: AxisSizes):
        self.sizes = sizes
        self.cells: list[Cell] = []
        self.numbers: dict[Cell, int] = {}
        self.shardings: dict[int, Sharding] = {}
        self.number(Cell((), (), True))

    def number(self, cell: Cell) -> int:
        if cell not in self.numbers:
            self.numbers[cell] = len(self.cells)
            self.cells.append(cell)
        return self.numbers[cell]

    def sharding(self, number: int) -> Sharding:
        if number not in self.shardings:
            self.shardings[number] = Sharding(self.cells[number].dims)
        return self.shardings[number]

    def blank(self, rank: int) -> int:
        return self.number(Cell(((),) * rank))

    def released(self, number: int) -> int:
        cell = self.cells[number]
        return self.number(replace(cell, held=False)) if cell.held and number else number

    def step(
        self, edge: EdgePattern, forward: bool, phase: int, twins: tuple[int, ...], cells: tuple[int, ...]
    ) -> tuple[Lesson, ...]:
        """What an edge teaches its results, or else its operands. `twins` has for each position the first
        position of the same value.
        """
        key = (forward, phase, twins, cells)
        known = edge.memo.get(key)
        if known is None:
            known = edge.memo[key] = tuple(self._learn(edge, forward, phase, twins, cells))
        return known

    def _learn(
        self, edge: EdgePattern, forward: bool, phase: int, twins: tuple[int, ...], cells: tuple[int, ...]
    ):
        claims = self._claims(edge, phase, cells)
        now = list(cells)
        for at in range(edge.operands, len(now)) if forward else range(edge.operands):
            have = self.cells[now[twins[at]]]
            if not claims or not now[at] or have.held and phase != SPREAD_STATE:
                continue
            dims, learned = self._refined(edge, at, have, claims)
            if learned:
                held = have.held or phase == SPREAD_STATE and not any(have.dims)
                now[twins[at]] = number = self.number(replace(have, dims=dims, held=held))
                yield twins[at], number, tuple(learned)

    def _claims(self, edge: EdgePattern, phase: int, cells: Sequence[int]) -> Claims:
        """For each factor the axes on which its values agree. The heaviest value goes first: the price of
        moving decides conflicts.
        """
        claims: Claims = {}
        factors, tensors = edge.factors, edge.factors.tensors
        for at in edge.heaviest:
            cell = self.cells[cells[at]]
            if not any(cell.dims) or cell.held and phase in (SPREAD_DATA, DATA):
                continue
            for dim, axes, size in zip(tensors[at], cell.dims, edge.shapes[at], strict=True):
                padded = round_up(size, shard_count(axes, self.sizes))
                for factor, split in project(dim, axes, padded, factors, self.sizes).items() if axes else ():
                    have = claims.get(factor)
                    passes = factors.type_of(factor) != UNSPLIT or factor in factors.restored
                    if passes and (have is None or split.axes[: len(have[0])] == have[0]):
                        claims[factor] = (split.axes, at)
        for group in factors.window_groups:
            _agree_on_windows(claims, group)
        return claims

    def _refined(
        self, edge: EdgePattern, at: int, cell: Cell, claims: Claims
    ) -> tuple[tuple[Axes, ...], list[tuple[int, int]]]:
        """The dims of a value, extended by what its factors agreed on; which dims grew, and from which
        positions they learned it.
        """
        tensor, shape, dims = edge.factors.tensors[at], edge.shapes[at], list(cell.dims)
        used = {a for axes in dims for a in axes}
        learned = []
        rank = {factor: i for i, factor in enumerate(claims)}
        learning = [
            d
            for d, dim in enumerate(tensor)
            if any(f in claims for f in dim) and not (cell.closed and cell.closed[d])
        ]
        for d in sorted(learning, key=lambda d: min(rank[f] for f in tensor[d] if f in rank)):
            axes, have = _dim_axes(tensor[d], claims, edge.factors, self.sizes), dims[d]
            new = tuple(itertools.takewhile(lambda a: a not in used, axes[len(have) :]))
            count = shard_count(have + new, self.sizes)
            if (
                axes[: len(have)] == have
                and new
                and (shape[d] >= count or _annotated_small(edge, tensor[d], claims))
            ):
                dims[d] = have + new
                used.update(new)
                learned.append((d, next(claims[f][1] for f in tensor[d] if f in claims)))
        return tuple(dims), learned


def _annotated_small(edge: EdgePattern, dim: DimFactors, claims: Claims) -> bool:
    """Whether axes come from a dim of the same few positions: somebody annotated it so, and some devices have
    none of it.
    """
    factor = dim[0]
    at = claims[factor][1] if len(dim) == 1 and factor in claims else None
    return at is not None and edge.factors.sizes[factor] > 1 and dim in edge.factors.tensors[at]


def _agree_on_windows(claims: Claims, group: Sequence[str]) -> None:
    """Gives windowed factors that are split over the same axes one list of axes: that of the heaviest value,
    or more.
    """
    agreed = None
    for axes, at in [claim for factor, claim in claims.items() if factor in group]:
        if agreed is None or axes[: len(agreed[0])] == agreed[0]:
            agreed = (axes, at)
    if agreed is not None:
        claims.update(dict.fromkeys(group, agreed))


def _dim_axes(dim: DimFactors, claims: Claims, factors: Factors, sizes: AxisSizes) -> Axes:
    """The axes of a dim, from those of its factors. A minor factor counts only where the major ones are split
    to single positions.
    """
    axes: Axes = ()
    majors = 1
    for factor in dim:
        mine = claims[factor][0] if factor in claims else ()
        if mine and majors != shard_count(axes, sizes):
            break
        if mine and majors > 1 and factors.sizes[factor] % shard_count(mine, sizes):
            break
        axes += tuple(a for a in mine if a not in axes)
        majors *= factors.sizes[factor]
    return axes
