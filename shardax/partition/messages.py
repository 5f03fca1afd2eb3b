"""Proposes choices by messages, where elimination is too dear: sequential tree-reweighted min-sum, TRW-S (Kolmogorov 2006).

Each variable tells each neighbour what its ways would cost, as far as it knows. Variables are visited in order and back again;
each shares out what it has been told evenly among the neighbours that come after it. After some sweeps the messages agree. In
each sweep a choice is read off: each variable takes the cheapest way, given the ways of those before it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

SWEEPS = 8
_NEVER = 1e17  # picoseconds, instead of infinity: messages are subtracted


def proposals(alone: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]) -> list[list[int]]:
    """Choices of a way for each variable, one after each sweep.

    Args:
      alone: for each variable the prices of its ways.
      pairs: for pairs of variables, in rising order, the prices of the pairs of their ways.

    >>> proposals([np.zeros(2), np.array([3.0, 0.0])], {(0, 1): np.array([[0.0, 5.0], [9.0, 1.0]])})[-1]
    [1, 1]
    """
    field = _Field(alone, pairs)
    return [field.sweep(forward) for _ in range(SWEEPS) for forward in (True, False)]


class _Field:
    """`around`: for each variable its neighbours, each with the table between the two, this variable's ways first."""

    def __init__(self, alone: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]):
        self.alone = [np.minimum(prices, _NEVER) for prices in alone]
        self.around: list[list[tuple[int, np.ndarray]]] = [[] for _ in alone]
        for (a, b), prices in pairs.items():
            prices = np.minimum(prices, _NEVER)
            self.around[a].append((b, prices))
            self.around[b].append((a, np.ascontiguousarray(prices.T)))
        self.told = {(a, b): np.zeros(len(alone[b])) for a, around in enumerate(self.around) for b, _ in around}
        self.share = [1.0 / max(1, self._most(v)) for v in range(len(alone))]

    def _most(self, v: int) -> int:
        after = sum(w > v for w, _ in self.around[v])
        return max(after, len(self.around[v]) - after)

    def sweep(self, forward: bool) -> list[int]:
        """Visits all variables; returns the ways that are cheapest by what they know."""
        count = len(self.alone)
        ways = [-1] * count
        for v in range(count) if forward else reversed(range(count)):
            known, given = self.alone[v].copy(), self.alone[v].copy()
            for w, prices in self.around[v]:
                told = self.told[w, v]
                known += told
                given += told if ways[w] < 0 else prices[:, ways[w]]
            ways[v] = int(given.argmin())
            known *= self.share[v]
            for w, prices in self.around[v]:
                if ways[w] < 0:
                    message = ((known - self.told[w, v])[:, None] + prices).min(axis=0)
                    self.told[v, w] = message - message.min()
        return ways
