"""What of a program has nothing to do with the rest: it is treated as if it were alone."""

from collections.abc import Hashable, Iterable, Sequence

from shardax.graph.graph import Graph, Node, Value


def connected(count: int, groups: Iterable[Sequence[int]]) -> list[int]:
    """For each of so many numbers the least one that it is connected with, through groups that share some.

    >>> connected(5, [(3, 1), (2,), (4, 3)])
    [0, 1, 2, 1, 1]
    """
    root = list(range(count))  # none is greater than what it is of
    for group in groups:
        first = group[0] if group else 0
        for v in group:
            while root[v] != v:
                root[v] = v = root[root[v]]
            if v < first:
                root[first] = v
                first = v
            else:
                root[v] = first
    for v in range(count):
        root[v] = root[root[v]]
    return root


def parts(graph: Graph) -> list[tuple[list[Value], list[Value]]]:
    """The inputs and outputs of each part of a program that shares no value with another, and has inputs."""
    of = _part_of_each(graph)
    found = {of[v]: (list[Value](), list[Value]()) for v in graph.inputs}
    for which, values in enumerate((graph.inputs, graph.outputs)):
        for v in values:
            if not v.is_literal and of[v] in found:
                found[of[v]][which].append(v)
    return list(found.values())


def connected_nodes(graph: Graph) -> list[list[Node]]:
    """The nodes of each part of a program that shares no value with another."""
    of, found = _part_of_each(graph), dict[Hashable, list[Node]]()
    for node in graph.nodes:
        values = (v for v in (*node.inputs, *node.outputs) if not v.is_literal)
        found.setdefault(next((of[v] for v in values), node), []).append(node)
    return list(found.values())


def _part_of_each(graph: Graph) -> dict[Value, int]:
    """A number for each value, equal where they are of one part."""
    numbers: dict[Value, int] = {}

    def number(v: Value) -> int:
        return numbers.setdefault(v, len(numbers))

    for v in graph.inputs:
        number(v)
    groups = [[number(v) for v in (*n.inputs, *n.outputs) if not v.is_literal] for n in graph.nodes]
    for v in graph.outputs:
        if not v.is_literal:
            number(v)
    of = connected(len(numbers), groups)
    return {v: of[i] for v, i in numbers.items()}
