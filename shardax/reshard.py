"""Resharding: the cheapest sequence of collectives that brings a value from one layout to another, found as a shortest path.

The nodes are layouts, and the edges are the steps of `STEPS`, each with the bytes that one device sends (V is the bytes in the
whole group of n devices; ring algorithms):

    all_gather, reduce_scatter   V (n-1)/n          all_to_all   (V/n) (n-1)/n        slice, crop, owe   0
    all_reduce                  2V (n-1)/n          ppermute     the shard            halo               the rows that move

The axes of an all_to_all may leave several dims at once, and come to several others. The price of a step is that of its
collectives on the network (`shardax.cost.network`), in picoseconds; to owe a reduction costs the reading and writing of the
shard, and slices are free, so that nothing is cheaper than to refine. Among paths of one price the one with the fewest
collectives is taken, then the one with the fewest steps, then the first found. Prices are whole numbers, so that plans are
deterministic. `plan` needs no devices; `collectives.apply` runs a plan on the local shard, inside `jax.shard_map`.

After GSPMD, sections 3.5 (resharding always succeeds) and 3.2 (halo exchange), but without a list of special cases.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import ne
from typing import NamedTuple

from shardax import halo
from shardax.cost.network import Network, network_of
from shardax.halo import Wanted
from shardax.sharding import Axes, AxisSizes, Layout, Sharding, round_up, shard_count

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
    return _plan(_canonical(src), _canonical(dst), tuple(shape), itemsize, network_of(sizes))


# The search


Pending = tuple[tuple[str, str], ...]


class _Node(NamedTuple):
    """A layout, as a tuple that is quick to make and to look up."""

    dims: tuple[Axes, ...]
    padded: tuple[int, ...]
    pending: Pending

    @property
    def pending_axes(self) -> Axes:
        return tuple(axis for axis, _ in self.pending)


class _Edge(NamedTuple):
    """A step to `after`. `price`: in picoseconds. `count`: of collectives."""

    kind: str
    axes: Axes
    after: _Node
    nbytes: int
    price: float
    dim: int | None = None
    to: int | None = None
    count: int = 1


class _Cost(NamedTuple):
    """Of a path, in the order in which paths are compared."""

    price: float
    collectives: int
    steps: int

    def and_then(self, more: "_Cost") -> "_Cost":
        return _Cost(self[0] + more[0], self[1] + more[1], self[2] + more[2])


class _Counts(dict[Axes, int]):
    """The number of pieces into which axes split a dim."""

    def __init__(self, sizes: AxisSizes):
        self.sizes = sizes

    def __missing__(self, axes: Axes) -> int:
        count = self[axes] = shard_count(axes, self.sizes)
        return count


@dataclass(frozen=True)
class _Problem:
    """What the search may use: mesh axes, dims, padded sizes of each dim; and how many major axes of each dim stay in place."""

    dst: _Node
    shape: tuple[int, ...]
    itemsize: int
    network: Network
    axes: Axes
    dims: tuple[int, ...]
    paddings: tuple[tuple[int, ...], ...]
    fixed: tuple[int, ...]
    counts: _Counts

    def count(self, axes: Axes) -> int:
        return self.counts[axes]

    def nbytes(self, node: _Node) -> int:
        """Bytes of the shard."""
        nbytes = self.itemsize
        for padded, axes in zip(node.padded, node.dims, strict=True):
            nbytes *= padded // self.counts[axes]
        return nbytes

    def free_axes(self, node: _Node) -> Axes:
        used = {a for axes in node.dims for a in axes}.union(node.pending_axes)
        return tuple(a for a in self.axes if a not in used)

    def movable(self, node: _Node, dim: int) -> Iterator[Axes]:
        """The minor axes of `dim` that may leave it together."""
        axes = node.dims[dim]
        return (axes[keep:] for keep in range(self.fixed[dim], len(axes)))

    def room(self, node: _Node, dim: int, axes: Axes) -> Iterator[int]:
        """The padded sizes with which `dim` can take `axes` as its minor-most: its own, or any where it is still whole."""
        count = self.count(node.dims[dim] + axes)
        paddings = (node.padded[dim],) if node.dims[dim] else self.paddings[dim]
        return (p for p in paddings if p % count == 0)


@lru_cache(maxsize=1 << 16)
def _plan(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, network: Network) -> Path:
    if src == dst:
        return Path((), 0.0)
    if 0 in shape:
        return Path((Step("empty", (), src, dst, 0.0),), 0.0)
    first, last = (_without_trivial_axes(layout, shape, network) for layout in (src, dst))
    if first == last:
        return Path((Step("crop", (), src, dst, 0.0),), 0.0)
    if first.pending == last.pending and all(map(_refines, first.dims, first.padded, last.dims, last.padded)):
        edges = list(_sliced(_node(first), _node(last)))
    else:
        edges = _cheapest(_node(first), _problem(first, last, shape, itemsize, network))
    steps = [Step("crop", (), src, first, 0.0), *_steps(first, edges), Step("crop", (), last, dst, 0.0)]
    nbytes, price = sum(e.nbytes for e in edges), sum(e.price for e in edges)
    return Path(tuple(s for s in steps if s.source != s.layout), float(nbytes), float(price))


def _node(layout: Layout) -> _Node:
    return _Node(layout.dims, layout.padded, layout.pending)


def _steps(source: Layout, edges: list[_Edge]) -> Iterator[Step]:
    for kind, axes, after, nbytes, _, dim, to, _ in edges:
        layout = Layout(Sharding(after.dims), after.padded, after.pending)
        yield Step(kind, axes, source, layout, float(nbytes), dim, to)
        source = layout


def _without_trivial_axes(layout: Layout, shape: tuple[int, ...], sizes: AxisSizes) -> Layout:
    """`layout` without the axes of one device: they cost nothing, and the search need not see them."""
    if 1 not in sizes.values():
        return layout
    dims = tuple(tuple(a for a in axes if sizes[a] > 1) for axes in layout.dims)
    padded = tuple(p if axes else n for axes, p, n in zip(dims, layout.padded, shape, strict=True))
    return Layout(Sharding(dims), padded, tuple(p for p in layout.pending if sizes[p[0]] > 1))


def _problem(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, network: Network) -> _Problem:
    used = {*src.sharding.axes, *dst.sharding.axes, *src.pending_axes, *dst.pending_axes}
    axes = tuple(a for a in network if a in used)
    paddings = tuple(_paddings(n, d, src, dst, axes, network) for d, n in enumerate(shape))
    dims = _dims(src, dst, shape, paddings)
    return _Problem(_node(dst), shape, itemsize, network, axes, dims, paddings, _fixed(src, dst), _counts(network))


@lru_cache
def _counts(network: Network) -> _Counts:
    return _Counts(network)


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


def _cheapest(src: _Node, problem: _Problem) -> list[_Edge]:
    """The cheapest path; where one collective costs no more than any path must, without a search."""
    left = _bound(problem)
    steps = _ONE.get((src.pending != problem.dst.pending, sum(map(ne, src.dims, problem.dst.dims))), _exchanges)
    found = [edge for edge in steps(src, problem) if edge.after == problem.dst]
    return found[:1] if found and found[0].price <= left(src).price else _shortest(src, problem, left)


def _refines(have: Axes, held: int, wanted: Axes, padded: int) -> bool:
    """Whether slices lead from one split of a dim to another."""
    return wanted[: len(have)] == have and (not have or held == padded)


def _sliced(node: _Node, dst: _Node) -> Iterator[_Edge]:
    for dim, (have, wanted) in enumerate(zip(node.dims, dst.dims, strict=True)):
        if have != wanted:
            node = _with(node, dim, wanted[len(have) :], dst.padded[dim])
            yield _Edge("slice", wanted[len(have) :], node, 0, 0.0, to=dim, count=0)


def _shortest(src: _Node, problem: _Problem, left: Callable[[_Node], _Cost]) -> list[_Edge]:
    """A* over layouts; `left` is a lower bound on the cost that is left."""
    best: dict[_Node, _Cost] = {src: _Cost(0.0, 0, 0)}
    via: dict[_Node, tuple[_Node, _Edge]] = {}
    tie, dst = itertools.count(), problem.dst
    queue = [(left(src), next(tie), best[src], src)]
    while queue:
        _, _, so_far, node = heapq.heappop(queue)
        if node == dst:
            return _backtrack(via, src, dst)
        if so_far != best[node]:
            continue
        for edge in _edges(node, problem):
            cost = so_far.and_then(_Cost(edge.price, edge.count, 1))
            if edge.after not in best or cost < best[edge.after]:
                estimate = cost.and_then(left(edge.after))
                if dst not in best or estimate < best[dst]:
                    best[edge.after], via[edge.after] = cost, (node, edge)
                    heapq.heappush(queue, (estimate, next(tie), cost, edge.after))
    raise AssertionError(f"no path from {src} to {dst}")


def _backtrack(via: Mapping[_Node, tuple[_Node, _Edge]], src: _Node, node: _Node) -> list[_Edge]:
    edges = []
    while node != src:
        node, edge = via[node]
        edges.append(edge)
    return edges[::-1]


def _bound(problem: _Problem) -> Callable[[_Node], _Cost]:
    """A lower bound on the cost that is left: of as many bytes, over the fastest links, as some device must still get.

    That is what it wants at the end and does not hold; looked at are the first device and its neighbour along each axis. What
    is summed or compared yet, nobody holds. Of each element of it n parts are to become one on c devices, which takes
    n + c - 2 messages, and so many elements over the number of devices are sent by one of them.
    """
    devices = [{a: int(a == one) for a in problem.axes} for one in (None, *problem.axes)]
    blocks = [_block_of(d, problem.dst, problem) for d in devices]
    wanted = list(zip(*blocks, strict=True))
    volumes = [math.prod(end - first for first, end in block) for block in blocks]
    count, elements = problem.count(problem.axes), math.prod(problem.shape)
    copies = count // math.prod(map(problem.count, problem.dst.dims))
    overlaps: dict[tuple[int, Axes, int], list[int]] = {}

    def overlap(dim: int, axes: Axes, padded: int) -> list[int]:
        """How much of what each device wants of a dim it holds."""
        block = padded // problem.count(axes)
        held = (_rows(d, axes, block, problem.shape[dim], problem) for d in devices)
        return [max(0, min(e, f) - max(a, b)) for (a, e), (b, f) in zip(held, wanted[dim], strict=True)]

    def missing(node: _Node) -> int:
        parts = problem.count(tuple(a for a in node.pending_axes if a not in problem.dst.pending_axes))
        if parts > 1:
            messages = 0 if problem.dst.pending else -(-elements * (parts + copies - 2) // count)
            return max(*volumes, messages)
        held = [1] * len(devices)
        for key in zip(range(len(problem.shape)), node.dims, node.padded, strict=True):
            rows = overlaps.get(key) or overlaps.setdefault(key, overlap(*key))
            held = [h * n for h, n in zip(held, rows, strict=True)]
        return max(v - h for v, h in zip(volumes, held, strict=True))

    def left(node: _Node) -> _Cost:
        if node == problem.dst:
            return _Cost(0.0, 0, 0)
        rows = missing(node)
        return _Cost(problem.network.least(problem.axes, rows * problem.itemsize), 1, 1) if rows else _Cost(0.0, 0, 1)

    return left


def _block_of(device: dict[str, int], node: _Node, problem: _Problem) -> list[tuple[int, int]]:
    """The true rows of each dim that a device holds, as (first, end)."""
    return [
        _rows(device, axes, padded // problem.count(axes), size, problem)
        for size, axes, padded in zip(problem.shape, node.dims, node.padded, strict=True)
    ]


def _rows(device: dict[str, int], axes: Axes, block: int, size: int, problem: _Problem) -> tuple[int, int]:
    number = 0
    for a in axes:
        number = number * problem.network[a] + device[a]
    return min(size, number * block), min(size, number * block + block)


# The steps


def _edges(node: _Node, problem: _Problem) -> Iterator[_Edge]:
    """All steps that one can take from a layout."""
    for steps in STEPS:
        yield from steps(node, problem)


def _sends(problem: _Problem, kind: str, axes: Axes, after: _Node, nbytes: int, dim: int | None = None, to: int | None = None):
    """A collective in which each device sends so many bytes."""
    minor = None
    if kind == "reduce_scatter" and to is not None and to == len(problem.shape) - 1:
        minor = after.padded[to] // problem.count(after.dims[to])
    return _Edge(kind, axes, after, nbytes, problem.network.collective(kind, axes, nbytes, minor), dim, to)


def _all_gathers(node: _Node, problem: _Problem) -> Iterator[_Edge]:
    for dim in problem.dims:
        for axes in problem.movable(node, dim):
            nbytes = problem.nbytes(node) * (problem.count(axes) - 1)
            yield _sends(problem, "all_gather", axes, _without(node, dim, axes, problem), nbytes, dim=dim)


def _slices(node: _Node, problem: _Problem) -> Iterator[_Edge]:
    for dim in problem.dims:
        for axes in _to_slice(node, dim, problem):
            for padded in problem.room(node, dim, axes):
                yield _Edge("slice", axes, _with(node, dim, axes, padded), 0, 0.0, to=dim, count=0)


def _to_slice(node: _Node, dim: int, problem: _Problem) -> list[Axes]:
    """Each free axis, and all axes at once that `dim` lacks to be as it is wanted."""
    free = problem.free_axes(node)
    have, wanted = node.dims[dim], problem.dst.dims[dim]
    lacking = wanted[len(have) :]
    at_once = len(lacking) > 1 and wanted[: len(have)] == have and set(lacking) <= set(free)
    return [*([lacking] if at_once else []), *((a,) for a in free)]


def _all_to_alls(node: _Node, problem: _Problem) -> Iterator[_Edge]:
    for dim, to in itertools.permutations(problem.dims, 2):
        for axes in problem.movable(node, dim):
            for padded in problem.room(node, to, axes):
                after = _without(_with(node, to, axes, padded), dim, axes, problem)
                sent = _padded_nbytes(node, to, padded, problem) // problem.count(axes) * (problem.count(axes) - 1)
                yield _sends(problem, "all_to_all", axes, after, sent, dim, to)


def _exchanges(node: _Node, problem: _Problem) -> Iterator[_Edge]:
    """One all_to_all of axes that leave any dims and come to any others, in any order: what `_all_to_alls` has not."""
    ways = [[(), *problem.movable(node, dim)] if dim in problem.dims else [()] for dim in range(len(node.dims))]
    for leaving in itertools.product(*ways):
        targets = tuple(dim for dim in problem.dims if not leaving[dim])
        for arriving in _arrivals(tuple(a for axes in leaving for a in axes), targets):
            if sum(map(bool, leaving)) + len(arriving) > 2 or not set(arriving.values()) <= set(leaving):
                yield from _exchanged(node, leaving, arriving, problem)


@lru_cache
def _arrivals(axes: Axes, targets: tuple[int, ...]) -> list[dict[int, Axes]]:
    """The ways in which axes may come to dims, major to minor in each."""
    found = []
    for order in itertools.permutations(axes) if len(axes) > 1 and targets else ():
        for cuts in itertools.combinations_with_replacement(range(len(axes) + 1), len(targets) - 1):
            ends = (0, *cuts, len(axes))
            pairs = zip(targets, itertools.pairwise(ends), strict=True)
            found.append({dim: order[start:end] for dim, (start, end) in pairs if start < end})
    return found


def _exchanged(node: _Node, leaving: tuple[Axes, ...], arriving: dict[int, Axes], problem: _Problem) -> Iterator[_Edge]:
    axes = tuple(a for a in problem.axes if any(a in some for some in leaving))
    count = problem.count(axes)
    for paddings in itertools.product(*(problem.room(node, dim, some) for dim, some in arriving.items())):
        after, volume = node, problem.nbytes(node)
        for (dim, some), padded in zip(arriving.items(), paddings, strict=True):
            volume = volume if node.dims[dim] else volume // problem.shape[dim] * padded
            after = _with(after, dim, some, padded)
        for dim, some in enumerate(leaving):
            after = _without(after, dim, some, problem) if some else after
        yield _sends(problem, "all_to_all", axes, after, volume // count * (count - 1))


def _reduce_scatters(node: _Node, problem: _Problem) -> Iterator[_Edge]:
    axes, kind = _settleable(node)
    if kind != "sum":
        return
    for k, to in itertools.product(range(1, len(axes) + 1), problem.dims):
        for some in itertools.permutations(axes, k):
            for padded in problem.room(node, to, some):
                after = _with(_settle(node, some), to, some, padded)
                sent = _padded_nbytes(node, to, padded, problem) // problem.count(some) * (problem.count(some) - 1)
                yield _sends(problem, "reduce_scatter", some, after, sent, to=to)


def _all_reduces(node: _Node, problem: _Problem) -> Iterator[_Edge]:
    axes, _ = _settleable(node)
    for k in range(1, len(axes) + 1):
        for some in itertools.combinations(axes, k):
            nbytes = -(-2 * problem.nbytes(node) * (problem.count(some) - 1) // problem.count(some))
            yield _sends(problem, "all_reduce", some, _settle(node, some), nbytes)


def _ppermutes(node: _Node, problem: _Problem) -> Iterator[_Edge]:
    """Every layout with the same blocks on other devices: as many hold a block as need it, so one sender per receiver does."""
    for dims, pending in _rearrangements(node, problem):
        after = _Node(dims, node.padded, pending)
        if after != node:
            yield _sends(problem, "ppermute", _moved(node, after, problem.network), after, problem.nbytes(node))


def _rearrangements(node: _Node, problem: _Problem) -> Iterator[tuple[tuple[Axes, ...], Pending]]:
    """The ways to fill the places of a layout with other axes, so that each dim keeps its number of blocks."""
    kinds = {kind for _, kind in node.pending}
    kind = kinds.pop() if len(kinds) == 1 else None
    swap_pending = kind is not None and bool(problem.dst.pending)
    places = [axes[fixed:] for axes, fixed in zip(node.dims, problem.fixed, strict=True)]
    places += [node.pending_axes] if swap_pending else []
    pool = {*problem.free_axes(node)}.union(*places)
    for filled in _fill(tuple(places), tuple(a for a in problem.axes if a in pool), problem):
        dims, pending = filled[: len(node.dims)], node.pending
        if kind is not None and swap_pending:
            pending = tuple((a, kind) for a in sorted(filled[-1]))
        yield tuple(axes[:f] + new for axes, f, new in zip(node.dims, problem.fixed, dims, strict=True)), pending


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


def _halos(node: _Node, problem: _Problem) -> Iterator[_Edge]:
    """Changes of the padded size of a split dim: only the rows that change device are sent."""
    for dim in problem.dims:
        axes, padded = node.dims[dim], node.padded[dim]
        for other in problem.paddings[dim] if axes else ():
            if other != padded and other % problem.count(axes) == 0:
                yield _halo(node, dim, other, problem)


def _halo(node: _Node, dim: int, padded: int, problem: _Problem) -> _Edge:
    """Its price is that of its ppermutes."""
    axes, count = node.dims[dim], problem.count(node.dims[dim])
    old, after = node.padded[dim] // count, _with(node, dim, (), padded)
    sent = halo.exchange_of(next_blocks(dim, axes, old, padded // count, count, problem.shape[dim])).sent
    row = problem.nbytes(node) // old
    price = sum(problem.network.collective("ppermute", axes, row * rows) for rows in sent)
    return _Edge("halo" if sent else "crop", axes if sent else (), after, row * sum(sent), price, dim, count=len(sent))


def _owes(node: _Node, problem: _Problem) -> Iterator[_Edge]:
    """All pending reductions at once that are not owed yet: the first device keeps its shard, the others write zeros."""
    lacking = tuple(p for p in problem.dst.pending if p not in node.pending)
    if lacking and _in_order(node.pending + lacking) == problem.dst.pending:
        axes = tuple(a for a, _ in lacking)
        if set(axes) <= set(problem.free_axes(node)):
            price = problem.network.compute(0, 2 * problem.nbytes(node))
            yield _Edge("owe", axes, node._replace(pending=problem.dst.pending), 0, price, count=0)


_ONE = {(False, 1): _all_gathers, (False, 2): _all_to_alls, (True, 0): _all_reduces, (True, 1): _reduce_scatters}
"""What one step may be, by whether it settles something, and by how many dims it splits otherwise."""

STEPS = (_all_gathers, _slices, _all_to_alls, _exchanges, _reduce_scatters, _all_reduces, _ppermutes, _halos, _owes)


def _with(node: _Node, dim: int, axes: Axes, padded: int) -> _Node:
    return _changed(node, dim, node.dims[dim] + axes, padded)


def _without(node: _Node, dim: int, axes: Axes, problem: _Problem) -> _Node:
    left = node.dims[dim][: -len(axes)]
    return _changed(node, dim, left, node.padded[dim] if left else problem.shape[dim])


def _changed(node: _Node, dim: int, axes: Axes, padded: int) -> _Node:
    dims, sizes, pending = node
    return _Node((*dims[:dim], axes, *dims[dim + 1 :]), (*sizes[:dim], padded, *sizes[dim + 1 :]), pending)


def _padded_nbytes(node: _Node, dim: int, padded: int, problem: _Problem) -> int:
    nbytes = problem.nbytes(node)
    return nbytes if node.dims[dim] else nbytes // problem.shape[dim] * padded


# Pending reductions are settled in their order; among neighbours of one kind the order means nothing.


def _canonical(layout: Layout) -> Layout:
    pending = _in_order(layout.pending)
    return layout if pending == layout.pending else Layout(layout.sharding, layout.padded, pending)


def _in_order(pending: Pending) -> Pending:
    if len(pending) < 2:
        return pending
    return tuple(p for _, run in itertools.groupby(pending, key=lambda p: p[1]) for p in sorted(run))


def _settleable(node: _Node) -> tuple[Axes, str | None]:
    """The axes whose reductions may be settled now, all of one kind, and that kind."""
    for kind, run in itertools.groupby(node.pending, key=lambda p: p[1]):
        return tuple(a for a, _ in run), kind
    return (), None


def _settle(node: _Node, axes: Axes) -> _Node:
    return node._replace(pending=_in_order(tuple(p for p in node.pending if p[0] not in axes)))


# Who sends what: ppermute and halo


def _places(layout: Layout | _Node, sizes: AxisSizes) -> dict[str, tuple[int, int]]:
    """Where each used axis stands: its dim (the pending axes count as one more) and its stride in blocks there."""
    return {
        a: (dim, shard_count(axes[i + 1 :], sizes))
        for dim, axes in enumerate((*layout.dims, layout.pending_axes))
        for i, a in enumerate(axes)
    }


def _moved(source: _Node, layout: _Node, sizes: AxisSizes) -> Axes:
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
