"""Users' own shard_maps inside shard_jit: bytes as written, results as under plain jax.jit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
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
    "all_gather": lambda a, b: island(
        lambda a: lax.all_gather(a, "x", tiled=True), in_specs=XY, out_specs=Y, check_vma=False
    )(a),
    "all_to_all": lambda a, b: island(
        lambda a: lax.all_to_all(a, "x", 1, 0, tiled=True), in_specs=X, out_specs=P(None, "x")
    )(b.T[:, :4]),
    "psum_scatter": lambda a, b: island(
        lambda a: lax.psum_scatter(a, "x", tiled=True) * lax.axis_index("y").astype("float32"),
        in_specs=Y,
        out_specs=XY,
    )(a),
    "some axes": lambda a, b: island(
        lambda a: lax.psum(a @ jnp.ones((6, 6)), "x"), in_specs=X, out_specs=P(), axis_names={"x"}
    )(a),
    "loop around": _centered_in_a_loop,
    "branch": lambda a, b: island(
        lambda a: lax.cond(lax.axis_index("x") > 1, lambda a: a * 2, lambda a: a - 1, a),
        in_specs=XY,
        out_specs=XY,
    )(a),
    "nested": _nested,
    "random": lambda a, b: island(_noisy, in_specs=XY, out_specs=XY)(a),
}


@pytest.mark.parametrize("specs", [(XY, P()), (None, None), (P("y"), P("x", "y"))], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_island(program, specs):
    got = sx.shard_jit(PROGRAMS[program], mesh=MESH, in_shardings=specs)(A, B)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, jax.jit(PROGRAMS[program])(A, B)
    )


def test_nothing_is_sent_but_what_is_written():
    plan = sx.shard_jit(_sum_of_products, mesh=MESH, in_shardings=(XY, P("y"))).plan(A, B)
    assert [(c.kind, c.axes, c.shape) for c in plan.collectives] == [("all_reduce", ("y",), (2, 8))]


DEVICES = np.array(jax.devices())


def _mesh(shape, names, devices=DEVICES):
    return Mesh(
        devices[: int(np.prod(shape))].reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape)
    )


SIX, FLAT = _mesh((2, 3), ("x", "y")), _mesh((8,), ("z",))
MESHES = {  # (the program's, the island's)
    "3x2 in 2x3": (SIX, _mesh((3, 2), ("x", "y"))),
    "reversed": (MESH, _mesh((4, 2), ("x", "y"), DEVICES[::-1])),
    "transposed": (MESH, Mesh(DEVICES.reshape(4, 2).T, ("p", "q"))),
    "shuffled": (FLAT, _mesh((2, 4), ("u", "v"), DEVICES[[3, 1, 4, 0, 5, 7, 2, 6]])),
    "flat": (MESH, FLAT),
    "an axis of one": (MESH, _mesh((8, 1), ("z", "w"))),
}


def _everything(mesh, a):
    """Collectives over one axis, over all, and over all in the wrong order: who has which number, and what he
    gets.
    """
    first, *_ = names = mesh.axis_names
    around, back = names if len(names) > 1 else first, names[::-1]
    b = a * lax.axis_index(first).astype("float32") + lax.axis_index(around).astype("float32")
    b = b + lax.psum(a, names[-1]) + lax.ppermute(a, first, [(0, 1)])
    b = b + lax.ppermute(a, around, [(i, (5 * i + 1) % mesh.size) for i in range(mesh.size - 1)])
    gathered = lax.all_gather(a, back, tiled=True)
    return (
        b
        + lax.psum_scatter(gathered, around, tiled=True)
        + lax.all_to_all(gathered, back, 0, 0, tiled=True)[: len(a)]
    )


@pytest.mark.parametrize("name", MESHES)
def test_island_over_another_mesh(name):
    """What an island computes depends on the places on its mesh, not on who holds them: nothing is moved for
    that.
    """
    mesh, own = MESHES[name]
    spec = P(own.axis_names)

    def f(x):
        y = jax.shard_map(
            partial(_everything, own), mesh=own, in_specs=spec, out_specs=spec, check_vma=False
        )(x * 2)
        return jnp.sin(y) if mesh is SIX else jnp.sin(sx.annotate(y, P(mesh.axis_names[0])))

    x = np.random.RandomState(2).randn(mesh.size**2, 3).astype("float32")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        want = jax.jit(jax.value_and_grad(lambda x: (jnp.sin(_plain(own, spec, x)) ** 2).sum()))(x)
    step = sx.shard_jit(jax.value_and_grad(lambda x: (f(x) ** 2).sum()), mesh=mesh)
    for _ in range(2):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3), step(x), want)
    np.testing.assert_allclose(
        jax.grad(lambda x: (sx.shard_jit(f, mesh=mesh)(x) ** 2).sum())(x), want[1], rtol=1e-3, atol=1e-3
    )


def _plain(own, spec, x):
    return jax.shard_map(partial(_everything, own), mesh=own, in_specs=spec, out_specs=spec, check_vma=False)(
        x * 2
    )


def test_island_over_other_devices_is_refused():
    other = _mesh((4,), ("z",))
    f = sx.shard_jit(
        lambda a: jax.shard_map(jnp.sin, mesh=other, in_specs=P("z"), out_specs=P("z"))(a), mesh=MESH
    )
    with pytest.raises(
        ValueError,
        match=r"shard_map at .*py:\d+ has shards on the mesh \(z=4\) of devices .*leave out its mesh=",
    ):
        f(A)
