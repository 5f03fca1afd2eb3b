"""Finds the cheapest choice for variables whose prices stand in tables: a pairwise Markov random field, solved by elimination.

A *variable* has a few ways. A *table* has the price of each combination of the ways of its variables: the price of a node by
itself, or of a reshard between two. To eliminate a variable is to add up the tables that it is in and to keep, for each
combination of its neighbours' ways, the least price; that is one more table, over the neighbours. Where no table outgrows
`LIMIT` the result is the optimum (Dechter 1999, bucket elimination). Where one would, its parts are minimized apart (Dechter and
Rish 2003, mini-buckets): what comes out is a lower bound, the choice is improved variable by variable, and the `gap` between the
two is known.

Equal tables are one object (`intern`), and an elimination of the same tables is done once: so alike layers are solved once.
Prices are whole numbers, so sums are exact; among equals the first way is taken.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

LIMIT = 1 << 15  # entries of a table
ROUNDS = 20  # of improvement, where a table outgrew that


@dataclass(frozen=True)
class Solution:
    """The number of the way of each variable, their price in all, and a lower bound on the price of any choice."""

    ways: list[int]
    price: float
    bound: float

    @property
    def gap(self) -> float:
        """How much the price may be above the optimum: 0 where it is proven to be that."""
        return self.price - self.bound


@dataclass(eq=False, slots=True)
class Table:
    """Prices over some variables, which stand in rising order; a dim for each."""

    scope: tuple[int, ...]
    prices: np.ndarray


@dataclass(eq=False)
class Problem:
    """Variables, by their numbers of ways, and tables."""

    counts: list[int] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def variable(self, count: int) -> int:
        """A new variable with so many ways."""
        self.counts.append(count)
        return len(self.counts) - 1

    def add(self, scope: Sequence[int], prices: np.ndarray) -> None:
        """Adds a table over one variable or two."""
        if len(scope) == 2 and scope[0] > scope[1]:
            scope, prices = scope[::-1], prices.T
        if len(scope) == 2 and scope[0] == scope[1]:
            scope, prices = scope[:1], prices.diagonal()
        self.tables.append(Table(tuple(scope), intern(prices)))

    def price(self, ways: Sequence[int]) -> float:
        """The price of a choice."""
        return float(sum(table.prices[tuple([ways[v] for v in table.scope])] for table in self.tables))


def solve(problem: Problem, limit: int = LIMIT) -> Solution:
    """The cheapest choice, or one with a known gap where a table outgrows `limit`.

    >>> problem = Problem()
    >>> a, b = problem.variable(2), problem.variable(2)
    >>> problem.add((a,), np.array([0.0, 3.0]))
    >>> problem.add((a, b), np.array([[5.0, 9.0], [0.0, 1.0]]))
    >>> solve(problem)
    Solution(ways=[1, 0], price=3.0, bound=3.0)
    """
    elimination = _Elimination(problem, limit)
    bound = elimination.run()
    ways = elimination.decode()
    if not elimination.exact:
        ways = _improved(problem, ways)
    return Solution(ways, problem.price(ways), bound)


_interned: dict[tuple, np.ndarray] = {}


def intern(prices: np.ndarray) -> np.ndarray:
    """The one array that is equal to this."""
    if len(_interned) > 1 << 16:
        _interned.clear()
        _least.clear()
    return _interned.setdefault((prices.shape, prices.tobytes()), prices)


Parts = tuple[tuple[int, tuple[int, ...]], ...]
_least: dict[tuple[Parts, int], tuple[np.ndarray, list[np.ndarray]]] = {}


class _Elimination:
    """The state of an elimination. `of`: the tables that each variable is in. `buckets`: (variable, its tables) as they were
    when it went."""

    def __init__(self, problem: Problem, limit: int):
        self.counts, self.limit, self.exact = problem.counts, limit, True
        self.of: list[dict[int, Table]] = [{} for _ in problem.counts]
        self.buckets: list[tuple[int, list[Table]]] = []
        self.numbers = itertools.count()
        self.constant = 0.0
        for table in problem.tables:
            self.put(table)

    def put(self, table: Table) -> None:
        if not table.scope:
            self.constant += float(table.prices)
        number = next(self.numbers)
        for v in table.scope:
            self.of[v][number] = table

    def run(self) -> float:
        """Eliminates all variables, the one that leaves the smallest table first; returns the price of the rest."""
        queue = [(self.outgrowth(v), v) for v in range(len(self.counts))]
        heapq.heapify(queue)
        gone = [False] * len(self.counts)
        while queue:
            size, v = heapq.heappop(queue)
            if gone[v]:
                continue
            if (now := self.outgrowth(v)) != size:
                heapq.heappush(queue, (now, v))
                continue
            gone[v] = True
            for w in self.eliminate(v):
                heapq.heappush(queue, (self.outgrowth(w), w))
        return self.constant

    def outgrowth(self, v: int) -> int:
        """The size of the table that eliminating a variable leaves."""
        return math.prod([self.counts[w] for w in self.neighbours(v)])

    def neighbours(self, v: int) -> set[int]:
        found: set[int] = set()
        for table in self.of[v].values():
            found.update(table.scope)
        found.discard(v)
        return found

    def eliminate(self, v: int) -> Iterable[int]:
        """Eliminates one variable; returns its neighbours."""
        numbered, around = self.of[v], self.neighbours(v)
        tables = list(numbered.values())
        for number, table in numbered.items():
            for w in table.scope:
                if w != v:
                    del self.of[w][number]
        self.of[v] = {}
        self.buckets.append((v, tables))
        for group in self.groups(tables, v):
            self.put(_without(v, group, self.counts[v]))
        return around

    def groups(self, tables: list[Table], v: int) -> list[list[Table]]:
        """The tables that are minimized together: all, if what they leave is not too large."""
        groups: list[tuple[set[int], list[Table]]] = []
        for table in sorted(tables, key=lambda table: -len(table.scope)):
            for scope, group in groups:
                if math.prod([self.counts[w] for w in scope.union(table.scope) if w != v]) <= self.limit:
                    scope.update(table.scope)
                    group.append(table)
                    break
            else:
                groups.append((set(table.scope), [table]))
        self.exact &= len(groups) < 2
        return [group for _, group in groups]

    def decode(self) -> list[int]:
        """The way of each variable, last eliminated first: the cheapest, given those that are known."""
        ways = [0] * len(self.counts)
        for v, tables in reversed(self.buckets):
            total = np.zeros(self.counts[v])
            for table in tables:
                total = total + table.prices[tuple([slice(None) if w == v else ways[w] for w in table.scope])]
            ways[v] = int(total.argmin())
        return ways


def _without(v: int, tables: Sequence[Table], count: int) -> Table:
    """The least prices of the sum of tables, whatever the way of one variable is."""
    scope = sorted({w for table in tables for w in table.scope})
    place = {w: i for i, w in enumerate(scope)}
    parts = tuple([(id(table.prices), tuple([place[w] for w in table.scope])) for table in tables])
    at = place[v]
    known = _least.get((parts, at))
    if known is None:
        total = np.zeros(())
        for table in tables:
            shape = [1] * len(scope)
            for w, n in zip(table.scope, table.prices.shape, strict=True):
                shape[place[w]] = n
            total = total + table.prices.reshape(shape)
        kept = [table.prices for table in tables]  # whose identities the key holds
        known = _least[parts, at] = intern(total.min(axis=at)), kept
    return Table((*scope[:at], *scope[at + 1 :]), known[0])


def _improved(problem: Problem, ways: list[int]) -> list[int]:
    """A choice in which no variable alone can do better (Besag 1986, iterated conditional modes)."""
    of: list[list[Table]] = [[] for _ in problem.counts]
    for table in problem.tables:
        for v in table.scope:
            of[v].append(table)
    for _ in range(ROUNDS):
        before = list(ways)
        for v, tables in enumerate(of):
            parts = [t.prices[tuple([slice(None) if w == v else ways[w] for w in t.scope])] for t in tables]
            total = np.sum(parts, axis=0) if parts else np.zeros(problem.counts[v])
            if total.min() < total[ways[v]]:
                ways[v] = int(total.argmin())
        if ways == before:
            break
    return ways
