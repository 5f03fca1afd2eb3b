"""Bounds the price of each way by messages, and proposes choices, where elimination is too dear: sequential
tree-reweighted min-sum, TRW-S (Kolmogorov 2006).

Each variable sends each neighbour what its ways would cost, as far as it knows. Variables are visited in
order and back again; each shares out the messages that came in evenly among the neighbours that come after
it. After some sweeps the messages agree. In each sweep a choice is read off: each variable takes the
cheapest way, given the ways of those before it. What a variable costs at least is counted apart: the sum is
a lower bound on the price of any choice, and grows from sweep to sweep. (What a message costs at least is
counted where that arrives. On the way back, where it came from counts it too, but sends on as much less.)
What a way costs more than the cheapest of its variable, it adds to that bound: ways with which any choice
costs too much can be left out, and the bound grows faster among the others (fixing by reduced costs).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardax.partition.tables import Problem

_ROUNDING = 1e-9  # messages are no whole numbers
FEWER = 0.9  # of the ways, or the others stay too: to leave them out takes as long as two sweeps


class _Groups:
    """Which entry of a table each way has. `order`: the ways, sorted by it; `starts`: of each entry there."""

    def __init__(self, of: np.ndarray):
        self.of, self.order = of, np.argsort(of, kind="stable")
        self.starts = np.searchsorted(of[self.order], np.arange(of.max() + 1))

    def least(self, prices: np.ndarray) -> np.ndarray:
        """Of the prices of all ways, the least for each entry."""
        return np.minimum.reduceat(prices[self.order], self.starts)


class _Edge(NamedTuple):
    """From a variable to another: the table between them, the variable's own entries first, those of each
    side's ways, and the numbers of the incoming and the outgoing message. A message has a price for each
    entry."""

    to: int
    prices: np.ndarray
    own: _Groups | None
    other: _Groups | None
    incoming: int
    outgoing: int


class Messages:
    """Those between the variables of a problem with tables over one or two.

    Attributes:
      bound: no choice costs less. It grows from sweep to sweep.
      kept: for each variable the ways that are left; `known`: what each of them costs, as far as messages
        have come.

    >>> problem = Problem()
    >>> a, b = problem.variable(2), problem.variable(2)
    >>> problem.add((b,), np.array([3.0, 0.0]))
    >>> problem.add((a, b), np.array([[0.0, 5.0], [9.0, 1.0]]))
    >>> messages = Messages(problem)
    >>> messages.sweep()[-1], round(messages.bound, 6)
    ([1, 1], 1.0)
    >>> messages.within(1.0, [1, 1])
    [array([1]), array([1])]
    """

    def __init__(self, problem: Problem):
        distinct = {id(table.prices): table.prices for table in problem.tables}
        dearest = {number: _dearest(prices) for number, prices in distinct.items()}
        # stands for infinity, since messages are subtracted: more than any choice that can be
        self._never = 2 * sum([dearest[id(table.prices)] for table in problem.tables]) or 1.0
        self.known = [np.zeros(count) for count in problem.counts]
        for table in problem.tables:
            if len(table.scope) == 1:
                self.known[table.scope[0]] += np.minimum(table.full(), self._never)
        self.pairs = [table for table in problem.tables if len(table.scope) == 2]
        self.messages = [np.zeros(n) for table in self.pairs for n in reversed(table.prices.shape)]
        self.kept = [np.arange(count) for count in problem.counts]
        self.bound = -np.inf
        self._excess = [np.zeros(0)] * len(problem.counts)
        self._there = -np.inf
        self._join()

    def _join(self) -> None:
        """`_before` and `_after`: for each variable the edges to those that stand earlier and later."""
        self._before: list[list[_Edge]] = [[] for _ in self.known]
        self._after: list[list[_Edge]] = [[] for _ in self.known]
        distinct = {id(table.prices): table.prices for table in self.pairs}  # many are one array
        finite = {number: _finite(prices, self._never) for number, prices in distinct.items()}
        some = {id(of): of for table in self.pairs for of in table.entries if of is not None}
        known = {number: _Groups(entries) for number, entries in some.items()}
        for number, table in enumerate(self.pairs):
            (a, b), (of_a, of_b) = table.scope, (known.get(id(entries)) for entries in table.entries)
            prices, there, back = finite[id(table.prices)], 2 * number, 2 * number + 1
            self._after[a].append(_Edge(b, prices, of_a, of_b, back, there))
            self._before[b].append(_Edge(a, prices.T, of_b, of_a, there, back))
        sides = zip(self._before, self._after, strict=True)
        self._share = [1.0 / max(1, len(before), len(after)) for before, after in sides]

    def sweep(self, reads: bool = True) -> list[list[int]]:
        """Visits all variables and comes back; returns the choices that were read off on each way, none
        unless it `reads`, which takes a quarter of the time."""
        there, self._there = self._visit(range(len(self.known)), self._before, self._after, reads)
        back, bound = self._visit(range(len(self.known) - 1, -1, -1), self._after, self._before, reads)
        self.bound = bound - _ROUNDING * abs(bound)
        choices = (there, back) if reads else ()
        return [[int(kept[way]) for kept, way in zip(self.kept, ways, strict=True)] for ways in choices]

    def _visit(
        self, order: range, visited: Sequence[Sequence[_Edge]], coming: Sequence[Sequence[_Edge]], reads: bool
    ) -> tuple[list[int], float]:
        """A choice, and a lower bound on the price of any."""
        messages, known, share, ways, bound = self.messages, self.known, self._share, [0] * len(order), 0.0
        for v in order:
            total = mine = known[v]
            for to, between, own, other, incoming, _ in visited[v] if reads else ():
                taken = ways[to] if other is None else other.of[ways[to]]
                prices = between[:, taken] - messages[incoming]
                total = total + (prices if own is None else prices[own.of])
            if reads:
                ways[v] = int(total.argmin())
            least = np.minimum.reduce(mine)
            bound += float(least)
            self._excess[v] = mine = mine - least
            mine = mine * share[v]
            for to, between, own, other, incoming, outgoing in coming[v]:
                of_entries = mine if own is None else own.least(mine)
                message = np.minimum.reduce((of_entries - messages[incoming])[:, None] + between)
                more = message - messages[outgoing]
                messages[outgoing] = message
                known[to] += more if other is None else more[other.of]
        return ways, bound

    def within(self, price: float, choice: Sequence[int]) -> list[np.ndarray]:
        """The ways without those with which any choice costs more than this one, whose price it is, by what
        the last sweep knew."""
        most = price - self._there + _ROUNDING * (abs(price) + abs(self._there))
        ways = []
        for kept, excess, way in zip(self.kept, self._excess, choice, strict=True):
            cheap = excess <= most
            cheap[np.searchsorted(kept, way)] = True  # whatever rounding says
            ways.append(kept[cheap])
        return ways

    def keep(self, ways: Sequence[np.ndarray]) -> None:
        """Leaves out all others, if they are many."""
        if sum(map(len, ways)) > FEWER * sum(map(len, self.kept)):
            return
        left = [np.searchsorted(kept, some) for kept, some in zip(self.kept, ways, strict=True)]
        self.known = [known[some] for known, some in zip(self.known, left, strict=True)]
        self.kept = [kept[some] for kept, some in zip(self.kept, left, strict=True)]
        for number, table in enumerate(self.pairs):
            own = [left[v] for v in table.scope]
            for message, some, entries in zip((2 * number + 1, 2 * number), own, table.entries, strict=True):
                used = some if entries is None else np.unique(entries[some])
                self.messages[message] = self.messages[message][used]
            self.pairs[number] = table.cut(own)
        self._join()


def _dearest(prices: np.ndarray) -> float:
    """Of the prices that are finite."""
    return float(np.max(prices, where=np.isfinite(prices), initial=0.0))


def _finite(prices: np.ndarray, never: float) -> np.ndarray:
    """The same without infinities, in memory along its longer dim, which is quickest to go through."""
    return np.minimum(prices, never, order="C" if prices.shape[1] >= prices.shape[0] else "F")
