"""Decisions: what was chosen, as data that can be walked, printed, and passed on to nodes that are alike."""

from inspect import cleandoc

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardax.cost.network import Network
from shardax.partition.decisions import Decision, Decisions, Reshard, local_trip_count
from shardax.sharding import replicated_layout
from shardax.spmd_rules.registry import Split
from tests.choices import SIZES, chosen, laid_out, layout
from tests.graphs import graph, the

pytestmark = pytest.mark.quick

ROWS, WHOLE = layout(P("x"), (10, 4)), replicated_layout((10, 4))


def loop(x, w):
    return lax.scan(lambda c, _: (jnp.sin(c) @ w, None), x, length=3)[0]


def decided(f, shapes, ins, outs=None, sizes=SIZES) -> Decisions:
    return chosen(laid_out(graph(f, *shapes), ins, outs, sizes))


def test_a_reshard_is_needed_where_the_layouts_differ():
    assert Reshard(ROWS, WHOLE).needed and not Reshard(ROWS, layout(P("x"), (10, 4))).needed
    padded = Reshard(ROWS, layout(P("x"), (16, 4)))
    owed = Reshard(layout(P(), (10, 4), "y"), WHOLE)
    assert padded.needed and owed.needed


def test_every_node_stands_beside_its_decision():
    program = graph(lambda x: jnp.cos(jnp.sin(x)), (10, 4))
    steps = [Decision((Reshard(ROWS, ROWS),), (ROWS,), (ROWS,)) for _ in program.nodes]
    pairs = list(Decisions(program, (ROWS,), steps, ()).pairs())
    assert [(node.name, step) for node, step in pairs] == [("sin", steps[0]), ("cos", steps[1])]
    with pytest.raises(ValueError):
        list(Decisions(program, (ROWS,), steps[:1], ()).pairs())


def test_what_is_read_otherwise_than_it_is_made_is_printed_below_its_node():
    program = graph(lambda x: jnp.sin(x), (10, 4))
    owing = layout(P(), (10, 4), "y")
    steps = [Decision((Reshard(owing, ROWS),), (ROWS,), (ROWS,))]
    assert str(Decisions(program, (owing,), steps, (Reshard(ROWS, WHOLE),))) == cleandoc("""
        arguments: P(None, None)@[10, 4] pending sum over y
        sin: P('x', None)@[12, 4] -> P('x', None)@[12, 4]
          operand 0 from P(None, None)@[10, 4] pending sum over y
        results: P(None, None)@[10, 4]
          result 0 from P('x', None)@[12, 4]""")


def test_bodies_are_printed_inside_their_node():
    """Its even rows over the one axis: both run as the carry is, and nothing is printed below them."""
    line = Network({"x": 4}, SIZES.chip)
    lines = str(decided(loop, [(12, 4), (4, 4)], (P("x"), P()), sizes=line)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("scan: "))
    inside = [line for line in lines[at + 1 :] if line.startswith("  ")]
    assert inside[0].startswith("  arguments: ") and inside[-1].startswith("  results: ")
    assert [line.split(":")[0].strip() for line in inside[1:-1]] == ["sin", "dot_general"]


def test_nothing_is_said_of_no_arguments():
    assert str(Decisions(graph(lambda: 1.0), (), [], ())) == "arguments:\nresults:"


def test_alike_nodes_run_alike_with_values_of_their_own():
    """The bodies of the other program have the same layouts, and their own graphs."""
    found, other = decided(loop, [(10, 4), (4, 4)], (P("x"), P())), graph(loop, (10, 4), (4, 4))
    copied = found.of(other)
    (inside,) = next(step for node, step in copied.pairs() if node.name == "scan").bodies
    assert str(copied) == str(found) and copied.graph is other
    assert inside.graph is the("scan", other).bodies[0]


def test_without_bodies_they_share_one_decision():
    f = lambda x: jnp.sin(x)  # noqa: E731
    found = decided(f, [(10, 4)], (P("x"),))
    assert found.of(graph(f, (10, 4))).steps[0] is found.steps[0]


def test_each_device_does_its_part_of_the_trips():
    """10 trips over 4 devices: 3 each, of which the last device does one."""
    scan = the("scan", graph(lambda x: lax.map(jnp.sin, x), (10, 4)))
    counts = [
        local_trip_count(scan, Decision((), (), (), splits), SIZES)
        for splits in ({}, {"trips": Split(("x",), 12)}, {"trips": Split(("x", "y"), 16)})
    ]
    assert counts == [10, 3, 2]


def test_a_lowering_is_told_the_shapes_of_shards():
    (node,) = graph(jnp.matmul, (10, 16), (16, 9)).nodes
    operands = layout(P("x", ("y", "z")), (10, 16)), layout(P(("y", "z")), (16, 9))
    splits = {"m": Split(("x",), 12), "k": Split(("y", "z"), 16)}
    decision = Decision((), operands, (layout(P("x"), (10, 9), ("y", "z")),), splits)
    local = decision.local(node, SIZES)
    assert (local.in_shape(0), local.in_shape(1), local.out_shape()) == ((3, 4), (4, 9), (3, 9))
    assert local.node is node and local.splits == splits
