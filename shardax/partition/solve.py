"""Finds the cheapest choice for variables whose prices stand in tables (`tables.py`), by elimination.

To eliminate a variable is to add up the tables that it is in and to keep, for each combination of its
neighbours' ways, the least price; that is one more table, over the neighbours. Where no table outgrows
`LIMIT` the result is the optimum (Dechter 1999, bucket elimination). Where one would, messages
(`messages.py`) give a lower bound and propose choices, of which the best mixture is taken now and then: ways
with which any choice costs more than that one are left out, and the bound rises faster among the others. Most
programs end with no gap so. Where the bound hardly rises any more, the choice is improved: as few variables
as must be are held at their ways, others in each round, and all others are chosen anew, exactly: first among
the ways with which a choice may cost little more than the bound, then among more and more. The `gap` to the
bound is known. Among equals the first way is taken.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from shardax.partition.messages import Messages
from shardax.partition.tables import Entries, Problem, Table, added, distinct, without

LIMIT = 1 << 16  # entries of a table
NEARLY = 1e-6  # the share of the price up to which a gap is no reason to look further
SLOW = 1e-2  # the share of the gap by which a sweep must raise the bound
FUSED, READ = 6, 2  # sweeps between two times that the best mixture of choices is found; so many give some
VISITS, ENTRIES = 25_000, 600_000_000  # of variables, and of their tables, in all sweeps: a few seconds
FEW, SWEEPS = 1000, 8  # more than these are visited only so often: that takes as long as the rest of a plan
ROUNDS = 30  # of improvement
IDLE, PATIENT = 2, 6  # that many with little gain, where the gap is small, and where it is not; sweeps too
LITTLE, SMALL = 1e-4, 0.1  # shares of the price
HALVINGS = 12  # of the gap, within which fewer ways remain
WIDEST = 4  # of these halvings, within which the choice is improved: most ways are within fewer
WIDE = 10_000  # ways in all, more of which take longer than that gains
FINER = 16  # tables in these rounds are so many times smaller, as long as that finds what is near the bound


@dataclass(frozen=True)
class Solution:
    """The number of the way of each variable, their price in all, and a lower bound on the price of any
    choice.
    """

    ways: list[int]
    price: float
    bound: float

    @property
    def gap(self) -> float:
        """How much the price may be above the optimum: 0 where it is proven to be that."""
        return self.price - self.bound


def solve(problem: Problem, limit: int = LIMIT) -> Solution:
    """The cheapest choice, or one with a known gap where a table outgrows `limit`. Problems that share no
    table are solved apart.

    >>> problem = Problem()
    >>> a, b = problem.variable(2), problem.variable(2)
    >>> problem.add((a,), np.array([0.0, 3.0]))
    >>> problem.add((a, b), np.array([[5.0, 9.0], [0.0, 1.0]]))
    >>> solve(problem)
    Solution(ways=[1, 0], price=3.0, bound=3.0)
    """
    ways, bound = [0] * len(problem.counts), 0.0
    for variables, part in problem.components():
        found, least = _of_all(part, limit)
        for v, way in zip(variables, found, strict=True):
            ways[v] = way
        bound += least
    return Solution(ways, problem.price(ways), bound)


def _of_all(problem: Problem, limit: int) -> tuple[list[int], float]:
    """The ways, and a lower bound on their price."""
    fewer, parts = _contracted(problem)
    around = _Elimination(fewer, 0)
    core, rest = around.core()
    chosen, bound = dict[int, int](), around.constant
    for variables, part in core.components():
        ways, least = _solved(part, limit)
        chosen.update(zip([rest[v] for v in variables], ways, strict=True))
        bound += least
    of_fewer = around.decode(chosen)
    return [int(states[of_fewer[v]]) for v, states in parts], bound


def _solved(core: Problem, limit: int) -> tuple[list[int], float]:
    """The ways, and a lower bound on the price, of a problem in which everything is connected."""
    if not _Shapes(core.counts, core.tables, limit).run():
        return _bounded(core, limit)
    elimination = _Elimination(core, limit)
    elimination.run()
    return elimination.decode(), elimination.constant


def _bounded(core: Problem, limit: int) -> tuple[list[int], float]:
    """The same, where elimination takes too large tables, at least as long as all ways are there."""
    messages, choices = Messages(core), list[list[int]]()
    price, bound, slow = math.inf, -math.inf, 0
    count, entries = len(core.counts), sum(table.prices.size for table in core.tables)
    most = SWEEPS if count > FEW else max(SWEEPS, min(VISITS // count, ENTRIES // entries))
    fused = SWEEPS if count > FEW else FUSED  # so few sweeps do not repay leaving ways out between them
    for sweep in itertools.count(1):
        before = messages.bound
        choices += messages.sweep(reads=slow > 0 or (sweep + 1) % fused < READ)
        bound = max(bound, messages.bound)
        slow = slow + 1 if messages.bound - before <= SLOW * (price - messages.bound) < math.inf else 0
        if not slow and sweep % fused:
            continue
        kept = [np.unique(ways) for ways in zip(*choices, strict=True)]
        best, _ = _among(core, kept, min(choices, key=core.price), -math.inf, limit, IDLE)
        stuck = slow == PATIENT or sweep >= most
        halvings = HALVINGS if stuck and count <= FEW else 0  # after few sweeps the bound is too low for that
        best, least = cheapest_within(core, messages, best, halvings, limit)
        known, price, bound = price, core.price(best), max(bound, least)
        if price - bound <= NEARLY * price < math.inf:
            return best, min(bound, price)
        if stuck:
            best = _widened(core, messages, best, halvings, limit)
            left = messages.within(core.price(best), best)
            best, exact = _among(core, left, best, bound, limit // FINER)
            price, slow = core.price(best), 0
            if exact or sweep >= most or price >= known:
                return best, price if exact else min(bound, price)
        choices = [best]
        messages.keep(messages.within(price, best))
    raise AssertionError("sweeps end")


def cheapest_within(
    core: Problem, messages: Messages, best: list[int], halvings: int, limit: int
) -> tuple[list[int], float]:
    """The cheapest choice of those ways with which one may cost less than a price, which lies as far above
    the bound as `best` costs, or half as far, and so on: the highest for which they are few enough to be
    eliminated. And a lower bound: whatever has another way costs more than that price.
    """
    price = core.price(best)
    for halved in range(halvings + 1):
        most = messages.bound + (price - messages.bound) / 2**halved
        ways = messages.within(most, best)
        if _Shapes(list(map(len, ways)), core.tables, limit).run():
            found, _ = _among(core, ways, best, -math.inf, limit)
            return found, min(most, core.price(found))
    return best, messages.bound


def _widened(core: Problem, messages: Messages, best: list[int], halvings: int, limit: int) -> list[int]:
    """A choice that costs no more than `best`, improved among the ways with which one may cost little more
    than the bound, then among those with which one may cost twice as much more, and so on. The fewer these
    are, the fewer variables must be held; and the bound rises near the optimum before a choice is found that
    does not cost much more.
    """
    gap = core.price(best) - messages.bound
    for halved in range(halvings, WIDEST - 1, -1):
        ways = messages.within(messages.bound + gap / 2**halved, best)
        if sum(map(len, ways)) > WIDE:
            break
        best, _ = _among(core, ways, best, messages.bound, limit, IDLE)
    return best


def _contracted(problem: Problem) -> tuple[Problem, list[tuple[int, np.ndarray]]]:
    """The problem with fewer variables, and for each variable which of these it is part of, and its way in
    each of that one's.

    Two variables are one where few pairs of their ways are possible at all: those are its ways.
    """
    pairs: dict[int, tuple[Table, np.ndarray]] = {}
    for table in problem.tables:
        if len(table.scope) == 2 and pairs.keys().isdisjoint(table.scope):
            finite = np.isfinite(table.full())
            if not finite.all() and 0 < 2 * np.count_nonzero(finite) <= 3 * max(finite.shape):
                pairs.update(dict.fromkeys(table.scope, (table, np.argwhere(finite))))
    fewer, numbers = Problem(), dict[Table, int]()
    parts: list[tuple[int, np.ndarray]] = []
    for v, count in enumerate(problem.counts):
        if v not in pairs:
            parts.append((fewer.variable(count), np.arange(count)))
            continue
        table, possible = pairs[v]
        if table not in numbers:
            numbers[table] = fewer.variable(len(possible))
        parts.append((numbers[table], possible[:, table.scope.index(v)]))
    for table in problem.tables:
        _add_parts(fewer, table, [parts[v] for v in table.scope])
    return fewer, parts


def _add_parts(fewer: Problem, table: Table, parts: Sequence[tuple[int, np.ndarray]]) -> None:
    """Adds a table over variables of which these are parts."""
    scope, prices, entries = [number for number, _ in parts], table.prices, list[Entries]()
    if len(scope) == 2 and scope[0] == scope[1]:
        fewer.add(scope[:1], table.full()[parts[0][1], parts[1][1]])
        return
    for axis, ((_, states), known) in enumerate(zip(parts, table.entries, strict=True)):
        states = states if known is None else known[states]
        count = prices.shape[axis]
        if len(states) == count and not np.count_nonzero(states != np.arange(count)):
            entries.append(None)
            continue
        used, numbers = distinct(states)
        own = len(used) == len(states) or len(scope) == 1
        prices = prices.take(states if own else used, axis=axis)
        entries.append(None if own else numbers)
    fewer.add(scope, prices, entries)


class _Elimination:
    """The state of an elimination. `of`: the tables that each variable is in; `near`: the others that are in
    these. `buckets`: (variable, its tables) as they were when it went. `limit`: the entries of a table; where
    one would outgrow it, variables are held, if some are given."""

    def __init__(self, problem: Problem, limit: int, held: "_Held | None" = None):
        self.counts, self.limit, self.held = list(problem.counts), limit, held
        self.of: list[dict[int, Table]] = [{} for _ in problem.counts]
        self.near: list[set[int]] = [set() for _ in problem.counts]
        self.buckets: list[tuple[int, list[Table]]] = []
        self.numbers = itertools.count()
        self.constant = 0.0
        for table in problem.tables:
            self.put(table)
            for v in table.scope:
                self.near[v].update(table.scope)
        for v, near in enumerate(self.near):
            near.discard(v)

    def put(self, table: Table) -> None:
        if not table.scope:
            self.constant += float(table.prices)
        number = next(self.numbers)
        for v in table.scope:
            self.of[v][number] = table

    def core(self) -> tuple[Problem, list[int]]:
        """Eliminates the variables with at most two neighbours, which leave no larger tables; returns the
        problem of the others, and which these are."""
        todo = list(range(len(self.counts)))
        gone: set[int] = set()
        while todo:
            v = todo.pop()
            if v not in gone and len(self.near[v]) <= 2:
                gone.add(v)
                todo += self.eliminate(v)
        rest = [v for v in range(len(self.counts)) if v not in gone]
        problem, number = Problem([self.counts[v] for v in rest]), {v: i for i, v in enumerate(rest)}
        together: dict[tuple[int, ...], list[Table]] = {}
        for table in (table for v in rest for table in self.of[v].values() if table.scope[0] == v):
            together.setdefault(table.scope, []).append(table)
        for scope, tables in together.items():
            table = added(tables)
            problem.add([number[v] for v in scope], table.prices, table.entries)
        return problem, rest

    def run(self) -> bool:
        """Eliminates all variables, the one that leaves the smallest table first; whether that is
        possible.
        """
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
            if size > self.limit:
                if self.held is None:
                    return False
                heapq.heappush(queue, (size, v))
                v = self.held.next(v, self.near[v], self.of)
                around = self.hold(v, self.held.ways[v])
            else:
                around = self.eliminate(v)
            gone[v] = True
            for w in around:
                heapq.heappush(queue, (self.outgrowth(w), w))
        return True

    def outgrowth(self, v: int) -> int:
        """The size of the table that eliminating a variable leaves."""
        return math.prod([self.counts[w] for w in self.near[v]])

    def eliminate(self, v: int) -> Iterable[int]:
        """Eliminates one variable; returns its neighbours."""
        tables = self.taken(v)
        self.buckets.append((v, tables))
        if tables:
            self.put(without(v, tables))
        return self.joined(v)

    def joined(self, v: int) -> Iterable[int]:
        """Makes the neighbours of a variable that has gone neighbours of one another; returns them."""
        around = self.near[v]
        for w in around:
            self.near[w] |= around
            self.near[w] -= {v, w}
        return around

    def taken(self, v: int) -> list[Table]:
        """The tables that a variable is in, which none is in any more."""
        numbered = self.of[v]
        self.of[v] = {}
        for number, table in numbered.items():
            for w in table.scope:
                if w != v:
                    del self.of[w][number]
        return list(numbered.values())

    def hold(self, v: int, way: int) -> Iterable[int]:
        """Fixes the way of a variable; returns its neighbours."""
        around, tables = self.near[v], self.taken(v)
        alone = np.full(self.counts[v], np.inf)
        alone[way] = 0.0
        self.buckets.append((v, [Table((v,), alone)]))
        for table in tables:
            self.put(table.held(v, way))
        for w in around:
            self.near[w].discard(v)
        return around

    def decode(self, known: Mapping[int, int] = MappingProxyType({})) -> list[int]:
        """The way of each variable, last eliminated first: the cheapest, given those that are known."""
        ways = [known.get(v, 0) for v in range(len(self.counts))]
        for v, tables in reversed(self.buckets):
            total = np.zeros(self.counts[v])
            for table in tables:
                total = total + table.along(v, ways)
            ways[v] = int(total.argmin())
        return ways


def _among(
    core: Problem,
    kept: Sequence[np.ndarray],
    ways: list[int],
    bound: float,
    limit: int,
    patience: int = PATIENT,
) -> tuple[list[int], bool]:
    """A choice that costs no more than `ways`, of a few ways of each variable, these among them; and whether
    no choice of those costs less. Variables with one way are none.
    """
    open_ = [v for v, some in enumerate(kept) if len(some) > 1]
    fewer, number = Problem([len(kept[v]) for v in open_]), {v: i for i, v in enumerate(open_)}
    for table in core.tables:
        table = table.cut([kept[v] for v in table.scope])
        for v in table.scope:
            table = table if v in number else table.held(v, 0)
        if table.scope:
            fewer.add([number[v] for v in table.scope], table.prices, table.entries)
        else:
            bound -= float(table.prices)
    start = [int(np.searchsorted(kept[v], ways[v])) for v in open_]
    found, exact = _improved(fewer, start, bound, limit, patience)
    best = list(ways)
    for v, way in zip(open_, found, strict=True):
        best[v] = int(kept[v][way])
    return best, exact


class _Shapes(_Elimination):
    """An elimination of variables with so many ways, without prices: whether it is possible."""

    def __init__(self, counts: list[int], tables: Iterable[Table], limit: int):
        self.counts, self.limit, self.held = counts, limit, None
        self.near = [set() for _ in counts]
        for table in tables:
            open_ = [v for v in table.scope if counts[v] > 1]
            for v in open_:
                self.near[v].update(open_)
        for v, near in enumerate(self.near):
            near.discard(v)

    def eliminate(self, v: int) -> Iterable[int]:
        return self.joined(v)


@dataclass(eq=False)
class _Held:
    """The ways at which variables are held, and how often each was, so that others are in the next round."""

    ways: list[int]
    times: list[int]

    def next(self, v: int, neighbours: Iterable[int], of: Sequence[Mapping[int, Table]]) -> int:
        """Which variable to hold so that v's table shrinks: one seldom held, of those the one in most
        tables.
        """
        held = min((v, *sorted(neighbours)), key=lambda w: (self.times[w], -len(of[w]), w))
        self.times[held] += 1
        return held


def _improved(
    problem: Problem, ways: list[int], bound: float, limit: int, patience: int
) -> tuple[list[int], bool]:
    """A choice that costs no more, and whether none costs less: else no round found a better one.
    `patience`: how many may gain little in a row, as long as the gap is not small."""
    held = _Held(ways, [0] * len(problem.counts))
    price, idle = problem.price(ways), 0
    for _ in range(ROUNDS):
        elimination = _Elimination(problem, limit, held)
        elimination.run()
        held.ways = elimination.decode()
        if not any(held.times):
            return held.ways, True
        now = problem.price(held.ways)
        idle = idle + 1 if price - now <= LITTLE * price else 0
        price = now
        if price <= bound or idle >= (IDLE if price - bound <= SMALL * price else patience):
            break
    return held.ways, False
