"""Rewrites bodies so that they read given rows of an array that does not change; other reads of it stay as
they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from shardax.graph.graph import Graph, Node, Value
from shardax.graph.indices import READS, Index, Place
from shardax.graph.operands import Constants, constants_of, with_constants

RowsAt = Mapping[Place, Value]


def places_read(
    nodes: Sequence[Node], array: Value, place_of: Callable[[Node], Place | None]
) -> dict[Place, None]:
    """The places at which nodes and their bodies read an array."""
    names = set(_names(nodes, array))
    found = (place_of(node) for node in Graph([], list(nodes)).walk() if _reads(node, names))
    return {place: None for place in found if place is not None}


def _names(nodes: Sequence[Node], array: Value) -> Iterator[Value]:
    """The values that are an array: behind barriers, and in bodies."""
    here = {array}
    for node in nodes:
        if node.name == "optimization_barrier":
            here.update(new for old, new in zip(node.inputs, node.outputs, strict=True) if old in here)
        for body, given in zip(node.bodies, constants_of(node), strict=True):
            for inner in (inner for outer, inner in given if outer in here):
                yield from _names(body.nodes, inner)
    yield from here


def _reads(node: Node, names: Set[Value]) -> bool:
    return node.name in READS and node.inputs[0] in names and names.isdisjoint(node.inputs[1:])


@dataclass(eq=False, slots=True)
class Reading:
    """`rows` are those of each value that is the array; `place_of` says where a node reads."""

    index: Index
    place_of: Callable[[Node], Place | None]
    rows: dict[Value, RowsAt] = field(default_factory=dict)

    def run(self, nodes: Sequence[Node], given: Sequence[Value]) -> list[Node]:
        """The nodes, reading rows at the places of these; `given` are the results."""
        made = [one for node in nodes for one in self._through(node)]
        read = {v for node in made for v in node.inputs}.union(given)
        return [_without_unread(node, read) if node.name == "optimization_barrier" else node for node in made]

    def _through(self, node: Node) -> list[Node]:
        if _reads(node, self.rows.keys()) and (place := self.place_of(node)) is not None:
            return self.index.of_row(node, self.rows[node.inputs[0]][place], place)
        if node.name == "optimization_barrier":
            return [self._beside(node)]
        pairs = constants_of(node)
        return [
            self._with_bodies(node, pairs) if any(outer in self.rows for outer, _ in sum(pairs, [])) else node
        ]

    def _beside(self, node: Node) -> Node:
        """A barrier, with the rows of its arrays beside them."""
        inputs, outputs = list(node.inputs), list(node.outputs)
        for old, new in zip(node.inputs, node.outputs, strict=True):
            if old in self.rows:
                self.rows[new] = {place: Value(row.aval) for place, row in self.rows[old].items()}
                inputs += self.rows[old].values()
                outputs += self.rows[new].values()
        return replace(node, inputs=inputs, outputs=outputs)

    def _with_bodies(self, node: Node, pairs: Sequence[Constants]) -> Node:
        """A node whose bodies are given rows too."""
        new, inside = [], []
        for body, given in zip(node.bodies, pairs, strict=True):
            child, more = Reading(self.index, self.place_of), []
            for outer, inner in given:
                if outer in self.rows:
                    child.rows[inner] = {place: Value(row.aval) for place, row in self.rows[outer].items()}
                    more += zip(self.rows[outer].values(), child.rows[inner].values(), strict=True)
            new.append([*given, *more])
            inside.append(child.run(body.nodes, body.outputs))
        return with_constants(node, new, inside)


def _without_unread(barrier: Node, read: Set[Value]) -> Node:
    kept = [(old, new) for old, new in zip(barrier.inputs, barrier.outputs, strict=True) if new in read]
    return replace(barrier, inputs=[old for old, _ in kept], outputs=[new for _, new in kept])
