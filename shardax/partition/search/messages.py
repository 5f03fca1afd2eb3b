"""Chooses ways by messages, where elimination is too dear: sequential tree-reweighted min-sum, TRW-S (Kolmogorov 2006).

Each variable tells each neighbour what its ways would cost, as far as it knows. Variables are visited in order and back again;
each shares out what it has been told evenly among the neighbours that come after it. After some sweeps the messages agree, and
the ways are read off in order: each variable takes the cheapest, given the ways of those before it.
"""

from collections.abc import Mapping

import numpy as np

SWEEPS = 24
_NEVER = 1e17  # picoseconds, instead of infinity: messages are subtracted


def choose_by_messages(alone: Mapping[int, np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]) -> dict[int, int]:
    """A way for each variable, the best that was met.

    Args:
      alone: for each variable the prices of its ways.
      pairs: for pairs of variables, in rising order, the prices of the pairs of their ways.

    >>> choose_by_messages({0: np.zeros(2), 1: np.array([3.0, 0.0])}, {(0, 1): np.array([[0.0, 5.0], [9.0, 1.0]])})
    {0: 1, 1: 1}
    """
    field = _Field(alone, pairs)
    best, least = {}, np.inf
    for _ in range(SWEEPS):
        for order in (field.order, field.order[::-1]):
            ways = field.sweep(order)
            price = field.price(ways)
            if price < least:
                best, least = ways, price
    return {v: best[v] for v in field.order}


class _Field:
    """`around`: for each variable its neighbours, each with the table between the two, this variable's ways first."""

    def __init__(self, alone: Mapping[int, np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]):
        self.order = sorted(alone)
        self.alone = {v: np.minimum(prices, _NEVER) for v, prices in alone.items()}
        self.pairs = {pair: np.minimum(prices, _NEVER) for pair, prices in pairs.items()}
        self.around: dict[int, list[tuple[int, np.ndarray]]] = {v: [] for v in self.order}
        for (a, b), prices in self.pairs.items():
            self.around[a].append((b, prices))
            self.around[b].append((a, np.ascontiguousarray(prices.T)))
        self.told = {(a, b): np.zeros(len(self.alone[b])) for a in self.order for b, _ in self.around[a]}
        self.share = {v: 1.0 / max(1, self._most(v)) for v in self.order}

    def _most(self, v: int) -> int:
        after = sum(w > v for w, _ in self.around[v])
        return max(after, len(self.around[v]) - after)

    def sweep(self, order: list[int]) -> dict[int, int]:
        """Visits all variables; returns the ways that are cheapest by what they know."""
        ways: dict[int, int] = {}
        for v in order:
            known, given = self.alone[v].copy(), self.alone[v].copy()
            for w, prices in self.around[v]:
                told = self.told[w, v]
                known += told
                given += prices[:, ways[w]] if w in ways else told
            ways[v] = int(given.argmin())
            known *= self.share[v]
            for w, prices in self.around[v]:
                if w not in ways:
                    message = ((known - self.told[w, v])[:, None] + prices).min(axis=0)
                    self.told[v, w] = message - message.min()
        return ways

    def price(self, ways: Mapping[int, int]) -> float:
        return sum(float(self.alone[v][ways[v]]) for v in self.order) + sum(
            float(prices[ways[a], ways[b]]) for (a, b), prices in self.pairs.items()
        )
