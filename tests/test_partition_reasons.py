"""Why emission sends: every collective of a local program has its facts, and they are those of the decisions."""

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardax.cost.network import Network
from shardax.ledger import causes
from shardax.partition.decisions import Decision, Origin
from shardax.partition.owed import Owed, united
from shardax.partition.reasons import Resharded, Settled
from shardax.sharding import replicated_layout
from tests.choices import SENDING, SIZES, chosen, emitted, equations, laid_out, layout, steps
from tests.graphs import graph

pytestmark = pytest.mark.quick


def summed(x, u, v):
    first = x @ u
    second = x @ v
    return jnp.sin(first + second)


def looped(x, u, v):
    """The sum is carried; every iteration reads u whole."""
    return lax.scan(lambda c, _: (c + x @ v, jnp.sin(c) @ u.T), x @ u, None, length=3)


CONTRACTED = P(None, "x"), P("x"), P("x")


def decided(f, ins=CONTRACTED, outs=None, sizes=SIZES):
    return chosen(laid_out(graph(f, (10, 64), (64, 64), (64, 64)), ins, outs, sizes))


def sent(decisions, sizes=SIZES):
    """Of each collective: its axes, and its cause."""
    for eqn in equations(emitted(decisions, sizes=sizes).jaxpr, *SENDING):
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        axes = axes if isinstance(axes, tuple) else (axes,)
        yield axes, causes.of(eqn.source_info.name_stack).cause


@pytest.mark.parametrize("f", [summed, looped])
@pytest.mark.parametrize("ins", [(P(None, "x"), P("x"), P("x")), (P("x", "y"), P("y", "z"), P("z"))])
def test_every_collective_has_the_cause_that_it_is_there_for(f, ins):
    decisions = decided(f, ins)
    found = list(sent(decisions))
    assert found and all(set(axes) == set(cause.axes) for axes, cause in found)
    read = {(r.source, r.target): node for node, step in steps(decisions) for r in step.reshards}
    for _, cause in found:
        if isinstance(cause, Resharded) and cause.reader is not None:
            assert (cause.source, cause.target) in read and cause.source != cause.target
            assert cause.reader.inputs[cause.place] is cause.value
            assert cause.decision.reshards[cause.place].target == cause.target


def test_a_result_that_is_resharded_has_no_reader():
    columns = P(None, ("x", "y", "z"))  # by all devices, as a sine is made that is sent in any case
    (whole,) = sent(decided(lambda x, u, v: (jnp.sin(x), u, v)[0], (columns, P(), P()), (P(None, None),)))
    assert isinstance(whole[1], Resharded) and whole[1].reader is None and whole[1].place == 0
    assert (whole[1].source, whole[1].target) == (layout(columns, (10, 64)), replicated_layout((10, 64)))


def test_a_sum_is_settled_for_the_contributions_that_it_has():
    """Before a sine that all devices compute: a slow chip, or one with more axes, would split that first."""
    line = Network({"x": 4})
    decisions = decided(summed, sizes=line)
    ((axes, cause),) = sent(decisions, line)
    assert isinstance(cause, Settled) and axes == ("x",)
    made = [node for node, _ in decisions.pairs() if node.name == "dot_general"]
    newest, older = cause.owed.origins()
    assert (newest.node.line, older.node.line) == (made[1].line, made[0].line)
    assert cause.also == (older.node.line,)


def contribution(f, number: int) -> Owed:
    (node,) = graph(f, (8,)).nodes
    return Owed(Origin(node, Decision((), (), ())), number)


def test_lines_of_older_contributions_are_named_once_and_never_the_newest():
    def one(x):
        return jnp.sin(x)

    def other(x):
        return jnp.cos(x)

    owed = united([contribution(other, 0), contribution(other, 1), contribution(one, 2)])
    line = contribution(other, 0).origin.node.line
    assert Settled(("x",), owed).also == (line,)
    assert Settled(("x",), united([contribution(one, 0), contribution(one, 1)])).also == ()


def test_what_came_in_has_no_lines():
    settled = Settled(("x",), None, carried=False)
    assert settled.also == () and Settled(("x",), None).carried


def test_a_reshard_serves_no_other_line():
    (value,) = graph(jnp.sin, (8,)).inputs
    assert Resharded(value, layout(P("x"), (8,)), layout(P(), (8,)), ("x",)).also == ()
