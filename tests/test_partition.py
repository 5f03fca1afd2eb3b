"""Replay, emission of loops, and what runs replicated: from decisions to a program, without any device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.graph import annotations
from shardax.partition.replicated import replicated
from shardax.sharding import replicated_layout
from shardax.spmd_rules.registry import RULES
from tests.test_traffic import ROWS

MESH = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
LINE = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))  # no axis is left for what one iteration does
SLOW = sx.Options(chip="slow")


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def planned(f, *args, ins, outs=None, mesh=MESH, options=SLOW):
    return sx.shard_jit(f, mesh=mesh, in_shardings=ins, out_shardings=outs, options=options).plan(*args)


def equations(jaxpr, name):
    """All of one primitive, in bodies too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield eqn
        for param in eqn.params.values():
            for body in param if isinstance(param, tuple) else (param,):
                inner = getattr(body, "jaxpr", body)
                yield from equations(inner, name) if hasattr(inner, "eqns") else ()


# Replay


class Followed:
    """Goes through decisions, and checks that every operand is read from a layout in which the value is there
    by then.
    """

    def __init__(self):
        self.layouts, self.makers, self.checked = {}, {}, 0

    def graph(self, decisions):
        for value, layout in zip(decisions.graph.inputs, decisions.inputs, strict=True):
            self.layouts[value] = {layout}
        for node, decision in decisions.pairs():
            assert tuple(reshard.target for reshard in decision.reshards) == decision.operands
            for value, reshard in zip(node.inputs, decision.reshards, strict=True):
                self.reshard(value, reshard)
            for body in decision.bodies:
                self.graph(body)
            for value, layout in zip(node.outputs, decision.results, strict=True):
                self.layouts[value] = {layout}
                self.makers[value] = node
        for value, reshard in zip(decisions.graph.outputs, decisions.outputs, strict=True):
            self.reshard(value, reshard)

    def reshard(self, value, reshard):
        if not value.is_literal:
            assert reshard.source in self.known(value), (value, reshard)
            self.layouts[value].add(reshard.target)
            self.checked += 1

    def known(self, value):
        """Also what was annotated to be it, and what every device can make whole."""
        found, node = set(self.layouts[value]), self.makers.get(value)
        if node is not None and annotations.of_node(node) and not node.inputs[0].is_literal:
            found |= self.known(node.inputs[0])
        if node is not None and (
            annotations.of_node(node) or node.name in RULES and RULES[node.name].made_anywhere
        ):
            found.add(replicated_layout(value.shape))
        return found


@pytest.mark.promotes_ranks
@pytest.mark.once
@pytest.mark.parametrize("name", ROWS)
def test_operands_are_read_from_what_is_there(name):
    f, args, ins, outs, _ = ROWS[name]
    followed = Followed()
    followed.graph(planned(f, *args, ins=ins, outs=outs, options=sx.Options()).decisions)
    assert followed.checked


def test_a_copy_is_made_once():
    """Two products want x whole: the second reads the copy of the first."""
    f = lambda x, a, b: (x @ a, x @ b)  # noqa: E731
    ins = (P(None, "x"), P(None, "y"), P(None, "y"))
    decisions = planned(
        f, floats(8, 64), floats(64, 4096), floats(64, 4096), ins=ins, options=sx.Options()
    ).decisions
    first, second = (step.reshards[0] for node, step in decisions.pairs() if node.name == "dot_general")
    assert first.source != first.target and second.source == second.target == first.target


# Loops


@pytest.mark.parametrize("reverse", [False, True])
def test_trips_of_a_map_are_split(reverse):
    """10 trips on 4 devices: 3 each."""

    def f(xs, w):
        return lax.scan(lambda total, x: (total + x.sum(), jnp.tanh(x) @ w), 0.0, xs, reverse=reverse)

    plan = planned(f, floats(10, 6, 4), floats(4, 4), ins=(P("x"), P()), mesh=LINE)
    (scan,) = equations(plan.local_jaxpr.jaxpr, "scan")
    assert (scan.params["length"], scan.params["reverse"]) == (3, reverse)
    assert [v.aval.shape for v in scan.outvars][-1] == (3, 6, 4)


def test_a_recurrence_is_not_split():
    f = lambda xs: lax.scan(lambda c, x: (c * 0.5 + x, c), jnp.zeros(8), xs)  # noqa: E731
    plan = planned(f, floats(10, 8), ins=(P(None, "x"),), mesh=LINE)
    (scan,) = equations(plan.local_jaxpr.jaxpr, "scan")
    assert scan.params["length"] == 10 and scan.outvars[0].aval.shape == (2,)


def test_each_device_keeps_its_block_of_a_stack():
    """Each trip's result is whole on every device, and the stack rests split: no device holds all of it.

    A slow chip would split six sines, and gather them in each trip.
    """
    f = lambda x: lax.scan(lambda c, _: (jnp.sin(c), c), x, length=8)[1]  # noqa: E731
    plan = planned(f, floats(6), ins=(P(),), outs=P("x"), options=sx.Options())
    (scan,) = equations(plan.local_jaxpr.jaxpr, "scan")
    assert (8, 6) not in [v.aval.shape for v in scan.outvars] and (2, 6) in [
        v.aval.shape for v in scan.outvars
    ]
    assert not plan.collectives


def test_a_while_and_its_test_read_the_same_carry():
    f = lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2.0), (0, x))[1]  # noqa: E731
    plan = planned(f, floats(8, 4), ins=(P("x", "y"),))
    (loop,) = [*equations(plan.local_jaxpr.jaxpr, "while"), *equations(plan.local_jaxpr.jaxpr, "scan")]
    assert (2, 2) in [v.aval.shape for v in loop.outvars] and not plan.collectives


def test_branches_leave_one_layout():
    """One branch owes a sum, the other does not: both settle it, or none."""

    def f(p, x, w):
        return lax.cond(p, lambda: x @ w, lambda: jnp.zeros((8, 16)))

    plan = planned(
        f, jax.ShapeDtypeStruct((), "bool"), floats(8, 64), floats(64, 16), ins=(P(), P(None, "x"), P("x"))
    )
    (cond,) = equations(plan.local_jaxpr.jaxpr, "cond")
    shapes = [tuple(v.aval.shape for v in branch.jaxpr.outvars) for branch in cond.params["branches"]]
    assert (
        shapes[0] == shapes[1]
        and sum(c.kind in ("all_reduce", "reduce_scatter") for c in plan.collectives) == 1
    )


# What runs replicated


def nodes(plan):
    return [(found.node.name, found.axes) for found in replicated(plan.decisions, dict(MESH.shape))]


def test_one_matrix_is_decomposed_by_all():
    """What is done to it before is split over both axes, and gathered over both."""
    (found,) = replicated(
        planned(jnp.linalg.cholesky, floats(64, 64), ins=(P("x"),)).decisions, dict(MESH.shape)
    )
    assert (found.node.name, found.axes, found.nbytes, found.small) == (
        "cholesky",
        ("x", "y"),
        64 * 8 * 4 * 7,
        False,
    )


def test_a_batch_of_them_is_not():
    assert nodes(planned(jnp.linalg.cholesky, floats(8, 64, 64), ins=(P("x"),))) == []


def test_what_the_readers_want_whole_is_no_replication():
    """The result is wanted whole by who asked: to gather before or after sends the same."""
    assert nodes(planned(jnp.sin, floats(64, 64), ins=(P("x"),), outs=P())) == []


def test_refused_in_strict_mode():
    primitive = jax.extend.core.Primitive("test_partition_unknown")
    primitive.def_abstract_eval(lambda x: x)
    with pytest.raises(ValueError, match="test_partition_unknown"):
        planned(primitive.bind, floats(64, 64), ins=(P("x"),), options=sx.Options(strict=True))
    with pytest.warns(UserWarning, match="test_partition_unknown"):
        planned(primitive.bind, floats(64, 64), ins=(P("x"),))
    assert np.isfinite(planned(jnp.sin, floats(4), ins=(P("x"),)).decisions.price)


def test_a_sum_rides_the_carry_however_many_axes_are_idle():
    """The way that takes its operands as they come is in every list: there are thirty others of the same price, over
    other axes."""

    def adding(a, w):
        start = jnp.zeros((4, 8, 16, 32))
        return lax.scan(lambda total, _: (total + jnp.sin(a) @ w, None), start, length=3)[0]

    mesh = AbstractMesh((4, 2, 2, 2), ("x", "y", "z", "u"), axis_types=(AxisType.Auto,) * 4)
    how = {"ins": (P(None, None, None, "x"), P("x")), "mesh": mesh, "options": sx.Options(chip="v5e")}
    (settled,) = planned(adding, floats(4, 8, 16, 64), floats(64, 32), **how).collectives
    assert (settled.kind, settled.axes, settled.trips) == ("all_reduce", ("x",), 1)


def test_operands_of_a_barrier_have_nothing_to_do_with_each_other():
    """As of the weights of a layer that is computed again: each is chosen as if it stood in a barrier alone."""
    shapes = [(8, 16), (16, 24), (4, 4, 32), (64,), (8, 8, 8), (3, 40), (16, 16)]
    ins = [
        P("x"),
        P(None, "y"),
        P("y", None, "x"),
        P(("x", "y")),
        P(None, "x", "y"),
        P(None, "y"),
        P("y", "x"),
    ]
    outs = [P("y"), P("x"), P("x"), P("y"), P("x"), P(), P("x", "y")]

    def barrier(*xs):
        return [2 * x for x in lax.optimization_barrier(tuple(jnp.sin(x) for x in xs))]

    args, how = [floats(*shape) for shape in shapes], {"options": sx.Options()}
    together = planned(barrier, *args, ins=tuple(ins), outs=outs, **how)
    each = [planned(barrier, x, ins=(i,), outs=[o], **how) for x, i, o in zip(args, ins, outs, strict=True)]
    assert together.comm_bytes == sum(plan.comm_bytes for plan in each) > 0
    assert together.decisions.price == sum(plan.decisions.price for plan in each)
    (eqn,) = equations(together.local_jaxpr, "optimization_barrier")
    assert len(eqn.outvars) == len(shapes)
