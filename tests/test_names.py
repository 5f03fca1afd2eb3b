"""Annotations under other systems' names: the same sharding inside shard_jit and, placed at once, outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import Partial, Replicate, Shard

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
THREE = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
IDS = np.arange(8)

CASES = {
    "split by an axis": (lambda x: sx.split(x, 1, "x"), P(None, "x")),
    "split by two": (lambda x: sx.split(x, -1, ("y", "x")), P(None, ("y", "x"))),
    "split by a count": (lambda x: sx.split(x, 0, 2), P("y")),
    "split by a count of two axes": (lambda x: sx.split(x, 0, 8), P(("x", "y"))),
    "split in one": (lambda x: sx.split(x, 0, 1), P()),
    "shard": (lambda x: sx.shard(x, IDS.reshape(4, 2)), P("x", "y")),
    "shard along one dim": (lambda x: sx.shard(x, IDS.reshape(1, 8)), P(None, ("x", "y"))),
    "shard transposed": (lambda x: sx.shard(x, IDS.reshape(4, 2).T), P("y", "x")),
    "mesh_split": (lambda x: sx.mesh_split(x, MESH, [1, -1]), P("y")),
    "mesh_split on both": (lambda x: sx.mesh_split(x, MESH, [1, 0]), P("y", "x")),
    "mark_sharding by number": (lambda x: sx.mark_sharding(x, MESH, (0, None)), P("x")),
    "mark_sharding by name": (lambda x: sx.mark_sharding(x, MESH, (None, "y")), P(None, "y")),
    "mark_sharding by both": (lambda x: sx.mark_sharding(x, MESH, (("y", 0), None)), P(("y", "x"))),
    "redistribute": (lambda x: sx.redistribute(x, MESH, [Shard(1), Replicate()]), P(None, "x")),
    "redistribute left to right": (lambda x: sx.redistribute(x, MESH, [Shard(-2), Shard(0)]), P(("x", "y"))),
    "replicate": (sx.replicate, P()),
}

BAD = {
    "split of no dim": (lambda x: sx.split(x, 2, "x"), "x has 2 dims, none of them is 2"),
    "split in three": (lambda x: sx.split(x, 0, 3), "none of its axes has so many devices; name the axes"),
    "shard of another rank": (lambda x: sx.shard(x, IDS), r"shape \(8,\) for an array of shape \(16, 8\)"),
    "shard twice on a device": (
        lambda x: sx.shard(x, (IDS // 2).reshape(4, 2)),
        "no tiling by the axes of the mesh",
    ),
    "shard of other devices": (lambda x: sx.shard(x, [[0, 1]]), "no tiling by the axes"),
    "mesh_split twice": (
        lambda x: sx.mesh_split(x, MESH, [0, 0]),
        "uses 'x' of the mesh .x=4, y=2. twice, for dims 0 and 1: ",
    ),
    "mesh_split of a missing dim": (lambda x: sx.mesh_split(x, MESH, [2, -1]), "has no dim 2"),
    "mesh_split too short": (lambda x: sx.mesh_split(x, MESH, [0]), "one entry for each dim, -1"),
    "mark_sharding of a missing axis": (lambda x: sx.mark_sharding(x, MESH, ("z", None)), "has no dim 'z'"),
    "mark_sharding too short": (lambda x: sx.mark_sharding(x, MESH, (None,)), "one entry for each dim, None"),
    "mark_sharding twice": (lambda x: sx.mark_sharding(x, MESH, (0, "x")), "twice, for dims 0 and 1: "),
    "redistribute, owing": (
        lambda x: sx.redistribute(x, MESH, [Partial("max"), Replicate()]),
        "can owe a sum alone, and no 'max'",
    ),
    "redistribute too short": (
        lambda x: sx.redistribute(x, MESH, [Shard(0)]),
        "one placement for each of its 2 dims",
    ),
    "redistribute, what": (lambda x: sx.redistribute(x, MESH, ["x", Replicate()]), "'x' is no placement"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("inside", [True, False])
def test_sharding(name, inside):
    annotate, spec = CASES[name]
    x = jnp.arange(128.0).reshape(16, 8)
    with jax.set_mesh(MESH):
        y = sx.shard_jit(annotate, mesh=MESH)(x) if inside else annotate(x)
    assert y.sharding.is_equivalent_to(jax.sharding.NamedSharding(MESH, spec), 2), y.sharding
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("inside", [True, False])
def test_bad_input(name, inside):
    annotate, words = BAD[name]
    with jax.set_mesh(MESH), pytest.raises(ValueError, match=words):
        (sx.shard_jit(annotate, mesh=MESH) if inside else annotate)(jnp.zeros((16, 8)))


def test_redistribute_to_partial_owes_a_sum_inside_and_outside_on_explicit_axes_only():
    """A sum that is made over "x" is not done before what reads it: one reduce_scatter, no all_reduce."""
    x, w = np.arange(128.0, dtype="float32").reshape(16, 8), np.ones((8, 4), "float32")

    def product(x, w):
        y = sx.redistribute(x @ w, MESH, [Partial(), Replicate()])
        return sx.redistribute(2 * y, MESH, [Shard(0), Replicate()])

    run = sx.shard_jit(product, mesh=MESH, in_shardings=(P(None, "x"), P("x")))
    np.testing.assert_allclose(run(x, w), 2 * x @ w)
    assert [c.kind for c in run.plan(x, w).collectives] == ["reduce_scatter"]
    with pytest.raises(ValueError, match=r"axis 'x' of the mesh \(x=4, y=2\) is Auto, and a jax.Array"):
        sx.redistribute(jnp.zeros((16, 8)), MESH, [Partial(), Replicate()])
    explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        y = sx.redistribute(jnp.ones((16, 8)), explicit, [Partial(), Shard(1)])
        assert y.sharding.spec.unreduced == {"x"}
        np.testing.assert_array_equal(jax.sharding.reshard(y, P()), np.ones((16, 8)))


@pytest.mark.parametrize("inside", [True, False])
def test_shard_in_another_order(inside):
    """Outside the array lies so; inside it is a boundary: blocks of the same sizes, in the mesh's order."""
    order, x = IDS[::-1].reshape(4, 2), jnp.arange(128.0).reshape(16, 8)
    with jax.set_mesh(MESH):
        y = (
            sx.shard_jit(lambda x: sx.shard(x, order), mesh=MESH) if inside else lambda x: sx.shard(x, order)
        )(x)
    first = next(s for s in y.addressable_shards if s.index == (slice(0, 4), slice(0, 4)))
    assert first.device.id == (0 if inside else 7)
    np.testing.assert_array_equal(x, y)


def test_a_count_that_several_axes_have():
    with (
        jax.set_mesh(THREE),
        pytest.raises(ValueError, match=r"\('a',\) and \('b',\) and \('c',\) have so many devices"),
    ):
        sx.split(jnp.zeros((16, 8)), 0, 2)


def test_no_mesh():
    with pytest.raises(ValueError, match="no mesh in context"):
        sx.split(jnp.zeros(8), 0, 2)
