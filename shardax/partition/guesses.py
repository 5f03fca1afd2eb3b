"""Guesses: about what it costs to have a value in a layout. They rank ways; the search has exact prices."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from operator import itemgetter

from shardax.cost.network import Network
from shardax.graph.graph import Value
from shardax.partition.sites import Layouts
from shardax.sharding import Layout

Made = Mapping[Layout, float]
"""The layouts in which a value may be made, and about how much more each costs than the cheapest, with all
that goes before it."""

Taking = Callable[[int, Layout], float]
"""About what it costs to have one of several values, by its place, in a layout."""


class Guesses:
    """On the chip of a network; `nbytes`: what a value takes on a device in a layout."""

    def __init__(self, network: Network, nbytes: Callable[[Value, Layout], int]):
        self.network, self.nbytes = network, nbytes
        self.known: dict[Hashable, Callable[[Layout, Layout], float]] = {}

    def taking(self, values: Sequence[Value], made: Sequence[Made]) -> Taking:
        """What it costs to have one of several values in a layout: to make it in the best of those in which
        it may be made, and to bring it from there. What costs more to make so than this is not tried.
        """
        sources = [sorted(layouts.items(), key=itemgetter(1)) for layouts in made]
        moving = list(map(self.moving, values))

        @cache
        def taken(which: int, target: Layout) -> float:
            best, move = made[which].get(target, math.inf) if made[which] else 0.0, moving[which]
            for source, more in sources[which]:
                if more >= best:
                    break
                if (price := more + move(source, target)) < best:
                    best = price
            return best

        return taken

    def giving(self, values: Sequence[Value], requested: Sequence[Layouts]) -> Taking:
        """What it costs to bring one of several values from a layout to one that is requested of it."""
        moving = list(map(self.moving, values))

        @cache
        def given(which: int, have: Layout) -> float:
            return min([moving[which](have, request) for request in requested[which]])

        return given

    def moving(self, value: Value) -> Callable[[Layout, Layout], float]:
        """What it costs to bring a value, and all that are like it, from one layout to another."""
        key = value.shape, value.itemsize, value.is_literal
        if key not in self.known:
            self.known[key] = cache(partial(self._moved, value))
        return self.known[key]

    def _moved(self, value: Value, source: Layout, target: Layout) -> float:
        if value.is_literal or source == target:
            return 0.0
        sent = 0.0
        owed = tuple(a for a in source.pending_axes if a not in target.pending_axes)
        if owed:
            scattered = not set(owed).isdisjoint(target.sharding.axes)
            sent += (1 if scattered else 2) * self.nbytes(value, source)
        lost = [
            a
            for have, needed in zip(source.dims, target.dims, strict=True)
            for a in have
            if needed[: len(have)] != have
        ]
        kept = [a for a in lost if a in target.sharding.axes]
        if kept:
            sent += self.nbytes(value, source)
        if lost and len(kept) < len(lost):
            sent += self.nbytes(value, target)
        if source.padded != target.padded and not lost:
            sent += self.nbytes(value, target) / 8
        return self.network.collective("all_gather", (), sent) if sent else 0.0
