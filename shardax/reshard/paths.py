"""Resharding: the cheapest sequence of collectives that brings a value from one layout to another, found as a
shortest path.

The nodes are layouts, and the edges are the steps of `steps.STEPS`, each with the bytes that one
device sends (V is the bytes in the whole group of n devices; ring algorithms):

    all_gather, reduce_scatter   V (n-1)/n      all_to_all   (V/n) (n-1)/n      slice, crop, owe   0
    all_reduce                  2V (n-1)/n      ppermute, swap   the shard      halo   the rows that move

The axes of an all_to_all may leave several dims at once, and come to several others. The price of a step is
that of its collectives on the network (`shardax.cost.network`), in picoseconds; to owe a reduction costs the
reading and writing of the shard, and slices are free, so that nothing is cheaper than to refine. Among paths
of one price the one with the fewest collectives is taken, then the one with the fewest steps, then the first
found. Prices are whole numbers, so that plans are deterministic. `plan` needs no devices; `run.apply`
runs a plan on the local shard, inside `jax.shard_map`.

After GSPMD, sections 3.5 (resharding always succeeds) and 3.2 (halo exchange), but without a list of special
cases.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardax.cost.network import Network, network_of
from shardax.reshard.steps import Counts, Edge, Space, State, canonical, with_more
from shardax.sharding import Axes, AxisSizes, Layout, Sharding, minor_most, round_up, shard_count

FEW = 3  # axes over which all layouts that a value may take are looked at
MOST = 4  # dims, likewise
COLLECTIVES = frozenset(
    {"all_gather", "all_reduce", "all_to_all", "halo", "ppermute", "reduce_scatter", "swap"}
)


@dataclass(frozen=True, slots=True)
class Step:
    """One collective or local operation. `axes` leave dim `dim` and arrive, minor-most, at dim `to`, where
    they do either.
    """

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
    """Steps between two layouts, the bytes that one device sends in all of them, and their price in
    picoseconds.
    """

    steps: tuple[Step, ...]
    nbytes: float
    price: float = 0.0

    def __str__(self):
        return "; ".join(map(str, self.steps)) or "nothing"


def plan(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, sizes: AxisSizes) -> Path:
    """The cheapest path from layout `src` to layout `dst` for a value of global `shape` with `itemsize` bytes
    per element.

    >>> x, y = ("x",), ("y",)
    >>> src, dst = Layout(Sharding((x, ())), (8, 8)), Layout(Sharding(((), x)), (8, 8))
    >>> print(plan(src, dst, (8, 8), 4, {"x": 4, "y": 2}))
    all_to_all x from dim 0 to dim 1 (48 bytes)
    >>> pending = Layout(Sharding(((), ())), (8, 8), (("x", "sum"), ("y", "sum")))
    >>> print(plan(pending, dst, (8, 8), 4, {"x": 4, "y": 2}))
    reduce_scatter x to dim 1 (192 bytes); all_reduce y (64 bytes)
    """
    return _plan(canonical(src), canonical(dst), tuple(shape), itemsize, network_of(sizes))


def price(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, sizes: AxisSizes) -> float:
    """The price of that path, in picoseconds; quicker than the path itself."""
    if src == dst or 0 in shape:
        return 0.0
    return _price(src, dst, tuple(shape), itemsize, network_of(sizes))


# The search


@lru_cache(maxsize=1 << 18)
def _price(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, network: Network) -> float:
    first, last = (_without_trivial_axes(canonical(layout), shape, network) for layout in (src, dst))
    return sum(
        [edge.price for edge in _route(*_standing_for(first, last, shape, network), itemsize, network).edges]
    )


def _standing_for(
    src: Layout, dst: Layout, shape: tuple[int, ...], network: Network
) -> tuple[Layout, Layout, tuple[int, ...]]:
    """Two layouts and a shape that stand for all that cost the same: dims have another order, and axes that
    are joined alike other names. (On a chip with lanes the minor-most dim is not like others.)"""
    apart = [minor_most(shape)] if shape and network.chip.lanes else []
    like = [d for d in range(len(shape)) if d not in apart]
    columns = [(shape[d], src.padded[d], dst.padded[d], src.dims[d], dst.dims[d], d) for d in like]
    order = [d for *_, d in sorted(columns) if shape[d] > 1 or src.dims[d] or dst.dims[d]] + apart
    used = [
        a
        for layout in (src, dst)
        for axes in (*(layout.dims[d] for d in order), layout.pending_axes)
        for a in axes
    ]
    standing: dict[str, str] = {}  # for each axis the first of those joined alike that none before it has
    for axis in dict.fromkeys(used):
        joined = network[axis], network.lines[axis]
        alike = (a for a in network if (network[a], network.lines[a]) == joined)
        standing[axis] = next(a for a in alike if a not in standing.values())
    layouts = []
    for layout in (src, dst):
        dims = tuple([tuple([standing[a] for a in layout.dims[d]]) for d in order])
        pending = tuple([(standing[a], reduction) for a, reduction in layout.pending])
        layouts.append(canonical(Layout(Sharding(dims), tuple([layout.padded[d] for d in order]), pending)))
    return layouts[0], layouts[1], tuple([shape[d] for d in order])


@lru_cache(maxsize=1 << 16)
def _plan(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, network: Network) -> Path:
    if src == dst:
        return Path((), 0.0)
    if 0 in shape:
        return Path((Step("empty", (), src, dst, 0.0),), 0.0)
    first, last = (_without_trivial_axes(layout, shape, network) for layout in (src, dst))
    if first == last:
        return Path((Step("crop", (), src, dst, 0.0),), 0.0)
    route = _route(first, last, shape, itemsize, network)
    steps = [Step("crop", (), src, first, 0.0), *_steps(first, route), Step("crop", (), last, dst, 0.0)]
    nbytes, price = sum(e.nbytes for e in route.edges), sum(e.price for e in route.edges)
    return Path(tuple(s for s in steps if s.source != s.layout), float(nbytes), float(price))


class _Route(NamedTuple):
    """Edges between two layouts. `staying`: the major axes of each dim that both have and that stay in place,
    which the edges leave out; `blocks`: into how many pieces these split the dims."""

    edges: Sequence[Edge]
    staying: tuple[Axes, ...]
    blocks: tuple[int, ...]


@lru_cache(maxsize=1 << 16)
def _route(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, network: Network) -> _Route:
    """The cheapest way from one layout to another.

    What both split alike is left out, where the blocks are as good as a value of their own: all of them full,
    and such that any axes split them evenly.
    """
    first, last = _state(src), _state(dst)
    sides = zip(first.dims, first.padded, last.dims, last.padded, strict=True)
    only_slices = all(b[: len(a)] == a and (not a or p == q) for a, p, b, q in sides)
    if first.pending == last.pending and only_slices:
        return _Route(list(_sliced(first, last)), ((),) * len(shape), (1,) * len(shape))
    axes = _axes(first, last, network)
    counts = _counts(network)
    staying = tuple(
        shared
        if p == q == n and not n % (counts[shared] * counts[tuple([a for a in axes if a not in shared])])
        else ()
        for n, p, q, shared in zip(
            shape, first.padded, last.padded, map(_common_prefix, first.dims, last.dims), strict=True
        )
    )
    blocks = tuple([counts[axes] for axes in staying])
    shape = tuple(n // count for n, count in zip(shape, blocks, strict=True))
    first, last = _inside(first, staying, blocks), _inside(last, staying, blocks)
    return _Route(_between(first, last, shape, itemsize, network), staying, blocks)


def _state(layout: Layout) -> State:
    return State(layout.dims, layout.padded, layout.pending)


def _inside(state: State, staying: Sequence[Axes], blocks: Sequence[int]) -> State:
    """A layout as that of one block."""
    dims = tuple(axes[len(shared) :] for axes, shared in zip(state.dims, staying, strict=True))
    return State(
        dims, tuple(p // count for p, count in zip(state.padded, blocks, strict=True)), state.pending
    )


def _axes(src: State, dst: State, network: Network) -> Axes:
    used = {a for state in (src, dst) for axes in (*state.dims, state.pending_axes) for a in axes}
    return tuple(a for a in network if a in used)


def _steps(source: Layout, route: _Route) -> Iterator[Step]:
    """The steps of a route; slices of one dim that follow one another are one."""
    edges: list[Edge] = []
    for edge in route.edges:
        last = edges[-1] if edges else None
        if last and edge.kind == last.kind == "slice" and edge.to == last.to:
            edges[-1] = edge._replace(axes=last.axes + edge.axes)
        else:
            edges.append(edge)
    for kind, axes, after, nbytes, _, dim, to, _ in edges:
        dims = tuple(map(tuple.__add__, route.staying, after.dims))
        layout = Layout(Sharding(dims), tuple(map(int.__mul__, after.padded, route.blocks)), after.pending)
        yield Step(kind, axes, source, layout, float(nbytes), dim, to)
        source = layout


def _between(
    src: State, dst: State, shape: tuple[int, ...], itemsize: int, network: Network
) -> Sequence[Edge]:
    """The edges of the cheapest path. Over one or two axes those to all targets of a source are found
    together.
    """
    axes = _axes(src, dst, network)
    paddings = tuple(_paddings(n, d, src, dst, axes, network) for d, n in enumerate(shape))
    dims = _dims(src, dst, shape, paddings, few=len(axes) > FEW)
    fixed = (0,) * len(shape)
    if len(axes) > FEW:  # major axes that both layouts have stay in place
        sides = zip(src.dims, dst.dims, src.padded, dst.padded, strict=True)
        fixed = tuple(len(_common_prefix(a, b)) if p == q else 0 for a, b, p, q in sides)
    space = _space(shape, itemsize, network, axes, dims, paddings, fixed, dst.pending)
    return _shortest(src, dst, space) if len(axes) > FEW else _reach(src, space).to(dst)


@lru_cache(maxsize=1 << 12)
def _space(shape, itemsize: int, network: Network, axes: Axes, dims, paddings, fixed, owing) -> Space:
    """Spaces of even dims that the same axes divide have the same steps: they share those of the least of
    them, in which all bytes can be divided."""
    counts, like = _counts(network), None
    finest = counts[axes]
    least = tuple([math.gcd(n, finest) if d in dims else 1 for d, n in enumerate(shape)])
    if (shape, itemsize) != (least, finest) and all(paddings[d] in ((), (shape[d],)) for d in dims):
        evenly = tuple([(n,) if some else () for n, some in zip(least, paddings, strict=True)])
        like = _space(least, finest, network, axes, dims, evenly, fixed, owing)
    return Space(shape, itemsize, network, axes, dims, paddings, fixed, owing, counts, like)


@lru_cache
def _counts(network: Network) -> Counts:
    return Counts(network)


def _paddings(size: int, dim: int, src: State, dst: State, axes: Axes, sizes: AxisSizes) -> tuple[int, ...]:
    """The sizes to which a dim may be padded: as given, and so that axes make no more blocks of it than it
    has rows, or had.
    """
    present = [state.padded[dim] for state in (dst, src) if state.dims[dim]]
    subsets = itertools.chain.from_iterable(itertools.combinations(axes, k) for k in range(1, len(axes) + 1))
    counts = {shard_count(some, sizes) for some in subsets}
    return tuple(
        sorted({*present, *(round_up(size, count) for count in counts if count <= max([size, *present]))})
    )


def _dims(
    src: State, dst: State, shape: tuple[int, ...], paddings: Sequence[tuple[int, ...]], few: bool
) -> tuple[int, ...]:
    """The dims that may be split on the way: all, if these are not many and even; else those that `src` or
    `dst` splits, and one more that all axes divide, or two.

    A sum pending over x, requested on dim 0 over (x, y), is cheapest when dim 1 is sliced over y first, half
    being scattered then; an all_to_all brings y to dim 0. (More dims would win a little only where several
    are uneven, and cost the search much.)
    """
    used = [d for d in range(len(shape)) if src.dims[d] or dst.dims[d]]
    others = [d for d in range(len(shape)) if d not in used and shape[d] > 1]
    if (
        not few
        and len(used) + len(others) <= MOST
        and all(paddings[d] in ((), (shape[d],)) for d in (*used, *others))
    ):
        return tuple(sorted(used + others))
    others.sort(key=lambda d: (max(paddings[d], default=2 * shape[d]) / shape[d], -shape[d]))
    enough = 1 if others and paddings[others[0]] == (shape[others[0]],) else 2
    return tuple(sorted(used + others[:enough]))


def _common_prefix(a: Axes, b: Axes) -> Axes:
    return a[: next((i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), min(len(a), len(b)))]


def _without_trivial_axes(layout: Layout, shape: tuple[int, ...], sizes: AxisSizes) -> Layout:
    """`layout` without the axes of one device: they cost nothing, and the search need not see them."""
    if 1 not in sizes.values():
        return layout
    dims = tuple(tuple(a for a in axes if sizes[a] > 1) for axes in layout.dims)
    padded = tuple(p if axes else n for axes, p, n in zip(dims, layout.padded, shape, strict=True))
    return Layout(Sharding(dims), padded, tuple(p for p in layout.pending if sizes[p[0]] > 1))


def _sliced(node: State, dst: State) -> Iterator[Edge]:
    for dim, (have, target) in enumerate(zip(node.dims, dst.dims, strict=True)):
        if have != target:
            node = with_more(node, dim, target[len(have) :], dst.padded[dim])
            yield Edge("slice", target[len(have) :], node, 0, 0.0, to=dim, count=0)


class _Cost(NamedTuple):
    """Of a path, in the order in which paths are compared."""

    price: float
    collectives: int
    steps: int

    def and_then(self, more: "_Cost") -> "_Cost":
        return _Cost(self[0] + more[0], self[1] + more[1], self[2] + more[2])


class _Reach:
    """How to get from one layout to others, found in the order of their price, as far as was needed
    (Dijkstra).
    """

    def __init__(self, src: State, space: Space):
        self.src, self.space = space.number(src), space
        self.best: dict[int, tuple[float, int, int]] = {self.src: (0.0, 0, 0)}  # as a _Cost, but quicker
        self.via: dict[int, tuple[int, Edge]] = {}
        self.done: set[int] = set()
        self.order = itertools.count()
        self.queue = [(self.best[self.src], next(self.order), self.src)]

    def to(self, dst: State) -> list[Edge]:
        last = self.space.number(dst)
        while last not in self.done:
            assert self.queue, f"no path from {self.space.states[self.src]} to {dst}"
            so_far, _, node = heapq.heappop(self.queue)
            if node not in self.done:
                self.done.add(node)
                self.leave(node, so_far)
        return _backtrack(self.via, self.src, last)

    def leave(self, node: int, so_far: tuple[float, int, int]) -> None:
        best, (price, collectives, steps) = self.best, so_far
        for more, count, after, edge in self.space.edges(node):
            cost = (price + more, collectives + count, steps + 1)
            known = best.get(after)
            if known is None or cost < known:
                best[after], self.via[after] = cost, (node, edge)
                heapq.heappush(self.queue, (cost, next(self.order), after))


_reach = lru_cache(maxsize=1 << 12)(_Reach)


def _shortest(src: State, dst: State, space: Space) -> list[Edge]:
    """The same for one target, by A*: over many axes there are very many layouts."""
    left, first, last = _bound(dst, space), space.number(src), space.number(dst)
    best: dict[int, _Cost] = {first: _Cost(0.0, 0, 0)}
    via: dict[int, tuple[int, Edge]] = {}
    order = itertools.count()
    queue = [(left(src), next(order), best[first], first)]
    while queue:
        _, _, so_far, node = heapq.heappop(queue)
        if node == last:
            return _backtrack(via, first, last)
        if so_far != best[node]:
            continue
        for price, count, after, edge in space.edges(node):
            cost = so_far.and_then(_Cost(price, count, 1))
            if after not in best or cost < best[after]:
                estimate = cost.and_then(left(edge.after))
                if last not in best or estimate < best[last]:
                    best[after], via[after] = cost, (node, edge)
                    heapq.heappush(queue, (estimate, next(order), cost, after))
    raise AssertionError(f"no path from {src} to {dst}")


def _backtrack(via: Mapping[int, tuple[int, Edge]], src: int, node: int) -> list[Edge]:
    edges = []
    while node != src:
        node, edge = via[node]
        edges.append(edge)
    return edges[::-1]


def _bound(dst: State, space: Space) -> Callable[[State], _Cost]:
    """A lower bound on the cost that is left: of as many bytes, over the fastest links, as some device must
    still get.

    That is what it needs at the end and does not hold; looked at are the first device and its neighbour along
    each axis. What is summed or compared yet, nobody holds. Of each element of it n parts are to become one
    on c devices, which takes n + c - 2 messages, and so many elements over the number of devices are sent by
    one of them.
    """
    devices = [{a: int(a == one) for a in space.axes} for one in (None, *space.axes)]
    blocks = [_block_of(d, dst, space) for d in devices]
    target = list(zip(*blocks, strict=True))
    volumes = [math.prod(end - first for first, end in block) for block in blocks]
    count, elements = space.count(space.axes), math.prod(space.shape)
    copies = count // math.prod(map(space.count, dst.dims))
    overlaps: dict[tuple[int, Axes, int], list[int]] = {}

    def overlap(dim: int, axes: Axes, padded: int) -> list[int]:
        """How much of what each device needs of a dim it holds."""
        block = padded // space.count(axes)
        held = (_rows(d, axes, block, space.shape[dim], space) for d in devices)
        return [max(0, min(e, f) - max(a, b)) for (a, e), (b, f) in zip(held, target[dim], strict=True)]

    def missing(node: State) -> int:
        parts = space.count(tuple(a for a in node.pending_axes if a not in dst.pending_axes))
        if parts > 1:
            messages = 0 if dst.pending else -(-elements * (parts + copies - 2) // count)
            return max(*volumes, messages)
        held = [1] * len(devices)
        for key in zip(range(len(space.shape)), node.dims, node.padded, strict=True):
            rows = overlaps.get(key) or overlaps.setdefault(key, overlap(*key))
            held = [h * n for h, n in zip(held, rows, strict=True)]
        return max(v - h for v, h in zip(volumes, held, strict=True))

    def left(node: State) -> _Cost:
        if node == dst:
            return _Cost(0.0, 0, 0)
        rows = missing(node)
        return (
            _Cost(space.network.least(space.axes, rows * space.itemsize), 1, 1) if rows else _Cost(0.0, 0, 1)
        )

    return left


def _block_of(device: dict[str, int], node: State, space: Space) -> list[tuple[int, int]]:
    """The true rows of each dim that a device holds, as (first, end)."""
    return [
        _rows(device, axes, padded // space.count(axes), size, space)
        for size, axes, padded in zip(space.shape, node.dims, node.padded, strict=True)
    ]


def _rows(device: dict[str, int], axes: Axes, block: int, size: int, space: Space) -> tuple[int, int]:
    number = 0
    for a in axes:
        number = number * space.network[a] + device[a]
    return min(size, number * block), min(size, number * block + block)
