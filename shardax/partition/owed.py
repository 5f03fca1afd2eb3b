"""Owed: of which contributions a pending sum is. When it is settled, the plan names them.

Where two pending sums are added, the result owes what both owe. Of a chain of additions, such as a residual
stream, each sum holds the one before it, so that a long chain costs one small object for each addition.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardax import _jax
from shardax.graph import annotations
from shardax.graph.graph import Node, Value
from shardax.partition.decisions import Decision, Origin
from shardax.sharding import Axes


@dataclass(frozen=True, slots=True, eq=False)
class Owed:
    """What is pending in a value: of one contribution that arose at `origin`, or of several `parts`, the
    newest of which arose there. `number` counts contributions in program order.
    """

    origin: Origin
    number: int
    parts: tuple["Owed", ...] = ()

    def origins(self) -> list[Origin]:
        """Where the contributions arose, each once, the newest first."""
        single: dict[int, Origin] = {}
        todo: list[Owed] = [self]
        seen = set[Owed](todo)
        while todo:
            owed = todo.pop()
            if not owed.parts:
                single[owed.number] = owed.origin
            new = [part for part in owed.parts if part not in seen]
            seen.update(new)
            todo += new
        return [single[number] for number in sorted(single, reverse=True)]


def united(parts: Iterable[Owed]) -> Owed | None:
    """What a sum of pending values owes; None of nothing."""
    different = tuple(dict.fromkeys(parts))
    if len(different) < 2:
        return different[0] if different else None
    newest = max(different, key=lambda owed: owed.number)
    return Owed(newest.origin, newest.number, different)


class Contributions:
    """What each pending value owes, over each axis. `makers`: the origins of values, those of annotated ones
    above all.
    """

    def __init__(self, makers: Mapping[Value, Origin]):
        self.makers = makers
        self.by_axis: dict[Value, dict[str, Owed]] = {}
        self.numbers = itertools.count()

    def note(self, node: Node, decision: Decision) -> None:
        """A pending result of a node that has run owes what operands owed that came in pending, or its
        bodies' results; else its sum arose here.
        """
        here = Owed(Origin(node, decision), next(self.numbers))
        for i, (value, layout) in enumerate(zip(node.outputs, decision.results, strict=True)):
            if layout.pending:
                sources = list(_sources(node, decision, i))
                self.by_axis[value] = {
                    axis: united(
                        owed for v, axes in sources if axis in axes and (owed := self.owed(v, (axis,)))
                    )
                    or here
                    for axis in layout.pending_axes
                }

    def owed(self, value: Value, axes: Axes) -> Owed | None:
        """What a value owes over these axes; what it owes at all, where a reshard put its sum on others."""
        by_axis = self.of(value)
        return united(by_axis[a] for a in axes if a in by_axis) or united(by_axis.values())

    def of(self, value: Value) -> dict[str, Owed]:
        """By axis. What is annotated owes what it is of."""
        value = self.annotated(value)
        return self.by_axis.get(value, {})

    def annotated(self, value: Value) -> Value:
        """What a value is annotated to be, where it has no sums of its own."""
        while value not in self.by_axis:
            maker = self.makers.get(value)
            if maker is None or not annotations.of_node(maker.node):
                return value
            value = maker.node.inputs[0]
        return value

    def came_in(self, value: Value) -> bool:
        """Whether no node makes it: an argument, or what a body takes."""
        return self.annotated(value) not in self.makers

    def enter(self, node: Node) -> None:
        """The inputs of bodies that are the same in every iteration owe what they owe outside."""
        for body, operands in zip(node.bodies, _constant(node), strict=True):
            self.by_axis |= {
                inner: owed
                for inner, outer in zip(body.inputs, operands, strict=False)
                if (owed := self.of(outer))
            }


def _sources(node: Node, decision: Decision, i: int) -> Iterator[tuple[Value, Axes]]:
    """What may be pending in result i: values, with the axes over which each is pending there."""
    operands = [
        (v, reshard.target.pending_axes) for v, reshard in zip(node.inputs, decision.reshards, strict=True)
    ]
    if node.name == "optimization_barrier":
        yield operands[i]
    elif not node.bodies:
        yield from operands
    for body in decision.bodies[node.name == "while" :]:
        yield body.graph.outputs[i], body.outputs[i].target.pending_axes
    if node.name in _CARRIES:
        yield from operands[_CARRIES[node.name](node.params)][i : i + 1]


def _scan_carries(params) -> slice:
    consts, carries = _jax.scan_counts(params)
    return slice(consts, consts + carries)


_CARRIES = {
    "scan": _scan_carries,
    "while": lambda params: slice(params["cond_nconsts"] + params["body_nconsts"], None),
}


def _constant(node: Node) -> list[Sequence[Value]]:
    """For each body the operands that its first inputs are in every iteration."""
    if node.name == "while":
        cond, body = node.params["cond_nconsts"], node.params["body_nconsts"]
        return [node.inputs[:cond], node.inputs[cond : cond + body]]
    if node.name == "scan":
        return [node.inputs[: _jax.scan_counts(node.params)[0]]]
    return [node.inputs[node.name == "cond" :]] * len(node.bodies)
