"""This file says where a pending reduction may be settled further on: after the nodes through which it may wait.

gather -> mul -> dot_general        what is looked up is large, what is made of it is small
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardax import reshard
from shardax.cost.nominal import COLLECTIVE
from shardax.graph import Graph, Node, Value
from shardax.partition.decisions import MADE_ANYWHERE
from shardax.sharding import Axes, Layout, Padding
from shardax.spmd_rules.registry import RULES

_FAR = 4  # nodes

Array = tuple[Layout, tuple[int, ...], int]  # as completion wants it, its shape, bytes of an element


@dataclass(frozen=True, slots=True)
class Stop:
    """A value into which reductions of `kinds` may have waited. `beside`: the other operands of the node that makes it, which
    then are the same on all devices over which something waits."""

    made: Array
    kinds: tuple[str, ...]
    beside: tuple[Array, ...]


Stops = tuple[Stop, ...]


class Onward:
    """Where what a program's values owe may be settled later."""

    def __init__(self, graph: Graph, uses: Counter[Value], wanted: Callable[[Value], Layout]):
        self.reader = {v: node for node in graph.walk() for v in node.inputs if uses[v] == 1}
        self.made_anywhere = {v for node in graph.walk() if node.name in MADE_ANYWHERE for v in node.outputs}
        self.wanted = wanted

    def stops(self, value: Value) -> Iterator[Stop]:
        """The stops of what is pending in a value, nearest first: as far as one node alone reads it."""
        for _ in range(_FAR):
            node = self.reader.get(value)
            if node is None or node.bodies or len(node.outputs) != 1 or node.name not in RULES:
                return
            kinds, group = _passing(node, node.inputs.index(value))
            if not kinds:
                return
            beside = [v for i, v in enumerate(node.inputs) if i not in group and v not in self.made_anywhere]
            value = node.outputs[0]
            yield Stop(self._array(value), kinds, tuple(self._array(v) for v in beside if not v.is_literal))

    def _array(self, value: Value) -> Array:
        return self.wanted(value), value.shape, value.itemsize


def _passing(node: Node, operand: int) -> tuple[tuple[str, ...], Sequence[int]]:
    """The kinds of reductions that may wait through an operand, and the operands that then are pending together."""
    groups = [group for group in RULES[node.name].passes_of(node) if operand in group.operands]
    return (groups[0].kinds, groups[0].operands) if groups else ((), ())


def price_onward(owing: Layout, stops: Sequence[Stop], padding: Padding, most: float) -> float:
    """The least price, in bytes sent, of settling what a layout owes at one of the stops; `most` where none is less."""
    spent = 0.0
    for stop in stops:
        if not {kind for _, kind in owing.pending} <= {*stop.kinds}:
            break
        spent += sum(_price(array, array[0], _waiting(array, owing.pending_axes, padding), padding) for array in stop.beside)
        waiting = _waiting(stop.made, owing.pending_axes, padding)
        most = min(most, spent + _price(stop.made, replace(waiting, pending=owing.pending), stop.made[0], padding))
    return most


def _waiting(array: Array, axes: Axes, padding: Padding) -> Layout:
    """How an array lies while something waits over these axes: as it is wanted, but not split over them."""
    wanted, shape, _ = array
    return padding.layout(wanted.sharding.without(axes), shape)


def _price(array: Array, source: Layout, target: Layout, padding: Padding) -> float:
    path = reshard.plan(source, target, *array[1:], padding.sizes)
    return path.nbytes + COLLECTIVE * sum(step.kind in reshard.COLLECTIVES for step in path.steps)
