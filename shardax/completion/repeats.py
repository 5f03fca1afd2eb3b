"""Finds which items (nodes, by their numbers) of a program make alike blocks, as the layers of an unrolled
model do.

A long run of classes that repeats itself, such as the forward pass of the layers, is cut into blocks. A
later item belongs to the first of the blocks that its operands come from. So a layer's backward pass and its
part of the optimizer belong to the layer's block, although they are far away in the program; and of a sum
over all parameters, number by number, what adds those of the layer. The choice of blocks changes no result,
only how often a result is computed.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from shardax.graph.graph import Value

REST = 1 << 30  # the block of what belongs to no repetition
_RESTS = itertools.repeat(REST)
_SHORTEST = 4  # items of a block; one with bodies, as a loop, counts as what is in it
_OF_ONE = 3  # tensors of an item
_FEWEST = 3  # blocks that are worth it


def groups(
    classes: Sequence[int],
    tensors: Sequence[Sequence[Value]],
    values: Sequence[Sequence[Value]],
    arguments: set[Value],
) -> list[int]:
    """For each item the number of its block, REST for most of a program that repeats nothing.

    Args:
      classes: of each item its node class, by number.
      tensors: the values of each item that have dims, those that it makes last.
      values: all values of each item, likewise.
      arguments: of the program.
    """
    runs = _long_runs(np.asarray(classes, np.int64), [max(1, len(vs) // _OF_ONE) for vs in tensors])
    cuts = [_cut(run, classes, tensors, values, arguments) for run in runs]
    return max(cuts, key=_spread, default=[REST] * len(classes))


def _spread(block_of: list[int]) -> int:
    """How many items are in blocks, the largest of them aside: a row of annotations that repeats itself, cut
    into blocks, leaves all layers to the first of these."""
    sizes = Counter(block_of)
    del sizes[REST]
    return sum(sizes.values()) - max(sizes.values())


def _cut(run: tuple[int, int, int], classes, tensors, values, arguments: set[Value]) -> list[int]:
    """The block of each item, if a run is cut into blocks."""
    start, period, count = run
    before_run = arguments.union(
        *tensors[:start]
    )  # what is made before the run belongs to the block that uses it, as arguments do
    block_of, home = [REST] * len(classes), {}
    numbers: dict[Value, tuple[int, int]] = {}  # of each value without dims its maker's class and block
    for i in range(start, len(classes)):
        block, mine = (i - start) // period, tensors[i]
        if block >= count:
            block = min(map(home.get, mine, _RESTS)) if mine else _of_addend(classes[i], values[i], numbers)
        block_of[i] = block
        for value in mine:
            if home.setdefault(value, block) != block and value in before_run:
                home[value] = REST  # several blocks use it: it belongs to none
        for value in values[i]:
            if not (value.shape or value.is_literal or value in arguments):
                numbers.setdefault(value, (classes[i], block))
    for i in reversed(range(start)):
        block_of[i] = block = min(map(home.get, tensors[i][-1:], _RESTS), default=REST)
        for value in tensors[i]:
            home.setdefault(value, block)
    return _joined(block_of)


def _of_addend(kind: int, values: Sequence[Value], numbers: Mapping[Value, tuple[int, int]]) -> int:
    """The block of what an item adds to a running sum of numbers, as to the norm of all gradients."""
    known = [numbers[value] for value in values if value in numbers]
    added = {block for maker, block in known if maker != kind}
    return added.pop() if len(added) == 1 and any(maker == kind for maker, _ in known) else REST


def _joined(block_of: list[int]) -> list[int]:
    """Items that are in no block, but between two items of one block, join that block."""
    last, waiting = REST, 0
    for i, block in enumerate(block_of):
        if block == REST:
            waiting += 1
            continue
        if block == last and waiting:
            block_of[i - waiting : i] = [block] * waiting
        last, waiting = block, 0
    return block_of


def _long_runs(classes: np.ndarray, weights: Sequence[int]) -> list[tuple[int, int, int]]:
    """The first long repetition, and the longest: where each starts, its period, and how often it repeats. An
    item counts as many times as its weight.
    """
    runs = [run for period in _periods(classes) for run in _runs(classes, period)]
    if not runs:
        return []
    longest = max(runs, key=lambda run: (run[2], -run[0], -run[1]))
    first = min(run for run in runs if 3 * run[2] >= longest[2])
    found = []
    for start, period, length in dict.fromkeys([first, longest]):
        period *= -(-_SHORTEST // sum(weights[start : start + period]))
        found += [(start, period, length // period)] if length // period >= _FEWEST else []
    return found


def _periods(classes: np.ndarray) -> list[int]:
    """The distances at which many items repeat, at least three times in a row: the most promising few."""
    order = np.argsort(classes, kind="stable")
    same = classes[order][1:] == classes[order][:-1]
    gaps = np.where(same, np.diff(order), 0)
    again = gaps[1:][(gaps[1:] == gaps[:-1]) & (gaps[1:] > 0)]
    counts = Counter(again.tolist())
    return sorted(counts, key=lambda gap: (-counts[gap] * gap, gap))[:8]


def _runs(classes: np.ndarray, period: int) -> list[tuple[int, int, int]]:
    """(start, period, length) of each stretch in which every item equals the one a period further on."""
    equal = np.concatenate([[False], classes[:-period] == classes[period:], [False]])
    edges = np.flatnonzero(equal[1:] != equal[:-1])
    stretches = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [
        (start, period, end - start + period)
        for start, end in stretches
        if end - start >= (_FEWEST - 1) * period
    ]
