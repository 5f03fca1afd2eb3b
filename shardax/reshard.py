"""Resharding: the cheapest sequence of collectives that brings a value from one layout to another, found as a shortest path.

The nodes are layouts, and the edges are the steps that `steps_from` yields, each with the bytes that one device sends (V is the
bytes in the whole group of n devices; ring algorithms):

    all_gather, reduce_scatter   V (n-1)/n          all_to_all   (V/n) (n-1)/n        slice, crop, owe   0
    all_reduce                  2V (n-1)/n          ppermute     the shard            halo               the rows that move

The cheapest path sends the fewest bytes, where the start of each collective counts as an eighth of the first shard: one more
collective has to save that much. Among equals it has the fewest collectives, then the fewest steps, then it is the first
found. Costs are exact, so that plans are deterministic. `plan` needs no devices; `collectives.apply` runs a plan on the local
shard, inside `jax.shard_map`.

After GSPMD, sections 3.5 (resharding always succeeds) and 3.2 (halo exchange), but without a list of special cases.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from shardax import halo
from shardax.cost.network import Network
from shardax.halo import Wanted
from shardax.sharding import Axes, AxisSizes, Layout, Sharding, round_up, shard_count

START = Fraction(1, 8)  # of the first shard's bytes, for each collective
COLLECTIVES = frozenset({"all_gather", "all_reduce", "all_to_all", "halo", "ppermute", "reduce_scatter"})


@dataclass(frozen=True, slots=True)
class Step:
    """One collective or local operation. `axes` leave dim `dim` and arrive, minor-most, at dim `to`, where they do either."""

    kind: str
    axes: Axes
    source: Layout
    layout: Layout
    nbytes: float
    dim: int | None = None
    to: int | None = None

    def __str__(self):
        places = [f"{word} dim {d}" for word, d in (("from", self.dim), ("to", self.to)) if d is not None]
        return " ".join([self.kind, ",".join(self.axes), *places, f"({float(self.nbytes):g} bytes)"])


@dataclass(frozen=True)
class Path:
    """Steps between two layouts, the bytes that one device sends in all of them, and their price in picoseconds."""

    steps: tuple[Step, ...]
    nbytes: float
    price: float = 0.0

    def __str__(self):
        return "; ".join(map(str, self.steps)) or "nothing"


def plan(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, sizes: AxisSizes) -> Path:
    """The cheapest path from layout `src` to layout `dst` for a value of global `shape` with `itemsize` bytes per element.

    >>> x, y = ("x",), ("y",)
    >>> src, dst = Layout(Sharding((x, ())), (8, 8)), Layout(Sharding(((), x)), (8, 8))
    >>> print(plan(src, dst, (8, 8), 4, {"x": 4, "y": 2}))
    all_to_all x from dim 0 to dim 1 (48 bytes)
    >>> pending = Layout(Sharding(((), ())), (8, 8), (("x", "sum"), ("y", "sum")))
    >>> print(plan(pending, dst, (8, 8), 4, {"x": 4, "y": 2}))
    reduce_scatter x to dim 1 (192 bytes); all_reduce y (64 bytes)
    """
    return _plan(_canonical(src), _canonical(dst), tuple(shape), itemsize, tuple(sizes.items()))


# The search


@dataclass(frozen=True)
class _Problem:
    """What the search may use: mesh axes, dims, padded sizes of each dim; and how many major axes of each dim stay in place."""

    dst: Layout
    shape: tuple[int, ...]
    itemsize: int
    sizes: AxisSizes
    axes: Axes
    dims: tuple[int, ...]
    paddings: tuple[tuple[int, ...], ...]
    fixed: tuple[int, ...]
    counts: dict[Axes, int]

    def count(self, axes: Axes) -> int:
        return self.counts[axes]

    def local_shape(self, layout: Layout) -> list[int]:
        return [p // self.counts[axes] for p, axes in zip(layout.padded, layout.sharding.dims, strict=True)]

    def nbytes(self, layout: Layout) -> int:
        return math.prod(self.local_shape(layout)) * self.itemsize

    def free_axes(self, layout: Layout) -> Axes:
        used = {*layout.sharding.axes, *layout.pending_axes}
        return tuple(a for a in self.axes if a not in used)

    def movable(self, layout: Layout, dim: int) -> Iterator[Axes]:
        """The minor axes of `dim` that may leave it together."""
        axes = layout.dims[dim]
        return (axes[keep:] for keep in range(self.fixed[dim], len(axes)))

    def room(self, layout: Layout, dim: int, axes: Axes) -> Iterator[int]:
        """The padded sizes with which `dim` can take `axes` as its minor-most: its own, or any where it is still whole."""
        count = self.count(layout.dims[dim] + axes)
        paddings = (layout.padded[dim],) if layout.dims[dim] else self.paddings[dim]
        return (p for p in paddings if p % count == 0)


@lru_cache(maxsize=1 << 16)
def _plan(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, sizes: tuple[tuple[str, int], ...]) -> Path:
    if src == dst:
        return Path((), 0.0)
    if 0 in shape:
        return Path((Step("empty", (), src, dst, 0.0),), 0.0)
    first, last = (_without_trivial_axes(layout, shape, dict(sizes)) for layout in (src, dst))
    if first == last:
        return Path((Step("crop", (), src, dst, 0.0),), 0.0)
    steps = _shortest(first, _problem(first, last, shape, itemsize, dict(sizes)))
    nbytes = float(sum(s.nbytes for s in steps))
    steps = [Step("crop", (), src, first, 0), *steps, Step("crop", (), last, dst, 0)]
    network = Network(dict(sizes))
    price = sum(network.collective(s.kind, s.axes, float(s.nbytes)) for s in steps if s.kind in COLLECTIVES)
    return Path(tuple(replace(s, nbytes=float(s.nbytes)) for s in steps if s.source != s.layout), nbytes, float(price))


def _without_trivial_axes(layout: Layout, shape: tuple[int, ...], sizes: AxisSizes) -> Layout:
    """`layout` without the axes of one device: they cost nothing, and the search need not see them."""
    dims = tuple(tuple(a for a in axes if sizes[a] > 1) for axes in layout.dims)
    padded = tuple(p if axes else n for axes, p, n in zip(dims, layout.padded, shape, strict=True))
    return Layout(Sharding(dims), padded, tuple(p for p in layout.pending if sizes[p[0]] > 1))


def _problem(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, sizes: AxisSizes) -> _Problem:
    used = {*src.sharding.axes, *dst.sharding.axes, *src.pending_axes, *dst.pending_axes}
    axes = tuple(a for a in sizes if a in used)
    paddings = tuple(_paddings(n, d, src, dst, axes, sizes) for d, n in enumerate(shape))
    counts = {order: shard_count(order, sizes) for k in range(len(axes) + 1) for order in itertools.permutations(axes, k)}
    return _Problem(dst, shape, itemsize, sizes, axes, _dims(src, dst, shape, paddings), paddings, _fixed(src, dst), counts)


def _paddings(size: int, dim: int, src: Layout, dst: Layout, axes: Axes, sizes: AxisSizes) -> tuple[int, ...]:
    given = [layout.padded[dim] for layout in (dst, src) if layout.dims[dim]]
    subsets = itertools.chain.from_iterable(itertools.combinations(axes, k) for k in range(1, len(axes) + 1))
    return tuple(dict.fromkeys([*given, *sorted(round_up(size, shard_count(s, sizes)) for s in subsets)]))


def _dims(src: Layout, dst: Layout, shape: tuple[int, ...], paddings: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The dims that may be split on the way: those that `src` or `dst` splits, and one more that all axes divide, else two.

    A sum pending over x, wanted on dim 0 over (x, y), is cheapest when dim 1 is sliced over y first, half being scattered then;
    an all_to_all brings y to dim 0. (More dims would win a little only where several are uneven, and cost the search much.)
    """
    used = [d for d in range(len(shape)) if src.dims[d] or dst.dims[d]]
    others = [d for d in range(len(shape)) if d not in used and shape[d] > 1]
    others.sort(key=lambda d: (max(paddings[d], default=0) / shape[d], -shape[d]))
    enough = 1 if others and paddings[others[0]] == (shape[others[0]],) else 2
    return tuple(sorted(used + others[:enough]))


def _fixed(src: Layout, dst: Layout) -> tuple[int, ...]:
    """How many major axes of each dim never move, `src` and `dst` having them in common."""
    return tuple(
        _common_prefix(a, b) if p == q else 0 for a, b, p, q in zip(src.dims, dst.dims, src.padded, dst.padded, strict=True)
    )


def _common_prefix(a: Axes, b: Axes) -> int:
    return next((i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), min(len(a), len(b)))


def _shortest(src: Layout, problem: _Problem) -> list[Step]:
    """A* over layouts; the cost of a path is (bytes and starts, collectives, steps)."""
    start = START * problem.nbytes(src)
    tie = itertools.count()
    best: dict[Layout, tuple[float, int, int]] = {src: (0, 0, 0)}
    via: dict[Layout, Step] = {}
    queue: list[tuple[float, int, int, int, Layout]] = [(0, 0, 0, next(tie), src)]
    done, missing = set(), _bound(problem)
    while queue:
        *_, layout = heapq.heappop(queue)
        if layout == problem.dst:
            return _backtrack(via, src, layout)
        if layout in done:
            continue
        done.add(layout)
        nbytes, collectives, steps = best[layout]
        for step in steps_from(layout, problem):
            sends = step.kind in COLLECTIVES
            cost = (nbytes + step.nbytes + sends * start, collectives + sends, steps + 1)
            if step.layout not in best or cost < best[step.layout]:
                best[step.layout], via[step.layout] = cost, step
                estimate = cost[0] + missing(step.layout)
                heapq.heappush(queue, (estimate, *cost[1:], next(tie), step.layout))
    raise AssertionError(f"no path from {src} to {problem.dst}")


def _backtrack(via: dict[Layout, Step], src: Layout, layout: Layout) -> list[Step]:
    steps = []
    while layout != src:
        steps.append(via[layout])
        layout = via[layout].source
    return steps[::-1]


def _bound(problem: _Problem) -> Callable[[Layout], int]:
    """A lower bound on the bytes still to be sent: what some device wants at the end and does not hold yet.

    Looked at are the first device and its neighbour along each axis. What is summed or compared yet, nobody holds.
    """
    devices = [
        {a: int(a == one) for a in problem.axes} for one in (None, *problem.axes) if one is None or problem.sizes[one] > 1
    ]
    wanted = [_block_of(d, problem.dst, problem) for d in devices]
    volumes = [math.prod(end - first for first, end in block) for block in wanted]
    unsettled = {a for a in problem.axes if a not in problem.dst.pending_axes}

    def missing(layout: Layout) -> int:
        if layout.pending and not unsettled.isdisjoint(layout.pending_axes):
            return max(volumes) * problem.itemsize
        held = (_overlap(_block_of(d, layout, problem), want) for d, want in zip(devices, wanted, strict=True))
        return max(v - h for v, h in zip(volumes, held, strict=True)) * problem.itemsize

    return missing


def _block_of(device: dict[str, int], layout: Layout, problem: _Problem) -> list[tuple[int, int]]:
    """The true rows of each dim that a device holds, as (first, end)."""
    block = []
    for n, axes, b in zip(problem.shape, layout.sharding.dims, problem.local_shape(layout), strict=True):
        number = 0
        for a in axes:
            number = number * problem.sizes[a] + device[a]
        block.append((min(n, number * b), min(n, number * b + b)))
    return block


def _overlap(block: list[tuple[int, int]], other: list[tuple[int, int]]) -> int:
    return math.prod(max(0, min(e, f) - max(a, b)) for (a, e), (b, f) in zip(block, other, strict=True))


# The steps


def steps_from(layout: Layout, problem: _Problem) -> Iterator[Step]:
    """All steps that one can take from `layout`."""
    for steps in STEPS:
        yield from steps(layout, problem)


def _all_gathers(layout: Layout, problem: _Problem) -> Iterator[Step]:
    for dim in problem.dims:
        for axes in problem.movable(layout, dim):
            after = _without(layout, dim, axes, problem)
            nbytes = problem.nbytes(layout) * (problem.count(axes) - 1)
            yield Step("all_gather", axes, layout, after, nbytes, dim=dim)


def _slices(layout: Layout, problem: _Problem) -> Iterator[Step]:
    for dim in problem.dims:
        for axes in _to_slice(layout, dim, problem):
            for padded in problem.room(layout, dim, axes):
                yield Step("slice", axes, layout, _with(layout, dim, axes, padded), 0, to=dim)


def _to_slice(layout: Layout, dim: int, problem: _Problem) -> list[Axes]:
    """Each free axis, and all axes at once that `dim` lacks to be as it is wanted."""
    free = problem.free_axes(layout)
    have, wanted = layout.dims[dim], problem.dst.dims[dim]
    lacking = wanted[len(have) :]
    at_once = len(lacking) > 1 and wanted[: len(have)] == have and set(lacking) <= set(free)
    return [*([lacking] if at_once else []), *((a,) for a in free)]


def _all_to_alls(layout: Layout, problem: _Problem) -> Iterator[Step]:
    for dim, to in itertools.permutations(problem.dims, 2):
        for axes in problem.movable(layout, dim):
            for padded in problem.room(layout, to, axes):
                after = _without(_with(layout, to, axes, padded), dim, axes, problem)
                sent = _padded_nbytes(layout, to, padded, problem) // problem.count(axes) * (problem.count(axes) - 1)
                yield Step("all_to_all", axes, layout, after, sent, dim=dim, to=to)


def _reduce_scatters(layout: Layout, problem: _Problem) -> Iterator[Step]:
    axes, kind = _settleable(layout)
    if kind != "sum":
        return
    for k, to in itertools.product(range(1, len(axes) + 1), problem.dims):
        for some in itertools.permutations(axes, k):
            for padded in problem.room(layout, to, some):
                after = _with(_settle(layout, some), to, some, padded)
                sent = _padded_nbytes(layout, to, padded, problem) // problem.count(some) * (problem.count(some) - 1)
                yield Step("reduce_scatter", some, layout, after, sent, to=to)


def _all_reduces(layout: Layout, problem: _Problem) -> Iterator[Step]:
    axes, _ = _settleable(layout)
    for k in range(1, len(axes) + 1):
        for some in itertools.combinations(axes, k):
            nbytes = _exact(2 * problem.nbytes(layout) * (problem.count(some) - 1), problem.count(some))
            yield Step("all_reduce", some, layout, _settle(layout, some), nbytes)


def _ppermutes(layout: Layout, problem: _Problem) -> Iterator[Step]:
    """Every layout with the same blocks on other devices: as many hold a block as need it, so one sender per receiver does."""
    for dims, pending in _rearrangements(layout, problem):
        after = Layout(Sharding(dims), layout.padded, pending)
        if after != layout:
            axes = _moved(layout, after, problem.sizes)
            yield Step("ppermute", axes, layout, after, problem.nbytes(layout))


def _rearrangements(layout: Layout, problem: _Problem) -> Iterator[tuple[tuple[Axes, ...], tuple[tuple[str, str], ...]]]:
    """The ways to fill the places of `layout` with other axes, so that each dim keeps its number of blocks."""
    kinds = {kind for _, kind in layout.pending}
    kind = kinds.pop() if len(kinds) == 1 else None
    swap_pending = kind is not None and bool(problem.dst.pending)
    places = [axes[fixed:] for axes, fixed in zip(layout.dims, problem.fixed, strict=True)]
    places += [layout.pending_axes] if swap_pending else []
    pool = {*problem.free_axes(layout)}.union(*places)
    for filled in _fill(tuple(places), tuple(a for a in problem.axes if a in pool), problem):
        dims, pending = filled[: len(layout.dims)], layout.pending
        if kind is not None and swap_pending:
            pending = tuple((a, kind) for a in sorted(filled[-1]))
        yield tuple(axes[:f] + new for axes, f, new in zip(layout.dims, problem.fixed, dims, strict=True)), pending


def _fill(places: tuple[Axes, ...], pool: Axes, problem: _Problem) -> Iterator[tuple[Axes, ...]]:
    if not places:
        yield ()
        return
    first, *rest = places
    for axes in _orders(pool, problem.count(first), problem) if first else [()]:
        left = tuple(a for a in pool if a not in axes)
        yield from ((axes, *others) for others in _fill(tuple(rest), left, problem))


def _orders(pool: Axes, count: int, problem: _Problem) -> list[Axes]:
    """The ordered choices of axes of `pool` that make `count` blocks."""
    choices = itertools.chain.from_iterable(itertools.permutations(pool, k) for k in range(1, len(pool) + 1))
    return [axes for axes in choices if problem.count(axes) == count]


def _halos(layout: Layout, problem: _Problem) -> Iterator[Step]:
    """Changes of the padded size of a split dim: only the rows that change device are sent."""
    for dim in problem.dims:
        count = problem.count(layout.dims[dim])
        for padded in problem.paddings[dim] if layout.dims[dim] else ():
            if padded % count == 0 and padded != layout.padded[dim]:
                old, axes = layout.padded[dim] // count, layout.dims[dim]
                rows = sum(halo.exchange_of(next_blocks(dim, axes, old, padded // count, count, problem.shape[dim])).sent)
                after = _with(layout, dim, (), padded)
                kind, axes = ("halo", axes) if rows else ("crop", ())
                yield Step(kind, axes, layout, after, problem.nbytes(layout) // old * rows, dim=dim)


def _owes(layout: Layout, problem: _Problem) -> Iterator[Step]:
    """The last step to a layout with pending reductions, if any: all that is not owed yet. (Owing earlier gains nothing.)"""
    lacking = tuple(p for p in problem.dst.pending if p not in layout.pending)
    owing = _canonical(Layout(layout.sharding, layout.padded, layout.pending + lacking))
    if lacking and owing == problem.dst:
        yield Step("owe", tuple(a for a, _ in lacking), layout, owing, 0)


STEPS = (_all_gathers, _slices, _all_to_alls, _reduce_scatters, _all_reduces, _ppermutes, _halos, _owes)


def _with(layout: Layout, dim: int, axes: Axes, padded: int) -> Layout:
    return _replace(layout, dim, layout.dims[dim] + axes, padded)


def _without(layout: Layout, dim: int, axes: Axes, problem: _Problem) -> Layout:
    left = layout.dims[dim][: -len(axes)]
    return _replace(layout, dim, left, layout.padded[dim] if left else problem.shape[dim])


def _replace(layout: Layout, dim: int, axes: Axes, padded: int) -> Layout:
    dims, sizes = layout.dims, layout.padded
    sharding = object.__new__(Sharding)  # skips the check, which the search keeps by construction
    object.__setattr__(sharding, "dims", (*dims[:dim], axes, *dims[dim + 1 :]))
    return Layout(sharding, (*sizes[:dim], padded, *sizes[dim + 1 :]), layout.pending)


def _padded_nbytes(layout: Layout, dim: int, padded: int, problem: _Problem) -> int:
    nbytes = problem.nbytes(layout)
    return nbytes if layout.dims[dim] else nbytes // problem.shape[dim] * padded


def _exact(numerator: int, denominator: int) -> Any:
    return Fraction(numerator, denominator) if numerator % denominator else numerator // denominator


# Pending reductions are settled in their order; among neighbours of one kind the order means nothing.


def _canonical(layout: Layout) -> Layout:
    runs = itertools.groupby(layout.pending, key=lambda p: p[1])
    pending = tuple(p for _, run in runs for p in sorted(run))
    return layout if pending == layout.pending else Layout(layout.sharding, layout.padded, pending)


def _settleable(layout: Layout) -> tuple[Axes, str | None]:
    """The axes whose reductions may be settled now, all of one kind, and that kind."""
    for kind, run in itertools.groupby(layout.pending, key=lambda p: p[1]):
        return tuple(a for a, _ in run), kind
    return (), None


def _settle(layout: Layout, axes: Axes) -> Layout:
    return _canonical(Layout(layout.sharding, layout.padded, tuple(p for p in layout.pending if p[0] not in axes)))


# Who sends what: ppermute and halo


def _places(layout: Layout, sizes: AxisSizes) -> dict[str, tuple[int, int]]:
    """Where each used axis stands: its dim (the pending axes count as one more) and its stride in blocks there."""
    return {
        a: (dim, shard_count(axes[i + 1 :], sizes))
        for dim, axes in enumerate((*layout.dims, layout.pending_axes))
        for i, a in enumerate(axes)
    }


def _moved(source: Layout, layout: Layout, sizes: AxisSizes) -> Axes:
    before, after = _places(source, sizes), _places(layout, sizes)
    return tuple(a for a in sizes if before.get(a) != after.get(a))


def _block(coordinates: dict[str, int], places: dict[str, tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Which block a device holds, as far as the moved axes tell: its number in each dim."""
    numbers: dict[int, int] = {}
    for axis, i in coordinates.items():
        if axis in places:
            dim, stride = places[axis]
            numbers[dim] = numbers.get(dim, 0) + i * stride
    return tuple(sorted(numbers.items()))


def pairs(source: Layout, layout: Layout, axes: Axes, sizes: AxisSizes) -> list[tuple[int, int]]:
    """(sender, receiver) for each device along `axes`; a device that holds what it needs sends to itself."""
    before, after = _places(source, sizes), _places(layout, sizes)
    devices = [dict(zip(axes, c, strict=True)) for c in itertools.product(*(range(sizes[a]) for a in axes))]
    held, needed = [_block(d, before) for d in devices], [_block(d, after) for d in devices]
    content = range(len(devices))
    stay = {i for i in content if held[i] == needed[i]}
    senders = sorted((i for i in content if i not in stay), key=lambda i: (held[i], i))
    receivers = sorted((i for i in content if i not in stay), key=lambda i: (needed[i], i))
    return sorted([*zip(senders, receivers, strict=True), *((i, i) for i in stay)])


@lru_cache(maxsize=4096)
def next_blocks(dim: int, axes: Axes, old: int, new: int, count: int, size: int) -> Wanted:
    """What `count` devices want that hold blocks of `old` rows of a dim of `size` rows, and are to hold blocks of `new` rows.

    >>> halo.exchange_of(next_blocks(0, ("x",), 65, 66, 4, 257)).sent
    [3]
    """
    firsts = range(0, count * new, new)
    return Wanted(dim, axes, tuple(firsts), tuple(min(first + new, size) for first in firsts), new, size, old)
