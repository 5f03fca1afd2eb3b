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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple

from shardax.cost.network import Network, network_of
from shardax.reshard.reach import Priced
from shardax.reshard.steps import (
    Counts,
    Edge,
    Pending,
    Scale,
    Space,
    State,
    canonical,
    canonical_pending,
    with_more,
)
from shardax.sharding import Axes, AxisSizes, Layout, Sharding, minor_most, round_up

FEW = 3  # axes over which all layouts that a value may take are looked at
MOST = 4  # dims, likewise
COLLECTIVES = frozenset(
    {"all_gather", "all_reduce", "all_to_all", "halo", "ppermute", "reduce_scatter", "swap"}
)


Cost = tuple[float, int, int]
"""Of a path, in the order in which paths are compared: its price, its collectives, its steps."""


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
    return _price(src, dst, tuple(shape), itemsize, network_of(sizes), bound=False)


def least(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, sizes: AxisSizes) -> float:
    """A lower bound on that price: itself, where it is quick to find, which it is not over many axes."""
    return _price(src, dst, tuple(shape), itemsize, network_of(sizes), bound=True)


# The search


@lru_cache(maxsize=1 << 18)
def _price(
    src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, network: Network, bound: bool
) -> float:
    if src == dst or 0 in shape:
        return 0.0
    first, last = _end(src, shape, network), _end(dst, shape, network)
    if _only_slices(first, last):
        return 0.0
    first, last, shape, _, _ = _within_blocks(first, last, shape, network)
    first, last = _renamed(first, last, network)
    frame = _frame(shape, _uses(first) | _uses(last), network)
    if frame.few:
        return frame.priced(itemsize, last.pending).price(first, last)
    search = _search(first, last, shape, itemsize, network, standing=True)
    return search.least() if bound else search.price()


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
    nbytes = sum(e.nbytes for e in route.edges)
    return Path(tuple(s for s in steps if s.source != s.layout), float(nbytes), route.price)


class _Route(NamedTuple):
    """Edges between two layouts, and their price. `staying`: the major axes of each dim that both have and
    that stay in place, which the edges leave out; `blocks`: into how many pieces these split the dims."""

    edges: Sequence[Edge]
    price: float
    staying: tuple[Axes, ...]
    blocks: tuple[int, ...]


@lru_cache(maxsize=1 << 16)
def _route(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, network: Network) -> _Route:
    """The cheapest way from one layout to another."""
    first, last = _state(src), _state(dst)
    if _only_slices(first, last):
        return _Route(list(_sliced(first, last)), 0.0, ((),) * len(shape), (1,) * len(shape))
    first, last, shape, staying, blocks = _within_blocks(first, last, shape, network)
    price, edges = _search(first, last, shape, itemsize, network).path()
    return _Route(edges, price, staying, blocks)


@lru_cache(maxsize=1 << 16)
def _end(layout: Layout, shape: tuple[int, ...], network: Network) -> State:
    return _state(_without_trivial_axes(layout, shape, network))


def _state(layout: Layout) -> State:
    return State(layout.sharding.dims, layout.padded, canonical_pending(layout.pending))


@lru_cache(maxsize=1 << 16)
def _uses(state: State) -> frozenset[Any]:
    """What limits the paths from a layout, or to it: the axes that it uses, and (dim, padded size) of what
    they split."""
    split = [(d, p) for d, (axes, p) in enumerate(zip(state.dims, state.padded, strict=True)) if axes]
    return frozenset([*itertools.chain(*state.dims), *state.pending_axes, *split])


def _only_slices(first: State, last: State) -> bool:
    if first.pending != last.pending:
        return False
    sides = zip(first.dims, first.padded, last.dims, last.padded, strict=True)
    return all([b[: len(a)] == a and (not a or p == q) for a, p, b, q in sides])


def _within_blocks(
    first: State, last: State, shape: tuple[int, ...], network: Network
) -> tuple[State, State, tuple[int, ...], tuple[Axes, ...], tuple[int, ...]]:
    """Two layouts and a shape without what both split alike; the axes that do, and into how many blocks:
    where these are as good as a value of their own, all of them full, and such that any axes split them
    evenly.
    """
    if not any([a and b and a[0] == b[0] for a, b in zip(first.dims, last.dims, strict=True)]):
        return first, last, shape, ((),) * len(shape), (1,) * len(shape)
    axes, counts = _axes(_uses(first) | _uses(last), network), _counts(network)
    sides = zip(shape, first.padded, last.padded, first.dims, last.dims, strict=True)
    staying = tuple(
        [
            shared
            if p == q == n
            and (shared := _common_prefix(a, b))
            and not n % (counts[shared] * counts[tuple([x for x in axes if x not in shared])])
            else ()
            for n, p, q, a, b in sides
        ]
    )
    if not any(staying):
        return first, last, shape, staying, (1,) * len(shape)
    blocks = tuple([counts[axes] for axes in staying])
    shape = tuple([n // count for n, count in zip(shape, blocks, strict=True)])
    return _inside(first, staying, blocks), _inside(last, staying, blocks), shape, staying, blocks


def _renamed(first: State, last: State, network: Network) -> tuple[State, State]:
    """Two layouts between which a path costs the same, whichever of the axes that cost alike are where: named
    in the order in which they come, so that one pair stands for all of these.
    """
    if not network.alike:
        return first, last
    names: dict[str, str] = {}
    unused = {axes: iter(axes) for axes in network.alike.values()}
    for axis in (*itertools.chain(*first.dims, *last.dims), *first.pending_axes, *last.pending_axes):
        if axis not in names:
            names[axis] = next(unused[network.alike[axis]]) if axis in network.alike else axis
    return _with_names(first, names), _with_names(last, names)


def _with_names(state: State, names: Mapping[str, str]) -> State:
    dims = tuple([tuple([names[a] for a in axes]) for axes in state.dims])
    pending = tuple([(names[a], kind) for a, kind in state.pending])
    return State(dims, state.padded, canonical_pending(pending))


def _inside(state: State, staying: Sequence[Axes], blocks: Sequence[int]) -> State:
    """A layout as that of one block."""
    dims = tuple([axes[len(shared) :] for axes, shared in zip(state.dims, staying, strict=True)])
    padded = tuple([p // count for p, count in zip(state.padded, blocks, strict=True)])
    return State(dims, padded, state.pending)


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


def _search(
    src: State,
    dst: State,
    shape: tuple[int, ...],
    itemsize: int,
    network: Network,
    standing: bool = False,
) -> "_Search":
    """`standing`: only the price is wanted, so that another value may stand for this one."""
    frame = _frame(shape, _uses(src) | _uses(dst), network)
    fixed = (0,) * len(shape)
    if not frame.few:  # major axes that both layouts have stay in place
        sides = zip(src.dims, dst.dims, src.padded, dst.padded, strict=True)
        fixed = tuple([len(_common_prefix(a, b)) if p == q else 0 for a, b, p, q in sides])
    value = frame.value(standing, itemsize, fixed, dst.pending)
    return _Search(value.number(src), value.number(dst), value, frame.few)


class _Search(NamedTuple):
    """Between two layouts of a value, by their numbers; over a `few` axes, through all layouts."""

    first: int
    last: int
    value: "_Value"
    few: bool

    def price(self) -> float:
        found, ends = self.value.scale.found, (self.first, self.last)
        if ends not in found:
            found[ends], _ = self.path()
        return found[ends]

    def least(self) -> float:
        return _bound(self.last, self.value)(self.first)[0]

    def path(self) -> tuple[float, list[Edge]]:
        """Its price and its steps."""
        left = _nothing if self.few else _bound(self.last, self.value)
        price, via = _shortest(self.first, self.last, self.value.scale, left)
        node, edges = self.last, list[Edge]()
        while node != self.first:
            before, edge = via[node]
            sent = self.value.scale.bytes(edge.nbytes)
            edges.append(edge._replace(after=self.value.state(node), nbytes=sent))
            node = before
        return price, edges[::-1]


def _nothing(node: int) -> Cost:
    return 0.0, 0, 0


@dataclass(frozen=True, eq=False)
class _Frame:
    """Between which layouts paths are looked for, whichever axes are where: over a `few` axes, through all
    layouts. `order`: the dims that may be split, sorted, so that one value stands for all that differ by the
    order of theirs; `others`: elements of the others. `values`: those that were looked up, and the `numbers`
    of their layouts in a space.
    """

    shape: tuple[int, ...]
    axes: Axes
    dims: tuple[int, ...]
    paddings: tuple[tuple[int, ...], ...]
    minor: int | None
    network: Network
    few: bool
    order: tuple[int, ...]
    others: int
    values: dict[Hashable, "_Value"] = field(default_factory=dict)
    prices: dict[Hashable, Priced] = field(default_factory=dict)
    numbers: dict[Hashable, dict[State, int]] = field(default_factory=dict)

    def priced(self, itemsize: int, owing: Pending) -> Priced:
        """The prices of all ways to layouts that owe this."""
        key = itemsize, owing
        if key not in self.prices:
            self.prices[key] = _priced(self, itemsize, owing)
        return self.prices[key]

    def value(self, standing: bool, itemsize: int, fixed: tuple[int, ...], owing: Pending) -> "_Value":
        """This value, or the one that stands for it."""
        key = standing, itemsize, fixed, owing
        if key not in self.values:
            if standing:
                value = _value(self, self.order, itemsize * self.others, fixed, owing)
            else:
                value = _value(self, tuple(range(len(self.shape))), itemsize, fixed, owing)
            self.values[key] = value
        return self.values[key]


@lru_cache(maxsize=1 << 14)
def _frame(shape: tuple[int, ...], uses: frozenset[Any], network: Network) -> _Frame:
    """`uses`: what either layout does (`_uses`)."""
    axes, counts = _axes(uses, network), _counts(network)
    split = [set[int]() for _ in shape]
    for dim, padded in uses.difference(axes):
        split[dim].add(padded)
    paddings = tuple(
        [_paddings(n, tuple(sorted(padded)), axes, counts) for n, padded in zip(shape, split, strict=True)]
    )
    few = len(axes) <= FEW
    dims = _dims([d for d, padded in enumerate(split) if padded], shape, paddings, few=not few)
    paddings = tuple([sizes if d in dims else () for d, sizes in enumerate(paddings)])
    return _frame_of(shape, axes, dims, paddings, few, network)


@lru_cache(maxsize=1 << 14)
def _frame_of(shape: tuple[int, ...], axes: Axes, dims, paddings, few: bool, network: Network) -> _Frame:
    counts = _counts(network)
    minor = minor_most(shape) if shape and network.chip.lanes else None
    places, others = [], 1
    for d, n in enumerate(shape):
        if not paddings[d]:
            others *= n
        elif paddings[d] == (n,):
            places.append((d == minor, _least(n, axes, counts), (), d))
        else:
            places.append((d == minor, n, paddings[d], d))
    order = tuple([d for *_, d in sorted(places)])
    return _Frame(shape, axes, dims, paddings, minor, network, few, order, others)


def _axes(uses: frozenset[Any], network: Network) -> Axes:
    return tuple([a for a in network if a in uses])


@dataclass(frozen=True, eq=False, slots=True)
class _Value:
    """A value as one of a space, which has its dims in this `order`, even ones as short as they can be;
    `even`: these. `shape`: of the value, in this order. `numbers`: of the layouts that were looked up.
    """

    scale: Scale
    order: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    even: tuple[bool, ...]
    numbers: dict[State, int]

    def number(self, state: State) -> int:
        known = self.numbers.get(state)
        if known is None:
            dims, padded = [state.dims[d] for d in self.order], [state.padded[d] for d in self.order]
            known = self.numbers[state] = self.scale.space.number(
                State(tuple(dims), self._padded(self.scale.space.shape, padded), state.pending)
            )
        return known

    def state(self, number: int) -> State:
        dims, padded, pending = self.scale.space.states[number]
        return State(dims, self._padded(self.shape, padded), pending)

    def _padded(self, shape: tuple[int, ...], padded: Sequence[int]) -> tuple[int, ...]:
        return tuple([n if even else p for n, p, even in zip(shape, padded, self.even, strict=True)])


def _value(
    frame: _Frame, order: tuple[int, ...], itemsize: int, fixed: tuple[int, ...], owing: Pending
) -> _Value:
    """Values share a space in which all bytes can be divided, and the dims that are split evenly are as short
    as the same axes divide.
    """
    axes, network = frame.axes, frame.network
    shape, paddings = tuple([frame.shape[d] for d in order]), [frame.paddings[d] for d in order]
    fixed = tuple([fixed[d] for d in order])
    dims = tuple([i for i, d in enumerate(order) if d in frame.dims])
    minor = order.index(frame.minor) if frame.minor in order else None
    counts = _counts(network)
    split = [d in dims and bool(paddings[d]) for d in range(len(shape))]
    even = tuple([not splits or paddings[d] == (shape[d],) for d, splits in enumerate(split)])
    kinds = list(zip(shape, split, even, strict=True))
    lengths = tuple([_least(n, axes, counts) if s and evenly else n if s else 1 for n, s, evenly in kinds])
    padded = tuple(
        [
            () if not s else (n,) if evenly else paddings[d]
            for d, (n, (_, s, evenly)) in enumerate(zip(lengths, kinds, strict=True))
        ]
    )
    minor = minor if minor in dims else None
    space = _space(lengths, counts[axes], network, axes, dims, padded, fixed, owing, minor)
    ours, theirs = math.prod(shape) * itemsize, math.prod(lengths) * counts[axes]
    shared = math.gcd(ours, theirs)
    stretch = (1, 1) if minor is None else (lengths[minor], shape[minor])
    scale = _scale(space, ours // shared, theirs // shared, stretch)
    numbers = frame.numbers.setdefault((order, space.like or space), {})
    return _Value(scale, order, shape, itemsize, even, numbers)


def _priced(frame: _Frame, itemsize: int, owing: Pending) -> Priced:
    """Dims that are split evenly are as short as the same axes divide, and what is left of them is counted in
    the bytes of an element."""
    axes, network = frame.axes, frame.network
    counts = _counts(network)
    order = [d for d in frame.order if frame.paddings[d]]
    sizes = tuple([frame.paddings[d] for d in order])
    is_even = [padded == (frame.shape[d],) for d, padded in zip(order, sizes, strict=True)]
    kinds = list(zip(order, is_even, strict=True))
    lengths = tuple([_least(frame.shape[d], axes, counts) if even else frame.shape[d] for d, even in kinds])
    paddings = tuple([(n,) if even else p for n, even, p in zip(lengths, is_even, sizes, strict=True)])
    minor = order.index(frame.minor) if frame.minor in order else None
    stretch = 1 if minor is None else frame.shape[order[minor]] // lengths[minor]
    count, rank = counts[axes], len(order)
    dims, even = tuple(range(rank)), ((count,),) * rank
    space = _space((count,) * rank, count, network, axes, dims, even, (0,) * rank, owing, minor)
    itemsize = itemsize * math.prod(frame.shape) // math.prod(lengths)
    return Priced(space, order, sizes, lengths, paddings, itemsize, stretch)


@lru_cache(maxsize=1 << 12)
def _least(size: int, axes: Axes, counts: Counts) -> int:
    """The least size that the same of these axes divide."""
    return math.lcm(*[count for count in _counts_of_subsets(axes, counts) if not size % count])


@lru_cache(maxsize=1 << 12)
def _space(shape, itemsize: int, network: Network, axes: Axes, dims, paddings, fixed, owing, minor) -> Space:
    within = shape, itemsize, network, axes, dims, paddings, fixed
    like = _space(*within, (), minor) if owing else None
    return Space(*within, owing, minor, _counts(network), like)


_scale = lru_cache(maxsize=1 << 12)(Scale)


@lru_cache
def _counts(network: Network) -> Counts:
    return Counts(network)


@lru_cache(maxsize=1 << 14)
def _paddings(size: int, split: tuple[int, ...], axes: Axes, counts: Counts) -> tuple[int, ...]:
    """The sizes to which a dim may be padded: as it is before or after, where it is split, and so that axes
    make no more blocks of it than it has rows, or had.
    """
    most = max((size, *split))
    rounded = {round_up(size, count) for count in _counts_of_subsets(axes, counts) if count <= most}
    return tuple(sorted({*split} | rounded))


@lru_cache
def _counts_of_subsets(axes: Axes, counts: Counts) -> list[int]:
    subsets = itertools.chain.from_iterable(itertools.combinations(axes, k) for k in range(1, len(axes) + 1))
    return sorted({counts[some] for some in subsets})


def _dims(
    used: list[int], shape: tuple[int, ...], paddings: Sequence[tuple[int, ...]], few: bool
) -> tuple[int, ...]:
    """The dims that may be split on the way: all, if these are not many and even; else those that are split
    before or after, and one more that all axes divide, or two.

    A sum pending over x, requested on dim 0 over (x, y), is cheapest when dim 1 is sliced over y first, half
    being scattered then; an all_to_all brings y to dim 0. (More dims would win a little only where several
    are uneven, and cost the search much.)
    """
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
            yield Edge("slice", target[len(have) :], node, 0, 0, to=dim, count=0)


def _shortest(
    first: int, last: int, prices: Scale, left: Callable[[int], Cost]
) -> tuple[float, Mapping[int, tuple[int, Edge]]]:
    """The price of the path from one layout to another, and for each layout that before it with the step
    between, by A*: `left` bounds the cost that is left from below."""
    best: dict[int, Cost] = {first: (0.0, 0, 0)}
    via: dict[int, tuple[int, Edge]] = {}
    order = itertools.count()
    queue = [(left(first), next(order), best[first], first)]
    while queue:
        _, _, so_far, node = heapq.heappop(queue)
        if node == last:
            return so_far[0], via
        if so_far != best[node]:
            continue
        for tariff, count, after, edge in prices.space.edges(node):
            cost = (so_far[0] + prices[tariff], so_far[1] + count, so_far[2] + 1)
            if after not in best or cost < best[after]:
                more = left(after)
                estimate = (cost[0] + more[0], cost[1] + more[1], cost[2] + more[2])
                if last not in best or estimate < best[last]:
                    best[after], via[after] = cost, (node, edge)
                    heapq.heappush(queue, (estimate, next(order), cost, after))
    raise AssertionError(f"no path to {prices.space.states[last]}")


@lru_cache(maxsize=1 << 10)
def _bound(goal: int, value: _Value) -> Callable[[int], Cost]:
    """A lower bound on the cost that is left: of as many bytes, over the fastest links, as some device must
    still get.

    That is what it needs at the end and does not hold; looked at are the first device and its neighbour along
    each axis. What is summed or compared yet, nobody holds. Of each element of it n parts are to become one
    on c devices, which takes n + c - 2 messages, and so many elements over the number of devices are sent by
    one of them.
    """
    space, shape, dst = value.scale.space, value.shape, value.state(goal)
    devices = [{a: int(a == one) for a in space.axes} for one in (None, *space.axes)]
    blocks = [_block_of(d, dst, shape, space) for d in devices]
    target = list(zip(*blocks, strict=True))
    volumes = [math.prod(end - first for first, end in block) for block in blocks]
    count, elements = space.count(space.axes), math.prod(shape)
    copies = count // math.prod(map(space.count, dst.dims))
    overlaps: dict[tuple[int, Axes, int], list[int]] = {}

    def overlap(dim: int, axes: Axes, padded: int) -> list[int]:
        """How much of what each device needs of a dim it holds."""
        block = padded // space.count(axes)
        held = (_rows(d, axes, block, shape[dim], space) for d in devices)
        return [max(0, min(e, f) - max(a, b)) for (a, e), (b, f) in zip(held, target[dim], strict=True)]

    def missing(node: State) -> int:
        parts = space.count(tuple(a for a in node.pending_axes if a not in dst.pending_axes))
        if parts > 1:
            messages = 0 if dst.pending else -(-elements * (parts + copies - 2) // count)
            return max(*volumes, messages)
        held = [1] * len(devices)
        for key in zip(range(len(shape)), node.dims, node.padded, strict=True):
            rows = overlaps.get(key) or overlaps.setdefault(key, overlap(*key))
            held = [h * n for h, n in zip(held, rows, strict=True)]
        return max(v - h for v, h in zip(volumes, held, strict=True))

    @cache
    def left(node: int) -> Cost:
        rows = 0 if node == goal else missing(value.state(node))
        if not rows:
            return 0.0, 0, int(node != goal)
        return space.network.least(space.axes, rows * value.itemsize), 1, 1

    return left


def _block_of(
    device: dict[str, int], node: State, shape: tuple[int, ...], space: Space
) -> list[tuple[int, int]]:
    """The true rows of each dim that a device holds, as (first, end)."""
    return [
        _rows(device, axes, padded // space.count(axes), size, space)
        for size, axes, padded in zip(shape, node.dims, node.padded, strict=True)
    ]


def _rows(device: dict[str, int], axes: Axes, block: int, size: int, space: Space) -> tuple[int, int]:
    number = 0
    for a in axes:
        number = number * space.network[a] + device[a]
    return min(size, number * block), min(size, number * block + block)
