"""The passes by which what is gathered to be sent to the host is so in turn, and lies as at rest."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from shardax.passes.in_turn import in_turn, sends
from shardax.passes.layouts import laid_out
from shardax.passes.moves import brings
from shardax.zero.offload import at_host

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

pytestmark = pytest.mark.quick


def gathered(*shards):
    """Arrays that are put together, cut and sent."""
    whole = (lax.pad(x, jnp.float32(0), [(0, 0, 0), (0, 48, 0)]) for x in shards)
    return [jax.device_put(x[:, :95], HOST) for x in whole]


def program(function, *types):
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.make_jaxpr(function)(*(at_host(x) if host else x for x, host in types))


SHARD = jax.ShapeDtypeStruct((1000, 48), "float32")


def test_each_waits_for_the_copy_of_the_one_before():
    before = program(gathered, *[(SHARD, False)] * 3)
    after = in_turn(before).jaxpr
    makers = {v: eqn for eqn in after.eqns for v in eqn.outvars}
    copies = [eqn.outvars[0] for eqn in after.eqns if sends(eqn)]
    joins = [eqn for eqn in after.eqns if eqn.primitive is lax.pad_p]
    assert copies == list(after.outvars)
    assert joins[0].invars[0] in after.invars
    for copy, join in zip(copies, joins[1:], strict=False):
        barrier = makers[join.invars[0]]
        assert barrier.primitive is lax.optimization_barrier_p and copy in barrier.invars


def test_what_is_only_cut_waits_for_nothing():
    before = program(lambda *xs: [jax.device_put(x[:, :40], HOST) for x in xs], *[(SHARD, False)] * 2)
    assert in_turn(before) is before


def test_what_is_put_together_before_another_is_sent_waits_for_nothing():
    def f(x, y):
        whole = [lax.pad(each, jnp.float32(0), [(0, 0, 0), (0, 48, 0)]) for each in (x, y)]
        return [jax.device_put(each, HOST) for each in whole]

    before = program(f, *[(SHARD, False)] * 2)
    assert in_turn(before) is before


def test_what_is_copied_lies_as_at_rest():
    """What is brought, what is sent, and what this is put together of; not what a loop brings of it."""

    def f(x, w):
        rows = lax.scan(lambda c, row: (c + jax.device_put(row, DEVICE), None), x[0], w)[0]
        return *gathered(x), jax.device_put(w, DEVICE) + 1.0, rows

    eqns = laid_out(program(f, (SHARD, False), (SHARD, True))).jaxpr.eqns
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    readers = {v: eqn for eqn in eqns for v in eqn.invars if not isinstance(v, jax.extend.core.Literal)}

    def layout(eqn):
        return eqn.params["layout"].major_to_minor if eqn.primitive.name == "layout_constraint" else None

    assert [layout(makers[eqn.invars[0]]) for eqn in eqns if sends(eqn)] == [(1, 0)]  # as TPUs tile it
    assert [layout(readers[eqn.outvars[0]]) for eqn in eqns if brings(eqn)] == [(1, 0)]
    assert sum(eqn.primitive.name == "layout_constraint" for eqn in eqns) == 3
