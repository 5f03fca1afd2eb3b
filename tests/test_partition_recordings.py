"""recordings: what is staged again is what would have been traced, on each node's own line."""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import source_info_util
from jax.sharding import PartitionSpec as P

from shardax import _jax
from shardax.cost import noted
from shardax.ledger import causes
from shardax.partition.recordings import Recordings
from tests.choices import chosen, emitted, laid_out
from tests.graphs import graph

pytestmark = pytest.mark.quick


def layers(x, weights):
    """Alike, each on its own line and under its own names; some add up one operand, or have other
    literals."""
    with jax.named_scope("first"):
        x = jnp.tanh(x @ weights) * 2.0
    with jax.named_scope("second"):
        x = jnp.tanh(x @ weights) * 2.0
    x = jnp.tanh(x @ weights) * 3.0
    return x + x, x + weights[:10], lax.cumsum(x), lax.cumsum(x * x)


def looped(x, weights):
    def step(x, _):
        x = jnp.tanh(x @ weights)
        return jnp.sin(jnp.sin(jnp.sin(x))), x.sum()

    return lax.scan(step, x, length=3)


def described(jaxpr, arguments: int | None = None) -> list:
    """What it says of each equation: its variables by number, and where it comes from. Of constants, which
    come in before its arguments, those of one type are taken for equal: what is staged again shares them. So
    are the numbers that are made of nothing else, as of the device's place, by what they are made of.
    """
    count = len(jaxpr.invars) - (len(jaxpr.invars) if arguments is None else arguments)
    numbers: dict = {v: f"constant {v.aval}" for v in jaxpr.invars[:count]}
    made = itertools.count(len(jaxpr.invars) - count)
    numbers |= {v: i for i, v in enumerate(jaxpr.invars[count:])}

    def number(atom):
        return (
            (str(atom.aval), str(atom.val))
            if _jax.is_literal(atom)
            else numbers[atom]
            if atom in numbers
            else numbers.setdefault(atom, next(made))
        )

    def param(value):
        return described(_jax.closed(value).jaxpr) if _jax.is_jaxpr(value) else str(value)

    def is_place(eqn) -> bool:
        """Whether it makes a number of nothing but others: what is staged again shares them."""
        operands = [number(v) for v in eqn.invars if not _jax.is_literal(v)]
        return eqn.outvars[0].aval.size <= 1 and all(str(x).startswith("constant") for x in operands)

    found = []
    for eqn in jaxpr.eqns:
        params = {name: param(value) for name, value in eqn.params.items()}
        if is_place(eqn):
            what = f"constant {eqn.primitive.name} {[number(v) for v in eqn.invars]} {params}"
            numbers[eqn.outvars[0]] = what
            continue
        found.append(
            (
                eqn.primitive.name,
                [number(v) for v in eqn.invars],
                [(number(v), str(v.aval)) for v in eqn.outvars],
                params,
                _jax.user_line(eqn.source_info),
                str(eqn.source_info.name_stack),
                _jax.innermost_mark(eqn.source_info.name_stack).node.line,
                str(eqn.effects),
                eqn.ctx,
            )
        )
    return found


def traced_each_time(self, kind, function, shards):
    return list(function(shards))


SPECS = [(P("x"), P()), (P("x", "y"), P("y", "x")), (P(None, ("x", "y")), P("z", None))]


@pytest.mark.parametrize("specs", SPECS, ids=str)
@pytest.mark.parametrize("f", [layers, looped])
def test_the_program_is_that_of_tracing_each_node(f, specs):
    decisions = chosen(laid_out(graph(f, (10, 12), (12, 12)), specs))
    again = mock.Mock(side_effect=_jax.staged_again)
    with mock.patch.object(_jax, "staged_again", again):
        found = emitted(decisions)
    with mock.patch.object(Recordings, "run", traced_each_time):
        expected = emitted(decisions)
    assert again.call_count >= 2
    assert described(found.jaxpr, 2) == described(expected.jaxpr, 2)


LINE = graph(jnp.sin, (3,)).nodes[0].eqn.source_info.traceback  # nodes are run on a line of the user's


def run_twice(function, *args) -> tuple[list[str], int]:
    """The equations of two runs of a function as one kind, and how often it was called."""
    called = mock.Mock(side_effect=function)

    def twice(*args):
        recordings = Recordings()
        with source_info_util.user_context(LINE):
            return [recordings.run("kind", called, args) for _ in range(2)]

    jaxpr = jax.make_jaxpr(twice)(*args).jaxpr
    return [eqn.primitive.name for eqn in jaxpr.eqns], called.call_count


X = np.ones(3, "float32")


def test_what_is_another_value_each_time_is_made_each_time():
    """Though it is a number, and made of no operand but constants."""

    def drawn(x):
        return x * lax.rng_uniform(np.float32(0), np.float32(1), shape=()) + lax.rng_uniform(
            np.float32(0), np.float32(1), shape=()
        )

    jaxpr = emitted(chosen(laid_out(graph(drawn, (8, 6)), [P("x")]))).jaxpr
    (local,) = [eqn.params["jaxpr"] for eqn in jaxpr.eqns] if len(jaxpr.eqns) == 1 else [jaxpr]
    assert [eqn.primitive.name for eqn in _jax.closed(local).jaxpr.eqns].count("rng_uniform") == 2


def test_where_a_device_is_is_found_once():
    """What is made of no operand, if it is a number, is there already. A sum over devices is sent again."""

    def function(xs):
        total = lax.psum(np.float32(1), "x")
        place = lax.mul(lax.axis_index("x"), np.int32(3))
        return [xs[0] * total, lax.dynamic_slice(xs[0], [place], [1]), place]

    def twice(x):
        recordings = Recordings()
        with source_info_util.user_context(LINE):
            return [recordings.run("kind", function, [x]) for _ in range(2)]

    jaxpr = jax.make_jaxpr(twice, axis_env=[("x", 2)])(X).jaxpr
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert names.count("axis_index") == 1 and names.count("dynamic_slice") == 2
    assert jaxpr.outvars[2] is jaxpr.outvars[5]


@pytest.mark.parametrize(
    "function, names, calls",
    [
        (lambda xs: [jnp.sin(xs[0]), xs[0], 2.0, 1], ["sin"] * 2, 1),
        (lambda xs: [lax.iota("int32", 3)], ["iota"] * 2, 1),
        (lambda xs: [xs[0] + np.arange(3, dtype="float32")], ["add"] * 2, 1),
        (lambda xs: [jax.jit(jnp.sin)(xs[0])], ["jit"] * 2, 2),  # it has a body
        (lambda xs: [lax.cond(xs[0][0] > 0, jnp.sin, jnp.cos, xs[0])], None, 2),
    ],
)
def test_what_is_recorded(function, names, calls):
    """A function is called once, but where its equations have bodies: they have lines of their own."""
    found, called = run_twice(function, X)
    assert called == calls and found[: len(found) // 2] == found[len(found) // 2 :]
    assert names is None or found == names


def test_effects_and_causes_are_of_one_call():
    class Told(causes.Cause):
        pass

    def caused(xs):
        with causes.scope("all_gather", "why", Told()):
            return [jnp.sin(xs[0])]

    def printed(xs):
        jax.debug.print("{x}", x=xs[0])
        return xs

    assert run_twice(caused, X)[1] == run_twice(printed, X)[1] == 2


def test_notes_are_of_one_call_each():
    """Equations with one note count once."""

    def twice(x):
        recordings = Recordings()
        for _ in range(2):
            with source_info_util.user_context(LINE):
                (x,) = recordings.run("kind", called, [x])
        return x

    def doubled(xs):
        with noted.scope("kernel", 7.0):
            return [jnp.sin(xs[0]) * 2.0]

    called = mock.Mock(side_effect=doubled)
    eqns = jax.make_jaxpr(twice)(X).eqns
    notes = [noted.of(eqn.source_info.name_stack) for eqn in eqns]
    assert called.call_count == 1 and [note.flops for note in notes] == [7.0] * 4
    assert notes[0] is notes[1] is not notes[2] is notes[3]


def test_equations_in_another_context_are_traced():
    def moved(xs):
        with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
            return [jnp.sin(xs[0])]

    assert run_twice(moved, X)[1] == 2


def test_constants_are_told_apart():
    """Those that came of others too, as their conversions do, which JAX does while it traces."""

    def two(x):
        recordings = Recordings()
        with source_info_util.user_context(LINE):
            converted = [
                recordings.run(
                    "convert", lambda xs: [lax.convert_element_type(xs[0], "float32")], [np.float64(c)]
                )
                for c in (0.5, 0.25, 0.5)
            ]
            return [recordings.run("add", lambda xs: [xs[0] + xs[1]], [x, c]) for (c,) in converted]

    eqns = jax.make_jaxpr(two)(X).jaxpr.eqns
    assert [float(np.asarray(eqn.invars[1].val)) for eqn in eqns] == [0.5, 0.25, 0.5]


def test_what_reads_other_variables_is_traced():
    def both(x, y, z):
        recordings = Recordings()
        with source_info_util.user_context(LINE):
            for other in (y, z):
                recordings.run("kind", lambda xs, other=other: [xs[0] + other], [x])

    jaxpr = jax.make_jaxpr(both)(X, X, X).jaxpr
    assert [eqn.invars[1] for eqn in jaxpr.eqns] == jaxpr.invars[1:]


def test_kinds_types_and_equal_operands_are_told_apart():
    def four(x, y):
        recordings = Recordings()
        with source_info_util.user_context(LINE):
            for kind, shards in [
                ("a", (x, y)),
                ("b", (x, y)),
                ("a", (x, x)),
                ("a", (y[:2], x[:2])),
                ("a", (y, x)),
            ]:
                recordings.run(kind, called, shards)

    called = mock.Mock(side_effect=lambda shards: [shards[0] + shards[1]])
    jaxpr = jax.make_jaxpr(four)(X, X).jaxpr
    assert called.call_count == 4
    adds = [[jaxpr.invars.index(v) for v in e.invars if v in jaxpr.invars] for e in jaxpr.eqns]
    assert [a for a in adds if len(a) == 2] == [[0, 1], [0, 1], [0, 0], [1, 0]]
