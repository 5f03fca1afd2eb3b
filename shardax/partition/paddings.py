"""To what size each dim of a program's values is padded: in each part of the program for the finest split
that this part gives to dims of its size.

Shards of different splits nest only where both are padded alike (`Padding`), which matters for values of
which one is made of the other. What merely stands side by side in a program has paddings of its own:
otherwise rows that nobody needs would be sent and computed in one part because another is split more finely.
So it is with axes that are cut in several because one part splits a dim within them: in others they go
together, as if they were not cut.
"""

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import jax

from shardax.annotations.explicit import memory_of
from shardax.completion.complete import Completion
from shardax.graph.connected import connected
from shardax.graph.graph import Graph, Node, Value
from shardax.sharding import Axes, Padding


@dataclass(frozen=True)
class Paddings:
    """`common`: of all values but those of `parts`."""

    common: Padding
    parts: Mapping[Value, Padding] = field(default_factory=dict)

    def of(self, value: Value) -> Padding:
        return self.parts.get(value, self.common)

    def of_node(self, node: Node) -> Padding:
        """That of the arrays that a node reads and makes: they are of one part, but for what it copies
        from one memory to the other, which is as at the host then.
        """
        if not self.parts:
            return self.common
        arrays = sorted(arrays_of(node), key=is_at_host, reverse=node.name == "device_put")
        return next((self.parts[v] for v in arrays if v in self.parts), self.common)


def paddings_of(graph: Graph, completion: Completion) -> Paddings:
    splits = frozenset(completion.splits())
    common = Padding(completion.sizes, splits)
    if all(common.padded(n, axes) == n for n, axes in splits):
        return Paddings(common)  # nothing is padded in any part
    found: dict[Value, Padding] = {}
    for part in _parts(graph, hosted_apart=True):  # nothing is padded in the host's memory
        some = frozenset(split for v in part for split in _splits(v, completion))
        found.update(dict.fromkeys(part, Padding(completion.sizes, some)))
    return Paddings(common, found)


def _splits(value: Value, completion: Completion) -> list[tuple[int, Axes]]:
    return [(n, axes) for n, axes in zip(value.shape, completion.sharding(value).dims, strict=True) if axes]


def joined_axes(graph: Graph, completion: Completion) -> dict[Value, tuple[Axes, ...]]:
    """For the values of each part of a program the axes that completion uses only together there, one after
    the other: a mesh with one axis in their place would serve as well.
    """
    several = any(len(axes) > 1 for _, axes in completion.splits())
    found: dict[Value, tuple[Axes, ...]] = {}
    for part in _parts(graph) if several else ():
        used = {axes for v in part for axes in completion.sharding(v).dims if axes}
        found.update(dict.fromkeys(part, _joined_runs(used)))
    return {v: runs for v, runs in found.items() if runs}


def _joined_runs(used: Set[Axes]) -> tuple[Axes, ...]:
    """The longest runs of axes of which all that are used have all, in this order, or none.

    >>> _joined_runs({("x", "y"), ("z", "x", "y"), ("z",)}), _joined_runs({("x", "y"), ("y",)})
    ((('x', 'y'),), ())
    """
    pairs = sorted({pair for axes in used for pair in itertools.pairwise(axes)})
    joined = [
        pair
        for pair in pairs
        if all(set(pair).isdisjoint(axes) or pair in itertools.pairwise(axes) for axes in used)
    ]
    after = dict(joined)
    runs = [[first] for first in after if first not in after.values()]
    for run in runs:
        while run[-1] in after:
            run.append(after[run[-1]])
    return tuple(map(tuple, runs))


def whole_axes(graph: Graph, completion: Completion, cut: Sequence[Axes]) -> dict[Value, tuple[Axes, ...]]:
    """For the values of each part of a program the axes that go together there, of those that are `cut` out
    of one axis of the mesh because some other part has to split it so.
    """
    found: dict[Value, tuple[Axes, ...]] = {}
    for part in _parts(graph) if cut else ():
        used = {axes for v in part for axes in completion.sharding(v).dims}
        runs = (run for group in cut for run in _runs(group, used))
        found.update(dict.fromkeys(part, tuple([run for run in runs if len(run) > 1])))
    return found


def _runs(group: Axes, used: Set[Axes]) -> list[Axes]:
    """Axes in runs, of which all that are used have all or none.

    >>> _runs(("x", "y", "z"), {("x", "y"), ("w", "x", "y", "z"), ("w",)})
    [('x', 'y'), ('z',)]
    """
    runs = [group[:1]]
    for before, after in itertools.pairwise(group):
        pair = before, after
        joined = all(set(pair).isdisjoint(axes) or pair in itertools.pairwise(axes) for axes in used)
        runs = [*runs[:-1], (*runs[-1], after)] if joined else [*runs, (after,)]
    return runs


def _parts(graph: Graph, hosted_apart: bool = False) -> list[list[Value]]:
    """The arrays of a program and of its bodies, those together that operations join. Numbers have no dims,
    and join nothing. Arrays at the host may be apart from those on the device.
    """
    nodes = [arrays_of(node) for node in graph.walk()]
    numbers = {v: i for i, v in enumerate(dict.fromkeys(itertools.chain.from_iterable(nodes)))}
    hosted_apart = hosted_apart and any(map(is_at_host, numbers))
    joined = itertools.chain.from_iterable([_joined(node, hosted_apart) for node in nodes])
    of = connected(len(numbers), ([numbers[v] for v in arrays] for arrays in joined))
    parts: dict[int, list[Value]] = {}
    for v, i in numbers.items():
        parts.setdefault(of[i], []).append(v)
    return list(parts.values())


def arrays_of(node: Node) -> Sequence[Value]:
    """The arrays that a node reads and makes, and those through which they enter and leave its bodies."""
    inside = [v for body in node.bodies for v in (*body.inputs, *body.outputs)]
    return [v for v in (*node.inputs, *node.outputs, *inside) if v.shape and not v.is_literal]


def _joined(arrays: Sequence[Value], hosted_apart: bool) -> list[Sequence[Value]]:
    """All of them, or those on the device and those at the host."""
    if not hosted_apart:
        return [arrays]
    return [[v for v in arrays if is_at_host(v) is at_host] for at_host in (False, True)]


def is_at_host(value: Value) -> bool:
    return memory_of(value.aval) is jax.memory.Space.Host
