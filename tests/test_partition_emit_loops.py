"""emit for loops and branches: local trips, carries and results of the types that the decisions say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.cost.network import Network
from shardax.partition.decisions import local_trip_count
from shardax.partition.emit_loops import switch
from tests.choices import SENDING, SIZES, chosen, emitted, equations, laid_out
from tests.graphs import auto_mesh, graph, the

pytestmark = pytest.mark.quick

LINE = Network({"x": 4}, SIZES.chip)  # no axis is left for what one iteration does
SPECS = [(P("x"), P()), (P("x", "y"), P("y", "z")), (P(None, ("x", "z")), P("z"))]


def scan(a, w):
    return lax.scan(lambda c, _: (jnp.sin(c @ w), c.sum(0)), a, length=3)


def loop(a, w):
    return lax.while_loop(lambda c: c.sum() < 9, lambda c: jnp.sin(c @ w), a)


def branch(a, w):
    return lax.cond(a.sum() < 3, lambda: a @ w, lambda: jnp.sin(a))


def mapped(xs, w):
    return lax.scan(lambda t, x: (t + x.sum(), jnp.sin(x @ w)), 0.0, xs)


def ran(f, specs, *shapes, sizes=SIZES):
    """The equation of the loop on shards; its node, with its decision."""
    decisions = chosen(laid_out(graph(f, *(shapes or ((10, 16), (16, 16)))), specs, sizes=sizes))
    ((node, decision),) = ((n, d) for n, d in decisions.pairs() if n.bodies)
    local = emitted(decisions, sizes=sizes)
    return next(equations(local.jaxpr, node.name)), node, decision


def shapes_of(layouts):
    return [lay.local_shape(SIZES) for lay in layouts]


@pytest.mark.parametrize("f, specs", [(f, s) for f in (scan, loop, branch) for s in SPECS])
def test_results_have_the_shapes_of_their_layouts(f, specs):
    eqn, node, decision = ran(f, specs)
    assert [v.aval.shape for v in eqn.outvars] == shapes_of(decision.results)
    assert [v.aval.dtype for v in eqn.outvars] == [v.aval.dtype for v in node.outputs]


@pytest.mark.parametrize("specs", SPECS)
def test_branches_give_the_same_types(specs):
    eqn, _, decision = ran(branch, specs)
    given = [[v.aval.shape for v in body.jaxpr.outvars] for body in eqn.params["branches"]]
    assert given == [shapes_of(decision.results)] * 2


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length, trips", [(8, 2), (10, 3), (3, 1)])
def test_each_device_runs_its_block_of_a_map(length, trips, reverse):
    def f(xs, w):
        return lax.scan(lambda t, x: (t + x.sum(), jnp.sin(x @ w)), 0.0, xs, reverse=reverse)

    eqn, node, decision = ran(f, (P("x"), P()), (length, 6, 4), (4, 4), sizes=LINE)
    assert eqn.params["length"] == trips == local_trip_count(node, decision, LINE)
    assert eqn.params["reverse"] == reverse
    assert eqn.outvars[-1].aval.shape == decision.results[-1].local_shape(LINE) == (trips, 6, 4)


@pytest.mark.parametrize("length, selects", [(8, 0), (10, 1)])
def test_only_blocks_of_unequal_trips_are_guarded(length, selects):
    """Of 10 trips in blocks of 3 two are of nobody: what they add is not kept."""
    eqn, *_ = ran(mapped, (P("x"), P()), (length, 6, 4), (4, 4))
    body = eqn.params["jaxpr"].jaxpr
    assert len(list(equations(body, "select_n"))) == selects


def test_a_device_keeps_its_block_of_what_all_of_them_make():
    """No device has the whole stack, and none sends for it, on a chip that does not split six sines."""

    def f(a):
        return sx.annotate(lax.scan(lambda c, _: (jnp.sin(c), c), a, length=8)[1], P("x"))

    with jax.sharding.use_abstract_mesh(auto_mesh(**SIZES)):
        decisions = chosen(laid_out(graph(f, (6,)), (P(),), sizes=Network(SIZES)))
    local = emitted(decisions).jaxpr
    (eqn,) = equations(local, "scan")
    shapes = [v.aval.shape for v in eqn.outvars]
    assert (8, 6) not in shapes and (2, 6) in shapes and not list(equations(local, *SENDING))


def test_a_branch_is_taken_by_its_index_or_by_the_platform():
    node = the("cond", graph(lambda i, x: lax.switch(i, [jnp.sin, jnp.cos], x), np.int32(0), (4,)))
    x = jax.ShapeDtypeStruct((4,), "float32")
    taken = jax.make_jaxpr(lambda i, x: switch(node, [jnp.sin, jnp.cos], i, x))(np.int32(0), x)
    (cond,) = equations(taken.jaxpr, "cond")
    names = [body.jaxpr.eqns[0].primitive.name for body in cond.params["branches"]]
    assert names == ["sin", "cos"] and cond.params.get("branches_platforms") is None
