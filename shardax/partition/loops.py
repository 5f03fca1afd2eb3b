"""choose for scan, while and cond: the layouts in which their bodies take and leave values, then the bodies themselves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardax import _jax
from shardax.graph import Graph, Node, Value
from shardax.partition.decisions import Decision, Decisions
from shardax.sharding import Layout, Sharding, from_spec, whole

if TYPE_CHECKING:
    from shardax.partition.choose import Chooser


def choose_structured(chooser: "Chooser", node: Node) -> Decision:
    """Decides a node with bodies."""
    return _CHOICES[node.name](chooser, node)


def _scan(chooser: "Chooser", node: Node) -> Decision:
    consts, carries = _jax.scan_counts(node.params)
    (body,) = node.bodies
    const_layouts = [_at_hand(chooser, v) for v in node.inputs[:consts]]
    xs = [_unstacked(chooser, outer, inner) for outer, inner in _pairs(node.inputs, body.inputs, consts + carries)]
    ys = [chooser.wanted(inner) for inner in body.outputs[carries:]]
    carry, decisions = _fixpoint(chooser, body, const_layouts, body.inputs[consts:][:carries], xs, ys)
    operands = [*const_layouts, *carry, *map(_stacked, xs, node.inputs[consts + carries :])]
    results = [*carry, *map(_stacked, ys, node.outputs[carries:])]
    return _decision(chooser, node, operands, results, (decisions,))


def _while(chooser: "Chooser", node: Node) -> Decision:
    cond, body = node.bodies
    cond_consts, body_consts = node.params["cond_nconsts"], node.params["body_nconsts"]
    layouts = [_at_hand(chooser, v) for v in node.inputs[: cond_consts + body_consts]]
    carry = [chooser.wanted(v) for v in body.inputs[body_consts:]]
    decisions = (
        chooser.graph(cond, layouts[:cond_consts] + carry, [whole(())]),
        chooser.graph(body, layouts[cond_consts:] + carry, carry),
    )
    return _decision(chooser, node, layouts + carry, carry, decisions)


def _cond(chooser: "Chooser", node: Node) -> Decision:
    operands = [_at_hand(chooser, v) for v in node.inputs[1:]]
    results = [chooser.wanted(v) for v in node.outputs]
    decisions = tuple(chooser.graph(body, operands, results) for body in node.bodies)
    return _decision(chooser, node, [whole(()), *operands], results, decisions)


def _island(chooser: "Chooser", node: Node) -> Decision:
    """shard_map: its specs say how operands and results lie. To its body a shard is the whole value."""
    (body,) = node.bodies
    _check_axes(chooser, node)
    inside = chooser.graph(body, [whole(v.shape) for v in body.inputs], [whole(v.shape) for v in body.outputs])
    operands, results = (
        [Layout(from_spec(spec, len(v.shape)), v.shape) for spec, v in zip(node.params[side], values, strict=True)]
        for side, values in (("in_specs", node.inputs), ("out_specs", node.outputs))
    )
    return _decision(chooser, node, operands, results, (inside,))


def _check_axes(chooser: "Chooser", node: Node) -> None:
    own, sizes = dict(node.params["mesh"].shape), dict(chooser.sizes)
    if own != sizes:
        raise ValueError(
            f"shard_map at {node.line} is over a mesh with axes {own}, inside a shard_jit over {sizes}: give both the same mesh"
        )


def _fixpoint(chooser: "Chooser", body: Graph, consts, carried: Sequence[Value], xs, ys) -> tuple[list[Layout], Decisions]:
    """Layouts of the carries that a body gives back as it takes them. A sum that the body only adds to stays pending.

    First each carry is taken as completion wants it. Those that come back owing a sum are then taken owing it, and the body is
    decided anew. What comes back otherwise, or had to be settled inside, is taken as wanted after all.
    """
    wanted = [chooser.wanted(v) for v in carried]
    free = chooser.graph(body, [*consts, *wanted, *xs], [None] * len(wanted) + ys)
    carry = [_owing(want, move.target) for want, move in zip(wanted, free.outputs[: len(wanted)], strict=True)]
    while carry != wanted:
        decisions = chooser.graph(body, [*consts, *carry, *xs], [None] * len(carry) + ys)
        left = decisions.outputs[: len(carry)]
        waited = [_waited(chooser, value, lay, move) for value, lay, move in zip(carried, carry, left, strict=True)]
        if all(waited):
            break
        carry = [have if ok else want for want, have, ok in zip(wanted, carry, waited, strict=True)]
    return carry, chooser.graph(body, [*consts, *carry, *xs], [*carry, *ys])


def _owing(wanted: Layout, out: Layout) -> Layout:
    """The wanted layout, owing the sums that the body left, unless they are over axes that it is split over."""
    sums = tuple(p for p in out.pending if p[1] == "sum")
    clash = any(axis in wanted.sharding.axes for axis, _ in sums)
    return wanted if clash else Layout(wanted.sharding, wanted.padded, sums)


def _waited(chooser: "Chooser", value: Value, layout: Layout, move) -> bool:
    """Whether a pending carry came back owing the same, and nothing in the body needed it settled."""
    if not layout.pending:
        return True
    return move.target.pending == layout.pending and all(there.pending for there in chooser.layouts(value))


def _at_hand(chooser: "Chooser", value: Value) -> Layout:
    """A layout in which nothing is owed: one that the value is in already, else the wanted one."""
    settled = [layout for layout in chooser.layouts(value) if not layout.pending]
    wanted = chooser.wanted(value)
    return wanted if wanted in settled or not settled else settled[0]


def _unstacked(chooser: "Chooser", outer: Value, inner: Value) -> Layout:
    """How one trip's part of a stacked value lies: as the stack does already, else as completion wants it."""
    wanted = chooser.wanted(inner)
    for layout in chooser.layouts(outer):
        if not layout.pending and not layout.dims[0] and layout.dims[1:] == wanted.dims:
            return Layout(wanted.sharding, layout.padded[1:])
    return wanted


def _stacked(layout: Layout, outer: Value) -> Layout:
    """How a stack of values lies of which each lies so."""
    return Layout(Sharding(((), *layout.dims)), (outer.shape[0], *layout.padded))


def _pairs(outer: Sequence[Value], inner: Sequence[Value], start: int):
    return zip(outer[start:], inner[start:], strict=True)


def _decision(chooser: "Chooser", node: Node, operands, results, bodies: tuple[Decisions, ...]) -> Decision:
    moves = tuple(chooser.move(v, t) for v, t in zip(node.inputs, operands, strict=True))
    return Decision(moves, tuple(operands), tuple(results), settled=chooser.store_results(node, results), bodies=bodies)


_CHOICES = {"cond": _cond, "scan": _scan, "shard_map": _island, "while": _while}
