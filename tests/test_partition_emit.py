"""emit: the local program has the types that the decisions say, and sends where they say so, once."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardax.cost.network import Network
from shardax.ledger import causes
from shardax.partition.decisions import Reshard
from shardax.partition.emit import Emitter, Reader, emit_values, purpose, reshard_reason
from shardax.partition.reasons import Resharded, Settled
from shardax.sharding import from_spec, replicated_layout
from tests.choices import SENDING, SIZES, chosen, emitted, equations, laid_out, layout
from tests.graphs import graph, walk_values

pytestmark = pytest.mark.quick


def chain(a, b):
    return jnp.sin(a @ b) @ b


def pending(a, b):
    return (a @ b + a @ a).T + 1.0


def extremes(a, b):
    return a.max(0) + b.min(0), jnp.exp(a).sum()


def mixed(a, b):
    """Other types than the arguments have."""
    return jnp.argmax(a, 0), (a > 0).astype("int8"), jnp.concatenate([a, b])[3:]


PROGRAMS = [chain, pending, extremes, mixed]
SPECS = {
    "uneven rows": (10, P("x"), P("x")),
    "a contraction": (16, P(None, "x"), P("x")),
    "three axes": (10, P("x", "y"), P(("y", "z"), "x")),
}
CASES = pytest.mark.parametrize("f, specs", [(f, s) for f in PROGRAMS for s in SPECS])


def decided(f, specs: str):
    n, *ins = SPECS[specs]
    return chosen(laid_out(graph(f, (n, n), (n, n)), ins))


def shards_of(decisions):
    """Each value in each layout in which it is there, with its shard's type."""
    found = []

    def run(decisions, shards, sizes):
        found.extend(emit_values(decisions, shards, sizes).items())
        return Emitter(sizes).graph(decisions, shards)

    emitted(decisions, run)
    return [(v, lay, shard.aval) for v, shards in found for lay, shard in shards.items()]


@CASES
def test_each_shard_has_the_type_of_its_layout(f, specs):
    decisions = decided(f, specs)
    found = shards_of(decisions)
    for value, lay, aval in found:
        assert (aval.shape, aval.dtype) == (lay.local_shape(SIZES), value.aval.dtype), (value, lay)
    made = {(node.outputs[i], lay) for node, d in decisions.pairs() for i, lay in enumerate(d.results)}
    assert made <= {(value, lay) for value, lay, _ in found}
    assert {v for v, *_ in found} == {*walk_values(decisions.graph)}


@CASES
def test_the_program_takes_and_gives_what_the_decisions_say(f, specs):
    decisions = decided(f, specs)
    local = emitted(decisions)
    taken = local.in_avals[-len(decisions.inputs) :]  # before them stand constants of lowerings
    assert [a.shape for a in taken] == [x.local_shape(SIZES) for x in decisions.inputs]
    assert [a.shape for a in local.out_avals] == [r.target.local_shape(SIZES) for r in decisions.outputs]


@CASES
def test_what_needs_no_reshard_sends_nothing(f, specs):
    """And what does is sent under a scope that says for whom, and in which sharding."""
    decisions = decided(f, specs)
    names = [causes.of(e.source_info.name_stack) for e in equations(emitted(decisions).jaxpr, *SENDING)]
    found = [name for name in names if name and isinstance(name.cause, Resharded | Settled)]
    readers = [(node, step.reshards) for node, step in decisions.pairs()]
    needed = [(node, r) for node, some in (*readers, (None, decisions.outputs)) for r in some if r.needed]
    words = {reshard_reason(purpose(node), r.target.sharding) for node, r in needed}
    assert {name.reason for name in found if isinstance(name.cause, Resharded)} <= words
    assert needed or not found


def test_what_two_read_in_one_layout_is_brought_there_once():
    program, sizes = graph(lambda a, b, c: (a @ b, a @ c), (8, 64), (64, 4096), (64, 4096)), Network(SIZES)
    decisions = chosen(laid_out(program, (P(None, "x"), P(None, "y"), P(None, "y")), sizes=sizes))
    first, second = (step.reshards[0] for _, step in decisions.pairs())
    sent = list(equations(emitted(decisions, sizes=sizes).jaxpr, *SENDING))
    assert first.needed and first.target == second.target and len(sent) == 1


def test_each_device_makes_what_it_can_make():
    """Rows of an iota are made split; who reads it whole makes it whole, and nothing is gathered."""

    def f(a):
        rows = lax.iota("float32", 64)
        return a * rows, rows

    rows = P(("x", "y", "z"))  # no axis is left over which to split the product, and gather it
    decisions = chosen(laid_out(graph(f, (64,)), (rows,), (rows, P())))
    made = {step.results[0] for node, step in decisions.pairs() if node.name == "iota"}
    assert not list(equations(emitted(decisions).jaxpr, *SENDING))
    assert made == {layout(rows, (64,))} and len(list(equations(emitted(decisions).jaxpr, "iota"))) > 1


def test_shardings_are_shown_in_the_words_of_whom_it_is_for():
    decisions = chosen(laid_out(graph(jnp.sin, (16,)), (P("x"),), (P(),)))
    shown = emitted(decisions, shown=lambda sharding: from_spec(P("mine"), 1))
    (sent,) = equations(shown.jaxpr, *SENDING)
    assert causes.of(sent.source_info.name_stack).reason == "result in P('mine')"
    (node,) = graph(jnp.sin, (16,)).nodes
    assert reshard_reason(purpose(node), from_spec(P("x"), 1)) == "sin in P('x')"
    assert purpose(None) == "result"


def test_a_literal_is_an_array_of_its_own_type():
    program = graph(lambda a: a * 2.0, (16,))
    literal = program.nodes[0].inputs[1]
    whole = replicated_layout(())
    read = Emitter(SIZES).read(literal, Reshard(whole, whole), Reader(None))
    assert isinstance(read, np.ndarray) and read == 2 and read.dtype == literal.aval.dtype
