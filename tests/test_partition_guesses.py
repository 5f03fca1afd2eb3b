"""Guesses: about what it costs to have a value in a layout."""

import itertools
import math

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from shardax.cost.network import network_of
from shardax.partition.guesses import Guesses
from shardax.reshard import paths
from tests.choices import SIZES, layout
from tests.graphs import graph

pytestmark = pytest.mark.quick

SHAPE = (24, 32)
SPECS = (P(), P("x"), P("y"), P(("x", "y")), P(None, "x"), P("y", "x"), P(None, ("y", "z")))
LAYOUTS = [layout(spec, SHAPE) for spec in SPECS]
OWING = [layout(spec, SHAPE, pending=("z",)) for spec in SPECS[:-1]]


def guesses():
    sizes = network_of(SIZES)
    return Guesses(sizes, lambda v, lay: math.prod(lay.local_shape(sizes)) * v.itemsize)


def value(shape=SHAPE):
    return graph(jnp.tanh, shape).inputs[0]


def price(source, target):
    return paths.price(source, target, SHAPE, 4, SIZES)


@pytest.mark.parametrize("source", LAYOUTS + OWING, ids=str)
def test_what_costs_nothing_is_guessed_so(source):
    moved = guesses().moving(value())
    for target in LAYOUTS + OWING:
        if price(source, target) == 0:
            assert moved(source, target) == 0, target


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_what_is_sent_is_not_guessed_to_be_free(source):
    moved = guesses().moving(value())
    for target in LAYOUTS:
        assert (moved(source, target) > 0) == (price(source, target) > 0), target


def test_values_that_are_alike_share_what_is_known():
    known = guesses()
    assert known.moving(value()) is known.moving(value())
    assert known.moving(value()) is not known.moving(value((24, 64)))


def test_a_literal_is_everywhere():
    (literal,) = (v for node in graph(lambda x: x * 2.0, SHAPE).nodes for v in node.inputs if v.is_literal)
    taken = guesses().taking([literal], [{layout(P(), ()): 0.0}])
    assert taken(0, layout(P(), ())) == 0


def test_the_best_source_is_taken():
    """By what it costs to make, and to bring it from there."""
    known, v = guesses(), value()
    moved = known.moving(v)
    dear, far, near = 10 * moved(LAYOUTS[1], LAYOUTS[0]), LAYOUTS[1], LAYOUTS[0]
    for costs in itertools.permutations((0.0, 1.0, dear)):
        made = dict(zip((far, near, LAYOUTS[4]), costs, strict=True))
        taken = known.taking([v], [made])
        for target in LAYOUTS:
            assert taken(0, target) == min(more + moved(source, target) for source, more in made.items())


def test_a_result_goes_to_the_nearest_request():
    known, v = guesses(), value()
    moved, requested = known.moving(v), (LAYOUTS[1], LAYOUTS[4])
    given = known.giving([v, v], [requested, LAYOUTS])
    for have in LAYOUTS + OWING:
        assert given(0, have) == min(moved(have, request) for request in requested)
    assert all(given(1, have) == 0 for have in LAYOUTS)
