"""On CPUs collectives run in one order on all devices: they wait for loops, and loops for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh
from shardax import _jax
from shardax.ledger.collectives import is_collective
from shardax.passes.waits import waiting
from shardax.spmd_rules.equations import any_inside

AXIS = [("x", 2)]


def eqns_of(function, *shapes, dtype="float32"):
    """The equations of such a local program, which wait."""
    with _jax.axes_in_scope(dict(AXIS)):
        closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
        return waiting(closed).jaxpr.eqns


def depends(eqns):
    """Of each equation with collectives, in order, the numbers of those that it depends on."""
    reached, found = {}, []
    for eqn in eqns:
        own = set().union(*(reached.get(v, set()) for v in eqn.invars if not _jax.is_literal(v)))
        if any_inside(is_collective, eqn):
            found.append(sorted(own))
            own = own | {len(found) - 1}
        reached |= dict.fromkeys(eqn.outvars, own)
    return found


def loop(x):
    return lax.fori_loop(0, 3, lambda i, y: lax.psum(jnp.sin(y), "x"), x)


def test_a_collective_waits_for_a_loop_and_a_loop_for_collectives():
    def program(x, y, z):
        first = lax.all_gather(x, "x")
        return loop(y), first, lax.psum(z, "x"), lax.psum(x, "x")

    assert depends(eqns_of(program, (4,), (5,), (6,))) == [[], [0], [0, 1], [0, 1]]


@pytest.mark.parametrize("dtype", ["int32", "bool", "bfloat16", "complex64"])
def test_whatever_the_type(dtype):
    def program(x, y):
        carried = lax.fori_loop(0, 3, lambda i, y: lax.ppermute(y, "x", [(0, 1), (1, 0)]), y)
        return carried, lax.all_gather(x, "x")

    assert depends(eqns_of(program, (4,), (5,), dtype=dtype)) == [[], [0]]


def test_branches_bodies_and_what_depends_already():
    def branches(p, x, y):
        return lax.cond(p[0] > 0, lambda x: lax.psum(x, "x"), jnp.sin, x), lax.psum(y, "x")

    def body(x, y):
        return lax.scan(lambda c, _: ((loop(c[0]), lax.psum(c[1], "x")), None), (x, y), length=2)[0]

    assert depends(eqns_of(branches, (1,), (4,), (5,))) == [[], [0]]
    (scan,) = (eqn for eqn in eqns_of(body, (4,), (5,)) if eqn.primitive is lax.scan_p)
    assert depends(_jax.closed(scan.params["jaxpr"]).jaxpr.eqns) == [[], [0]]
    chain = lambda x: lax.psum(loop(lax.psum(x, "x")), "x")  # noqa: E731
    assert len(eqns_of(chain, (4,))) == 3  # nothing was added


def test_plain_collectives_are_left_alone():
    assert len(eqns_of(lambda x, y: (lax.psum(x, "x"), lax.psum(y, "x")), (4,), (5,))) == 2


def test_many_loops_beside_many_collectives():
    """Four loops and four sums that depend on none of them, 100 times. Each call ends before the next begins: where
    many are under way at once on few cores, plain `jax.jit` hangs too.
    """
    mesh = make_mesh({"x": 4, "y": 2})

    def program(xs):
        looped = [lax.scan(lambda c, row: (jnp.tanh(c @ row), None), x[0], x)[0] for x in xs]
        return [jnp.sum(x, 0) for x in xs], looped

    xs = [np.random.default_rng(n).normal(size=(3, 16, 16)).astype("float32") / 4 for n in range(4)]
    specs = [P(None, "x", "y")] * 2 + [P(None, "y", "x")] * 2
    run = sx.shard_jit(program, mesh=mesh, in_shardings=(specs,))
    wanted = jax.jit(program)(xs)
    for _ in range(100):
        found = jax.block_until_ready(run(xs))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5), found, wanted)
