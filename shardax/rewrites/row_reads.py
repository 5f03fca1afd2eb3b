"""Rewrites bodies so that they take the rows that they read of an array that does not change; other reads of
it stay as they are.
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
    aliases = set(_aliases(nodes, array))
    places = (place_of(node) for node in Graph([], list(nodes)).walk() if _reads(node, aliases))
    return {place: None for place in places if place is not None}


def _aliases(nodes: Sequence[Node], array: Value) -> Iterator[Value]:
    """The values that are an array: behind barriers, and in bodies."""
    aliases = {array}
    for node in nodes:
        if node.name == "optimization_barrier":
            aliases.update(new for old, new in zip(node.inputs, node.outputs, strict=True) if old in aliases)
        for body, constants in zip(node.bodies, constants_of(node), strict=True):
            for inner in (inner for outer, inner in constants if outer in aliases):
                yield from _aliases(body.nodes, inner)
    yield from aliases


def _reads(node: Node, aliases: Set[Value]) -> bool:
    return node.name in READS and node.inputs[0] in aliases and aliases.isdisjoint(node.inputs[1:])


@dataclass(eq=False, slots=True)
class Reading:
    """`rows` are those of each value that is the array; `place_of` says where a node reads."""

    index: Index
    place_of: Callable[[Node], Place | None]
    rows: dict[Value, RowsAt] = field(default_factory=dict)

    def run(self, nodes: Sequence[Node], results: Sequence[Value]) -> list[Node]:
        """The nodes, reading rows at the places of these; `results` are those of the body."""
        made = [one for node in nodes for one in self._through(node)]
        read = {v for node in made for v in node.inputs}.union(results)
        for i, node in enumerate(made):
            if node.name == "optimization_barrier":
                pairs = zip(node.inputs, node.outputs, strict=True)
                kept = [(old, new) for old, new in pairs if new in read]
                made[i] = replace(node, inputs=[old for old, _ in kept], outputs=[new for _, new in kept])
        return made

    def _through(self, node: Node) -> list[Node]:
        if _reads(node, self.rows.keys()) and (place := self.place_of(node)) is not None:
            return self.index.of_row(node, self.rows[node.inputs[0]][place], place)
        if node.name == "optimization_barrier":
            inputs, outputs = list(node.inputs), list(node.outputs)
            for old, new in zip(node.inputs, node.outputs, strict=True):
                if old in self.rows:  # they go through it beside their array
                    self.rows[new] = {place: Value(row.aval) for place, row in self.rows[old].items()}
                    inputs += self.rows[old].values()
                    outputs += self.rows[new].values()
            return [replace(node, inputs=inputs, outputs=outputs)]
        pairs = constants_of(node)
        return [
            self._with_bodies(node, pairs) if any(outer in self.rows for outer, _ in sum(pairs, [])) else node
        ]

    def _with_bodies(self, node: Node, pairs: Sequence[Constants]) -> Node:
        """A node whose bodies are given rows too."""
        new, inside = [], []
        for body, constants in zip(node.bodies, pairs, strict=True):
            child, more = Reading(self.index, self.place_of), []
            for outer, inner in constants:
                if outer in self.rows:
                    child.rows[inner] = {place: Value(row.aval) for place, row in self.rows[outer].items()}
                    more += zip(self.rows[outer].values(), child.rows[inner].values(), strict=True)
            new.append([*constants, *more])
            inside.append(child.run(body.nodes, body.outputs))
        return with_constants(node, new, inside)
