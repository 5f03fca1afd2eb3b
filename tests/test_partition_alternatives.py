"""Alternatives: few ways of each node, the best where they stand, priced by what a device does."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.completion.complete import complete
from shardax.cost.network import PICO, Network
from shardax.partition import alternatives
from shardax.partition.alternatives import (
    ENOUGH,
    FEWEST,
    MORE,
    MOST,
    Alternatives,
    Offered,
    lengths,
    stored,
    varied,
    views,
)
from shardax.partition.sites import Way
from shardax.sharding import from_spec, replicated_layout
from shardax.spmd_rules.registry import RULES
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
AXES = tuple(SIZES)
CASES = pytest.mark.parametrize("name, specs", [(name, specs) for name in PROGRAMS for specs in SPECS])


def program_of(name: str):
    f, *shapes = PROGRAMS[name]
    return graph(f, *shapes)


def ways_of(search):
    return [(node, site.ways) for node, site in search.site_of.items()]


def layouts_of(ways):
    return [(way.operands, way.results) for way in ways]


def sorts_of(search, node):
    """Of a way: whether it splits nothing, takes its operands as requested, and what these and its results owe."""
    requested = [{lay.sharding for lay in search.requests(v, frozenset())} for v in node.inputs]

    def sort_of(way):
        asked = all(lay.sharding in each for lay, each in zip(way.operands, requested, strict=True))
        return not way.detail[0], asked, tuple(lay.pending for lay in (*way.operands, *way.results))

    return sort_of


def shortened(ways, most: int, sort_of):
    """The first of some ways, and of each further sort the first."""
    kept = ways[:most]
    for way in ways[most:]:
        kept += [way] if sort_of(way) not in map(sort_of, kept) else []
    return kept


@CASES
def test_ways_are_few_and_differ(name, specs):
    """Those of joined axes come before as many others."""
    search = laid_out(program_of(name), specs)
    for node, ways in ways_of(search):
        lists, sort_of = 1 + bool(search.alternatives.joined_of(node)), sorts_of(search, node)
        assert 0 < len(ways) <= lists * (MOST + len(set(map(sort_of, ways))) - 1)
        assert lists > 1 or len(ways) == len(shortened(ways, MOST, sort_of))
        assert len(set(layouts_of(ways))) == len(ways)


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
    """Of the first node, whose operands come in as they do. Of each sort the first is never left out."""
    program = program_of(name)

    def first(most: int):
        monkeypatch.setattr(alternatives, "MOST", most)
        monkeypatch.setattr(alternatives, "FEWEST", most)
        search = laid_out(program, specs)
        node, ways = ways_of(search)[0]
        return ways, bool(search.alternatives.joined_of(node)), sorts_of(search, node)

    (every, is_joined, sort_of), (some, *_) = first(1000), first(2)
    assert layouts_of(some[:2]) == layouts_of(every[:2]) and len(every) < 1000
    assert set(map(sort_of, some)) == set(map(sort_of, every))
    assert len(some) <= 8 if is_joined else layouts_of(some) == layouts_of(shortened(every, 2, sort_of))


@pytest.mark.parametrize(
    "results, most, kept",
    [
        ("aaaabca", 5, [0, 1, 2, 4, 5]),
        ("aaaabca", 6, [0, 1, 2, 3, 4, 5]),
        ("aaaaa", 4, [0, 1, 2, 3]),
        ("ab", 6, [0, 1]),
    ],
)
def test_ways_with_the_same_results_make_room_for_others(results, most, kept):
    """In a list, which stays in order: the fourth one with results a is behind the first with b and c."""
    specs = {"a": P("x"), "b": P(None, "x"), "c": P()}
    ways = [Way((), (layout(specs[name], (8, 8)),)) for name in results]
    ranked = [Offered(way, float(i), (False, False, ())) for i, way in enumerate(ways)]
    first, others = varied(ranked, most)
    assert [each.price for each in first] == kept
    assert sorted(each.price for each in (*first, *others)) == list(range(len(results)))


@pytest.mark.parametrize("most", [1, 2])
def test_what_settles_sums_and_what_lets_them_wait_are_in_every_list(most, monkeypatch):
    """Few elements of many products: these owe a sum, of which nobody knows yet where it is best settled."""
    monkeypatch.setattr(alternatives, "MOST", most)
    monkeypatch.setattr(alternatives, "FEWEST", most)
    program = graph(lambda x, w: -(x @ w), (4, 64), (64, 4))
    search = laid_out(program, (P(None, "x"), P("x")))
    nodes = [the(name, program) for name in ("dot_general", "neg")]
    product, negated = (search.site_of[node].ways for node in nodes)
    owed = [way.results[0].pending_axes for way in product]
    assert owed[:most] == [("x",)] * most and () in owed[most:]
    assert [sorts_of(search, nodes[0])(way)[1] for way in product].count(True) >= 1
    sorts = {(whole, (owed, owed)) for whole in (False, True) for owed in ((), (("x", "sum"),))}
    found = {(whole, owed) for whole, _, owed in map(sorts_of(search, nodes[1]), negated)}
    assert found == sorts and len(negated) <= most + 5


def chain(x, count: int):
    for _ in range(count):
        x = jnp.sin(x)
    return x


def test_lists_are_the_shorter_the_more_nodes_a_program_has():
    """Those of bodies among them; within bounds."""

    def longest(count: int) -> set[int]:
        return set(lengths(graph(lambda x: chain(x, count), (4,))).values())

    few, many = ENOUGH // MOST, ENOUGH // FEWEST
    assert longest(1) == longest(few) == {MOST} and longest(few + 1) == {ENOUGH // (few + 1)} != {MOST}
    assert longest(many) == {FEWEST + MORE // many} and longest(MORE + 1) == {FEWEST}
    looped = graph(lambda x: lax.scan(lambda c, _: (chain(c, 399), None), x, length=3)[0], (4,))
    found = lengths(looped)
    assert found == dict.fromkeys(looped.walk(), ENOUGH // 400) and len(found) == 400


def test_what_stands_beside_a_program_makes_no_list_of_it_shorter():
    program = graph(lambda x, y: (chain(x, 400), jnp.cos(y), jnp.arange(3)), (4,), (4,))
    found = {node.name: most for node, most in lengths(program).items()}
    assert found == {"sin": ENOUGH // 400, "cos": MOST, "iota": MOST}


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
    assert once is not twice and once[0].results == twice[0].results == (layout(P(AXES), (16, 8)),)
    assert once[0].memory == 0 and twice[0].memory == 1 * 8 * 4


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


def used_in(ways):
    return {a for way in ways for lay in (*way.operands, *way.results) for a in lay.sharding.axes}


def test_axes_of_one_device_split_nothing():
    sizes = Network({"x": 4, "one": 1, "y": 2}, SIZES.chip)
    for _, ways in ways_of(laid_out(program_of("product"), (P("x"), P()), sizes=sizes)):
        assert used_in(ways) == {"x", "y"}


def test_some_are_split_only_as_some_sharding_is(monkeypatch):
    """All where idle axes are not used, else what is registered so: nor dims that nobody splits."""
    program = graph(jnp.tanh, (16, 8))
    known = complete(program, [from_spec(P("x"), 2)], SIZES)
    made, requested = [{layout(P("x"), (16, 8)): 0.0}], [(layout(P("x"), (16, 8)),)] * 2

    def ways(idle_axes):
        each = Alternatives(program, known, idle_axes)
        return each.of(program.nodes[0], made, requested, frozenset())[0]

    free, near, narrow = map(ways, (True, "near", False))
    monkeypatch.setitem(RULES, "tanh", replace(RULES["tanh"], as_suggested=True))
    assert layouts_of(ways(True)) == layouts_of(narrow)
    assert [way.operands[0].sharding.spec for way in near] == [P("x", None), P(None, "x"), P(None, None)]
    assert [way.operands[0].sharding.spec for way in narrow] == [P("x", None), P(None, None)]
    assert used_in(free) == set(AXES) and set(layouts_of(narrow)) < set(layouts_of(free))


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


@pytest.mark.parametrize(
    "rows, sent, is_copied", [(4, [4], False), (8, [4], False), (3, [3], True), (5, [1, 3], True)]
)
def test_whole_shards_that_shift_are_not_copied_once_more(rows, sent, is_copied):
    """What a ppermute brings is the result, if it is all of it; parts are read and put together."""
    sizes, shard = Network({"x": 4}, SIZES.chip), 4 * 8 * 4
    how = {"mesh": auto_mesh(**sizes), "in_shardings": P("x"), "options": sx.Options(chip="slow")}
    plan = sx.shard_jit(lambda x: jnp.roll(x, rows, 0), **how).plan(jax.ShapeDtypeStruct((16, 8), "float32"))
    assert sorted(c.nbytes for c in plan.collectives) == [n * 8 * 4 for n in sent]
    moved = sum(sizes.collective("ppermute", ("x",), n * 8 * 4) for n in sent)
    assert plan.decisions.price == moved + is_copied * sizes.compute(0, 2 * shard)


def test_what_stands_in_memory():
    """Arguments, results, and all that two read or that is no elementwise step of one reader."""

    def f(x, w):
        y = jnp.sin(x)  # read by one product, that reads it from memory
        once = jnp.tanh(y @ w)
        return jnp.exp(once) + 1.0

    program = graph(f, (8, 8), (8, 8))
    kept = {name for v, name in names(program).items() if v in stored(program)}
    assert kept == {"a", "b", "dot_general", "add", "sin"}


def test_products_are_made_in_the_order_in_which_they_are_read():
    """A transpose that alone reads a product is no work; what else moves elements is."""

    def f(x, w):
        return (x @ w).T, jnp.flip(x @ (w + 1.0)), (x @ (w + 2.0)).astype("bfloat16")

    program = graph(f, (8, 6), (6, 4))
    found = stored(program)
    kept = [v in found for node in program.nodes if node.name == "dot_general" for v in node.outputs]
    assert kept == [False, True, True]


def test_views_are_another_value_in_memory():
    def f(x):
        return x.reshape(4, 1, 6), x.reshape(24), x[None]

    program = graph(f, (4, 6))
    found = {v.shape for v in views(program, stored(program))}
    assert found == {(4, 1, 6), (1, 4, 6)}
