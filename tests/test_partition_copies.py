"""Copies: which of a value's copies its readers share, and what each reader pays beside."""

import itertools
import math

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardax.partition import copies
from shardax.partition.copies import copies_of, is_cut
from shardax.reshard import paths
from tests.choices import SIZES, layout

pytestmark = pytest.mark.quick

SHAPE = (21, 16)  # x=4 and y=2 do not divide 21
SPECS = (P(), P("x"), P("y"), P(("x", "y")), P(None, "x"), P("y", "x"), P("x", ("y", "z")))
LAYOUTS = [layout(spec, SHAPE) for spec in SPECS]


def price(source, target):
    return paths.price(source, target, SHAPE, 4, SIZES)


def test_what_is_cut_costs_nothing():
    """And what a device holds is cut out of what it holds itself."""
    for source, target in itertools.product(LAYOUTS, LAYOUTS):
        assert is_cut(source, source)
        if is_cut(source, target):
            assert price(source, target) == 0, f"{source} to {target}"


def test_pending_sums_are_not_cut():
    whole, owing = layout(P(), SHAPE), layout(P(), SHAPE, pending=("x",))
    assert is_cut(owing, owing) and not is_cut(owing, whole) and not is_cut(whole, owing)
    assert is_cut(owing, layout(P("y"), SHAPE, pending=("x",)))


def least(source, targets):
    """The least price of reading one value in these layouts, by trying every set of copies."""
    possible = [t for t in dict.fromkeys(targets) if price(source, t) > 0]
    sets = itertools.chain.from_iterable(itertools.combinations(possible, k) for k in range(3))
    return min(
        sum(price(source, c) for c in copies)
        + sum(min([price(source, t), *(price(c, t) for c in copies if is_cut(c, t))]) for t in targets)
        for copies in sets
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_best_state_is_the_least_of_all_sets_of_copies(seed):
    """For each layout in which the value is made, and any layouts in which two to four readers read it."""
    rng = np.random.RandomState(seed)
    targets = [LAYOUTS[i] for i in rng.randint(len(LAYOUTS), size=rng.randint(2, 5))]
    made = [LAYOUTS[i] for i in rng.choice(len(LAYOUTS), 2, replace=False)]
    shared = copies_of(made, [[t] for t in targets], price)
    tables = [shared.reader_table([t])[:, 0] for t in targets]
    paid = shared.making + np.sum(tables, axis=0)
    for way, source in enumerate(made):
        own = np.isfinite(shared.maker_table(made)[way]) & (shared.maker_table(made)[way] == 0)
        assert paid[own].min() == least(source, targets)


def test_no_state_is_of_another_layout():
    """A maker's way allows just the states of the layout that it makes."""
    shared = copies_of(LAYOUTS[:3], [LAYOUTS[3:5], LAYOUTS[3:]], price)
    table = shared.maker_table(LAYOUTS[:3])
    for way, made in enumerate(LAYOUTS[:3]):
        allowed = {state for state, p in zip(shared.states, table[way], strict=True) if p == 0}
        assert allowed and {source for source, _ in allowed} == {made}
    assert len(shared.states) == np.sum(table == 0)


def test_of_too_many_copies_those_are_kept_that_two_readers_look_at_first(monkeypatch):
    """Where a value may be made in many layouts and read in many. The others cost what they did."""
    made, readers = LAYOUTS[6:], [LAYOUTS[1:6], LAYOUTS[5:0:-1], LAYOUTS[3:5]]
    every = copies_of(made, readers, price)
    monkeypatch.setattr(copies, "STATES", 1)
    monkeypatch.setattr(copies, "LEAST", 2)
    few = copies_of(made, readers, price)

    def second(copy):
        places = [[i for i, t in enumerate(targets) if is_cut(copy, t)] for targets in readers]
        return sorted(min(each, default=math.inf) for each in places)[1]

    single = [some[0] for _, some in every.states if len(some) == 1]
    kept = [some[0] for _, some in few.states if len(some) == 1]
    assert len(kept) == 2 < len(single)
    assert max(map(second, kept)) <= min(second(copy) for copy in single if copy not in kept)
    at = [every.states.index(state) for state in few.states]
    np.testing.assert_array_equal(few.making, every.making[at])
    np.testing.assert_array_equal(few.reading, every.reading[at])


def test_a_copy_that_one_reader_alone_may_use_is_its_own():
    (state,) = copies_of([LAYOUTS[1]], [[LAYOUTS[4]]], price).states
    assert state == (LAYOUTS[1], ())
