"""What of a program has nothing to do with the rest: it is treated as if it were alone."""

from collections.abc import Iterable, Sequence

from shardax.graph.graph import Graph, Value


def connected(count: int, groups: Iterable[Sequence[int]]) -> list[int]:
    """For each of so many numbers the least one that it is connected with, through groups that share some.

    >>> connected(5, [(3, 1), (2,), (4, 3)])
    [0, 1, 2, 1, 1]
    """
    root = list(range(count))

    def root_of(v: int) -> int:
        while root[v] != v:
            root[v] = v = root[root[v]]
        return v

    for group in groups:
        first = root_of(group[0]) if group else 0
        for v in group[1:]:
            other = root_of(v)
            first, last = (first, other) if first < other else (other, first)
            root[last] = first
    return list(map(root_of, range(count)))


def parts(graph: Graph) -> list[tuple[list[Value], list[Value]]]:
    """The inputs and outputs of each part of a program that shares no value with another, and has inputs."""
    numbers: dict[Value, int] = {}

    def number(v: Value) -> int:
        return numbers.setdefault(v, len(numbers))

    starts = [(number(v), v) for v in graph.inputs]
    groups = [[number(v) for v in (*n.inputs, *n.outputs) if not v.is_literal] for n in graph.nodes]
    ends = [(number(v), v) for v in graph.outputs if not v.is_literal]
    of = connected(len(numbers), groups)
    found = {of[i]: (list[Value](), list[Value]()) for i, _ in starts}
    for which, values in enumerate((starts, ends)):
        for i, v in values:
            if of[i] in found:
                found[of[i]][which].append(v)
    return list(found.values())
