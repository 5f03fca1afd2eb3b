"""The steps that a reshard may take: from a layout, all layouts that one collective or local operation leads
to.

A `Space` limits between which layouts: which axes, which dims, and how these may be padded. It keeps the
steps from each layout that was looked up, so that all paths through the same space share them. What a step
costs depends on the bytes of the value: its `Scale` has the prices.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardax.cost.network import FAR, Network
from shardax.reshard import halo
from shardax.reshard.halo import HaloRequest
from shardax.sharding import Axes, AxisSizes, Layout, shard_count

Pending = tuple[tuple[str, str], ...]
PIECES = 12  # into which a swap cuts a shard at most: each is a collective of its own


class State(NamedTuple):
    """A layout, as a tuple that is quick to make and to look up."""

    dims: tuple[Axes, ...]
    padded: tuple[int, ...]
    pending: Pending

    @property
    def pending_axes(self) -> Axes:
        return tuple([axis for axis, _ in self.pending])


class Edge(NamedTuple):
    """A step to `after`, in which a device sends `nbytes` in `count` collectives. `tariff`: the number of
    what it costs, in its space.
    """

    kind: str
    axes: Axes
    after: State
    nbytes: int
    tariff: int
    dim: int | None = None
    to: int | None = None
    count: int = 1


class Tariff(NamedTuple):
    """What the price of a step depends on: its collectives, the axes that they run over, and the bytes that a
    device sends in each. `minor` and, of each, `far`: as a `cost.network.Message` has them.
    """

    kind: str
    axes: Axes = ()
    sent: tuple[int, ...] = ()
    minor: int | None = None
    far: tuple[bool, ...] = ()


FREE = Tariff("slice")
Leaving = tuple[int, int, int, Edge]
"""A step from a layout: its tariff, its collectives, the number of the layout after it, the step itself."""


class Counts(dict[Axes, int]):
    """The number of pieces into which axes split a dim."""

    __eq__ = object.__eq__
    __ne__ = object.__ne__

    def __hash__(self) -> int:
        return id(self)

    def __init__(self, sizes: AxisSizes):
        self.sizes = sizes

    def __missing__(self, axes: Axes) -> int:
        count = self[axes] = shard_count(axes, self.sizes)
        return count


@dataclass(frozen=True, eq=False)
class Space:
    """What a search may use: mesh axes, dims, padded sizes of each dim; and how many major axes of each dim
    stay in place.

    `owing`: the reductions that are to be pending at the end; `like`: the space in which nothing is. `minor`:
    the minor-most dim, on a chip with lanes. Steps have no prices here, but tariffs: values of other sizes
    that have the same steps share a space, each at its `Scale`.
    """

    shape: tuple[int, ...]
    itemsize: int
    network: Network
    axes: Axes
    dims: tuple[int, ...]
    paddings: tuple[tuple[int, ...], ...]
    fixed: tuple[int, ...]
    owing: Pending
    minor: int | None
    counts: Counts
    like: "Space | None" = None
    known: dict[int, list[Leaving]] = field(default_factory=dict)
    numbers: dict[State, int] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    shards: dict[State, int] = field(default_factory=dict)
    tariffs: dict[Tariff, int] = field(default_factory=dict)
    shared: dict[tuple[int, bool], list[Leaving]] = field(default_factory=dict)

    def __post_init__(self):
        for name in ("numbers", "states", "shards", "tariffs", "shared") if self.like else ():
            object.__setattr__(self, name, getattr(self.like, name))

    def number(self, state: State) -> int:
        """The number of a layout here, which is quicker to look up."""
        known = self.numbers.setdefault(state, len(self.states))
        if known == len(self.states):
            self.states.append(state)
        return known

    def edges(self, node: int) -> list[Leaving]:
        """All steps that one can take from a layout."""
        known = self.known.get(node)
        if known is None:
            state = self.states[node]
            key = node, bool(self.owing and state.pending)
            if key not in self.shared:
                self.shared[key] = [self._leaving(edge) for step in STEPS for edge in step(state, self)]
            known = self.known[node] = self.shared[key] + [self._leaving(e) for e in _owes(state, self)]
        return known

    def _leaving(self, edge: Edge) -> Leaving:
        return edge.tariff, edge.count, self.number(edge.after), edge

    def tariff(self, *what: Any, **how: Any) -> int:
        """The number of a `Tariff`."""
        return self.tariffs.setdefault(Tariff(*what, **how), len(self.tariffs))

    def count(self, axes: Axes) -> int:
        return self.counts[axes]

    def nbytes(self, node: State) -> int:
        """Bytes of the shard."""
        nbytes = self.shards.get(node)
        if nbytes is None:
            nbytes = self.itemsize
            for padded, axes in zip(node.padded, node.dims, strict=True):
                nbytes *= padded // self.counts[axes]
            self.shards[node] = nbytes
        return nbytes

    def width(self, node: State, dim: int) -> int | None:
        """How many elements of `dim` a device has, if it is the minor-most."""
        return node.padded[dim] // self.count(node.dims[dim]) if dim == self.minor else None

    def free_axes(self, node: State) -> Axes:
        used = {*itertools.chain(*node.dims), *node.pending_axes}
        return tuple([a for a in self.axes if a not in used])

    def movable(self, node: State, dim: int) -> Iterator[Axes]:
        """The minor axes of `dim` that may leave it together."""
        axes = node.dims[dim]
        return (axes[keep:] for keep in range(self.fixed[dim], len(axes)))

    def room(self, node: State, dim: int, axes: Axes) -> Iterator[int]:
        """The padded sizes with which `dim` can take `axes` as its minor-most: its own, or any where it is
        unsplit.
        """
        count = self.count(node.dims[dim] + axes)
        paddings = (node.padded[dim],) if node.dims[dim] else self.paddings[dim]
        return (p for p in paddings if p % count == 0)


def swap_needs(swap: Edge, counts: Counts) -> list[tuple[int, int]]:
    """The dims of a swap, each with the number of pieces into which it is cut, those into which the axes that
    stay split it.
    """
    assert swap.dim is not None and swap.to is not None
    finest, kept = 1, list[tuple[int, int]]()
    for dim in (swap.dim, swap.to):
        axes = swap.after.dims[dim]
        stays = tuple([a for a in axes if a not in swap.axes])
        kept.append((dim, counts[stays]))
        finest = math.lcm(finest, counts[axes[len(stays) :]])
    return [(dim, count * finest) for dim, count in kept]


class Scale(dict[int, float]):
    """The prices of the tariffs of a space, in picoseconds, for a value that has `ours` bytes where the space
    has `theirs`, and `stretch` elements along the minor-most dim, the second number where the space
    has the first. `found`: the prices of paths between two layouts that were looked for, over many axes.
    """

    __slots__ = ("space", "ours", "theirs", "stretch", "tariffs", "found")
    __eq__ = object.__eq__
    __ne__ = object.__ne__

    def __hash__(self) -> int:
        return id(self)

    def __init__(self, space: Space, ours: int, theirs: int, stretch: tuple[int, int]):
        self.space = space
        self.ours, self.theirs, self.stretch = ours, theirs, stretch
        self.tariffs: list[Tariff] = []
        self.found: dict[tuple[int, int], float] = {}

    def __missing__(self, number: int) -> float:
        if number >= len(self.tariffs):
            self.tariffs = list(self.space.tariffs)
        kind, axes, sent, minor, far = self.tariffs[number]
        network = self.space.network
        if kind == "owe":
            price = network.compute(0, 2 * self.bytes(*sent))
        else:
            left = None if minor is None else minor * self.stretch[1] // self.stretch[0]
            each = zip(sent, far or (False,) * len(sent), strict=True)
            price = float(sum([network.collective(kind, axes, self.bytes(n), left, f) for n, f in each]))
        self[number] = price
        return price

    def bytes(self, nbytes: int) -> int:
        """As many as these are of the space."""
        return -(-nbytes * self.ours // self.theirs)


def _sends(
    space: Space,
    kind: str,
    axes: Axes,
    after: State,
    nbytes: int,
    dim: int | None = None,
    to: int | None = None,
    minor: int | None = None,
):
    """A collective in which each device sends so many bytes."""
    return Edge(kind, axes, after, nbytes, space.tariff(kind, axes, (nbytes,), minor), dim, to)


def _all_gathers(node: State, space: Space) -> Iterator[Edge]:
    for dim in space.dims:
        for axes in space.movable(node, dim):
            nbytes = space.nbytes(node) * (space.count(axes) - 1)
            after, minor = _without(node, dim, axes, space), space.width(node, dim)
            yield _sends(space, "all_gather", axes, after, nbytes, dim=dim, minor=minor)


def _slices(node: State, space: Space) -> Iterator[Edge]:
    for dim in space.dims:
        for axis in space.free_axes(node):
            for padded in space.room(node, dim, (axis,)):
                after = with_more(node, dim, (axis,), padded)
                yield Edge("slice", (axis,), after, 0, space.tariff(*FREE), to=dim, count=0)


def _all_to_alls(node: State, space: Space) -> Iterator[Edge]:
    for dim, to in itertools.permutations(space.dims, 2):
        for axes in space.movable(node, dim):
            for padded in space.room(node, to, axes):
                after = _crossed(node, [(dim, axes)], [(to, axes, padded)], space)
                sent = _padded_nbytes(node, to, padded, space) // space.count(axes) * (space.count(axes) - 1)
                yield _sends(space, "all_to_all", axes, after, sent, dim, to)


def _exchanges(node: State, space: Space) -> Iterator[Edge]:
    """One all_to_all of axes that leave any dims and come to any others, in any order: what `_all_to_alls`
    has not.
    """
    if sum(map(len, node.dims)) < 2:
        return
    ways = [[(), *space.movable(node, dim)] if dim in space.dims else [()] for dim in range(len(node.dims))]
    for leaving in itertools.product(*ways):
        crossing = tuple([a for axes in leaving for a in axes])
        targets = tuple([dim for dim in space.dims if not leaving[dim]])
        if len(crossing) > 1 and targets:
            plain = crossing if sum(map(bool, leaving)) == 1 else None
            yield from _exchanged(node, leaving, _arrivals(crossing, targets, plain), space)


@lru_cache
def _arrivals(axes: Axes, targets: tuple[int, ...], plain: Axes | None) -> list[tuple[tuple[int, Axes], ...]]:
    """The ways in which axes may come to dims, major to minor in each; but for that in which all come to one
    as `plain`.
    """
    known = []
    for order in itertools.permutations(axes):
        for cuts in itertools.combinations_with_replacement(range(len(axes) + 1), len(targets) - 1):
            ends = (0, *cuts, len(axes))
            pairs = zip(targets, itertools.pairwise(ends), strict=True)
            arriving = tuple([(dim, order[start:end]) for dim, (start, end) in pairs if start < end])
            if len(arriving) > 1 or plain not in [some for _, some in arriving]:
                known.append(arriving)
    return known


def _exchanged(
    node: State, leaving: tuple[Axes, ...], arrivals: Sequence[tuple[tuple[int, Axes], ...]], space: Space
) -> Iterator[Edge]:
    crossing = {*itertools.chain(*leaving)}
    axes = tuple([a for a in space.axes if a in crossing])
    count, whole = space.count(axes), space.nbytes(node)
    left = _crossed(node, [(dim, some) for dim, some in enumerate(leaving) if some], [], space)
    tariffs: dict[int, int] = {}
    for arriving in arrivals:
        rooms = [list(space.room(node, dim, some)) for dim, some in arriving]
        for sizes in itertools.product(*rooms):
            dims, padded, volume = [*left.dims], [*left.padded], whole
            for (dim, some), size in zip(arriving, sizes, strict=True):
                dims[dim], padded[dim] = dims[dim] + some, size
                volume = volume if node.dims[dim] else volume // space.shape[dim] * size
            sent = volume // count * (count - 1)
            if sent not in tariffs:
                tariffs[sent] = space.tariff("all_to_all", axes, (sent,))
            after = State(tuple(dims), tuple(padded), node.pending)
            yield Edge("all_to_all", axes, after, sent, tariffs[sent])


def _reduce_scatters(node: State, space: Space) -> Iterator[Edge]:
    axes, reduction = _settleable(node)
    if reduction != "sum":
        return
    for k, to in itertools.product(range(1, len(axes) + 1), space.dims):
        for some in itertools.permutations(axes, k):
            for padded in space.room(node, to, some):
                after = with_more(_settle(node, some), to, some, padded)
                sent = _padded_nbytes(node, to, padded, space) // space.count(some) * (space.count(some) - 1)
                minor = space.width(after, to)
                yield _sends(space, "reduce_scatter", some, after, sent, to=to, minor=minor)


def _all_reduces(node: State, space: Space) -> Iterator[Edge]:
    axes, _ = _settleable(node)
    for k in range(1, len(axes) + 1):
        for some in itertools.combinations(axes, k):
            nbytes = -(-2 * space.nbytes(node) * (space.count(some) - 1) // space.count(some))
            yield _sends(space, "all_reduce", some, _settle(node, some), nbytes)


def _ppermutes(node: State, space: Space) -> Iterator[Edge]:
    """Every layout with the same blocks on other devices: as many hold a block as need it, so one sender per
    receiver does.
    """
    before = _places_of(node.dims, node.pending, space.counts)
    for dims, pending in _rearrangements(node, space):
        after = State(dims, node.padded, pending)
        if after != node:
            places = _places_of(dims, _in_place(node.pending, pending), space.counts)
            crossing = tuple([a for a in space.axes if before.get(a) != places.get(a)])
            nbytes = space.nbytes(node)
            tariff = space.tariff("ppermute", crossing, (nbytes,), far=(_is_far(crossing, space),))
            yield Edge("ppermute", crossing, after, nbytes, tariff)


def _is_far(axes: Axes, space: Space) -> bool:
    """Whether blocks that go anywhere along these axes go further than to neighbours."""
    return max([space.network[a] for a in axes]) >= FAR


def _rearrangements(node: State, space: Space) -> Iterator[tuple[tuple[Axes, ...], Pending]]:
    """The ways to fill the places of a layout with other axes, so that each dim keeps its number of
    blocks.
    """
    reductions = {reduction for _, reduction in node.pending}
    reduction = reductions.pop() if len(reductions) == 1 else None
    swap_pending = reduction is not None and bool(space.owing)
    places = [axes[fixed:] for axes, fixed in zip(node.dims, space.fixed, strict=True)]
    places += [node.pending_axes] if swap_pending else []
    pool = {*space.free_axes(node)}.union(*places)
    counts = tuple([space.count(axes) if axes else 0 for axes in places])
    for filled in _fill(counts, tuple([a for a in space.axes if a in pool]), space.network):
        dims, pending = filled[: len(node.dims)], node.pending
        if reduction is not None and swap_pending:
            pending = tuple((a, reduction) for a in sorted(filled[-1]))
        yield (
            tuple(axes[:f] + new for axes, f, new in zip(node.dims, space.fixed, dims, strict=True)),
            pending,
        )


@lru_cache(maxsize=1 << 14)
def _fill(counts: tuple[int, ...], pool: Axes, network: Network) -> list[tuple[Axes, ...]]:
    """The ways to fill places with axes of `pool` that make so many blocks of each, 0 where there is nothing
    to fill.
    """
    if not counts:
        return [()]
    first, rest = counts[0], counts[1:]
    orders = (
        itertools.chain.from_iterable(itertools.permutations(pool, k) for k in range(1, len(pool) + 1))
        if first
        else [()]
    )
    return [
        (axes, *others)
        for axes in orders
        if not axes or shard_count(axes, network) == first
        for others in _fill(rest, tuple([a for a in pool if a not in axes]), network)
    ]


def _swaps(node: State, space: Space) -> Iterator[Edge]:
    """The axes of two dims in each other's place, which split them into p blocks where they were q, and the
    other way round, times what both share: each device sends its shard in p · q pieces, one in each ppermute.
    (Where both are 1 one brings the whole shard.)
    """
    for dim, to in itertools.combinations(space.dims, 2):
        for here, there in itertools.product(space.movable(node, dim), space.movable(node, to)):
            blocks = space.count(here), space.count(there)
            finest = math.lcm(*blocks)
            count = finest // blocks[0] * (finest // blocks[1])
            if not 1 < count <= PIECES:
                continue
            kept = {dim: node.dims[dim][: -len(here)], to: node.dims[to][: -len(there)]}
            if all(node.padded[d] % (space.count(axes) * finest) == 0 for d, axes in kept.items()):
                dims = [*node.dims]
                dims[dim], dims[to] = kept[dim] + there, kept[to] + here
                axes = tuple([a for a in space.axes if a in (*here, *there)])
                nbytes, after = space.nbytes(node), State(tuple(dims), node.padded, node.pending)
                far = (_is_far(axes, space),) * count
                tariff = space.tariff("ppermute", axes, (nbytes // count,) * count, far=far)
                yield Edge("swap", axes, after, nbytes, tariff, dim, to, count)


def _halos(node: State, space: Space) -> Iterator[Edge]:
    """Changes of the padded size of a split dim: only the rows that change device are sent."""
    for dim in space.dims:
        axes, padded = node.dims[dim], node.padded[dim]
        for other in space.paddings[dim] if axes else ():
            if other != padded and other % space.count(axes) == 0:
                yield _halo(node, dim, other, space)


def _halo(node: State, dim: int, padded: int, space: Space) -> Edge:
    """Its price is that of its ppermutes."""
    axes, count = node.dims[dim], space.count(node.dims[dim])
    old, after = node.padded[dim] // count, with_more(node, dim, (), padded)
    sent, far = rows_sent(old, padded // count, space.shape[dim], tuple([space.network[a] for a in axes]))
    row = space.nbytes(node) // old
    tariff = space.tariff("ppermute", axes, tuple([row * rows for rows in sent]), far=tuple(far))
    kind = "halo" if sent else "crop"
    return Edge(kind, axes if sent else (), after, row * sum(sent), tariff, dim, count=len(sent))


@lru_cache(maxsize=1 << 14)
def rows_sent(old: int, new: int, size: int, counts: tuple[int, ...]) -> tuple[list[int], list[bool]]:
    """How many rows each device sends in each ppermute of such a halo, along whichever dim it is and axes of
    so many; and of each, whether it goes to others than neighbours.
    """
    exchange = halo.exchange_of(next_blocks(0, (), old, new, math.prod(counts), size))
    return exchange.sent, exchange.reaches_far(counts)


def _owes(node: State, space: Space) -> Iterator[Edge]:
    """All pending reductions at once that are not owed yet: the first device keeps its shard, the others
    write zeros.
    """
    lacking = tuple(p for p in space.owing if p not in node.pending)
    if lacking and canonical_pending(node.pending + lacking) == space.owing:
        axes = tuple(a for a, _ in lacking)
        if set(axes) <= set(space.free_axes(node)):
            after = node._replace(pending=space.owing)
            yield Edge("owe", axes, after, 0, space.tariff("owe", (), (space.nbytes(after),)), count=0)


STEPS = (
    _all_gathers,
    _slices,
    _all_to_alls,
    _exchanges,
    _reduce_scatters,
    _all_reduces,
    _ppermutes,
    _swaps,
    _halos,
)  # and `_owes`


def with_more(node: State, dim: int, axes: Axes, padded: int) -> State:
    return _changed(node, dim, node.dims[dim] + axes, padded)


def _crossed(
    node: State, leaving: Sequence[tuple[int, Axes]], arriving: Sequence[tuple[int, Axes, int]], space: Space
) -> State:
    """Minor axes leave some dims and come to others, which are padded so."""
    dims, sizes = [*node.dims], [*node.padded]
    for dim, axes, padded in arriving:
        dims[dim], sizes[dim] = dims[dim] + axes, padded
    for dim, axes in leaving:
        dims[dim] = dims[dim][: -len(axes)]
        sizes[dim] = sizes[dim] if dims[dim] else space.shape[dim]
    return State(tuple(dims), tuple(sizes), node.pending)


def _without(node: State, dim: int, axes: Axes, space: Space) -> State:
    left = node.dims[dim][: -len(axes)]
    return _changed(node, dim, left, node.padded[dim] if left else space.shape[dim])


def _changed(node: State, dim: int, axes: Axes, padded: int) -> State:
    dims, sizes, pending = node
    return State((*dims[:dim], axes, *dims[dim + 1 :]), (*sizes[:dim], padded, *sizes[dim + 1 :]), pending)


def _padded_nbytes(node: State, dim: int, padded: int, space: Space) -> int:
    nbytes = space.nbytes(node)
    return nbytes if node.dims[dim] else nbytes // space.shape[dim] * padded


# Pending reductions are settled in their order; among neighbours of one kind the order means nothing.


def canonical(layout: Layout) -> Layout:
    pending = canonical_pending(layout.pending)
    return layout if pending == layout.pending else Layout(layout.sharding, layout.padded, pending)


def canonical_pending(pending: Pending) -> Pending:
    if len(pending) < 2:
        return pending
    return tuple(p for _, run in itertools.groupby(pending, key=lambda p: p[1]) for p in sorted(run))


def _settleable(node: State) -> tuple[Axes, str | None]:
    """The axes whose reductions may be settled now, all of one kind, and that kind."""
    for reduction, run in itertools.groupby(node.pending, key=lambda p: p[1]):
        return tuple(a for a, _ in run), reduction
    return (), None


def _settle(node: State, axes: Axes) -> State:
    return node._replace(pending=canonical_pending(tuple(p for p in node.pending if p[0] not in axes)))


# Who sends what: ppermute, swap and halo


def _places(layout: Layout, counts: Counts) -> Mapping[str, tuple[int, int]]:
    return _places_of(layout.dims, layout.pending, counts)


@lru_cache(maxsize=1 << 12)
def _places_of(dims: tuple[Axes, ...], pending: Pending, counts: Counts) -> Mapping[str, tuple[int, int]]:
    """Where each used axis stands: its dim (the pending axes count as one more) and its stride in blocks
    there.
    """
    return {
        a: (dim, counts[axes[i + 1 :]])
        for dim, axes in enumerate((*dims, tuple([axis for axis, _ in pending])))
        for i, a in enumerate(axes)
    }


def _in_place(before: Pending, after: Pending) -> Pending:
    """Pending reductions, those that were so before where they stood, as far as there are as many: whose part
    of a sum is which, nobody asks, so that what stays need not cross.

    >>> _in_place((("x", "sum"), ("y", "sum")), (("w", "sum"), ("x", "sum")))
    (('x', 'sum'), ('w', 'sum'))
    """
    if len(before) != len(after):
        return after
    new = iter([p for p in after if p not in before])
    return tuple([p if p in after else next(new) for p in before])


def _block(coordinates: dict[str, int], places: Mapping[str, tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Which block a device holds, as far as these axes tell: its number in each dim."""
    numbers: dict[int, int] = {}
    for axis, i in coordinates.items():
        if axis in places:
            dim, stride = places[axis]
            numbers[dim] = numbers.get(dim, 0) + i * stride
    return tuple(sorted(numbers.items()))


def pairs(source: Layout, layout: Layout, axes: Axes, sizes: AxisSizes) -> list[tuple[int, int]]:
    """(sender, receiver) for each device along `axes`; a device that holds what it needs sends to itself."""
    counts = Counts(sizes)
    owed = _in_place(source.pending, layout.pending)
    before, after = _places(source, counts), _places_of(layout.dims, owed, counts)
    devices = [dict(zip(axes, c, strict=True)) for c in itertools.product(*(range(sizes[a]) for a in axes))]
    held, needed = [_block(d, before) for d in devices], [_block(d, after) for d in devices]
    content = range(len(devices))
    stay = {i for i in content if held[i] == needed[i]}
    senders = sorted((i for i in content if i not in stay), key=lambda i: (held[i], i))
    receivers = sorted((i for i in content if i not in stay), key=lambda i: (needed[i], i))
    return sorted([*zip(senders, receivers, strict=True), *((i, i) for i in stay)])


@dataclass(frozen=True)
class Swap:
    """How two dims come to be split by each other's axes.

    Attributes:
      dims: the two. `cuts`: into how many pieces a device cuts its shard along each, and, the other way
        round, of how many along each it puts together its new one.
      rounds: for each round (sender, receiver) along `axes` for each device; by device which of its pieces it
        sends, along each of the dims, and as which of its own it puts what comes.
    """

    dims: tuple[int, int]
    cuts: tuple[int, int]
    axes: Axes
    rounds: tuple["Round", ...]


class Round(NamedTuple):
    pairs: tuple[tuple[int, int], ...]
    sent: tuple[tuple[int, ...], tuple[int, ...]]
    put: tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=4096)
def swap_of(source: Layout, layout: Layout, dim: int, to: int, axes: Axes, network: Network) -> Swap:
    """Who sends what, so that in each round each device sends one piece and gets one.

    The p · g blocks of one dim and the q · g of the other are both made of p · q · g pieces, in g groups that
    stay among themselves: so what goes where is found for one group, of p by q devices.

    >>> from shardax.sharding import Sharding
    >>> x, y = ("x",), ("y",)
    >>> sides = Layout(Sharding((x, y)), (4, 4)), Layout(Sharding((y, x)), (4, 4))
    >>> swap_of(*sides, 0, 1, ("x", "y"), Network({"x": 2, "y": 4})).rounds[0].pairs
    ((0, 1), (1, 0), (2, 5), (3, 4), (4, 3), (5, 2), (6, 7), (7, 6))
    """
    counts = Counts(network)
    coordinates = dict(zip(axes, np.indices([network[a] for a in axes]).reshape(len(axes), -1), strict=True))

    def numbers(layout: Layout, dim: int) -> np.ndarray:
        """Which block of a dim each device holds."""
        stood = {a: stride for a, (d, stride) in _places(layout, counts).items() if d == dim}
        return np.sum([coordinates[a] * stood[a] for a in axes if a in stood], axis=0)

    (held, other), (needed, wanted) = ([numbers(lay, d) for d in (dim, to)] for lay in (source, layout))
    blocks = int(held.max()) + 1, int(other.max()) + 1
    p, q = (n // math.gcd(*blocks) for n in blocks)
    receiver = np.empty(blocks[::-1], int)
    receiver[needed, wanted] = np.arange(len(needed))
    rounds = []
    for along, across in _rounds(p, q):
        u, v = along[held % p, other % q], across[held % p, other % q]
        row, column = held * q + u, other * p + v
        ends = receiver[row // p, column // q]
        put = np.empty((2, len(ends)), int)
        put[:, ends] = row % p, column % q
        sent, received = ((tuple(a.tolist()), tuple(b.tolist())) for a, b in ((u, v), put))
        rounds.append(Round(tuple(enumerate(ends.tolist())), sent, received))
    return Swap((dim, to), (q, p), axes, tuple(rounds))


@lru_cache
def _rounds(p: int, q: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For p by q devices, which of its q by p pieces each sends in each round, so that each of the q by p
    that come to hold p by q pieces gets one: perfect matchings, of which a regular graph has as many as edges
    at a node (König 1916).
    """
    devices = list(itertools.product(range(p), range(q)))
    pieces = {device: list(itertools.product(range(q), range(p))) for device in devices}
    rounds = []
    for _ in range(p * q):
        sender: dict[tuple[int, int], tuple[int, int]] = {}
        sent: dict[tuple[int, int], tuple[int, int]] = {}

        def place(device: tuple[int, int], tried: set[tuple[int, int]], sender=sender, sent=sent) -> bool:
            """Finds a receiver for a device; those before it may have to take others."""
            for u, v in pieces[device]:
                end = (device[0] * q + u) // p, (device[1] * p + v) // q
                if end not in tried:
                    tried.add(end)
                    if end not in sender or place(sender[end], tried):
                        sender[end], sent[device] = device, (u, v)
                        return True
            return False

        assert all([place(device, set()) for device in devices])
        for device, piece in sent.items():
            pieces[device].remove(piece)
        both = np.array([sent[device] for device in devices]).reshape(p, q, 2)
        rounds.append((both[..., 0], both[..., 1]))
    return rounds


@lru_cache(maxsize=4096)
def next_blocks(dim: int, axes: Axes, old: int, new: int, count: int, size: int) -> HaloRequest:
    """What `count` devices need that hold blocks of `old` rows of a dim of `size` rows, and are to hold
    blocks of `new` rows.

    >>> halo.exchange_of(next_blocks(0, ("x",), 65, 66, 4, 257)).sent
    [3]
    """
    firsts = range(0, count * new, new)
    return HaloRequest(
        dim, axes, tuple(firsts), tuple(min(first + new, size) for first in firsts), new, size, old
    )
