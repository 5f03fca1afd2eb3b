"""The pass by which what the host computes is one call for each array, of arrays in its memory."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from shardax import _jax
from shardax.passes.moves import brings, is_at_host, moves
from shardax.zero import Zero
from tests.test_zero_offload import BOTH, odd_step, unrolled

pytestmark = [pytest.mark.quick, pytest.mark.mixed_dtypes, pytest.mark.promotes_ranks]


def programs(jaxpr) -> Iterator[Any]:
    """A jaxpr, and the bodies in it."""
    opened = _jax.closed(jaxpr).jaxpr
    yield opened
    bodies: list[Any] = []
    for eqn in opened.eqns:
        _jax.with_bodies(eqn, lambda body: bodies.append(body) or body)
    for body in bodies:
        yield from programs(body)


def roots_of_arrays(program) -> list[Any]:
    """Which only updates take."""
    return [eqn for eqn in program.eqns if eqn.primitive is lax.sqrt_p and eqn.outvars[0].aval.shape]


def unrolled_plan():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    make = lambda shape: jax.ShapeDtypeStruct(shape, "float32")  # noqa: E731
    step, state = unrolled(Zero("data", 3, offload="optimizer", update_on="host"), mesh, 3, 64, 256, make)
    return step.plan(state, jax.ShapeDtypeStruct((4096, 64), "float32"))


def test_one_call_for_each_array():
    found = list(programs(unrolled_plan().local_jaxpr))
    calls = [program for program in found if roots_of_arrays(program)]
    assert len(calls) == 6  # three layers of two
    for call in calls:
        assert all(is_at_host(v) for eqn in call.eqns for v in eqn.outvars)
        assert len(call.outvars) == 3  # both moments and the parameter


def test_what_is_sent_is_at_the_host_before_it_is_read():
    (program,) = (x for x in programs(unrolled_plan().local_jaxpr) if any(map(_is_call, x.eqns)))
    makers = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    arguments = set(program.invars)
    for eqn in filter(_is_call, program.eqns):
        arrays = [v for v in eqn.invars if v.aval.shape and v not in arguments]
        assert len(arrays) == 2  # the gradient and the parameter
        for v in arrays:
            (behind,) = makers[v].invars
            assert makers[behind].primitive is lax.optimization_barrier_p
            assert moves(makers[makers[behind].invars[0]])


def test_what_is_sent_is_made_once():
    """The norm of all gradients reads what is sent, not what that is cast from."""
    (program,) = (x for x in programs(unrolled_plan().local_jaxpr) if any(map(_is_call, x.eqns)))
    makers = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    gradients = [
        eqn.invars[0]
        for eqn in program.eqns
        if moves(eqn) and is_at_host(eqn.outvars[0]) and eqn.invars[0] in makers and eqn.invars[0].aval.shape
    ]
    assert len(gradients) == 6
    for g in gradients:
        assert makers[g].primitive is lax.optimization_barrier_p
        (made,) = makers[g].invars
        assert [eqn for eqn in program.eqns if made in eqn.invars] == [makers[g]]


@pytest.mark.parametrize("offload", ["optimizer", BOTH])
def test_the_host_updates_what_rests_padded(offload):
    """It masks the tails itself."""
    step, state, _, x_BM = odd_step(Zero("data", 3, offload=offload, update_on="host"))
    plan = step.plan(state, x_BM)
    found = [eqn for x in programs(plan.local_jaxpr) for eqn in roots_of_arrays(x)]
    assert len(found) == 2 and all(is_at_host(eqn.outvars[0]) for eqn in found)


def test_new_parameters_that_rest_padded_come_from_the_host_as_they_rest():
    """The device masks no tail of what it is sent: XLA would make an array for that."""
    step, state, _, x_BM = odd_step(Zero("data", 3, offload="optimizer", update_on="host"))
    (program,) = (x for x in programs(step.plan(state, x_BM).local_jaxpr) if any(map(_is_call, x.eqns)))
    makers = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    for new in program.outvars[:2]:
        assert brings(makers[new]) and _is_call(makers[makers[new].invars[0]])


def _is_call(eqn) -> bool:
    return eqn.primitive.name in ("jit", "pjit") and any(map(is_at_host, eqn.outvars))
