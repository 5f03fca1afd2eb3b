"""Alternatives: few ways of each node, the best where they stand, priced by what a device does."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.cost.network import PICO
from shardax.partition import alternatives
from shardax.partition.alternatives import MOST, stored, views
from shardax.sharding import replicated_layout
from tests.choices import SIZES, laid_out, layout
from tests.graphs import auto_mesh, graph, names, the

pytestmark = pytest.mark.quick

PROGRAMS = {
    "product": (jnp.matmul, (10, 16), (16, 9)),
    "batched product": (jnp.matmul, (4, 10, 16), (4, 16, 8)),
    "reduction": (lambda x, y: (x * y).max(0), (12, 7), (12, 7)),
    "reshape": (lambda x, y: (x + y).reshape(6, 4, 5), (24, 5), (24, 5)),
}
SPECS = [(P("x"), P(None, "x")), (P("x", "y"), P(("y", "z"))), (P(None, ("x", "z")), P("y"))]
CASES = pytest.mark.parametrize("name, specs", [(name, specs) for name in PROGRAMS for specs in SPECS])


def program_of(name: str):
    f, *shapes = PROGRAMS[name]
    return graph(f, *shapes)


def ways_of(search):
    return [(node, site.ways) for node, site in search.site_of.items()]


@CASES
def test_ways_are_few_and_differ(name, specs):
    for _, ways in ways_of(laid_out(program_of(name), specs)):
        assert 0 < len(ways[:MOST]) and not any(way.detail[0] for way in ways[MOST:])  # unsplit
        assert len(ways) <= MOST + 1
        assert len({(way.operands, way.results) for way in ways}) == len(ways)


@CASES
def test_they_are_in_the_order_of_what_they_look_to_cost(name, specs):
    search = laid_out(program_of(name), specs)
    for node, ways in ways_of(search):
        made = [search.made_at(v, 1.0) for v in node.inputs]
        requested = [search.requests(v, frozenset()) for v in node.outputs]
        taken = search.alternatives.guesses.taking(node.inputs, made)
        given = search.alternatives.guesses.giving(node.outputs, requested)
        brought = [sum(taken(i, lay) for i, lay in enumerate(way.operands)) for way in ways]
        left = [sum(given(i, lay) for i, lay in enumerate(way.results)) for way in ways]
        costs = [(way.price + b + g, b) for way, b, g in zip(ways, brought, left, strict=True)]
        descents = sum(a > b for a, b in itertools.pairwise(costs))
        assert descents <= bool(search.alternatives.joined_of(node))  # those of joined axes come first


@CASES
def test_a_layout_of_an_operand_costs_what_it_takes_to_make_it_and_bring_it(name, specs):
    """Never more than to make it so, and nothing in the layout that is made cheapest."""
    search = laid_out(program_of(name), specs)
    for node, _ in ways_of(search):
        made = [search.made_at(v, 1.0) for v in node.inputs]
        taken = search.alternatives.guesses.taking(node.inputs, made)
        for i, layouts in enumerate(made):
            assert min(layouts.values()) == 0.0
            assert all(0.0 <= taken(i, layout) <= more for layout, more in layouts.items())


@CASES
def test_those_that_are_left_out_stand_last(name, specs, monkeypatch):
    """Of the first node, whose operands come in as they do."""
    program = program_of(name)
    _, every = ways_of(laid_out(program, specs))[0]
    monkeypatch.setattr(alternatives, "MOST", 2)
    _, some = ways_of(laid_out(program, specs))[0]
    assert [(w.operands, w.results) for w in some[:2]] == [(w.operands, w.results) for w in every[:2]]
    assert len(some) <= 3 and not any(way.detail[0] for way in some[2:])


@CASES
def test_what_is_requested_is_among_the_ways(name, specs):
    """Operands as they come in, where completion has the result split as they are."""
    search = laid_out(program_of(name), specs)
    for node, ways in ways_of(search):
        assert any(way.results == tuple(map(search.requested, node.outputs)) for way in ways)


def test_nodes_that_are_alike_share_one_list():
    def f(x, y):
        return jnp.tanh(x), jnp.tanh(y), jnp.exp(x), jnp.tanh(x.T)

    search = laid_out(graph(f, (16, 8), (16, 8)), (P("x"), P("x")))
    first, second, other, third = (w for n, w in ways_of(search) if n.name in ("tanh", "exp"))
    assert first is second and first is not other and first is not third


def test_what_is_fused_is_not_alike():
    """The first sine is stored, for two read it; the other is not."""

    def f(x, y):
        once, twice = jnp.sin(y), jnp.sin(x)
        return once + 1.0, twice.sum(), twice + 1.0

    search = laid_out(graph(f, (16, 8), (16, 8)), (P("x"), P("x")))
    once, twice = (ways for node, ways in ways_of(search) if node.name == "sin")
    assert once is not twice and once[0].memory == 0 and twice[0].memory == 4 * 8 * 4


def test_an_annotation_has_one_way():
    with jax.sharding.use_abstract_mesh(auto_mesh(**SIZES)):
        program = graph(lambda x: sx.annotate(jnp.sin(x), P("y", "x")), (16, 8))
    (way,) = laid_out(program, (P("x"),)).site_of[the("annotate", program)].ways
    assert way.operands == way.results == (layout(P("y", "x"), (16, 8)),) and way.price == 0


def test_nothing_is_split_over_hidden_axes():
    """Devices along x are at other iterations of the map."""
    program = graph(lambda xs, w: lax.map(lambda x: jnp.sin(x @ w), xs), (8, 10, 16), (16, 16))
    search = laid_out(program, (P("x", "y"), P(None, "x")))
    ways = [way for node in the("scan", program).bodies[0].nodes for way in search.site_of[node].ways]
    used = {a for way in ways for lay in (*way.operands, *way.results) for a in lay.sharding.axes}
    owed = {a for way in ways for lay in (*way.operands, *way.results) for a in lay.pending_axes}
    assert search.ports[the("scan", program)].split is not None
    assert "x" not in used | owed and "y" in used


@pytest.mark.parametrize("count, specs", [(1, P()), (2, P("y")), (4, P("x")), (16, P(("x", "y", "z")))])
def test_a_product_on_so_many_devices_takes_that_part_of_the_time(count, specs):
    """The chip is bound by its FLOPs: twice the elements of m n k, each device doing its part."""
    program = graph(jnp.matmul, (1024, 1024), (1024, 1024))
    ways = laid_out(program, (specs, P())).site_of[the("dot_general", program)].ways
    split = layout(specs, (1024, 1024)), replicated_layout((1024, 1024))
    (price,) = (way.price for way in ways if way.operands == split)
    assert price == 2 * 1024**3 / count * PICO / SIZES.chip.flops


def test_traffic_is_what_stands_in_memory_and_is_read():
    def f(x):
        part = x[:4]
        return part, lax.optimization_barrier(x), jnp.tanh(x) + 1.0

    search = laid_out(graph(f, (16, 8)), (P(),))
    whole, part, read = 16 * 8 * 4, 4 * 8 * 4, {}
    for node, ways in ways_of(search):
        way = next(w for w in ways if not any(lay.sharding.axes for lay in (*w.operands, *w.results)))
        moved = search.alternatives.moved(node, way.detail[2])
        read[node.name] = search.alternatives.traffic(moved, (*way.operands, *way.results))
    assert (read["slice"], read["optimization_barrier"]) == (2 * part, 0)
    assert read["tanh"] == pytest.approx(whole, rel=0.01) == read["add"]  # between them nothing is stored


def test_traffic_of_more_bytes_never_costs_less():
    """Also where what is small becomes large, on a chip that takes its least time on a few bytes."""
    search = laid_out(graph(jnp.sin, (8,)), (P(),), sizes=dict(SIZES))
    prices = [search.alternatives.traffic_price(2.0**n) for n in np.arange(0, 40, 0.25)]
    assert prices == sorted(prices) and prices[0] < prices[-1]
    large, small = search.network.compute(0, 2.0**38), search.network.compute(0, 2.0**12)
    assert prices[-9] == pytest.approx(search.network.compute(0, 2.0**37.75), rel=1e-3)
    assert search.alternatives.traffic_price(2.0**12) <= small and large > small


def test_what_stands_in_memory():
    """Arguments, results, and all that two read or that is no elementwise step of one reader."""

    def f(x, w):
        y = jnp.sin(x)  # read by one product, that reads it from memory
        once = jnp.tanh(y @ w)
        return jnp.exp(once) + 1.0

    program = graph(f, (8, 8), (8, 8))
    kept = {name for v, name in names(program).items() if v in stored(program)}
    assert kept == {"a", "b", "dot_general", "add", "sin"}


def test_views_are_another_value_in_memory():
    def f(x):
        return x.reshape(4, 1, 6), x.reshape(24), x[None]

    program = graph(f, (4, 6))
    found = {v.shape for v in views(program, stored(program))}
    assert found == {(4, 1, 6), (1, 4, 6)}
