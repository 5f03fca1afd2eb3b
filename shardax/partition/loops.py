"""choose for scan, while and cond: the layouts in which their bodies take and leave values, then the bodies themselves."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from shardax import _jax, annotations
from shardax.cost.nominal import COLLECTIVE
from shardax.graph import Graph, Node, Value
from shardax.partition.decisions import Decision, Decisions
from shardax.partition.trials import cheapest, price_of_body
from shardax.sharding import Axes, AxisSizes, Layout, Sharding, from_spec, whole
from shardax.spmd_rules.registry import Split
from shardax.trips import LAST, REDUCED, adds_up, carries_of_map, has_open_loop, reads

if TYPE_CHECKING:
    from shardax.partition.choose import Chooser


def choose_structured(chooser: "Chooser", node: Node) -> Decision:
    """Decides a node with bodies."""
    return _CHOICES[node.name](chooser, node)


def _scan(chooser: "Chooser", node: Node) -> Decision:
    ways = [partial(_scan_split, chooser, node, split) for split in (None, *_trip_splits(chooser, node))]
    return cheapest(chooser, node, ways)


def _trip_splits(chooser: "Chooser", node: Node) -> list[Split]:
    """The splits of a map's trips that the layouts of its stacked operands and results suggest."""
    consts, carries = _jax.scan_counts(node.params)
    xs, ys = node.inputs[consts + carries :], node.outputs[carries:]
    layouts = [lay for v in xs for lay in chooser.layouts(v)] + [chooser.wanted(v) for v in (*xs, *ys)]
    leading = [(lay.dims[0], lay.padded[0]) for lay in layouts if lay.dims[0] and not chooser.hidden & set(lay.dims[0])]
    if not leading or carries_of_map(node) is None:
        return []
    splits, inside = [Split(axes, padded) for axes, padded in dict.fromkeys(leading)], _axes_asked_inside(chooser, node, xs)
    return [
        split
        for split in splits
        if inside.isdisjoint(split.axes) and (split.padded == node.params["length"] or not has_open_loop(node))
    ]


def _axes_asked_inside(chooser: "Chooser", node: Node, xs: Sequence[Value]) -> set[str]:
    """The axes over which annotations ask to have each trip split. Were the trips split over them, a device would have whole
    microbatches in memory."""
    parts = [chooser.asked[v][1:] for v in xs if v in chooser.asked]
    parts += [chooser.asked[v] for body in node.bodies for inner in body.walk() for v in inner.outputs if v in chooser.asked]
    return {a for dims in parts for axes in dims for a in axes or ()}


def _scan_split(chooser: "Chooser", node: Node, split: Split | None) -> Decision:
    """A scan whose trips are split, or that every device runs whole.

    Where they are split, nothing inside is split over the same axes: the devices along them are at different trips.
    """
    consts, count = _jax.scan_counts(node.params)
    (body,) = node.bodies
    with chooser.hiding(split.axes if split else ()):
        const_layouts = [_at_hand(chooser, v) for v in node.inputs[:consts]]
        xs = [_unstacked(chooser, outer, inner, split) for outer, inner in _pairs(node.inputs, body.inputs, consts + count)]
        stacks = [chooser.wanted(v) for v in node.outputs[count:]]
        carried, trips = body.inputs[consts:][:count], node.params["length"]
        carry, ys, decisions = _fixpoint(chooser, body, const_layouts, carried, xs, stacks, [True] * count, trips)
    stacked_xs = [_stacked(lay, v, split) for lay, v in zip(xs, node.inputs[consts + count :], strict=True)]
    made = zip(ys, node.outputs[count:], strict=True)
    stacked_ys = [_stacked(lay, v, split or _kept_block(chooser, lay, v)) for lay, v in made]
    start, end = _owed_by_trips(node, carry, split)
    operands, results = [*const_layouts, *start, *stacked_xs], [*end, *stacked_ys]
    return _decision(chooser, node, operands, results, (decisions,), {"trips": split} if split else {})


def _owed_by_trips(node: Node, carry: list[Layout], split: Split | None) -> tuple[list[Layout], list[Layout]]:
    """The layouts in which carries come in and go out: what split trips reduce is pending over their axes."""
    if split is None:
        return carry, carry
    kinds = [(c.kind, c.reduction) for c in carries_of_map(node) or ()]
    owing = [_owe(lay, split.axes, kind or "sum") for lay, (_, kind) in zip(carry, kinds, strict=True)]
    start = [owe if kind == REDUCED else lay for lay, owe, (kind, _) in zip(carry, owing, kinds, strict=True)]
    end = [owe if kind in (REDUCED, LAST) else lay for lay, owe, (kind, _) in zip(carry, owing, kinds, strict=True)]
    return start, end


def _owe(layout: Layout, axes: Axes, kind: str) -> Layout:
    return Layout(layout.sharding, layout.padded, tuple(sorted((*layout.pending, *((a, kind) for a in axes)))))


def _while(chooser: "Chooser", node: Node) -> Decision:
    with chooser.hiding(_where_devices_part(chooser)):
        return _while_inside(chooser, node)


def _where_devices_part(chooser: "Chooser") -> AxisSizes | tuple[()]:
    """The axes to hide in a loop or branch: all where devices are at different trips of a loop around it. They do not get to
    the same collectives there, and some collectives have all devices meet."""
    return chooser.sizes if chooser.hidden else ()


def _while_inside(chooser: "Chooser", node: Node) -> Decision:
    cond, body = node.bodies
    cond_consts, body_consts = node.params["cond_nconsts"], node.params["body_nconsts"]
    layouts = [_at_hand(chooser, v) for v in node.inputs[: cond_consts + body_consts]]
    free = [not reads(cond, v) for v in cond.inputs[cond_consts:]]
    carry, _, inside = _fixpoint(chooser, body, layouts[cond_consts:], body.inputs[body_consts:], (), (), free)
    decisions = (chooser.graph(cond, layouts[:cond_consts] + carry, [whole(())]), inside)
    return _decision(chooser, node, layouts + carry, carry, decisions)


def _cond(chooser: "Chooser", node: Node) -> Decision:
    with chooser.hiding(_where_devices_part(chooser)):
        return _cond_inside(chooser, node)


def _cond_inside(chooser: "Chooser", node: Node) -> Decision:
    operands = [_at_hand(chooser, v) for v in node.inputs[1:]]
    results = _owing_in_all(chooser, node, operands)
    decisions = tuple(chooser.graph(body, operands, results) for body in node.bodies)
    return _decision(chooser, node, [whole(()), *operands], results, decisions)


def _owing_in_all(chooser: "Chooser", node: Node, operands: list[Layout]) -> list[Layout]:
    """The wanted layouts of a branch's results, owing the sums that every branch leaves. What only some leave they settle
    themselves: the others need not send it."""
    wanted = [chooser.wanted(v) for v in node.outputs]
    free = [chooser.graph(body, operands, [None] * len(wanted)).outputs for body in node.bodies]
    left = [{move.target.pending: move.target for move in moves} for moves in zip(*free, strict=True)]
    return [_owing(want, *outs.values()) if len(outs) == 1 else want for want, outs in zip(wanted, left, strict=True)]


def _island(chooser: "Chooser", node: Node) -> Decision:
    """shard_map: its specs say how operands and results lie. To its body a shard is the whole value."""
    (body,) = node.bodies
    inside = chooser.graph(body, [whole(v.shape) for v in body.inputs], [whole(v.shape) for v in body.outputs])
    operands, results = (
        [Layout(from_spec(spec, len(v.shape)), v.shape) for spec, v in zip(node.params[side], values, strict=True)]
        for side, values in (("in_specs", node.inputs), ("out_specs", node.outputs))
    )
    return _decision(chooser, node, operands, results, (inside,))


def _fixpoint(
    chooser: "Chooser",
    body: Graph,
    consts,
    carried: Sequence[Value],
    xs,
    stacks: Sequence[Layout],
    may_owe: Sequence[bool],
    trips: int = 2,
) -> tuple[list[Layout], list[Layout], Decisions]:
    """Layouts of the carries that a body gives back as it takes them, and of its other results, whose stacks are wanted so.

    First each carry is taken as completion wants it. Those that come back owing a sum are then taken owing it, and the body is
    decided anew. What comes back otherwise, had to be settled inside, or may not owe, is taken as wanted after all; and so is
    what some node of the body settles in another form, if that costs more.
    """
    count = len(carried)
    wanted = [chooser.wanted(v) for v in carried]
    free = chooser.graph(body, [*consts, *wanted, *xs], [None] * len(body.outputs))
    left = zip(wanted, free.outputs[:count], may_owe, strict=True)
    carry = [_owing(want, move.target) if may else want for want, move, may in left]
    given = zip(body.outputs[count:], free.outputs[count:], stacks, strict=True)
    ys = [_settled_later(chooser.wanted(v), move.target, stack, v.nbytes) for v, move, stack in given]
    while carry != wanted:
        decisions = chooser.graph(body, [*consts, *carry, *xs], [None] * count + ys)
        left = decisions.outputs[:count]
        waited = [_waited(chooser, value, lay, move) for value, lay, move in zip(carried, carry, left, strict=True)]
        if all(waited):
            break
        carry = [have if ok else want for want, have, ok in zip(wanted, carry, waited, strict=True)]
    if carry != wanted:
        sums = [adds_up(body, taken, given) for taken, given in zip(carried, body.outputs, strict=False)]
        added = [have if ok else want for want, have, ok in zip(wanted, carry, sums, strict=True)]
        prices = [_of_carries(chooser, body, lays, wanted, [*consts, *lays, *xs], ys, trips) for lays in (carry, added, wanted)]
        carry = (carry, added, wanted)[prices.index(min(prices))]
    return carry, ys, chooser.graph(body, [*consts, *carry, *xs], [*carry, *ys])


def _of_carries(chooser: "Chooser", body: Graph, carry, wanted, operands, ys, trips: int) -> float:
    """The price of a loop whose carries lie so, settled at its end."""
    decisions = chooser.graph(body, operands, [*carry, *ys])
    ends = zip(body.outputs, carry, wanted, strict=False)
    return trips * price_of_body(chooser, decisions) + sum(chooser.price(v, have, want) for v, have, want in ends)


def _owing(wanted: Layout, out: Layout) -> Layout:
    """The wanted layout, owing the sums that the body left, unless they are over axes that it is split over."""
    sums = tuple(p for p in out.pending if p[1] == "sum")
    clash = any(axis in wanted.sharding.axes for axis, _ in sums)
    return wanted if clash else Layout(wanted.sharding, wanted.padded, sums)


def _settled_later(wanted: Layout, out: Layout, stack: Layout, nbytes: int) -> Layout:
    """The wanted layout, owing what the body left where settling all trips at once is better: where the stack is wanted split
    over what it owes, one reduce-scatter sends half; where a trip sends less than a start costs, one start is enough."""
    owing = _owing(wanted, out)
    return owing if {*owing.pending_axes} & {*stack.dims[0]} or nbytes < COLLECTIVE else wanted


def _waited(chooser: "Chooser", value: Value, layout: Layout, move) -> bool:
    """Whether a pending carry came back owing the same, and nothing in the body needed it settled."""
    if not layout.pending:
        return True
    return move.target.pending == layout.pending and all(there.pending for there in chooser.layouts(value))


def _at_hand(chooser: "Chooser", value: Value) -> Layout:
    """A layout in which nothing is owed: one that the value is in already, else the wanted one."""
    settled = [lay for lay in chooser.layouts(value) if not lay.pending and chooser.hidden.isdisjoint(lay.sharding.axes)]
    wanted = chooser.wanted(value)
    return wanted if wanted in settled or not settled else settled[0]


def _unstacked(chooser: "Chooser", outer: Value, inner: Value, split: Split | None) -> Layout:
    """How one trip's part of a stacked value lies: as the stack does already, else as completion wants it, or the annotation
    that alone reads it."""
    reader = chooser.onward.reader.get(inner)
    wanted = chooser.wanted(reader.outputs[0] if reader and annotations.of_node(reader) else inner)
    for layout in chooser.layouts(outer):
        if not layout.pending and layout.dims == (split.axes if split else (), *wanted.dims):
            return Layout(wanted.sharding, layout.padded[1:])
    return wanted


def _stacked(layout: Layout, outer: Value, split: Split | None) -> Layout:
    """How a stack of values lies of which each lies so."""
    axes, padded = (split.axes, split.padded) if split else ((), outer.shape[0])
    return Layout(Sharding((axes, *layout.dims)), (padded, *layout.padded), layout.pending)


def _kept_block(chooser: "Chooser", layout: Layout, stack: Value) -> Split | None:
    """How each device keeps but its block of what all of them make trip by trip: where no loop reads the whole stack, and it
    may rest so."""
    wanted, there = chooser.wanted(stack), {*layout.sharding.axes, *layout.pending_axes}
    even = wanted.padded[0] == stack.shape[0] and not jnp.issubdtype(stack.aval.dtype, jax.dtypes.extended)
    if not wanted.dims[0] or not even or stack in chooser.looped or not there.isdisjoint(wanted.dims[0]):
        return None
    return Split(wanted.dims[0], wanted.padded[0])


def _pairs(outer: Sequence[Value], inner: Sequence[Value], start: int):
    return zip(outer[start:], inner[start:], strict=True)


def _decision(chooser: "Chooser", node: Node, operands, results, bodies: tuple[Decisions, ...], splits=None) -> Decision:
    moves = tuple(chooser.move(v, t) for v, t in zip(node.inputs, operands, strict=True))
    settled = chooser.store_results(node, results)
    return Decision(moves, tuple(operands), tuple(results), splits or {}, settled=settled, bodies=bodies)


_CHOICES = {"cond": _cond, "scan": _scan, "shard_map": _island, "while": _while}
