"""Ports: a carry has one layout in, around and out; branches leave alike; what is hidden outside is so inside."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.cost import noted
from shardax.cost.network import Network
from shardax.partition.ports import iteration_splits
from shardax.sharding import replicated_layout
from shardax.spmd_rules.registry import Split
from tests.choices import SIZES, laid_out, layout
from tests.graphs import auto_mesh, graph, the

pytestmark = pytest.mark.quick

LINE = Network({"x": 4}, SIZES.chip)  # no axis is left over which bodies could split carries otherwise
SPECS = [(P("x"), P()), (P("x", "y"), P("y", "z")), (P(None, ("x", "z")), P("z"))]


def scan(a, w):
    """A recurrence, and a product that is added up."""
    once = a @ w

    def body(carry, _):
        return (jnp.sin(carry[0] @ w), carry[1] + once), carry[0].sum(0)

    return lax.scan(body, (a, jnp.zeros_like(a)), length=3)


def loop(a, w):
    return lax.while_loop(lambda c: c[0].sum() < 9, lambda c: (jnp.sin(c[0]), c[1] + a @ w), (a, a))


def branch(a, w):
    return lax.cond(a.sum() < 3, lambda a: (a @ w, a), lambda a: (jnp.sin(a), a * 2.0), a)


def mapped(xs, w):
    """Its iterations do not depend on each other, and add to a sum."""
    return lax.scan(lambda t, x: (t + x.sum(), jnp.sin(x @ w)), 0.0, xs)


def ports_of(f, specs, *shapes, sizes=SIZES):
    search = laid_out(graph(f, *(shapes or ((10, 16), (16, 16)))), specs, sizes=sizes)
    ((node, ports),) = search.ports.items()
    return search, node, ports


@pytest.mark.parametrize("f, specs", [(f, s) for f in (scan, loop) for s in SPECS])
def test_a_carry_is_in_one_layout_before_inside_and_after(f, specs):
    search, node, ports = ports_of(f, specs)
    assert len(ports.carries) == 2
    for port in ports.carries:
        for way in port.ways:
            assert len({*way.operands, *way.results}) == 1
        assert port.ways[0].results[0] == search.requested(port.makes[0])


@pytest.mark.parametrize("f, specs", [(f, s) for f in (scan, loop) for s in SPECS])
def test_what_a_body_keeps_is_taken_in_the_layout_that_it_has_outside(f, specs):
    """And owes nothing: in each iteration the same sum would be settled again."""
    for port in ports_of(f, specs)[2].operands:
        for way in port.ways:
            assert len({*way.operands, *way.results}) == 1 and not way.results[0].pending


@pytest.mark.parametrize("specs", SPECS)
def test_branches_take_and_leave_one_layout(specs):
    _, node, ports = ports_of(branch, specs)
    assert [way.operands for way in ports.operands[0].ways] == [(replicated_layout(()),)]  # which branch
    for port in (*ports.operands[1:], *ports.results):
        for way in port.ways:
            assert len({*way.operands, *way.results}) == 1
    assert all(len(port.reads) == len(node.bodies) for port in ports.results)


def test_what_branches_owe_may_be_settled_after_them():
    """It is as well sent there: of equals that way is the cheaper, by less than a picosecond."""
    f = lambda a, w: lax.cond(a.sum() < 3, lambda: a @ w, lambda: 2.0 * (a @ w))  # noqa: E731
    _, _, ports = ports_of(f, (P(None, "x"), P("x")))
    owing, settled = ports.results[0].ways[0], ports.results[0].ways[-1]
    assert owing.results[0].pending_axes == ("x",) and not settled.results[0].pending
    assert 0 == owing.price < settled.price < 1
    assert all(len({*way.operands, *way.results}) == 1 for way in ports.results[0].ways)


def test_the_test_of_a_loop_is_known_to_all():
    search, node, _ = ports_of(loop, SPECS[0])
    (site,) = (site for site in search.sites if list(site.reads) == node.bodies[0].outputs)
    assert [way.operands for way in site.ways] == [(replicated_layout(()),)]


def adding(a, w):
    """Adds up products until one of them is large."""
    start = jnp.zeros((10, 16))
    return lax.while_loop(lambda c: c[0].sum() < 9, lambda c: (a @ w, c[1] + a @ w), (start, start))


def test_a_carry_that_is_tested_owes_nothing():
    """The other may be kept as the parts of a sum, in the next round, once its body gives it back so."""
    search, _, ports = ports_of(adding, (P(None, "x"), P("x")), sizes=LINE)
    keys = [search.open_carries[port] for port in ports.carries]
    assert [may_owe for *_, may_owe in keys] == [False, True]
    assert [[lay.pending_axes for lay in search.left[key]] for key, *_ in keys] == [[], [("x",)]]


def test_carries_come_back_in_the_layouts_that_a_body_gave_them():
    program, specs = graph(adding, (10, 16), (16, 16)), (P(None, "x"), P("x"))
    first = laid_out(program, specs)
    again = laid_out(program, specs, returned=first.left)
    owed = [
        [{way.results[0].pending_axes for way in port.ways} for port in ports.carries]
        for search in (first, again)
        for ports in search.ports.values()
    ]
    assert owed == [[{()}, {()}], [{()}, {(), ("x",)}]] and again.left == first.left


@pytest.mark.parametrize("length", [8, 10])
def test_a_map_is_split_as_what_it_goes_over(length):
    search, node, ports = ports_of(mapped, (P("x", "y"), P()), (length, 6, 4), (4, 4))
    padded = -(-length // 4) * 4
    assert ports.split == Split(("x",), padded) and search.maps[node] == [ports.split]
    for port in (*ports.stacks, *ports.results):
        outside = [
            lay for way in port.ways for lay in (way.operands if port in ports.stacks else way.results)
        ]
        assert all(lay.dims[0] == ("x",) and lay.padded[0] == padded for lay in outside)
    inside = [lay for port in ports.stacks for way in port.ways for lay in way.results]
    assert inside and all("x" not in lay.sharding.axes for lay in inside)


def test_what_the_iterations_of_a_map_add_up_is_pending_over_them():
    _, _, ports = ports_of(mapped, (P("x", "y"), P()), (8, 6, 4), (4, 4))
    for way in ports.carries[0].ways:
        (start, given), (taken, end) = way.operands, way.results
        assert {"x"} <= {*start.pending_axes} & {*end.pending_axes} and taken == given
        assert "x" not in taken.pending_axes


def test_recurrences_are_not_split_nor_what_a_loop_inside_could_hang_on():
    def hanging(xs, w):
        return lax.map(lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1.0, x), xs)

    def recurrence(xs, w):
        return lax.scan(lambda c, x: (c * 0.5 + x, c), jnp.zeros((6, 4)), xs)

    def options(f, length):
        search = laid_out(graph(f, (length, 6, 4), (4, 4)), (P("x"), P()))
        (node,) = (node for node in search.ports if node.name == "scan")
        return iteration_splits(search, node, frozenset())

    assert options(hanging, 8) == [Split(("x",), 8)] and options(hanging, 10) == []  # garbage may go on
    assert options(recurrence, 8) == []
    assert options(mapped, 10) == [Split(("x",), 12)]


def test_a_map_over_an_axis_takes_no_rows_that_it_splits():
    f = lambda xs, ys: lax.map(lambda rows: rows[0] + rows[1], (xs, ys))  # noqa: E731
    _, _, ports = ports_of(f, (P("x"), P(None, "x")), (8, 4), (8, 4))
    rows = [lay for port in ports.stacks for way in port.ways for lay in way.results]
    assert ports.split == Split(("x",), 8) and all("x" not in lay.sharding.axes for lay in rows)


def test_hidden_axes_split_no_iterations():
    search, node, _ = ports_of(mapped, (P("x"), P()), (8, 6, 4), (4, 4))
    assert iteration_splits(search, node, frozenset({"x"})) == []
    assert iteration_splits(search, node, frozenset({"y"})) == [Split(("x",), 8)]


def kept(around):
    def f(a, w):
        with around():
            total = lax.scan(lambda t, _: (t + a @ w, None), jnp.zeros((10, 16)), length=3)[0]
        return sx.annotate(total, P("x"))

    with jax.sharding.use_abstract_mesh(auto_mesh(**LINE)):
        search = laid_out(graph(f, (10, 16), (16, 16)), (P(None, "x"), P("x")), sizes=LINE)
    return {lay.pending_axes for layouts in search.left.values() for lay in layouts}


def test_sums_are_kept_whole_where_that_is_noted():
    """They are wanted split over the axis that owes them, so that to keep their parts takes more memory."""
    assert kept(noted.whole_sums) == {("x",)} and kept(lambda: jax.named_scope("other")) == set()


def test_an_island_is_as_its_specs_say():
    """To its body a shard is whole, and nothing inside is split."""
    mesh = auto_mesh(**SIZES)
    island = lambda a, w: jax.shard_map(  # noqa: E731
        lambda a, w: jnp.sin(a) @ w, mesh=mesh, in_specs=(P("x"), P(None, "y")), out_specs=P("x", "y")
    )(a, w)
    program = graph(island, (8, 16), (16, 16))
    ports = laid_out(program, (P(), P())).ports[the("shard_map", program)]
    (a,), (w,), (made,) = ([*port.ways] for port in (*ports.operands, *ports.results))
    assert (a.operands[0], w.operands[0]) == (layout(P("x"), (8, 16)), layout(P(None, "y"), (16, 16)))
    assert (a.results[0], w.results[0]) == (replicated_layout((2, 16)), replicated_layout((16, 8)))
    assert made.results[0] == layout(P("x", "y"), (8, 16))
