"""Twins: nodes in alike parts of an unrolled program, as its layers are, which run as one of them does.

Parts (`completion/repeats.py`) are alike if each has the same nodes, connected in the same way: whatever the
order in which a program has them, as one that names its layers sorts the 10th before the 2nd. So each node
gets a color, by its class, its shardings and wishes, and again and again by the colors of those around it,
until no color splits any more (Weisfeiler and Leman 1968). Of what is around a part only the classes count:
the layer beside the embedding has no twins there.
"""

from collections.abc import Callable, Hashable, Iterator

import numpy as np

from shardax.completion.complete import Completion
from shardax.completion.repeats import REST
from shardax.graph.graph import Node, Value

FEWEST = 3  # parts that are worth it


def twins(completion: Completion, said: Callable[[Node], Hashable] = lambda node: None) -> dict[Node, Node]:
    """For the nodes of alike parts those that they run as: of those in one place the first in program order.
    `said`: what else must be equal of two nodes."""
    items = completion.items
    groups = np.array(items.groups[: items.count], np.int64)
    if np.count_nonzero(groups != REST) == 0:
        return {}
    colors = _Colors(completion, groups, said).refined()
    alike: dict[Hashable, list[np.ndarray]] = {}
    order = np.lexsort((colors, groups))
    for part in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if groups[part[0]] != REST:
            alike.setdefault(colors[part].tobytes(), []).append(part)
    found: dict[Node, Node] = {}
    for parts in alike.values():
        if len(parts) >= FEWEST:
            for first, *others in np.sort(np.stack(parts), axis=0).T.tolist():
                found.update((items.nodes[other], items.nodes[first]) for other in others)
    return found


class _Colors:
    """Those of the nodes of a program. `inside`, `across`: who reads what of whom in one part, and of another
    one. Of values without dims only the former counts: there is little to choose for them."""

    def __init__(self, completion: Completion, groups: np.ndarray, said: Callable[[Node], Hashable]):
        numbers: dict[Hashable, int] = {}
        self.of_class = _mixed(
            np.array([numbers.setdefault(key, len(numbers)) for key in _keys(completion, said)], np.uint64)
        )
        makers, readers, places, dims = np.array(list(_reads(completion)), np.int64).reshape(-1, 4).T
        inside = groups[makers] == groups[readers]
        across = ~inside & (dims > 0)
        self.inside = _Reads(makers[inside], readers[inside], places[inside])
        self.across = _Reads(makers[across], readers[across], places[across])

    def refined(self) -> np.ndarray:
        """The colors when none splits any more."""
        colors = _mixed(self.of_class + self.across.around(self.of_class))
        count = 0
        while (now := len(np.unique(colors))) > count:
            count, colors = now, _mixed(colors + self.inside.around(colors))
        return colors


class _Reads:
    """Who reads what of whom, sorted for sums over all that are around a node."""

    def __init__(self, makers: np.ndarray, readers: np.ndarray, places: np.ndarray):
        ends = np.concatenate([makers, readers])
        order = np.argsort(ends, kind="stable")
        there = _mixed(np.concatenate([2 * places, 2 * places + 1]).astype(np.uint64))
        self.others, self.places = np.concatenate([readers, makers])[order], there[order]
        self.ends, self.starts = np.unique(ends[order], return_index=True)

    def around(self, colors: np.ndarray) -> np.ndarray:
        """For each node a number for the colors around it, and for how they are connected to it."""
        found = np.zeros_like(colors)
        if len(self.ends):
            found[self.ends] = np.add.reduceat(_mixed(colors[self.others] ^ self.places), self.starts)
        return found


def _keys(completion: Completion, said: Callable[[Node], Hashable]) -> Iterator[Hashable]:
    """What is alike of nodes that may be twins, what is around them aside."""
    items, wished, numbers = completion.items, completion.wished, dict[Hashable, int]()
    number_of: dict[int, int] = {}  # by identity: most values share a sharding

    def number(value: Value) -> int:
        sharding = completion.shardings.get(value)
        if id(sharding) not in number_of:
            number_of[id(sharding)] = numbers.setdefault(sharding, len(numbers))
        return number_of[id(sharding)]

    for node, kind, values in zip(items.nodes[: items.count], items.numbers, items.values, strict=False):
        same = tuple(map(node.inputs.index, node.inputs))
        wishes = tuple(map(wished.get, values)) if wished else ()
        yield kind, same, tuple(map(number, values)), wishes, said(node)


def _reads(completion: Completion) -> Iterator[tuple[int, int, int, int]]:
    """(maker, reader, place, dims of the value), by the numbers of nodes."""
    nodes = completion.items.nodes[: completion.items.count]
    made = {v: (i, k) for i, node in enumerate(nodes) for k, v in enumerate(node.outputs)}
    for reader, node in enumerate(nodes):
        for place, value in enumerate(node.inputs):
            if value in made:
                maker, result = made[value]
                yield maker, reader, place << 20 | result, len(value.shape)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Numbers that look random, equal for equal ones (the finalizer of SplitMix64, Steele et al. 2014)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
