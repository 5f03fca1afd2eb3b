"""Which scans are maps, and how each carry of a map goes from iteration to iteration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax.spmd_rules.maps import (
    LAST,
    REDUCED,
    SAME,
    STEPS,
    Carry,
    carries_of_map,
    has_open_loop,
    reads,
)
from tests.graphs import auto_mesh, graph, the

pytestmark = pytest.mark.quick

SUM = Carry(REDUCED, "sum")


def scan_of(trip, start=(4,), length=3, dtype="float32"):
    """A scan of a body trip(carry, x), whose stack is of rows as the carry is."""
    run = lambda c, xs: lax.scan(trip, c, xs, length=length)  # noqa: E731
    return graph(run, start, (length, *start), dtype=dtype).nodes[-1]


def giving(f):
    return lambda c, x: (f(c, x), x * 2)


CARRIES = {
    "added to": (lambda c, x: c + jnp.sin(x), SUM),
    "subtracted from": (lambda c, x: c - x, SUM),
    "added to twice": (lambda c, x: c + x + x * x, SUM),
    "of which a maximum is taken": (lambda c, x: jnp.maximum(c, x), Carry(REDUCED, "max")),
    "of which a minimum is taken": (lambda c, x: jnp.minimum(x, c), Carry(REDUCED, "min")),
    "not read": (lambda c, x: jnp.sin(x), Carry(LAST)),
    "added to in a branch": (lambda c, x: lax.cond(x[0] > 0, lambda c: c + x, lambda c: c, c), SUM),
    "added to in a loop": (lambda c, x: lax.fori_loop(0, 2, lambda _, c: c + x, c), SUM),
    "multiplied": (lambda c, x: c * x, None),
    "subtracted": (lambda c, x: x - c, None),
    "read besides": (lambda c, x: c + jnp.sin(c), None),
    "added to and capped": (lambda c, x: jnp.minimum(c + x, 1), None),
    "of another reduction in a branch": (
        lambda c, x: lax.cond(x[0] > 0, lambda c: c + x, lambda c: jnp.maximum(c, x), c),
        None,
    ),
}


@pytest.mark.parametrize("name", CARRIES)
def test_carries(name):
    f, carry = CARRIES[name]
    assert carries_of_map(scan_of(giving(f))) == (carry and (carry,))


def test_what_is_given_back_as_it_is_taken():
    loop = scan_of(giving(lambda c, x: jnp.sin(x)))
    (body,) = loop.bodies
    body.outputs[0] = body.inputs[0]
    assert carries_of_map(loop) == (Carry(SAME),)


@pytest.mark.parametrize("step", [1, -2])
def test_counters(step):
    count = scan_of(giving(lambda i, x: i + step), (), dtype="int32")
    assert carries_of_map(count) == (Carry(STEPS, step=step),)


def test_what_a_trip_gives_of_a_carry_is_a_reader():
    assert carries_of_map(scan_of(lambda c, x: (c + x, c))) is None


def test_one_carry_that_ties_trips_ties_them_all():
    both = lambda c, x: ((c[0] + x, c[1] * x), None)  # noqa: E731
    run = lambda c, d, xs: lax.scan(both, (c, d), xs)  # noqa: E731
    assert carries_of_map(the("scan", graph(run, (4,), (4,), (3, 4)))) is None


def test_what_all_devices_must_run():
    def printed(c, x):
        jax.debug.callback(np.sum, x)
        return c, x

    island = jax.shard_map(jnp.sin, mesh=auto_mesh(x=2), in_specs=None, out_specs=jax.P("x"))
    assert carries_of_map(scan_of(printed)) is None
    assert carries_of_map(scan_of(lambda c, x: (c, island(x)))) is None


def test_no_trips_are_no_map():
    assert carries_of_map(scan_of(giving(lambda c, x: c), length=0)) is None


def test_booleans_cannot_be_pending():
    assert carries_of_map(scan_of(lambda c, x: (c | x, None), dtype="bool")) is None


def test_loops_that_may_go_on():
    outer = lambda inner: graph(lambda xs: lax.map(inner, xs), (3, 4)).nodes[-1]  # noqa: E731
    assert has_open_loop(outer(lambda x: lax.while_loop(lambda x: x.sum() < 3, lambda x: x + 1, x)))
    assert not has_open_loop(outer(lambda x: lax.scan(lambda c, y: (c + y, None), 0.0, x)[0]))


def test_who_reads_a_value():
    program = graph(lambda a, b, c: (jnp.sin(a), b), (4,), (4,), (4,))
    assert [reads(program, v) for v in program.inputs] == [True, True, False]
