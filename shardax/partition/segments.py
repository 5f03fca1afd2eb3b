"""Segments: stretches of a program that lie in one block of completion. Alike ones, as unrolled layers have, are chosen once.

What is chosen for a segment follows from its nodes' kinds and wiring, the shardings that completion wants, how often its
results are used and whether evenly, and the layouts in which what it reads is there. Where all are equal, so are the decisions.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass

from shardax.completion.blocks import Block, Pattern
from shardax.completion.complete import Completion
from shardax.graph import Node, Value


@dataclass(eq=False, slots=True)
class Stretch:
    """Where a segment lies in the blocks of a pattern: the places of the values that it reads, and of those that it makes."""

    reads: list[int]
    makes: list[int]


@dataclass(frozen=True, slots=True)
class Segment:
    """`key` is equal for segments in which everything is alike but the layouts of what they read; None if there is no other."""

    nodes: Sequence[Node]
    reads: Sequence[Value] = ()
    makes: Sequence[Value] = ()
    key: Hashable = None


def segments(
    completion: Completion, uses: Counter[Value], evened: Set[Value], ahead: Callable[[Value], Hashable]
) -> Iterator[Segment]:
    """The segments of the program, in order. `ahead`: what choice asks of the nodes after a value."""
    often = Counter(block.pattern for block in completion.blocks)
    numbers: dict[tuple[int, ...], int] = {}
    wanted = {b: numbers.setdefault(completion.wanted(b), len(numbers)) for b in completion.blocks if often[b.pattern] > 1}
    stretches: dict[tuple[Pattern, int, int], Stretch] = {}
    start = dict.fromkeys(completion.blocks, 0)
    nodes, first = completion.items.nodes, 0
    for block, run in itertools.groupby(completion.block_of):
        count = sum(1 for _ in run)
        mine = nodes[first : first + count]
        if block not in wanted:
            yield Segment(mine)
        else:
            key = (block.pattern, start[block], count)
            stretch = stretches.get(key) or stretches.setdefault(key, _stretch(block, mine))
            reads, makes = ([block.values[p] for p in places] for places in (stretch.reads, stretch.makes))
            read = tuple(min(uses[v], 2) for v in reads)
            made = tuple((uses[v], v in evened, ahead(v)) for v in makes)
            yield Segment(mine, reads, makes, (stretch, wanted[block], read, made))
        first, start[block] = first + count, start[block] + count


def _stretch(block: Block, nodes: Sequence[Node]) -> Stretch:
    makes = dict.fromkeys(v for node in nodes for v in node.outputs)
    reads = dict.fromkeys(v for node in nodes for v in node.inputs if v not in makes and not v.is_literal)
    return Stretch([block.place[v] for v in reads], [block.place[v] for v in makes])
