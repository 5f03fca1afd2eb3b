"""What a rewrite is: a function that finds in one graph what JAX shows only expanded, and returns what takes
its place.

Rewrites leave graphs as they are: `replaced` makes a new one, and the driver goes into bodies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from shardax.graph.affine import Affines
from shardax.graph.graph import Graph, Node, Value, without_unread


@dataclass(frozen=True, eq=False)
class Context:
    """Where a graph stands: `node` is the one whose body it is, `outer` where that one stands; None for a
    program.
    """

    graph: Graph
    node: Node | None = None
    outer: "Context | None" = None

    @cached_property
    def affines(self) -> Affines:
        """What is affine in the graph; of bodies that are as they were, what is known from around them."""
        outer = self.outer and self.outer.affines
        return outer if outer and self.graph in outer.graphs else Affines(self.graph, outer)

    @property
    def in_loop(self) -> bool:
        is_loop = self.node is not None and self.node.name in ("scan", "while")
        return is_loop or self.outer is not None and self.outer.in_loop


@dataclass(frozen=True)
class Replacements:
    """What takes the place of nodes, in program order, and of values that are read.

    Empty where nothing matches. `again`: a graph with these in place may have more.
    """

    nodes: Mapping[Node, Sequence[Node]] = field(default_factory=dict)
    values: Mapping[Value, Value] = field(default_factory=dict)
    again: bool = False


class Rewrite(Protocol):
    """Finds something in a graph, which stays as it is, and returns what takes its place.

    `context` is where the graph stands. Bodies are left aside: the driver rewrites these too, outer ones
    first, as they are after what was rewritten around them.
    """

    def __call__(self, graph: Graph, context: Context) -> Replacements: ...


def replaced(graph: Graph, replacements: Replacements) -> Graph:
    """The graph with these replacements, without what nothing reads then."""
    nodes, values = replacements.nodes, replacements.values
    if not nodes and not values:
        return graph
    new = [reading(one, values) for node in graph.nodes for one in nodes.get(node, (node,))]
    return without_unread(Graph(graph.inputs, new, [values.get(v, v) for v in graph.outputs]))


def reading(node: Node, values: Mapping[Value, Value]) -> Node:
    """The node with these values instead of those that it reads."""
    if values.keys().isdisjoint(node.inputs):
        return node
    return replace(node, inputs=[values.get(v, v) for v in node.inputs])


def makers_of(graph: Graph) -> dict[Value, Node]:
    """The node that makes each value."""
    return {value: node for node in graph.nodes for value in node.outputs}
