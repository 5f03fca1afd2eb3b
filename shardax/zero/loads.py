"""Loads: how many matrices of each size every device computes with, so that none takes longer than it must.

    3 matrices of 9 s, 3 of 6 s, 3 of 3 s, 3 of 2 s, on 8 devices      most
    by size     9 + 6 + 3 + 2    on three devices, nothing on five     20 s
    by cost     9  9  9  6 + 3  6 + 2  6  3 + 2  3 + 2               9 s

This is makespan scheduling: whichever takes longest goes to the device that has least to do (longest
processing time first, Graham 1969). The most loaded device takes at most 4/3 of what it would at best.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MOST_LOADS = 16  # that differ: a program has a branch for each

Load = tuple[int, ...]
"""Of one device, how many matrices of each size."""


@dataclass(frozen=True)
class Size:
    """So many matrices, each computed with in so many `seconds`. `sent`: the seconds in which all devices are
    sent the rows of one more matrix for each, and what is made of these comes back.
    """

    count: int
    seconds: float
    sent: float = 0.0


def loads(sizes: Sequence[Size], devices: int) -> list[Load]:
    """The loads of the devices, alike ones side by side, at most `MOST_LOADS` different ones.

    The stack of a size has as many rows for each device as the one with most of them needs, which are sent
    to all. So a matrix more on one device is taken where it spares more than it sends. In all this is never
    more than dealing out each size by number.

    >>> loads([Size(3, 9.0), Size(3, 6.0), Size(3, 3.0), Size(3, 2.0)], 8)[2:6]
    [(1, 0, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 0, 0)]
    """
    most = [_cheapest(sizes, devices)]
    if len(set(most[0])) > MOST_LOADS:
        most = [_in_groups(sizes, devices, k) for k in range(2, MOST_LOADS + 1) if devices % k == 0]
    by_number = [tuple(-(-size.count // devices) for size in sizes)] * devices
    return sorted(min([by_number, *most], key=lambda found: _price(found, sizes)), reverse=True)


def longest(found: Iterable[Load], sizes: Sequence[Size]) -> float:
    """The seconds of the most loaded device."""
    return max(sum(n * size.seconds for n, size in zip(load, sizes, strict=True)) for load in found)


def rows(found: Iterable[Load]) -> Load:
    """The rows that stacks have for each device."""
    return tuple(map(max, zip(*found, strict=True)))


def _price(found: Sequence[Load], sizes: Sequence[Size]) -> float:
    sent = sum(n * size.sent for n, size in zip(rows(found), sizes, strict=True))
    return longest(found, sizes) + sent


def _cheapest(sizes: Sequence[Size], devices: int) -> list[Load]:
    """The cheapest of loads within limits of each size, which are changed one by one while that helps."""
    found = [_within(limits, sizes, devices) for limits in _limits(sizes, devices)]
    best = min(found, key=lambda loads: _price(loads, sizes))
    while True:
        found = [_within(limits, sizes, devices) for limits in _near(rows(best), sizes, devices)]
        better = min(found, key=lambda loads: _price(loads, sizes), default=best)
        if not _price(better, sizes) < _price(best, sizes):
            return best
        best = better


def _limits(sizes: Sequence[Size], devices: int) -> Iterator[Load]:
    """As many of each size on a device as by number, one more, and any number."""
    for more in (0, 1, math.inf):
        yield tuple(int(min(size.count, -(-size.count // devices) + more)) for size in sizes)


def _near(limits: Load, sizes: Sequence[Size], devices: int) -> Iterator[Load]:
    for k, size in enumerate(sizes):
        for limit in (limits[k] - 1, limits[k] + 1):
            if -(-size.count // devices) <= limit <= size.count:
                yield (*limits[:k], limit, *limits[k + 1 :])


def _within(limits: Load, sizes: Sequence[Size], devices: int) -> list[Load]:
    """The longest ones first, each on the device that has least to do and is below the limit of its size."""
    counts, seconds = [[0] * len(sizes) for _ in range(devices)], [0.0] * devices
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k].seconds):
        free = [(seconds[d], d) for d in range(devices)]
        heapq.heapify(free)
        for _ in range(sizes[k].count):
            _, d = heapq.heappop(free)
            counts[d][k] += 1
            seconds[d] += sizes[k].seconds
            if counts[d][k] < limits[k]:
                heapq.heappush(free, (seconds[d], d))
    return list(map(tuple, counts))


def _in_groups(sizes: Sequence[Size], devices: int, groups: int) -> list[Load]:
    """Loads of so many groups of devices, alike within a group: of each size a matrix for each device of it
    at once, the last of which may be none.
    """
    each = devices // groups
    batches = [Size(-(-size.count // each), size.seconds, size.sent) for size in sizes]
    return [load for load in _cheapest(batches, groups) for _ in range(each)]
