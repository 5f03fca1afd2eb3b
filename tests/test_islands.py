"""Users' own shard_maps inside shard_jit: bytes as written, results as under plain jax.jit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
A = np.random.RandomState(0).randn(8, 6).astype("float32")
B = np.random.RandomState(1).randn(6, 8).astype("float32")
X, Y, XY = P("x"), P(None, "y"), P("x", "y")
island = partial(jax.shard_map, mesh=MESH)


def _sum_of_products(a, b):
    return island(lambda a, b: lax.psum(jnp.tanh(a @ b), "y"), in_specs=(XY, P("y")), out_specs=X)(a, b)


def _ring(a):
    def trip(carry, _):
        return lax.ppermute(carry, "x", [(i, (i + 1) % 4) for i in range(4)]), carry.sum()

    carry, sums = lax.scan(trip, a, None, length=3)
    return carry, lax.psum(sums, ("x", "y"))


def _centered_in_a_loop(a, b):
    center = island(lambda c: c - lax.pmean(c, "x"), in_specs=X, out_specs=X)
    return lax.scan(lambda c, _: (center(c) * 2, c.sum()), a, None, length=3)


def _nested(a, b):
    inner = partial(jax.shard_map, in_specs=Y, out_specs=P(), axis_names={"y"})
    return island(inner(lambda a: lax.psum(a, "y")), in_specs=X, out_specs=X, axis_names={"x"})(a)


def _noisy(a):
    return a + jax.random.normal(jax.random.fold_in(jax.random.key(0), lax.axis_index("x")), a.shape)


PROGRAMS = {
    "psum": lambda a, b: island(lambda a: lax.psum(a * 2, "x"), in_specs=X, out_specs=P())(jnp.sin(a)) + 1,
    "products": lambda a, b: _sum_of_products(a, b).sum(0),
    "gradient": jax.grad(lambda a, b: _sum_of_products(a, b).sum()),
    "gradient, recomputed": jax.grad(lambda a, b: jax.checkpoint(_sum_of_products)(a, b).sum()),
    "vmap": lambda a, b: jax.vmap(island(lambda a: lax.psum(a, "x"), in_specs=X, out_specs=P()), 1)(a),
    "ring": lambda a, b: island(_ring, in_specs=XY, out_specs=(XY, P()))(a),
    "all_gather": lambda a, b: island(lambda a: lax.all_gather(a, "x", tiled=True), in_specs=XY, out_specs=Y, check_vma=False)(
        a
    ),
    "all_to_all": lambda a, b: island(lambda a: lax.all_to_all(a, "x", 1, 0, tiled=True), in_specs=X, out_specs=P(None, "x"))(
        b.T[:, :4]
    ),
    "psum_scatter": lambda a, b: island(
        lambda a: lax.psum_scatter(a, "x", tiled=True) * lax.axis_index("y").astype("float32"), in_specs=Y, out_specs=XY
    )(a),
    "some axes": lambda a, b: island(
        lambda a: lax.psum(a @ jnp.ones((6, 6)), "x"), in_specs=X, out_specs=P(), axis_names={"x"}
    )(a),
    "loop around": _centered_in_a_loop,
    "branch": lambda a, b: island(
        lambda a: lax.cond(lax.axis_index("x") > 1, lambda a: a * 2, lambda a: a - 1, a), in_specs=XY, out_specs=XY
    )(a),
    "nested": _nested,
    "random": lambda a, b: island(_noisy, in_specs=XY, out_specs=XY)(a),
}


@pytest.mark.parametrize("specs", [(XY, P()), (None, None), (P("y"), P("x", "y"))], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_island(program, specs):
    got = sx.shard_jit(PROGRAMS[program], mesh=MESH, in_shardings=specs)(A, B)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, jax.jit(PROGRAMS[program])(A, B))


def test_nothing_is_sent_but_what_is_written():
    plan = sx.shard_jit(_sum_of_products, mesh=MESH, in_shardings=(XY, P("y"))).plan(A, B)
    assert [(c.kind, c.axes, c.shape) for c in plan.collectives] == [("all_reduce", ("y",), (2, 8))]


def test_other_mesh_is_refused():
    other = jax.make_mesh((8,), ("z",), axis_types=(AxisType.Auto,))
    f = sx.shard_jit(jax.shard_map(jnp.sin, mesh=other, in_specs=P("z"), out_specs=P("z")), mesh=MESH)
    with pytest.raises(ValueError, match="a shard_map inside this shard_jit has a mesh of its own.*Leave out its mesh="):
        f(A)
