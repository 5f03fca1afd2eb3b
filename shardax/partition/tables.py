"""Tables of prices, and their sums: a pairwise Markov random field, whose optimum `solve.py` finds.

A *variable* has a few ways. A *table* has the price of each combination of the ways of its variables: the
price of a node by itself, or of a reshard between two. Where several ways have the same prices, as the ways
of a maker have together with whichever copies, the table has one *entry* for them, and says for each way
which it is: nine tenths of the tables of a train step over three axes are such repetitions.

Equal tables are one object (`intern`), and the same sum of tables is taken once: so alike layers are solved
once. Prices are whole numbers, so sums are exact.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardax.graph.connected import connected

CHUNK = 1 << 16  # entries of a sum of tables that is taken at once
KEPT = 1 << 30  # bytes of the arrays that are kept to find equal ones

Entries = np.ndarray | None
"""The entry of a table's dim that each way of its variable has; None, where each has its own."""


@dataclass(eq=False, slots=True)
class Table:
    """Prices over some variables, which stand in rising order; a dim for each. `entries`: of each dim; all
    are in use.

    >>> table = Table((0, 1), np.array([[5.0, 9.0]]), (np.array([0, 0, 0]), None))
    >>> float(table.of([2, 1])), table.full().shape
    (9.0, (3, 2))
    """

    scope: tuple[int, ...]
    prices: np.ndarray
    entries: tuple[Entries, ...] = ()

    def __post_init__(self):
        self.entries = self.entries or (None,) * len(self.scope)

    def of(self, ways: Sequence[int]) -> float:
        """The price if all variables run so."""
        each = zip(self.scope, self.entries, strict=True)
        return self.prices[tuple([ways[v] if entries is None else entries[ways[v]] for v, entries in each])]

    def along(self, v: int, ways: Sequence[int]) -> np.ndarray:
        """The price of each way of one variable, if the others run so."""
        places, mine = list[Any](), None
        for w, entries in zip(self.scope, self.entries, strict=True):
            if w == v:
                places.append(slice(None))
                mine = entries
            else:
                places.append(ways[w] if entries is None else entries[ways[w]])
        prices = self.prices[tuple(places)]
        return prices if mine is None else prices[mine]

    def held(self, v: int, way: int) -> "Table":
        """The table over the others, if one variable runs so."""
        at = self.scope.index(v)
        entries = self.entries[at]
        prices = self.prices.take(way if entries is None else entries[way], axis=at)
        return Table(
            (*self.scope[:at], *self.scope[at + 1 :]),
            intern(prices),
            (*self.entries[:at], *self.entries[at + 1 :]),
        )

    def cut(self, ways: Sequence[np.ndarray]) -> "Table":
        """The table of some ways of each variable, with the entries that these have."""
        prices, entries = self.prices, list(self.entries)
        for dim, (some, own) in enumerate(zip(ways, self.entries, strict=True)):
            if own is None:
                used = some
            elif len(some) < len(own):
                used, entries[dim] = _used(own[some])
            else:
                continue
            prices = prices if len(used) == prices.shape[dim] else prices.take(used, axis=dim)
        return Table(self.scope, prices, tuple(entries))

    def full(self) -> np.ndarray:
        """The prices of all ways."""
        return self.only([None] * len(self.scope))

    def only(self, ways: Sequence[np.ndarray | None]) -> np.ndarray:
        """The prices of some ways of each variable, None for all."""
        prices = self.prices
        for dim, (some, entries) in enumerate(zip(ways, self.entries, strict=True)):
            taken = some if entries is None else entries if some is None else entries[some]
            prices = prices if taken is None else prices.take(taken, axis=dim)
        return prices


@dataclass(eq=False)
class Problem:
    """Variables, by their numbers of ways, and tables."""

    counts: list[int] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def variable(self, count: int) -> int:
        """A new variable with so many ways."""
        self.counts.append(count)
        return len(self.counts) - 1

    def add(self, scope: Sequence[int], prices: np.ndarray, entries: Sequence[Entries] = ()) -> None:
        """Adds a table over one variable or two."""
        if len(scope) == 2 and scope[0] > scope[1]:
            scope, prices, entries = scope[::-1], prices.T, entries[::-1]
        if len(scope) == 2 and scope[0] == scope[1]:
            scope, prices, entries = scope[:1], Table((0, 1), prices, tuple(entries)).full().diagonal(), ()
        self.tables.append(Table(tuple(scope), intern(prices), tuple(entries)))

    def components(self) -> list[tuple[list[int], "Problem"]]:
        """The problems that have nothing to do with one another, each with its variables: what stands side by
        side is chosen as if it were alone."""
        root = connected(len(self.counts), (table.scope for table in self.tables))
        parts = {v: (list[int](), Problem()) for v in dict.fromkeys(root)}
        number = []
        for v, count in enumerate(self.counts):
            variables, problem = parts[root[v]]
            variables.append(v)
            number.append(problem.variable(count))
        for table in self.tables:
            problem = parts[root[table.scope[0]]][1]
            scope = tuple([number[v] for v in table.scope])
            problem.tables.append(Table(scope, table.prices, table.entries))
        return list(parts.values())

    def price(self, ways: Sequence[int]) -> float:
        """The price of a choice."""
        return float(sum(table.of(ways) for table in self.tables))


class _Kept:
    """What is known of tables, until their arrays take `KEPT` bytes. `arrays`: each by a hash of what is in
    it; `sums`: what was left without a variable, by the tables and the places of their variables, with the
    tables themselves, whose identities the keys hold."""

    def __init__(self):
        self.arrays: dict[Hashable, np.ndarray] = {}
        self.sums: dict[Hashable, tuple[Table, Sequence[Table]]] = {}
        self.nbytes = 0

    def add(self, key: Hashable, array: np.ndarray) -> None:
        if self.nbytes > KEPT:
            self.arrays, self.sums, self.nbytes = {}, {}, 0
        self.arrays[key] = array
        self.nbytes += array.nbytes


_kept = _Kept()


def intern(prices: np.ndarray) -> np.ndarray:
    """The one array that is equal to this."""
    content = prices.tobytes()
    key = prices.shape, prices.dtype.char, hash(content)
    known = _kept.arrays.get(key)
    if known is None or known.tobytes() != content:
        _kept.add(key, prices)
        return prices
    return known


def distinct(entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The entries that are in use, and the number of each way's among these.

    >>> distinct(np.array([4, 4, 7]))
    (array([4, 7]), array([0, 0, 1]))
    """
    used, numbers = _used(entries)
    return used, intern(numbers)


def _used(entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same; the numbers are an array of their own."""
    used = np.zeros(entries.max() + 1, bool)
    used[entries] = True
    return np.flatnonzero(used), (np.cumsum(used) - 1)[entries]


def added(tables: Sequence[Table]) -> Table:
    """The sum of tables over the same variables."""
    if len(tables) == 1:
        return tables[0]
    shared = _shared(tables)
    prices = sum([_with_entries(table, shared) for table in tables[1:]], _with_entries(tables[0], shared))
    return Table(tables[0].scope, intern(prices), tuple([shared[w] for w in tables[0].scope]))


def without(v: int, tables: Sequence[Table]) -> Table:
    """The least prices of the sum of tables, whatever the way of one variable is."""
    scope = sorted({w for table in tables for w in table.scope})
    place = {w: i for i, w in enumerate(scope)}
    parts = tuple(
        [
            (id(table.prices), tuple([place[w] for w in table.scope]), tuple(map(id, table.entries)))
            for table in tables
        ]
    )
    key = parts, place[v]
    found = _kept.sums.get(key)
    if found is None:
        found = _kept.sums[key] = _without(v, tables, scope), tables
    return Table(tuple([w for w in scope if w != v]), found[0].prices, found[0].entries)


def _without(v: int, tables: Sequence[Table], scope: Sequence[int]) -> Table:
    own, others = [t for t in tables if t.scope == (v,)], [t for t in tables if t.scope != (v,)]
    shared = _shared(others)
    if own and (entries := shared.get(v)) is not None:  # of all ways with one entry the cheapest
        least = np.full(entries.max() + 1, np.inf)
        np.minimum.at(least, entries, sum(table.full() for table in own))
        own = [Table((v,), least, (entries,))]
    place = {w: i for i, w in enumerate(scope)}
    arrays = [(table.scope, _with_entries(table, shared)) for table in (*own, *others)]
    prices = intern(_least_sum(_folded(arrays, place, place[v])))
    return Table(tuple([w for w in scope if w != v]), prices, tuple([shared[w] for w in scope if w != v]))


def _shared(tables: Iterable[Table]) -> dict[int, Entries]:
    """The entries of each variable, where they are the same in all tables that it is in."""
    shared: dict[int, Entries] = {}
    for table in tables:
        for w, entries in zip(table.scope, table.entries, strict=True):
            shared[w] = entries if shared.get(w, entries) is entries else None
    return shared


def _with_entries(table: Table, shared: dict[int, Entries]) -> np.ndarray:
    """A table's prices, of all ways where it has other entries than the others."""
    prices = table.prices
    for dim, (w, entries) in enumerate(zip(table.scope, table.entries, strict=True)):
        if entries is not None and shared.get(w) is not entries:
            prices = prices.take(entries, axis=dim)
    return prices


def _folded(
    tables: Sequence[tuple[tuple[int, ...], np.ndarray]], place: dict[int, int], at: int
) -> list[np.ndarray]:
    """Tables with the same sum, each variable at its place but the one that is `at` first: what is over some
    of another's variables is added to that."""
    sums: dict[frozenset[int], np.ndarray] = {}
    for scope, prices in sorted(tables, key=lambda table: -len(table[0])):
        shape, over = [1] * len(place), frozenset(scope)
        for w, n in zip(scope, prices.shape, strict=True):
            shape[place[w]] = n
        prices = np.moveaxis(prices.reshape(shape), at, 0)
        into = next((larger for larger in sums if over <= larger), None)
        if into is None:
            sums[over] = prices
        else:
            sums[into] = sums[into] + prices
    return list(sums.values())


def _least_sum(tables: Sequence[np.ndarray]) -> np.ndarray:
    """The least of the sum of tables along their first dim; a large one is added up in parts that stay in the
    processor's cache.
    """
    _, *shape = full = np.broadcast_shapes(*(table.shape for table in tables))
    dim = next((dim for dim, n in enumerate(shape, 1) if n > 1), 0)
    if math.prod(full) <= CHUNK or not dim:
        return np.minimum.reduce(sum(tables[1:], start=tables[0]))
    rows = max(1, CHUNK * full[dim] // math.prod(full))
    parts = []
    for first in range(0, full[dim], rows):
        cut = (*[slice(None)] * dim, slice(first, first + rows))
        parts.append(_least_sum([table if table.shape[dim] == 1 else table[cut] for table in tables]))
    return np.concatenate(parts, axis=dim - 1)
