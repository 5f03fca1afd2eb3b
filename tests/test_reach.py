"""Prices of reshards over few axes, which are found of all layouts at once, are those of the paths, which are
found one by one, by other steps of the same kinds.
"""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardax.cost.chips import CHIPS, NOMINAL
from shardax.cost.network import Network
from shardax.reshard import paths, reach
from shardax.sharding import Layout, Sharding
from tests.test_reshard import random_layout

SHAPES = [(3, 6, 14), (57, 28), (24, 5, 8, 3), (2, 57, 28), (1024, 96), (7,), ()]


def pairs(shape, network, seed, count):
    rng = random.Random(seed)
    return [
        [random_layout(rng, shape, network, ["sum", "sum", "max"]) for _ in range(2)] for _ in range(count)
    ]


@pytest.mark.once
@pytest.mark.parametrize("chip", ["nominal", "v5p", "H100"])
@pytest.mark.parametrize(
    "sizes", [{"x": 2, "y": 2, "z": 2}, {"x": 3, "y": 5}, {"x": 2, "y": 4, "z": 3}], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prices_are_those_of_the_paths(shape, sizes, chip):
    network = Network(sizes, CHIPS.get(chip, NOMINAL))
    for src, dst in pairs(shape, network, len(shape), 12):
        price, path = paths.price(src, dst, shape, 4, network), paths.plan(src, dst, shape, 4, network)
        assert price == path.price, f"{src} -> {dst}: {path}"


def test_pending_sums_that_stay_need_not_cross():
    """Whichever of alike axes they are over: in which order the axes stand is nothing to a sum."""
    network = Network({"w": 5, "x": 5, "y": 5}, CHIPS["v3"])
    for before, after in itertools.product(itertools.combinations("wxy", 2), repeat=2):
        src, dst = (Layout(Sharding(()), (), tuple((a, "sum") for a in axes)) for axes in (before, after))
        path = paths.plan(src, dst, (), 4, network)
        assert paths.price(src, dst, (), 4, network) == path.price
        assert [{*step.axes} for step in path.steps] == ([{*before} ^ {*after}] if before != after else [])


def test_prices_stay_what_they_are_when_there_are_more_layouts():
    """What is found before those that owe something are looked up, and asked for again when it is forgotten."""
    network, shape = Network({"x": 2, "y": 2, "z": 2}), (2, 24, 48)
    ends = [end for pair in pairs(shape, network, 0, 30) for end in pair]
    some = sorted(itertools.permutations(ends, 2), key=lambda pair: len(pair[0].pending + pair[1].pending))
    several = some[:: len(some) // 150]
    paths._frame.cache_clear(), paths._frame_of.cache_clear(), reach.skeleton.cache_clear()
    paths._price.cache_clear()
    first = [paths.price(*pair, shape, 4, network) for pair in several]
    for forget in (paths._price, reach._grid, reach._steps, reach._from, reach._from_all):
        forget.cache_clear()
    assert first == [paths.price(*pair, shape, 4, network) for pair in several]
    assert first == [paths.plan(*pair, shape, 4, network).price for pair in several]


def test_prices_of_more_bytes_than_64_bits_count():
    network, shape = Network({"x": 64, "y": 3}), (1 << 36, 3 << 18)
    for src, dst in pairs(shape, network, 3, 20):
        price = paths.price(src, dst, shape, 8, network)
        assert price == pytest.approx(paths.plan(src, dst, shape, 8, network).price, rel=1e-12) and price >= 0


def test_threads_that_price_at_once_find_the_same():
    network, shape = Network({"x": 2, "y": 3, "z": 2}), (3, 14, 57)
    several = pairs(shape, network, 5, 60)
    wanted = [paths.price(*pair, shape, 4, network) for pair in several]
    for forget in (paths._frame, paths._frame_of, paths._space, paths._price, reach.skeleton):
        forget.cache_clear()

    def found(seed: int) -> list[float]:
        order = random.Random(seed).sample(range(len(several)), len(several))
        prices = {i: paths.price(*several[i], shape, 4, network) for i in order}
        return [prices[i] for i in range(len(several))]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(found, range(4))) == [wanted] * 4
