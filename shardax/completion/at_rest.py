"""The last strategy: state that rests otherwise than it is annotated is updated as it rests.

A parameter of 257 rows that is annotated P("model", None) rests in P(None, "model"), because a `jax.Array` between calls has
shards of one size. Its moments rest likewise, and so would each be resharded on the way in and on the way out if the optimizer
followed the annotation. Instead the elementwise neighbourhood of the result takes the sharding at rest, as far as the values
that something fixed; then only the gradient is resharded, and the parameter once, for the forward pass.
"""

from collections.abc import Sequence

from shardax import annotations
from shardax.completion.edges import ELEMENTWISE, Edge
from shardax.graph import Graph, Value
from shardax.sharding import Sharding


def successors(graph: Graph) -> list[tuple[Value, Value]]:
    """(argument, result that succeeds it) of every donated argument."""
    given = annotations.among(graph.nodes)
    return [(graph.inputs[note.like], node.outputs[0]) for node, note in given if note.like is not None]


def neighbourhoods(edges: Sequence[Edge], fixed: set[Value]) -> dict[Value, list[Value]]:
    """For each value those of the same shape that elementwise equations tie it to, none of them fixed."""
    beside: dict[Value, list[Value]] = {}
    for edge in edges:
        if edge.forward != ELEMENTWISE or edge.backward != ELEMENTWISE:
            continue
        shape = edge.results[0].shape
        values = [v for v in edge.values if v.shape == shape and v not in fixed and not v.is_literal]
        for value in values if _all_alike(edge) else ():
            beside.setdefault(value, []).extend(values)
    return beside


def _all_alike(edge: Edge) -> bool:
    return len({dims for dims in edge.factors.tensors if dims}) == 1


def updated_at_rest(
    graph: Graph, edges: Sequence[Edge], fixed: set[Value], wanted: dict[Value, Sharding], rest: dict[Value, Sharding]
) -> dict[Value, Sharding]:
    """The values that take a sharding at rest.

    Args:
      fixed: the values that annotations fixed.
      wanted: for each argument the sharding that completion gives it inside.
      rest: for each argument the sharding in which it rests.
    """
    beside = neighbourhoods(edges, fixed)
    taken: dict[Value, Sharding] = {}
    for argument, result in successors(graph):
        if rest[argument] == wanted[argument]:
            continue
        front = [result]
        while front:
            value = front.pop()
            if value not in taken:
                taken[value] = rest[argument]
                front.extend(beside.get(value, ()))
    return taken
