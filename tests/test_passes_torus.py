"""Collectives over a whole torus as two: the same values, where the places of devices ask for it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardax import _jax
from shardax.passes import torus, tpu

AUTO = (AxisType.Auto,)


def places(*extents, order=None):
    """Of devices of a torus, row by row: its dims in this order, major to minor."""
    order = order or range(len(extents))
    rows = np.indices([extents[d] for d in order]).reshape(len(extents), -1).T
    return rows[:, np.argsort(order)]


@pytest.mark.quick
@pytest.mark.parametrize(
    "at, dims, expected",
    [
        (places(2, 2, 2), 3, (4, 2)),
        (places(4, 4, 4), 3, (16, 4)),
        (places(2, 4, 4), 3, (8, 4)),
        (places(2, 4, 8, order=(2, 0, 1)), 3, (16, 4)),
        (places(4, 4, 4)[:16], 3, None),  # a plane
        (places(2, 2, 1), 3, None),
        (places(4, 4), 2, (4, 4)),
        (places(2, 4), 2, None),
        (places(16, 16), 2, (16, 16)),
        (places(3, 3, 3), 3, (9, 3)),
        (np.array([[0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 1]]), 3, None),  # in no order
    ],
)
def test_devices_divided(at, dims, expected):
    assert torus.divided(at, dims) == expected


def mesh_of_eight():
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=AUTO * 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("major, minor", [(2, 4), (4, 2)])
def test_the_same_values(dtype, axes, dim, major, minor):
    def run(x):
        scattered = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return scattered, lax.all_gather(scattered + 1, axes, axis=dim, tiled=True)

    def change(jaxpr):
        eqns = [_jax.with_bodies(eqn, change) for eqn in _jax.closed(jaxpr).jaxpr.eqns]
        split = lambda e: torus.in_parts(e, major, minor) if e.primitive.name in torus.DIMS else [e]  # noqa: E731
        return _jax.replaced_eqns(jaxpr, [new for eqn in eqns for new in split(eqn)])

    spec = P(axes) if dim == 0 else P(None, axes)
    mapped = jax.shard_map(run, mesh=mesh_of_eight(), in_specs=P(), out_specs=(spec, P()), check_vma=False)
    x = jnp.arange(16.0 * 24).reshape(16, 24).astype(dtype) % 31
    changed = change(jaxpr := jax.make_jaxpr(mapped)(x))
    assert str(changed).count("axis_index_groups=((") == 4
    for got, want in zip(*(jax.jit(jaxpr_as_fun(j))(x) for j in (changed, jaxpr)), strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(want))


class Placed(jax.sharding.Mesh):
    """A mesh of chips that are not there."""

    def __new__(cls, *_):
        return object.__new__(cls)

    def __init__(self, kind, extents, others=1):
        devices = [SimpleNamespace(device_kind=kind, coords=tuple(at)) for at in places(*extents)]
        self.__dict__["placed"] = np.array(devices, object).reshape(-1, others)

    devices = property(lambda self: self.__dict__["placed"])
    axis_names = property(lambda self: ("x", "y"))
    shape = property(lambda self: dict(zip("xy", self.devices.shape, strict=True)))
    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


def groups(mesh, kind, rows=4096, count=8):
    """Of the one collective of a program that is lowered for this mesh, by how many devices each."""

    def run(x):
        if kind == "reduce_scatter":
            return lax.psum_scatter(x, "x", scatter_dimension=0, tiled=True)
        return lax.all_gather(x, "x", tiled=True)

    abstract = AbstractMesh((count, 1), ("x", "y"), axis_types=AUTO * 2)
    mapped = jax.shard_map(run, mesh=abstract, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    jaxpr = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((rows * count, 16), "float32"))
    (eqn,) = tpu.suited(jaxpr, mesh).eqns
    body = _jax.closed(eqn.params["jaxpr"]).jaxpr
    return [len(e.params["axis_index_groups"][0]) for e in body.eqns if e.params["axis_index_groups"]]


@pytest.mark.quick
def test_by_chip_size_and_place():
    cube, flat = Placed("TPU v5p", (2, 2, 2)), Placed("TPU v5 lite", (2, 4, 1))
    assert groups(cube, "reduce_scatter") == [4, 2]
    assert groups(flat, "reduce_scatter") == groups(Placed("cpu", (2, 2, 2)), "reduce_scatter") == []
    assert groups(cube, "reduce_scatter", rows=128) == []  # soon sent
    assert groups(cube, "all_gather") == []  # of few devices
    assert groups(Placed("TPU v4", (4, 4, 4)), "all_gather", count=64) == [4, 16]
    assert groups(Placed("TPU v4", (4, 4, 4), 2), "reduce_scatter", count=32) == []  # not all of them
    for nobody_knows in (None, AbstractMesh((8, 1), ("x", "y"), axis_types=AUTO * 2)):
        assert groups(nobody_knows, "reduce_scatter") == []
