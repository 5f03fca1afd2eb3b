"""The common refinement of meshes: the same blocks on the same devices, in finer axes."""

import itertools
import math

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardax.annotations.user_mesh import UserMesh
from shardax.meshes.refinement import Placement, refinement
from shardax.sharding import Sharding, from_spec
from tests.graphs import auto_mesh

pytestmark = pytest.mark.quick


def mesh(places=None, **sizes) -> UserMesh:
    return UserMesh(tuple(sizes.items()), places)


A, B, FLAT, THREE = mesh(x=2, y=4), mesh(x=4, y=2), mesh(z=8), mesh(a=2, b=2, c=2)
TRANSPOSED = mesh((0, 4, 1, 5, 2, 6, 3, 7), p=4, q=2)
REVERSED = mesh((7, 6, 5, 4, 3, 2, 1, 0), x=2, y=4)
SIX, OTHER_SIX = mesh(x=2, y=3), mesh(x=3, y=2)
FITTING = [(A, B), (B, A), (A, FLAT), (FLAT, A), (THREE, A), (A, TRANSPOSED), (A, B, FLAT, THREE)]


def blocks(dims, axes) -> list[tuple[int, ...]]:
    """Which block each device holds. `axes`: for each axis the position of each device along it, and its
    size.
    """

    def number(dim, device):
        found = 0
        for axis in dim:
            positions, size = axes[axis]
            found = found * size + positions[device]
        return found

    count = len(next(iter(axes.values()))[0])
    return [tuple(number(dim, device) for dim in dims) for device in range(count)]


def positions(found: UserMesh) -> dict:
    """Of the devices, by their number in the program's mesh, along each axis."""
    shape = tuple(found.sizes.values())
    at = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape))
    places = range(math.prod(shape)) if found.places is None else found.places
    order = np.argsort(list(places))
    return {axis: (at[i][order].tolist(), n) for i, (axis, n) in enumerate(found.axes)}


def in_two_dims(names):
    """Some ways to split two dims over axes."""
    for order in itertools.permutations(names):
        for cut in range(len(order) + 1):
            yield order[:cut], order[cut:]


@pytest.mark.parametrize("meshes", FITTING, ids=lambda meshes: " and ".join(map(str, meshes)))
def test_refined_axes_cut_the_same_blocks(meshes):
    both = refinement(meshes)
    refined = positions(UserMesh(tuple(both.sizes.items())))
    assert not both.boundaries
    for own in meshes:
        for dims in in_two_dims(own.sizes):
            assert blocks(dims, positions(own)) == blocks(both.refined(dims, own), refined)


def test_names():
    """A refined axis is called after an axis that it is, else after the part of the program's."""
    assert dict(refinement([A, B]).sizes) == {"x": 2, "y.0": 2, "y.1": 2}
    assert dict(refinement([FLAT, mesh(a=2, b=4)]).sizes) == {"a": 2, "b": 4}
    assert dict(refinement([A]).sizes) == {"x": 2, "y": 4}
    assert dict(refinement([A, THREE]).sizes) == {"x": 2, "b": 2, "c": 2}


def test_folded():
    both = refinement([A, FLAT])
    assert [both.folded(axes) for axes in (("x", "y"), ("y", "x"), ("y",))] == [("z",), ("y", "x"), ("y",)]
    cut = refinement([A, B])
    assert cut.folded(("x", "y.0", "y.1")) == ("x", "y")
    assert cut.folded(("y.1",)) == ("y.1",)
    assert str(cut.shown(Sharding((("y.0", "y.1"), ())))) == "P('y', None)"


def test_open_dims_stay_open():
    assert refinement([A, B]).refined([("x",), None], B) == (("x", "y.0"), None)


def test_what_does_not_fit_is_a_boundary():
    for own, other in ((SIX, OTHER_SIX), (A, REVERSED)):
        both = refinement([own, other])
        assert both.boundaries == {other}
        assert not both.may_rest_on(other) and both.may_rest_on(own)
        for axis, size in other.axes:
            (dim,) = both.refined([(axis,)], other)
            assert math.prod(both.sizes[a] for a in dim) == size


def test_devices_in_another_order_keep_nothing():
    assert refinement([A, TRANSPOSED]).may_rest_on(TRANSPOSED) is False
    assert refinement([A, B]).may_rest_on(B)
    assert not refinement([A], of_arguments=[B]).may_rest_on(B)


def test_one_mesh_is_trivial():
    assert refinement([A, A]).is_trivial
    assert not refinement([A, B]).is_trivial
    assert not refinement([A]).cut([("y", 2)]).is_trivial


@pytest.mark.parametrize(
    "spec, shape, first, expected",
    [
        (P("x"), (8, 8), None, "P('x', None) on (x=2, y=4)"),
        (P(("x", "y.0")), (8, 8), None, "P('x', None) on (x=4, y=2)"),  # only there it has a spec
        (P("x"), (8, 8), B, "P('x', None) on (x=2, y=4)"),
        (P(None, "y.1"), (8, 8), B, "P(None, 'y') on (x=4, y=2)"),
        (P("y.0"), (8, 8), None, "P('y', None) on (x=2, y=4)"),  # half an axis has no spec: the whole
        (P("x"), (7, 8), None, "P(None, 'x') on (x=2, y=4)"),  # nothing divides 7
        (P(None), (8,), None, "P(None) on (x=2, y=4)"),
    ],
)
def test_how_values_rest(spec, shape, first, expected):
    placement = refinement([A, B]).rest(from_spec(spec, len(shape)), shape, first)
    assert f"{placement.sharding} on {placement.mesh}" == expected


def test_a_result_rests_across_where_it_has_to():
    both = refinement([SIX, OTHER_SIX])
    sharding = both.sharding(Placement(OTHER_SIX, Sharding((("x",), ()))))
    assert both.rest(sharding, (6, 6), OTHER_SIX).mesh == SIX
    across = both.rest(sharding, (6, 6), OTHER_SIX, across=True)
    assert (across.mesh, str(across.sharding)) == (OTHER_SIX, "P('x', None)")


def test_spelled_on_the_programs_mesh():
    both = refinement([A, B])
    assert str(both.spelled(Sharding((("y.0", "y.1"), ("x",))))) == "P('y', 'x')"
    assert both.spelled(Sharding((("y.0",),))) is None


def test_cut():
    one = refinement([mesh(x=32, y=2)])
    finer = one.cut([("x", 16)])
    assert dict(finer.sizes) == {"x.0": 16, "x.1": 2, "y": 2}
    assert dict(one.cut([("x", 5)]).sizes) == dict(one.sizes)  # it does not divide
    assert finer.folded(("x.0", "x.1")) == ("x",)


def test_on_the_users_own_mesh_else_on_one_like_it():
    program, own = auto_mesh(x=2, y=4), auto_mesh(x=4, y=2)
    split = Sharding((("x",),))
    assert Placement(A, split).on(program).mesh is program
    assert Placement(UserMesh(B.axes, None, own), split).on(program).mesh is own
    assert Placement(B, split).on(program).mesh == own
    assert Placement(B, split).on(program).spec == P("x")
