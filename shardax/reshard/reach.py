"""The prices of reshards over few axes, those of all layouts of a value at once.

Three things tell them, each for many values. A `Skeleton` has the layouts that some dims may take over some
axes, and the steps between them, whatever the sizes. A `Grid` has those of dims of certain lengths, in all
sizes to which each may be padded, and what is sent in each step, in elements. With the bytes of an element
each step has its price (`Priced`), and Dijkstra's algorithm, by `scipy.sparse.csgraph`, finds those of the
ways from one layout to all others.

The steps are those of `steps.STEPS`, looked up in a space of dims that all axes divide. Dims of other lengths
have those of them in which each is split only as some size to which it may be padded can be; a change from
one such size to another is a step, too.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csgraph, csr_array

from shardax.cost.network import Way
from shardax.reshard.steps import Leaving, Space, State, Tariff, rows_sent, swap_needs
from shardax.sharding import Axes

FEW = 64  # layouts, from all of which prices take no longer than from a few
NEITHER, BEFORE, AFTER = range(3)  # on which side of a step the length of the minor-most dim counts

Swap = tuple[int, list[tuple[int, int]]]
"""The place of a swap among steps, and its two dims, with the numbers of pieces into which they are cut."""


class Links(NamedTuple):
    """Steps between the layouts of a skeleton. `ends`: (from, to). `sent`: in which way, by number; in how
    many collectives; in each of them what part of what whole of the shard. `minor`: on which side it counts.
    `new`, `gone`: the dims that are split behind it only, or before it only, as bits. `swap`: of a swap its
    row of `cuts`, which has the dims that it cuts, in how many pieces each; -1 of what is none.
    """

    ends: np.ndarray
    sent: np.ndarray
    minor: np.ndarray
    new: np.ndarray
    gone: np.ndarray
    swap: np.ndarray
    cuts: np.ndarray


class Skeleton:
    """The layouts that lead to one another in a space of dims that all axes divide, and the steps between
    them. `place`: by the number of a layout in the space, its place here. `dims`, `counts`: by place, the
    axes of each dim, and into how many pieces they split it. `version`: rises when there are more.
    """

    def __init__(self, space: Space):
        self.space, self.version = space, 0
        self.place: dict[int, int] = {}
        like = skeleton(space.like) if space.like else None
        self.rows: dict[tuple[int, bool], tuple[np.ndarray, list[Swap]]] = like.rows if like else {}
        self.ways: dict[Way, int] = like.ways if like else {}

    def include(self, state: State) -> int:
        """The number of a layout in the space, which is here then, as are all that it leads to."""
        number = self.space.number(state)
        if number not in self.place:
            self._close([number, *self._owing_most(state)])
            self._describe()
            self.version += 1
        return number

    def _owing_most(self, state: State) -> Iterator[int]:
        """A layout that leads to all that owe the same reduction, over whichever axes."""
        reductions = {reduction for _, reduction in state.pending}
        if len(reductions) == 1:
            (reduction,) = reductions
            pending = tuple([(axis, reduction) for axis in sorted(self.space.axes)])
            yield self.space.number(State(((),) * len(state.dims), state.padded, pending))

    def _close(self, todo: list[int]) -> None:
        """Those that are here keep their places: what was numbered by them stays right."""
        found = {*self.place, *todo}
        while todo:
            after = {step[2] for step in self.space.edges(todo.pop())} - found
            found |= after
            todo += after
        new = sorted(found.difference(self.place))
        self.place = self.place | {number: place for place, number in enumerate(new, len(self.place))}

    def _describe(self) -> None:
        states = [self.space.states[number] for number in self.place]
        self.dims = [state.dims for state in states]
        shape = len(states), len(self.space.shape)
        counts = [self.space.counts[axes] for dims in self.dims for axes in dims]
        self.counts = np.array(counts, np.int64).reshape(shape)
        self.is_split = np.array([bool(axes) for dims in self.dims for axes in dims], bool).reshape(shape)
        rows, swaps, start = list[np.ndarray](), list[Swap](), 0
        for number in self.place:
            row, some = self._row(number)
            swaps += [(start + at, needs) for at, needs in some]
            rows.append(row)
            start += len(row)
        source = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        target, *sent, minor = np.concatenate(rows).T
        places = np.zeros(max(self.place) + 1, np.int64)
        places[list(self.place)] = range(len(states))
        ends = np.array([source, places[target]])
        split = self.is_split @ (1 << np.arange(shape[1]))
        before, after = split[ends]
        swap = np.full(start, -1)
        swap[np.array([at for at, _ in swaps], np.int64)] = range(len(swaps))
        cuts = np.array([needs for _, needs in swaps], np.int64).reshape(len(swaps), 2, 2)
        self.links = Links(ends, np.array(sent), minor, after & ~before, before & ~after, swap, cuts)

    def _row(self, number: int) -> tuple[np.ndarray, list[Swap]]:
        """The steps from a layout, without the places; those that do not owe are described once, whatever is
        owed at the end."""
        space, state = self.space, self.space.states[number]
        steps, key = space.edges(number), (number, bool(space.owing and state.pending))
        if key not in self.rows:
            self.rows[key] = self._described(space.shared[key], space.nbytes(state))
        row, swaps = self.rows[key]
        if more := steps[len(row) :]:
            row = np.concatenate([row, self._described(more, space.nbytes(state))[0]])
        return row, swaps

    def _described(self, steps: Sequence[Leaving], nbytes: int) -> tuple[np.ndarray, list[Swap]]:
        tariffs, rows, swaps = list(self.space.tariffs), list[tuple[int, ...]](), list[Swap]()
        for tariff, _, after, edge in steps:
            if edge.kind == "swap":
                swaps.append((len(rows), swap_needs(edge, self.space.counts)))
            minor = NEITHER
            if tariffs[tariff].minor is not None:
                minor = BEFORE if edge.kind == "all_gather" else AFTER
            rows.append((after, *self._sent(tariffs[tariff], nbytes), minor))
        return np.array(rows, np.int64).reshape(-1, 6), swaps

    def _sent(self, tariff: Tariff, nbytes: int) -> tuple[int, int, int, int]:
        """The way, how many collectives, and what part of what whole of the shard is sent in each."""
        kind, axes, sent, _, far = tariff
        assert len({*sent}) < 2, "where all axes divide all dims, pieces are of one size"
        part = Fraction(sent[0] if sent else 0, nbytes)
        return self.way(kind, axes, any(far)), len(sent), part.numerator, part.denominator

    def way(self, kind: str, axes: Axes, far: bool) -> int:
        return self.ways.setdefault(Way(kind, axes, far), len(self.ways))


@lru_cache(maxsize=1 << 12)
def skeleton(space: Space) -> Skeleton:
    """The one of a space."""
    return Skeleton(space)


class Grid:
    """The layouts of a skeleton in all sizes to which their split dims may be padded, and what is sent
    between them.

    A layout is a place in the skeleton, and a code that has the number of the size of each dim, 0 of one that
    is unsplit. `number`: that of each pair, -1 where there is no such. `row_ends`, `after`: the steps, as the
    rows of a matrix. What is sent, for each collective, or some that are alike: in which `step`; of how many
    `elements`, those of the shard; `minor`: how long that is along its minor-most dim, -1 where this does not
    count; `sent`: as that of `Links`.
    """

    def __init__(self, skeleton: Skeleton, lengths: Sequence[int], paddings: Sequence[Sequence[int]]):
        self.skeleton, self.place, self.lengths, self.paddings = skeleton, skeleton.place, lengths, paddings
        codes = list(itertools.product(*(range(len(sizes)) for sizes in paddings)))
        self.digits = np.array(codes, np.int64).reshape(len(codes), len(paddings))
        self.strides = [math.prod(map(len, paddings[d + 1 :])) for d in range(len(paddings))]
        sizes = [np.array(sizes, np.int64)[self.digits[:, d]] for d, sizes in enumerate(paddings)]
        self.sizes = np.array(sizes, np.int64).reshape(self.digits.T.shape)
        self._lay_out()
        ends, pieces = self._steps()
        if any(len(sizes) > 1 for sizes in paddings):
            each = [(ends, pieces), *self._halos(ends.shape[1])]
            ends, pieces = (np.hstack(some) for some in zip(*each, strict=True))
        order = np.argsort(ends[0], kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        self.row_ends = np.searchsorted(ends[0][order], np.arange(self.count + 1)).astype(np.int32)
        self.after = ends[1][order].astype(np.int32)
        step, self.elements, minor, *sent = pieces
        self.step, self.minor = place[step].astype(np.int32), minor
        self.sent = np.array(sent)

    def _lay_out(self) -> None:
        """Which pairs there are, and how many elements a shard has in each."""
        valid = np.ones((len(self.skeleton.dims), len(self.digits)), bool)
        self.local = np.ones(valid.shape, np.int64)
        for d, length in enumerate(self.lengths):
            is_split, count = self.skeleton.is_split[:, d, None], self.skeleton.counts[:, d, None]
            valid &= np.where(is_split, self.sizes[d] % count == 0, self.digits[:, d] == 0)
            self.local *= np.where(is_split, self.sizes[d] // count, length)
        self.count = int(valid.sum())
        self.number = np.where(valid, np.cumsum(valid).reshape(valid.shape) - 1, -1)

    def _steps(self) -> tuple[np.ndarray, np.ndarray]:
        """The steps of the skeleton, in all sizes: from where to where, and what is sent."""
        links = self.skeleton.links
        link, code, end = self._in_all_sizes()
        keep = np.ones(len(link), bool)
        here = np.flatnonzero(links.swap[link] >= 0)
        for dim, pieces in links.cuts[links.swap[link[here]]].transpose(1, 2, 0):
            keep[here] &= self.sizes[dim, code[here]] % pieces == 0
        link, code, end = link[keep], code[keep], end[keep]
        source, target = links.ends[:, link]
        elements = self.local[source, code]
        for d, length in enumerate(self.lengths):
            new = (links.new[link] >> d & 1).astype(bool)
            elements[new] = elements[new] // length * self.sizes[d, end[new]]
        minor = np.full(len(link), -1, np.int64)
        for side, place, size in ((BEFORE, source, code), (AFTER, target, end)):
            here = np.flatnonzero(links.minor[link] == side)
            if len(here):
                d = self.skeleton.space.minor
                minor[here] = self.sizes[d, size[here]] // self.skeleton.counts[place[here], d]
        ends = np.array([self.number[source, code], self.number[target, end]])
        sends = np.flatnonzero(links.sent[1, link])
        pieces = np.vstack([sends, elements[sends], minor[sends], links.sent[:, link[sends]]])
        return ends, pieces

    def _in_all_sizes(self) -> np.ndarray:
        """The steps of the skeleton, with the codes before and behind them: dims that are split then may be
        padded to any size."""
        links = self.skeleton.links
        several = [d for d, sizes in enumerate(self.paddings) if len(sizes) > 1]
        mask, rank = sum([1 << d for d in several]), len(self.paddings)
        kinds, kind = np.unique((links.new & mask) << rank | links.gone & mask, return_inverse=True)
        found = []
        for k, bits in enumerate(kinds.tolist()):
            here = np.flatnonzero(kind == k)
            source, target = links.ends[:, here]
            new = [d for d in several if bits >> rank + d & 1]
            gone = [d for d in several if bits >> d & 1]
            shifts = [
                sum(some)
                for some in itertools.product(
                    *([i * self.strides[d] for i in range(len(self.paddings[d]))] for d in new)
                )
            ]
            for code in np.flatnonzero(~self.digits[:, new].any(axis=1)).tolist():
                kept = code - sum([int(self.digits[code, d]) * self.strides[d] for d in gone])
                for shift in shifts:
                    some = here[(self.number[source, code] >= 0) & (self.number[target, kept + shift] >= 0)]
                    found.append([some, np.full_like(some, code), np.full_like(some, kept + shift)])
        return np.hstack([np.array(each) for each in found])

    def _halos(self, first: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The changes of the size of one dim, numbered from `first` on, and what is sent in them."""
        counts = self.skeleton.space.counts
        for d, sizes in enumerate(self.paddings):
            split: dict[Axes, list[int]] = {}
            for place, dims in enumerate(self.skeleton.dims):
                if dims[d]:
                    split.setdefault(dims[d], []).append(place)
            for (old, new), axes in itertools.product(itertools.permutations(range(len(sizes)), 2), split):
                if sizes[old] % counts[axes] or sizes[new] % counts[axes]:
                    continue
                places, codes = np.array(split[axes])[:, None], np.flatnonzero(self.digits[:, d] == old)
                source = self.number[places, codes]
                target = self.number[places, codes + (new - old) * self.strides[d]]
                some = (source >= 0) & (target >= 0)
                if some.any():
                    elements = self.local[places, codes][some]
                    steps = first + np.arange(len(elements))
                    ends = np.array([source[some], target[some]])
                    yield ends, self._moved(steps, elements, d, axes, sizes[old], sizes[new])
                    first += len(elements)

    def _moved(
        self, steps: np.ndarray, elements: np.ndarray, d: int, axes: Axes, old: int, new: int
    ) -> np.ndarray:
        space = self.skeleton.space
        count, counts = space.counts[axes], tuple([space.network[a] for a in axes])
        each = zip(*rows_sent(old // count, new // count, self.lengths[d], counts), strict=True)
        pieces = [np.zeros((7, 0), np.int64)]
        for rows, far in each:
            way = self.skeleton.way("ppermute", axes, far)
            alike = np.array([[-1], [way], [1], [rows], [old // count]])
            pieces.append(np.vstack([steps, elements, np.repeat(alike, len(steps), axis=1)]))
        return np.hstack(pieces)


_finding = RLock()  # another thread may plan, too


@lru_cache(maxsize=1 << 8)  # of a hundred thousand numbers each, where axes are three
def _grid(skeleton: Skeleton, version: int, lengths: tuple[int, ...], paddings) -> Grid:
    return Grid(skeleton, lengths, paddings)


class Priced:
    """The prices of reshards of a value, for each layout in which it comes and in which it is wanted.

    `space`: of dims that all axes divide. `order`: the dims of the value that may be split. `sizes`: to which
    each may be padded. An even one stands for all that the same axes divide, so its length and its only size
    here (`lengths`, `paddings`) may be a part of the value's. `itemsize`: the bytes of an element, with all
    that is left out counted in. `stretch`: how many elements of the minor-most dim one here stands for.
    """

    def __init__(
        self, space: Space, order: Sequence[int], sizes, lengths, paddings, itemsize: int, stretch: int
    ):
        self.skeleton, self.order, self.sizes = skeleton(space), order, sizes
        self.lengths, self.paddings, self.itemsize, self.stretch = lengths, paddings, itemsize, stretch
        self.version = 0
        self.places: dict[State, tuple[int, int]] = {}
        self.row_of: dict[int, int] = {}
        self.all: np.ndarray | None = None

    def price(self, first: State, last: State) -> float:
        """Of the cheapest way from one layout to another."""
        with _finding:
            start, end = self._place(first), self._place(last)
            if start[0] not in self.row_of or end[0] not in self.row_of:
                self._renew()
            source, target = self._number(start), self._number(end)
            prices = _from(source, *self._known()) if self.all is None else self.all[source]
            return float(prices[target])

    def _place(self, state: State) -> tuple[int, int]:
        """The number of a layout in the space, and the code of its sizes."""
        place = self.places.get(state)
        if place is None:
            dims, code = tuple([state.dims[d] for d in self.order]), 0
            for d, axes, sizes in zip(self.order, dims, self.sizes, strict=True):
                code = code * len(sizes) + (sizes.index(state.padded[d]) if axes else 0)
            number = self.skeleton.include(State(dims, self.skeleton.space.shape, state.pending))
            place = self.places[state] = number, code
        return place

    def _number(self, place: tuple[int, int]) -> int:
        number, code = place
        return int(self.numbers[self.row_of[number], code])

    def _renew(self) -> None:
        """Takes in what the skeleton has by now."""
        self.version = self.skeleton.version
        grid = _grid(self.skeleton, self.version, self.lengths, self.paddings)
        self.numbers, self.row_of = grid.number, grid.place
        self.all = _from_all(*self._known()) if grid.count <= FEW else None

    def _known(self) -> tuple[Any, ...]:
        """All that decides prices, which values share that differ by the order of their dims."""
        return self.skeleton, self.version, self.lengths, self.paddings, self.itemsize, self.stretch


@lru_cache(maxsize=1 << 8)
def _steps(skeleton: Skeleton, version: int, lengths, paddings, itemsize: int, stretch: int) -> csr_array:
    """All steps, with their prices."""
    grid = _grid(skeleton, version, lengths, paddings)
    way, times, part, whole = grid.sent
    elements = grid.elements
    if int(elements.max(initial=0)) * int(part.max(initial=0)) * itemsize >= 1 << 62:
        elements = elements.astype(object)
    nbytes = (-(-elements * part * itemsize // whole)).astype(float)
    minor = np.where(grid.minor < 0, -1, grid.minor * stretch)
    each = skeleton.space.network.collectives(tuple(skeleton.ways), way, nbytes, minor)
    prices = np.bincount(grid.step, times * each, len(grid.after))
    return csr_array((prices, grid.after, grid.row_ends), shape=(grid.count, grid.count))


@lru_cache(maxsize=1 << 10)  # of up to four thousand numbers each
def _from_all(*known) -> np.ndarray:
    """The prices of the ways between all layouts, where they are few."""
    return csgraph.dijkstra(_steps(*known))


@lru_cache(maxsize=1 << 12)
def _from(source: int, *known) -> np.ndarray:
    """The prices of the ways from one layout to all others."""
    return csgraph.dijkstra(_steps(*known), indices=source)
