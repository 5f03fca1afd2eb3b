"""What moves an argument or result between the program's mesh and one that does not fit it: who sends to whom."""

import jax
import numpy as np
import pytest

from shardax.annotations.user_mesh import UserMesh
from shardax.meshes.crossing import crossings, program_placement
from shardax.meshes.refinement import Placement, refinement
from shardax.sharding import Sharding
from tests.graphs import auto_mesh

pytestmark = pytest.mark.quick

PROGRAM = auto_mesh(x=2, y=3)
SIX, OTHER = UserMesh((("x", 2), ("y", 3)), None, PROGRAM), UserMesh((("x", 3), ("y", 2)))
REVERSED = UserMesh((("x", 2), ("y", 3)), (5, 4, 3, 2, 1, 0))
X, Y, BOTH, NO = ("x",), ("y",), ("x", "y"), ()


def crossing(side, there, dims, shape=(6, 12), dtype="float32"):
    refined = refinement([SIX, there])
    aval, placement = jax.ShapeDtypeStruct(shape, dtype), Placement(there, Sharding(dims))
    (found,) = crossings(side, [aval], [placement], refined)
    return found


def held(mesh, dims, device) -> list[int]:
    """The blocks of each dim that a device holds, by its number in the program's mesh."""
    places = list(range(6) if mesh.places is None else mesh.places)
    at = dict(
        zip(mesh.sizes, np.unravel_index(places.index(device), tuple(mesh.sizes.values())), strict=True)
    )
    found = []
    for dim in dims:
        number = 0
        for axis in dim:
            number = number * mesh.sizes[axis] + int(at[axis])
        found.append(number)
    return found


def held_here(found, device):
    return held(UserMesh(tuple(found.refinement.sizes.items())), found.sharding.dims, device)


@pytest.mark.parametrize("side", ["argument", "result"])
@pytest.mark.parametrize("there", [OTHER, REVERSED], ids=["other", "reversed"])
@pytest.mark.parametrize("dims", [(X, NO), (NO, X), (Y, X), (BOTH, NO), (NO, ("y", "x"))])
def test_every_device_gets_its_block(side, there, dims):
    found = crossing(side, there, dims)
    assert sorted(b for _, b in found.pairs) == sorted(a for a, _ in found.pairs) == list(range(6))
    for sender, receiver in found.pairs:
        a, b = (sender, receiver) if side == "argument" else (receiver, sender)
        assert held(there, dims, a) == held_here(found, b)


def test_who_has_the_block_keeps_it():
    """The example of the module: 0 and 5 keep theirs."""
    kept = [a for a, b in crossing("argument", OTHER, (X, NO)).pairs if a == b]
    assert kept == [0, 5]


def test_nothing_is_sent_of_what_is_whole_or_empty():
    assert not crossing("argument", OTHER, (NO, NO)).sends
    assert not crossing("argument", OTHER, (X, NO), shape=(0, 12)).sends
    assert crossing("argument", OTHER, (X, NO)).sends


def test_only_what_does_not_fit_crosses():
    fitting = UserMesh((("z", 6),))
    refined = refinement([SIX, OTHER, fitting])
    rests = [Placement(mesh, Sharding(((),))) for mesh in (SIX, OTHER, fitting)]
    avals = [jax.ShapeDtypeStruct((6,), "float32")] * 3
    assert [found.number for found in crossings("argument", avals, rests, refined)] == [1]


def test_where_it_crosses():
    """In the compiled program only arguments whose devices are in the program's order."""
    sides = [(side, there) for side in ("argument", "result") for there in (OTHER, REVERSED)]
    assert [crossing(side, there, (X, NO)).outside for side, there in sides] == [False, True, True, True]


@pytest.mark.parametrize("side, toward", [("argument", "from"), ("result", "to")])
def test_the_plan_tells_of_it(side, toward):
    found = crossing(side, OTHER, (X, NO))
    (sent,) = found.collectives(PROGRAM, "state/w")
    assert found.shard == (2, 12)
    assert (sent.kind, sent.nbytes, sent.devices) == ("ppermute", 2 * 12 * 4, 4)
    assert sent.reason == f"{side} state/w {toward} P('x') on (x=3, y=2)"
    assert found.reason() == f"{side} #0 {toward} P('x') on (x=3, y=2)"
    assert crossing(side, OTHER, (NO, NO)).collectives(PROGRAM) == ()


def test_of_random_keys_their_words_cross():
    keys = jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl="threefry2x32"), *words((6, 12, 2)))
    found = crossing("argument", OTHER, (X, NO), dtype=keys.dtype)
    assert (found.shape, found.dtype, found.shard) == ((6, 12, 2), np.dtype("uint32"), (2, 12, 2))
    assert program_placement(found, 2).sharding.rank == 2


def words(*shapes):
    return [jax.ShapeDtypeStruct(shape, "uint32") for shape in shapes]


def test_the_program_sees_it_on_its_own_mesh_if_that_has_a_spec():
    split = crossing("argument", OTHER, (X, NO))
    assert program_placement(split, 2).mesh == SIX
    assert str(program_placement(split, 2).sharding) == "P('y', None)"
    part = UserMesh((("x", 2), ("y", 2)))
    four = UserMesh((("z", 4),), None, auto_mesh(z=4))
    refined = refinement([four, part, UserMesh((("a", 2), ("b", 2)), (3, 2, 1, 0))])
    rests = [Placement(refined.meshes[2], Sharding((("a",),)))]
    (halved,) = crossings("argument", [jax.ShapeDtypeStruct((4,), "float32")], rests, refined)
    assert program_placement(halved, 1).mesh != four
    assert program_placement(halved, 1).mesh.sizes == dict(refined.sizes)
