"""Sources: the copies of a value together cost the least that any order and any choice of sources does."""

import itertools
import random

import pytest

from shardax.partition.sources import sources_of
from shardax.sharding import Layout, Sharding

pytestmark = pytest.mark.quick

LAYOUTS = [
    Layout(Sharding((axes, ())), (8, 8)) for k in range(4) for axes in itertools.permutations("xyz", k)
]


def least(have, read, price):
    """Of all orders in which the copies may be made, each from the nearest that is there."""

    def total(order):
        there, sum_ = list(have), 0
        for target in order:
            sum_ += min(price[source, target] for source in there)
            there.append(target)
        return sum_

    return min(map(total, itertools.permutations(read)))


@pytest.mark.parametrize("seed", range(200))
def test_the_tree_is_the_cheapest(seed):
    rng = random.Random(seed)
    some = rng.sample(LAYOUTS, 7)
    price = {pair: rng.randrange(rng.choice([3, 100])) for pair in itertools.permutations(some, 2)}
    have, read = some[: rng.choice([1, 2])], some[2 : 2 + rng.randrange(1, 6)]
    found = sources_of(have, read, lambda a, b: price[a, b])
    assert set(found) == set(read) and all(source in (*have, *read) for source in found.values())
    for target in read:  # each comes from what is there
        seen = set()
        while target not in have:
            assert target not in seen
            seen.add(target)
            target = found[target]
    assert sum(price[source, target] for target, source in found.items()) == least(have, read, price)


def test_what_is_there_is_not_made():
    assert sources_of(LAYOUTS[:2], [LAYOUTS[1], LAYOUTS[0]], lambda a, b: 1) == {}
