"""The solver of the search against every choice there is, and against an ILP. Needs no devices."""

import itertools

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from shardax.partition import solve as solver
from shardax.partition import tables
from shardax.partition.messages import Messages
from shardax.partition.solve import Solution, solve
from shardax.partition.tables import Problem, Table

pytestmark = [pytest.mark.quick, pytest.mark.once]


def random_problem(seed: int, count: int, most: int, pairs: int, highest: int = 50) -> Problem:
    """Variables of up to `most` ways; few different prices, so that many choices cost the same."""
    rng = np.random.default_rng(seed)
    problem = Problem()
    for _ in range(count):
        v = problem.variable(int(rng.integers(1, most + 1)))
        problem.add((v,), rng.integers(0, highest, problem.counts[v]).astype(float))
    for _ in range(pairs):
        a, b = map(int, rng.choice(count, 2, replace=False))
        problem.add((a, b), rng.integers(0, highest, (problem.counts[a], problem.counts[b])).astype(float))
    return problem


def exhaustive(problem: Problem) -> float:
    return min(problem.price(ways) for ways in itertools.product(*map(range, problem.counts)))


def ilp(problem: Problem) -> float:
    """The price of the optimum by HiGHS: one 0-1 variable for each entry of each table, those of shared
    variables tied.
    """
    sizes = [np.prod(table.prices.shape, dtype=int) for table in problem.tables]
    starts = np.cumsum([sum(problem.counts), *sizes])
    first = np.cumsum([0, *problem.counts])
    prices = np.concatenate([np.zeros(starts[0]), *(table.prices.ravel() for table in problem.tables)])
    rows, wanted = [], []
    for v, n in enumerate(problem.counts):
        rows.append({first[v] + i: 1.0 for i in range(n)})
        wanted.append(1.0)
    for table, start in zip(problem.tables, starts, strict=False):
        entries = np.arange(table.prices.size).reshape(table.prices.shape) + start
        for dim, v in enumerate(table.scope):
            for i in range(problem.counts[v]):
                rows.append({**{int(e): 1.0 for e in entries.take(i, axis=dim).ravel()}, first[v] + i: -1.0})
                wanted.append(0.0)
    matrix = lil_array((len(rows), len(prices)))
    for r, row in enumerate(rows):
        for column, value in row.items():
            matrix[r, column] = value
    found = milp(
        prices,
        constraints=LinearConstraint(matrix.tocsr(), wanted, wanted),
        integrality=np.arange(len(prices)) < starts[0],
        bounds=Bounds(0, 1),
    )
    assert found.success, found.message
    return round(found.fun)


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_the_exhaustive_optimum(seed):
    problem = random_problem(seed, 2 + seed % 7, 4, 3 + seed % 9)
    solution = solve(problem)
    assert solution.price == problem.price(solution.ways) == exhaustive(problem)
    assert solution.gap == 0


@pytest.mark.parametrize("seed", range(4))
def test_an_ilp_finds_nothing_better(seed):
    problem = random_problem(seed, 14, 4, 24)
    solution = solve(problem)
    assert solution.gap == 0
    assert solution.price == ilp(problem)


@pytest.mark.parametrize("seed", range(10))
def test_where_tables_outgrow_the_limit_the_gap_is_stated(seed):
    problem = random_problem(seed, 20, 5, 40)
    best = solve(problem)
    assert best.gap == 0
    bounded = solve(problem, limit=8)
    assert bounded.bound <= best.price <= bounded.price == problem.price(bounded.ways)
    assert bounded.price <= 1.15 * best.price


@pytest.mark.parametrize("seed", range(10))
def test_one_more_alternative_never_raises_the_price(seed):
    problem = random_problem(seed, 6, 3, 9)
    fewer = Problem()
    cut = next(v for v, n in enumerate(problem.counts) if n > 1)
    for v, n in enumerate(problem.counts):
        fewer.variable(n - (v == cut))
    for table in problem.tables:
        places = tuple(slice(0, -1) if v == cut else slice(None) for v in table.scope)
        fewer.add(table.scope, table.prices[places])
    assert solve(problem).price <= solve(fewer).price


def test_two_problems_side_by_side_cost_what_each_costs():
    one, other = random_problem(1, 8, 4, 14), random_problem(2, 9, 4, 15)
    both = Problem([*one.counts, *other.counts], list(one.tables))
    for table in other.tables:
        both.add([v + len(one.counts) for v in table.scope], table.prices)
    assert solve(both).price == solve(one).price + solve(other).price
    assert (
        solve(both, limit=8).price == solve(one, limit=8).price + solve(other, limit=8).price
    )  # also where it is not exact


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_a_sum_taken_in_parts_is_the_same(chunk, monkeypatch):
    monkeypatch.setattr(tables, "CHUNK", chunk)
    rng = np.random.default_rng(0)
    for _ in range(100):
        counts = rng.integers(1, 7, size=rng.integers(1, 5))
        at = int(rng.integers(len(counts)))
        shapes = [[n if d == at or rng.random() < 0.7 else 1 for d, n in enumerate(counts)] for _ in range(3)]
        some = [rng.integers(0, 100, size=shape).astype(float) for shape in shapes]
        first = [np.moveaxis(table, at, 0) for table in some]
        np.testing.assert_array_equal(tables._least_sum(first), sum(some).min(axis=at))


def test_what_is_left_without_a_variable():
    """Whichever tables it is in, several over the same variables, or over some of another's."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        counts = rng.integers(1, 6, size=5)
        v = int(rng.integers(5))
        scopes = [sorted({v, *rng.choice(5, size=rng.integers(3)).tolist()}) for _ in range(6)]
        some = [Table(tuple(s), rng.integers(0, 100, size=counts[s]).astype(float)) for s in scopes]
        left, wanted = tables.without(v, some), np.zeros(counts)
        for table in some:
            wanted = wanted + table.prices.reshape(
                [n if w in table.scope else 1 for w, n in enumerate(counts)]
            )
        wanted = wanted.min(axis=v, keepdims=True)
        shape = [n if w in left.scope else 1 for w, n in enumerate(counts)]
        np.testing.assert_array_equal(np.broadcast_to(left.prices.reshape(shape), wanted.shape), wanted)


def test_what_is_kept_of_tables_is_limited(monkeypatch):
    """Equal arrays are one object as long as they are kept; what is chosen is the same without."""
    problems = [random_problem(seed, 7, 5, 14) for seed in range(10)]
    wanted = [solve(problem) for problem in problems]
    monkeypatch.setattr(tables, "_kept", tables._Kept())
    monkeypatch.setattr(tables, "KEPT", 2000)
    for problem, found in zip(problems, wanted, strict=True):
        assert solve(problem) == found
        kept = [array.nbytes for array in tables._kept.arrays.values()]
        assert 0 < sum(kept) <= 2000 + max(kept)
    array = np.arange(3.0)
    assert tables.intern(array.copy()) is tables.intern(array)


def test_tables_with_one_hash_are_told_apart(monkeypatch):
    problems = [random_problem(seed, 7, 5, 14) for seed in range(10)]
    wanted = [solve(problem) for problem in problems]
    monkeypatch.setattr(tables, "_kept", tables._Kept())
    monkeypatch.setattr(tables, "hash", lambda content: 0, raising=False)
    assert [solve(problem) for problem in problems] == wanted


def test_ties_are_broken_by_the_order_of_ways():
    problem = Problem()
    a, b = problem.variable(3), problem.variable(3)
    problem.add((a, b), np.ones((3, 3)))
    assert solve(problem).ways == [0, 0]


def test_what_cannot_be_is_never_chosen():
    problem = Problem()
    a, b = problem.variable(2), problem.variable(2)
    problem.add((a, b), np.array([[np.inf, 7.0], [np.inf, np.inf]]))
    assert solve(problem).ways == [0, 1]


@pytest.mark.parametrize("seed", range(30))
def test_what_cannot_be_is_not_proven(seed):
    """Where half of all pairs cannot be, sweeps read off such choices too: the search goes on from these."""
    problem, rng = random_problem(seed, 12, 4, 20), np.random.default_rng(seed)
    possible = [int(rng.integers(count)) for count in problem.counts]
    for table in problem.tables[len(problem.counts) :]:
        table.prices = table.prices.copy()
        taken = table.prices[tuple(possible[v] for v in table.scope)]
        table.prices[rng.random(table.prices.shape) < 0.5] = np.inf
        table.prices[tuple(possible[v] for v in table.scope)] = taken
    assert solve(problem, 1 << 30).price <= solve(problem, 4).price < np.inf


@pytest.mark.parametrize("seed", range(20))
def test_the_unit_of_prices_does_not_matter(seed):
    """Of a chip on which a product takes centuries the same is chosen, also where some pairs cannot be."""
    problem, rng = random_problem(seed, 12, 4, 20), np.random.default_rng(seed)
    for table in problem.tables[len(problem.counts) :]:
        table.prices = np.where(rng.random(table.prices.shape) < 0.2, np.inf, table.prices)
    found = solve(problem, 4)
    for table in problem.tables:
        table.prices = table.prices * 2.0**60
    assert solve(problem, 4) == Solution(found.ways, found.price * 2.0**60, found.bound * 2.0**60)


def test_messages_find_the_optimum_of_a_chain():
    rng = np.random.default_rng(0)
    problem = Problem()
    for _ in range(12):
        problem.variable(4)
    alone = {v: rng.integers(0, 50, 4).astype(float) for v in range(12)}
    for v, prices in alone.items():
        problem.add((v,), prices)
    for v in range(11):
        problem.add((v, v + 1), rng.integers(0, 50, (4, 4)).astype(float))
    messages = Messages(problem)
    assert min(map(problem.price, messages.sweep())) == solve(problem).price == pytest.approx(messages.bound)


@pytest.mark.parametrize("seed", range(20))
def test_messages_bound_the_price(seed):
    """No choice costs less, whatever the problem; that of a larger one need not be reached."""
    problem = random_problem(seed, 7, 4, 14)
    messages, optimum, before = Messages(problem), solve(problem).price, 0.0
    for _ in range(5):
        choices = messages.sweep()
        assert before < messages.bound * (1 + 1e-6) and messages.bound <= optimum
        assert optimum <= min(map(problem.price, choices))
        before = messages.bound


def with_way(problem: Problem, v: int, way: int) -> Problem:
    """The problem in which a variable runs so."""
    forced, only = Problem(list(problem.counts), list(problem.tables)), np.full(problem.counts[v], np.inf)
    only[way] = 0.0
    forced.add((v,), only)
    return forced


@pytest.mark.parametrize("seed", range(20))
def test_what_messages_rule_out_costs_more(seed):
    """Than any choice that is known, after each sweep; and the optimum is never ruled out."""
    problem = random_problem(seed, 9, 5, 18)
    messages, optimum, ruled_out = Messages(problem), solve(problem), 0
    some = solve(problem, limit=1)
    for choice in (some, optimum, optimum):
        messages.sweep()
        left = messages.within(choice.price, choice.ways)
        assert all(way in ways for way, ways in zip(optimum.ways, left, strict=True))
        for v, (known, kept) in enumerate(zip(messages.kept, left, strict=True)):
            for way in set(known.tolist()) - set(kept.tolist()):
                assert solve(with_way(problem, v, way)).price > choice.price
                ruled_out += 1
        messages.keep(left)
        assert messages.bound <= optimum.price
    assert ruled_out or sum(problem.counts) == len(problem.counts)


@pytest.mark.parametrize("seed", range(10))
def test_messages_go_on_among_the_ways_that_are_left(seed):
    """With all that they know: the bound falls behind nothing that it was, and holds."""
    short, full = repeating(random_problem(seed, 12, 5, 20), seed)
    for problem in (short, full):
        messages, optimum = Messages(problem), solve(problem, 1 << 30)
        for _ in range(10):
            messages.sweep()
        before = messages.bound
        messages.keep(messages.within(optimum.price, optimum.ways))
        assert sum(map(len, messages.kept)) < sum(problem.counts)
        for choice in messages.sweep():
            assert all(way in kept for way, kept in zip(choice, messages.kept, strict=True))
            assert problem.price(choice) >= optimum.price
        assert before * (1 - 1e-6) <= messages.bound <= optimum.price


def test_the_cheapest_of_the_ways_near_the_bound():
    """It costs no more than what is known; nothing costs less than the bound; where both are one it is the
    optimum, as it often is."""
    proven = 0
    for seed in range(20):
        problem = random_problem(seed, 9, 5, 18)
        messages, optimum = Messages(problem), solve(problem)
        best = solve(problem, limit=1).ways
        for _ in range(6):
            messages.sweep()
        for halvings in (0, 4, 12):
            found, least = solver.cheapest_within(problem, messages, best, halvings, limit=16)
            assert least <= optimum.price <= problem.price(found) <= problem.price(best)
        proven += least == problem.price(found)
    assert proven >= 15


@pytest.mark.parametrize("seed", [22, 26, 50])
def test_what_sweeps_do_not_propose_is_found_near_the_bound(seed):
    """Choices that are read off, mixed and improved miss the optimum of these."""
    problem = random_problem(seed, 40, 8, 70)
    assert solve(problem, limit=8).price == solve(problem, limit=1 << 26).price


def repeating(problem: Problem, seed: int) -> tuple[Problem, Problem]:
    """The problem with several ways of a variable for each of its, which cost as much in most tables; and the
    same, each table written out."""
    rng = np.random.default_rng(seed)
    of = [np.sort(rng.permutation(np.r_[np.arange(n), rng.integers(0, n, n)])) for n in problem.counts]
    of = [rng.permutation(states) if rng.random() < 0.5 else states for states in of]
    short, full = (Problem([len(states) for states in of]) for _ in range(2))
    for table in problem.tables:
        entries = [None if rng.random() < 0.2 else tables.intern(of[v]) for v in table.scope]
        prices = table.prices
        for dim, (v, some) in enumerate(zip(table.scope, entries, strict=True)):
            prices = prices.take(of[v], axis=dim) if some is None else prices
        short.tables.append(Table(table.scope, tables.intern(prices), tuple(entries)))
        full.add(table.scope, short.tables[-1].full())
    for v, states in enumerate(of):  # and own prices, so that they are not the same in all
        own = rng.integers(0, 9, len(states)).astype(float)
        short.add((v,), own)
        full.add((v,), own)
    return short, full


@pytest.mark.parametrize("limit", [8, 1 << 16])
@pytest.mark.parametrize("seed", range(20))
def test_ways_that_share_an_entry_change_nothing(seed, limit):
    """Neither price nor bound nor choice."""
    short, full = repeating(random_problem(seed, 9, 4, 16), seed)
    assert any(e is not None for table in short.tables for e in table.entries)
    assert solve(short, limit) == solve(full, limit)
    some, others = Messages(short), Messages(full)
    assert some.sweep() == others.sweep()
    assert some.bound == pytest.approx(others.bound)


def test_a_variable_and_what_is_decided_with_it_are_one():
    """A maker and its copies: few pairs of their ways are possible, and those are the ways of one variable."""
    rng = np.random.default_rng(0)
    problem = Problem([4, 12, 5])
    possible = np.full((4, 12), np.inf)
    possible[np.repeat(np.arange(4), 3), np.arange(12)] = 0.0
    problem.add((0, 1), possible)
    for scope in ((0,), (1,), (2,), (0, 2), (1, 2)):
        problem.add(scope, rng.integers(0, 50, [problem.counts[v] for v in scope]).astype(float))
    fewer, _ = solver._contracted(problem)
    assert fewer.counts == [12, 5]
    assert any(e is not None for table in fewer.tables for e in table.entries)
    assert solve(problem).price == exhaustive(problem)
