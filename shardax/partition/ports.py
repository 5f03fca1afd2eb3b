"""The ports of scan, while, cond and shard_map: the layouts of their operands, carries and results, inside
and outside.

Each function lays out one node with bodies: the ports through which values come in, then the bodies, then the
ports through which they go out. What is chosen of the ports is read back in `replay.py`.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp

from shardax import _jax
from shardax.cost.network import Network
from shardax.graph import annotations
from shardax.graph.graph import Graph, Node, Value
from shardax.partition.sites import Layouts, Site, Way
from shardax.sharding import (
    Axes,
    AxisSizes,
    Layout,
    Sharding,
    from_spec,
    layout_at_rest,
    replicated_layout,
    shard_count,
)
from shardax.spmd_rules.maps import LAST, REDUCED, Carry, carries_of_map, has_open_loop, reads
from shardax.spmd_rules.registry import Split

_ONCE = 2.0**-6  # picoseconds: among equals, what all branches owe is settled once, after them
UNKNOWN_TRIP_COUNT = 2  # of a `while`: enough to move out of it what can be


@dataclass(eq=False, slots=True)
class Ports:
    """The ports of a node with bodies, in the order of its operands and results; `split`: how a scan's
    iterations are split; `parted`: whether devices may be at different branches, or trips.
    """

    operands: list[Site] = field(default_factory=list)
    carries: list[Site] = field(default_factory=list)
    stacks: list[Site] = field(default_factory=list)
    results: list[Site] = field(default_factory=list)
    split: Split | None = None
    parted: bool = False

    @property
    def sites(self) -> list[Site]:
        return [*self.operands, *self.carries, *self.stacks, *self.results]


class Search(Protocol):
    """What ports need of the search that they are added to; `partition/search.py` explains each."""

    sizes: AxisSizes
    trivial: frozenset[str]
    network: Network
    nbytes: Callable[[Value, Layout], int]
    annotated: dict[Value, tuple[Axes | None, ...]]
    reader: dict[Value, Node]
    outside: dict[Value, Value]
    returned: dict[Hashable, Layouts]
    open_carries: dict[Site, tuple[Hashable, frozenset[str], bool]]

    def add(self, site: Site) -> Site: ...
    def body(self, graph: Graph, runs: float, hidden: frozenset[str]) -> None: ...
    def close_carry(self, port: Site) -> None: ...
    def made(self, value: Value) -> Layouts: ...
    def at_hand(self, value: Value, hidden: frozenset[str]) -> list[Layout]: ...
    def owing(self, requested: Layout, value: Value, made: Iterable[Layout]) -> Layouts: ...
    def requested(self, value: Value, hidden: frozenset[str] = frozenset()) -> Layout: ...
    def split_of(self, node: Node, hidden: frozenset[str]) -> Split | None: ...


def lay_out(search: Search, node: Node, runs: float, hidden: frozenset[str]) -> Ports:
    """Adds the ports and bodies of a node to a search."""
    return _LAY_OUT[node.name](search, node, runs, hidden)


def iteration_splits(search: Search, node: Node, hidden: frozenset[str]) -> list[Split]:
    """The splits of a map's iterations that the layouts of its stacked operands and results suggest."""
    consts, carries = _jax.scan_counts(node.params)
    xs, ys = node.inputs[consts + carries :], node.outputs[carries:]
    layouts = [lay for v in xs for lay in search.made(v)] + [search.requested(v, hidden) for v in (*xs, *ys)]
    leading = [
        (lay.dims[0], lay.padded[0]) for lay in layouts if lay.dims[0] and not hidden & set(lay.dims[0])
    ]
    if not leading or carries_of_map(node) is None:
        return []
    splits, inside = (
        [Split(axes, padded) for axes, padded in dict.fromkeys(leading)],
        _axes_annotated_inside(search, node, xs),
    )
    return [
        split
        for split in splits
        if inside.isdisjoint(split.axes)
        and (split.padded == node.params["length"] or not has_open_loop(node))
    ]


def _axes_annotated_inside(search: Search, node: Node, xs: Sequence[Value]) -> set[str]:
    """The axes over which annotations split each iteration. Were the iterations split over them, a device
    would have whole microbatches in memory."""
    annotated = search.annotated
    parts = [annotated[v][1:] for v in xs if v in annotated]
    parts += [
        annotated[v] for body in node.bodies for inner in body.walk() for v in inner.outputs if v in annotated
    ]
    return {a for dims in parts for axes in dims for a in axes or ()}


def _scan(search: Search, node: Node, runs: float, hidden: frozenset[str]) -> Ports:
    """A scan whose iterations are split, or that every device runs unsplit.

    Where they are split, nothing inside is split over the same axes: the devices along them are at different
    iterations.
    """
    (consts, count), (body,) = _jax.scan_counts(node.params), node.bodies
    split = search.split_of(node, hidden)
    inside = hidden.union(split.axes if split else ())
    body_runs = runs * (
        split.padded // shard_count(split.axes, search.sizes) if split else node.params["length"]
    )
    ports = Ports(split=split)
    for outer, inner in zip(node.inputs[:consts], body.inputs, strict=False):
        ports.operands.append(_operand(search, outer, [inner], runs, inside))
    carries = carries_of_map(node) if split else None
    for i in range(count):
        values = node.inputs[consts + i], body.inputs[consts + i], body.outputs[i], node.outputs[i]
        port = _carry(search, (node, i), [values[0], values[2]], [values[1], values[3]], runs, inside, True)
        ports.carries.append(_owing_over(split, port, carries[i]) if split and carries else port)
        search.outside[values[2]] = values[3]
    for outer, inner in zip(node.inputs[consts + count :], body.inputs[consts + count :], strict=True):
        ports.stacks.append(_slices(search, outer, inner, split, runs, inside))
    search.body(body, body_runs, inside)
    for port in ports.carries:
        search.close_carry(port)
    for outer, inner in zip(node.outputs[count:], body.outputs[count:], strict=True):
        ports.results.append(_stack(search, outer, inner, split, runs, inside))
    return ports


def _while(search: Search, node: Node, runs: float, hidden: frozenset[str]) -> Ports:
    cond, body = node.bodies
    cond_consts, body_consts = node.params["cond_nconsts"], node.params["body_nconsts"]
    start, ports = cond_consts + body_consts, Ports(parted=bool(hidden))
    inners = [*cond.inputs[:cond_consts], *body.inputs[:body_consts]]
    for outer, inner in zip(node.inputs[:start], inners, strict=True):
        ports.operands.append(_operand(search, outer, [inner], runs, hidden))
    for i, init in enumerate(node.inputs[start:]):
        tested = cond.inputs[cond_consts + i]
        makes = [body.inputs[body_consts + i], node.outputs[i], tested]
        port = _carry(
            search, (node, i), [init, body.outputs[i]], makes, runs, hidden, not reads(cond, tested)
        )
        ports.carries.append(port)
        search.outside[body.outputs[i]] = node.outputs[i]
    search.body(cond, runs * UNKNOWN_TRIP_COUNT, hidden)
    search.body(body, runs * UNKNOWN_TRIP_COUNT, hidden)
    for port in ports.carries:
        search.close_carry(port)
    search.add(Site([cond.outputs[0]], [], [Way((replicated_layout(()),), ())]))
    return ports


def _cond(search: Search, node: Node, runs: float, hidden: frozenset[str]) -> Ports:
    """Each branch is run as often as the others: what all of them would send is as well sent afterwards."""
    ports = Ports(parted=bool(hidden))
    ports.operands.append(search.add(Site([node.inputs[0]], [], [Way((replicated_layout(()),), ())])))
    for outer, *inners in zip(node.inputs[1:], *(body.inputs for body in node.bodies), strict=True):
        ports.operands.append(_operand(search, outer, inners, runs, hidden, may_owe=True))
    for body in node.bodies:
        search.outside.update(zip(body.outputs, node.outputs, strict=True))
        search.body(body, runs / len(node.bodies), hidden)
    for outer, *inners in zip(node.outputs, *(body.outputs for body in node.bodies), strict=True):
        owing = [lay for inner in inners for lay in search.made(inner)]
        settled, *owed = search.owing(search.requested(outer, hidden), outer, owing)
        given = (lay for inner in inners for lay in search.at_hand(inner, hidden))
        layouts = dict.fromkeys([*owed, settled, *_annotated(search, outer, hidden), *given])
        ways = [
            Way((layout,) * len(inners), (layout,), 0.0 if layout.pending else _ONCE) for layout in layouts
        ]
        ports.results.append(search.add(Site(inners, [outer], ways, runs)))
    return ports


def _island(search: Search, node: Node, runs: float, hidden: frozenset[str]) -> Ports:
    """shard_map: its specs are the layouts of operands and results. To its body a shard is a value of
    its own, which other axes than the manual ones may split.
    """
    (body,), ports = node.bodies, Ports()
    specs = node.params["in_specs"], node.params["out_specs"]
    if "partly_manual" not in node.params:
        for value, inner, spec in zip(node.inputs, body.inputs, specs[0], strict=True):
            ways = [Way((_specified(search, value, spec),), (replicated_layout(inner.shape),))]
            ports.operands.append(search.add(Site([value], [inner], ways, runs)))
        search.body(body, runs, frozenset(search.sizes))
        for value, inner, spec in zip(node.outputs, body.outputs, specs[1], strict=True):
            ways = [Way((replicated_layout(inner.shape),), (_specified(search, value, spec),))]
            ports.results.append(search.add(Site([inner], [value], ways, runs)))
        return ports
    inside = hidden.union(node.params["newly_manual_axes"])
    for outer, inner, spec in zip(node.inputs, body.inputs, specs[0], strict=True):
        stack = from_spec(spec, len(spec)).without(search.trivial).dims
        rests = [
            Layout(Sharding(x.dims[len(stack) :]), x.padded[len(stack) :])
            for x in search.at_hand(outer, hidden)
        ]
        rests = [lay for lay in rests if inside.isdisjoint(lay.sharding.axes)]
        layouts = dict.fromkeys([search.requested(inner, inside), *rests])
        ways = [Way((_placed(lay, outer, stack),), (lay,)) for lay in layouts]
        ports.operands.append(search.add(Site([outer], [inner], ways, runs)))
    search.body(body, runs, inside)
    for outer, inner, spec in zip(node.outputs, body.outputs, specs[1], strict=True):
        stack = from_spec(spec, len(spec)).without(search.trivial).dims
        layouts = dict.fromkeys(
            [
                *search.owing(search.requested(inner, inside), inner, search.made(inner)),
                *search.at_hand(inner, inside),
            ]
        )
        ways = [Way((lay,), (_placed(lay, outer, stack),)) for lay in layouts]
        ports.results.append(search.add(Site([inner], [outer], ways, runs)))
    return ports


def _specified(search: Search, value: Value, spec) -> Layout:
    return layout_at_rest(from_spec(spec, len(value.shape)).without(search.trivial), value.shape)


def _placed(layout: Layout, stack: Value, dims: Sequence[Axes]) -> Layout:
    """The layout of a stack of values of this layout, one for each place along the manual axes."""
    return Layout(
        Sharding((*dims, *layout.dims)), (*stack.shape[: len(dims)], *layout.padded), layout.pending
    )


# Ports


def _operand(
    search: Search,
    outer: Value,
    inners: Sequence[Value],
    runs: float,
    hidden: frozenset[str],
    may_owe: bool = False,
) -> Site:
    """What bodies take and keep: in a layout in which nothing is owed, but where they run once."""
    requested = [search.requested(v, hidden) for v in (outer, *inners)]
    owing = (
        [lay for v in requested for lay in search.owing(v, outer, search.made(outer))[1:]] if may_owe else []
    )
    layouts = [*search.at_hand(outer, hidden), *requested, *owing]
    ways = [Way((lay,), (lay,) * len(inners)) for lay in dict.fromkeys(layouts)]
    return search.add(Site([outer], inners, ways, runs))


def _carry(
    search: Search, key, reads: Sequence[Value], makes: Sequence[Value], runs, hidden, may_owe: bool
) -> Site:
    """One layout, in which a carry comes in, is taken and given by the body, and goes out: perhaps as an
    annotation requests it then."""
    init, inner, result = reads[0], makes[0], makes[1]
    layouts = [
        search.requested(inner, hidden),
        *search.at_hand(init, hidden),
        *search.returned.get(key, ()),
        *_annotated(search, result, hidden),
    ]
    ways = [
        Way((lay,) * len(reads), (lay,) * len(makes))
        for lay in dict.fromkeys(layouts)
        if may_owe or not lay.pending
    ]
    site = search.add(Site(reads, makes, ways, runs))
    search.open_carries[site] = (key, hidden, may_owe)
    return site


def _owing_over(split: Split, port: Site, carry: Carry) -> Site:
    """Where iterations are split, what they reduce is pending over their axes: before the loop, if it adds to
    an initial value, and after it."""
    if carry.kind not in (REDUCED, LAST):
        return port

    def owe(layout: Layout) -> Layout:
        owed = ((a, carry.reduction or "sum") for a in split.axes)
        return Layout(layout.sharding, layout.padded, tuple(sorted((*layout.pending, *owed))))

    ways = []
    for way in port.ways:
        (start, body_end), (taken, end) = way.operands, way.results
        ways.append(Way((owe(start) if carry.kind == REDUCED else start, body_end), (taken, owe(end))))
    port.ways = ways
    return port


def _slices(
    search: Search, outer: Value, inner: Value, split: Split | None, runs: float, hidden: frozenset[str]
) -> Site:
    """The layouts of one iteration's part of a stacked value: that of the stack, or as completion
    requests."""
    rows = [Layout(Sharding(lay.dims[1:]), lay.padded[1:], lay.pending) for lay in search.made(outer)]
    rows = [row for row in rows if hidden.isdisjoint({*row.sharding.axes, *row.pending_axes})]
    requested = search.requested(inner, hidden)
    layouts = dict.fromkeys(
        [
            *_annotated(search, inner, hidden),
            *search.owing(requested, inner, rows),
            *(r for r in rows if not r.pending),
        ]
    )
    ways = [Way((_stacked(lay, outer, split),), (lay,)) for lay in layouts]
    return search.add(Site([outer], [inner], ways, runs))


def _annotated(search: Search, value: Value, hidden: frozenset[str]) -> list[Layout]:
    """The layout that the one who reads a value requests of it, if that is an annotation: perhaps outside, if
    a body gives it back."""
    while value in search.outside and value not in search.reader:
        value = search.outside[value]
    reader = search.reader.get(value)
    return [search.requested(reader.outputs[0], hidden)] if reader and annotations.of_node(reader) else []


def _stack(
    search: Search, outer: Value, inner: Value, split: Split | None, runs: float, hidden: frozenset[str]
) -> Site:
    """The layouts of a loop's stacked results: as each iteration leaves them. Each device may keep but its
    block of the stack.
    """
    requested = search.requested(inner, hidden)
    stack = search.requested(outer, hidden)
    layouts = dict.fromkeys(
        [*search.owing(requested, inner, search.made(inner)), *search.at_hand(inner, hidden)]
    )
    ways = []
    for lay in layouts:
        keeps = [None] if split else [_kept_block(search, lay, outer, stack), None]
        for keep in dict.fromkeys(keeps):
            made = _stacked(lay, outer, split or keep)
            nbytes = search.nbytes(outer, made)
            ways.append(Way((lay,), (made,), search.network.compute(0, nbytes), memory=nbytes))
    return search.add(Site([inner], [outer], ways, runs))


def _stacked(layout: Layout, outer: Value, split: Split | None) -> Layout:
    """The layout of a stack of values of this layout."""
    axes, padded = (split.axes, split.padded) if split else ((), outer.shape[0])
    return Layout(Sharding((axes, *layout.dims)), (padded, *layout.padded), layout.pending)


def _kept_block(search: Search, layout: Layout, stack: Value, requested: Layout) -> Split | None:
    """How each device keeps but its block of what all of them make iteration by iteration: where no loop
    reads the whole stack, and it may rest so."""
    used = {*layout.sharding.axes, *layout.pending_axes}
    even = requested.padded[0] == stack.shape[0] and not jnp.issubdtype(stack.aval.dtype, jax.dtypes.extended)
    if not requested.dims[0] or not even or not used.isdisjoint(requested.dims[0]):
        return None
    return Split(requested.dims[0], requested.padded[0])


_LAY_OUT = {"cond": _cond, "scan": _scan, "shard_map": _island, "while": _while}
