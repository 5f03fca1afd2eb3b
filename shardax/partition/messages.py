"""Proposes choices by messages, where elimination is too dear: sequential tree-reweighted min-sum, TRW-S
(Kolmogorov 2006).

Each variable sends each neighbour what its ways would cost, as far as it knows. Variables are visited in
order and back again; each shares out the messages that came in evenly among the neighbours that come after
it. After some sweeps the messages agree. In each sweep a choice is read off: each variable takes the cheapest
way, given the ways of those before it. What a variable or a message costs at least is counted apart, once:
the sum is a lower bound on the price of any choice, and grows from sweep to sweep.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardax.partition.tables import Table

SWEEPS = 8  # forward and back, at most; but more as long as few variables are visited
VISITS = 10_000  # of variables: what is small is solved well in the time that what is large takes anyway
ENOUGH = 1e-3  # the share by which one must raise the bound
_NEVER = 1e17  # picoseconds, instead of infinity: messages are subtracted
_ROUNDING = 1e-9  # messages are no whole numbers


def proposals(alone: Sequence[np.ndarray], pairs: Iterable[Table]) -> tuple[list[list[int]], float]:
    """Choices of a way for each variable, one after each sweep, and a lower bound on the price of any.

    Args:
      alone: for each variable the prices of its ways.
      pairs: tables over two variables each.

    >>> tables = [Table((0, 1), np.array([[0.0, 5.0], [9.0, 1.0]]))]
    >>> choices, bound = proposals([np.zeros(2), np.array([3.0, 0.0])], tables)
    >>> choices[-1], round(bound, 6)
    ([1, 1], 1.0)
    """
    field = _Field(alone, pairs)
    choices: list[list[int]] = []
    for _ in range(max(SWEEPS, VISITS // max(1, len(alone)))):
        before = field.bound
        choices += [field.sweep(True), field.sweep(False)]
        if field.bound - before <= ENOUGH * abs(field.bound):
            break
    return choices, field.bound - _ROUNDING * abs(field.bound)


class _Entries:
    """Which entry of a table each way has. `order`: the ways, sorted by it; `starts`: of each entry there."""

    def __init__(self, of: np.ndarray):
        self.of, self.order = of, np.argsort(of, kind="stable")
        self.starts = np.searchsorted(of[self.order], np.arange(of.max() + 1))

    def least(self, prices: np.ndarray) -> np.ndarray:
        """Of the prices of all ways, the least for each entry."""
        return np.minimum.reduceat(prices[self.order], self.starts)


@dataclass(frozen=True, slots=True)
class _Edge:
    """From a variable to another: the table between them, the variable's own entries first, those of each
    side's ways, and the numbers of the incoming and the outgoing message. A message has a price for each
    entry."""

    to: int
    prices: np.ndarray
    own: _Entries | None
    other: _Entries | None
    incoming: int
    outgoing: int


class _Field:
    """`before` and `after`: for each variable the edges to those that stand earlier and later. `bound`: of
    the last sweep.
    """

    def __init__(self, alone: Sequence[np.ndarray], pairs: Iterable[Table]):
        pairs = list(pairs)
        self.alone = [np.minimum(prices, _NEVER) for prices in alone]
        self.before: list[list[_Edge]] = [[] for _ in alone]
        self.after: list[list[_Edge]] = [[] for _ in alone]
        self.messages: list[np.ndarray] = []
        self.bound = -np.inf
        distinct = {id(table.prices): table.prices for table in pairs}  # many are one array
        finite = {number: _finite(prices) for number, prices in distinct.items()}
        some = {id(entries): entries for table in pairs for entries in table.entries if entries is not None}
        known = {number: _Entries(entries) for number, entries in some.items()}
        for table in pairs:
            (a, b), (of_a, of_b) = table.scope, (known.get(id(entries)) for entries in table.entries)
            prices, number = finite[id(table.prices)], len(self.messages)
            self.messages += [np.zeros(n) for n in reversed(prices.shape)]
            self.after[a].append(_Edge(b, prices, of_a, of_b, number + 1, number))
            self.before[b].append(_Edge(a, prices.T, of_b, of_a, number, number + 1))
        self.share = [1.0 / max(1, len(b), len(a)) for b, a in zip(self.before, self.after, strict=True)]

    def sweep(self, forward: bool) -> list[int]:
        """Visits all variables; returns the ways that are cheapest by what they know."""
        count, messages, bound = len(self.alone), self.messages, 0.0
        visited, coming = (self.before, self.after) if forward else (self.after, self.before)
        ways = [0] * count
        for v in range(count) if forward else reversed(range(count)):
            alone = self.alone[v]
            for edge in coming[v]:
                alone = alone + _of_ways(messages[edge.incoming], edge)
            known = total = alone
            for edge in visited[v]:
                known = known + _of_ways(messages[edge.incoming], edge)
                way = ways[edge.to]
                taken = way if edge.other is None else edge.other.of[way]
                total = total + _of_ways(edge.prices[:, taken], edge)
            ways[v] = int(total.argmin())
            least = np.minimum.reduce(known)
            bound += least
            known = (known - least) * self.share[v]
            for edge in coming[v]:
                of_entries = known if edge.own is None else edge.own.least(known)
                message = np.minimum.reduce((of_entries - messages[edge.incoming])[:, None] + edge.prices)
                least = np.minimum.reduce(message)
                bound += least
                messages[edge.outgoing] = message - least
        self.bound = float(bound)
        return ways


def _of_ways(prices: np.ndarray, edge: _Edge) -> np.ndarray:
    """Prices of the entries of an edge's own side, as those of the ways."""
    return prices if edge.own is None else prices[edge.own.of]


def _finite(prices: np.ndarray) -> np.ndarray:
    """The same without infinities, in memory along its longer dim, which is quickest to go through."""
    return np.minimum(prices, _NEVER, order="C" if prices.shape[1] >= prices.shape[0] else "F")
