"""Annotations of several meshes, rewritten to the axes of the one that the program runs on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.graph import annotations
from shardax.meshes.refinement import Placement, refinement
from shardax.meshes.sites import (
    in_refined_axes,
    named_axes,
    others,
    placements,
    program_mesh,
    refined_mesh,
    rewrite,
    settled,
    sites,
)
from shardax.sharding import Sharding, entry_axes
from tests.graphs import auto_mesh, graph, the

pytestmark = pytest.mark.quick

A, B, SMALL = auto_mesh(x=2, y=4), auto_mesh(x=4, y=2), auto_mesh(z=4)


def on(mesh, *spec):
    return lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def found_in(f, *shapes):
    """The graph of a function, its sites, and the refinement of their meshes."""
    program = graph(f, *shapes)
    found = sites(program, A)
    return program, found, refinement([program_mesh(A), *(site.mesh for site in found)])


def notes(program):
    return [(str(note.dims), note.source) for _, note in annotations.among(program.walk())]


def test_annotations_with_their_meshes():
    f = lambda x: on(A, "x")(jnp.sin(on(B, None, "y")(x)))  # noqa: E731
    _, found, _ = found_in(f, (8, 8))
    assert [(str(site.mesh), site.annotation.dims) for site in found] == [
        ("(x=4, y=2)", ((), ("y",))),
        ("(x=2, y=4)", (("x",), ())),
    ]


@pytest.mark.parametrize("mesh", [B, SMALL])
def test_what_is_whole_is_so_on_any_mesh(mesh):
    _, found, _ = found_in(on(mesh), (8, 8))
    assert [site.mesh for site in found] == [program_mesh(A)]


def test_a_mesh_of_other_devices_is_refused():
    with pytest.raises(ValueError, match="with_sharding_constraint at .* asks for a sharding"):
        found_in(on(SMALL, "z"), (8, 8))


def test_what_an_island_names():
    island = jax.shard_map(
        lambda x: lax.psum(x, "x") * lax.axis_index("x").astype(x.dtype),
        mesh=B,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    _, found, _ = found_in(lambda x: island(x), (8, 8))
    names = [site.node.name for site in found]
    assert names[0] == "annotate" and names[-1] == "annotate"
    assert {"axis_index", "shard_map"} <= set(names) and any("psum" in name for name in names)
    assert {str(site.mesh) for site in found if site.annotation is None} == {"(x=4, y=2)"}


def test_rewritten():
    f = lambda x: on(A, "y")(jnp.sin(on(B, None, "x")(x)))  # noqa: E731
    program, found, both = found_in(f, (8, 8))
    rewrite(found, both)
    dims, sources = zip(*notes(program), strict=True)
    assert dims == ("((), ('x', 'y.0'))", "(('y.0', 'y.1'), ())")
    assert sources[0].endswith(" on (x=4, y=2)") and " on " not in sources[1]
    kept = [str(note.on) for _, note in annotations.among(program.nodes)]
    assert kept == ["(x=4, y=2)", "(x=2, y=4)"]  # the meshes that the user named


def test_a_trivial_refinement_leaves_the_nodes():
    program, found, same = found_in(on(A, "y"), (8, 8))
    rewrite(found, same)
    assert the("sharding_constraint", program).params["sharding"].spec == P("y")


def test_rows_that_are_fewer_than_devices_take_the_axes_that_they_need():
    f = lambda x: on(B, ("x", "y"))(x)  # noqa: E731
    program, found, both = found_in(f, (4, 8))
    rewrite(found, both)
    assert notes(program)[0][0] == "(('x', 'y.0'), ())"


def test_islands_run_on_the_refined_mesh():
    def ring(x):
        return lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)]) + lax.psum(x, ("x", "y"))

    f = jax.shard_map(ring, mesh=B, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    program, found, both = found_in(f, (8, 8))
    rewrite(found, both)
    island, sent = the("shard_map", program), the("ppermute", program)
    assert tuple(island.params["mesh"].shape.items()) == (("x", 2), ("y.0", 2), ("y.1", 2))
    assert island.params["in_specs"] == (P(("x", "y.0")),)
    assert sent.params["axis_name"] == ("x", "y.0")
    assert sent.params["perm"] == ((0, 1), (1, 2), (2, 3), (3, 0))
    (total,) = (node for node in program.walk() if node.name.startswith("psum"))
    assert set(total.params["axes"]) == {"x", "y.0", "y.1"}


def test_the_pairs_of_a_ppermute_count_in_the_order_of_the_mesh():
    pairs = [(i, (i + 1) % 8) for i in range(8)]
    ring = lambda x: lax.ppermute(x, ("y", "x"), pairs)  # noqa: E731
    f = jax.shard_map(ring, mesh=B, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    program, found, both = found_in(f, (8, 8))
    rewrite(found, both)
    params = the("ppermute", program).params
    assert (params["axis_name"], params["perm"]) == (("x", "y.0", "y.1"), tuple(pairs))


def test_named_axes():
    assert named_axes({"axes": ("x", 0)}) == {"axes": ("x", 0)}
    assert named_axes({"axis_name": "x", "perm": ()}) == {"axis_name": "x"}
    assert named_axes({"axes": (0, 1)}) == named_axes({"dimension": 0}) == {}


def test_programs_over_shards_in_refined_axes():
    both = refinement([program_mesh(A), program_mesh(B)])

    def shards(x):
        return lax.psum(x, "y") * lax.axis_index("y")

    made = jax.make_jaxpr(shards, axis_env=[("x", 2), ("y", 4)])(np.ones(3, "int32"))
    inner = in_refined_axes(made, both)
    assert inner.eqns[0].params["axes"] == ("y.0", "y.1")
    indices = [eqn.params["axis_name"] for eqn in inner.eqns if eqn.primitive.name == "axis_index"]
    assert sorted(axis for axes in indices for axis in entry_axes(axes)) == ["y.0", "y.1"]
    assert inner.eqns[-1].primitive.name == "mul" and inner.eqns[-1].outvars == inner.outvars
    assert in_refined_axes(made, refinement([program_mesh(A)])) is made


def test_the_refined_mesh():
    one, both = refinement([program_mesh(A)]), refinement([program_mesh(A), program_mesh(B)])
    assert refined_mesh(A, one) is A
    assert refined_mesh(A, both) == auto_mesh(**both.sizes)


def test_other_meshes_that_a_program_names():
    f = lambda x: jax.jit(on(B, "x"))(on(A, "y")(on(SMALL, "z")(x)))  # noqa: E731
    jaxpr = jax.make_jaxpr(f)(jax.ShapeDtypeStruct((8, 8), "float32")).jaxpr
    assert list(map(str, others(jaxpr, A))) == ["(x=4, y=2)"]
    assert list(map(str, others(jaxpr, B))) == ["(x=2, y=4)"]


def test_a_program_on_its_own_devices_is_settled():
    jaxpr = jax.make_jaxpr(on(B, "x"))(jax.ShapeDtypeStruct((8, 8), "float32"))
    assert [eqn.primitive.name for eqn in settled(jaxpr, A).eqns] == ["sharding_constraint"]
    elsewhere = jax.make_jaxpr(on(SMALL, "z"))(jax.ShapeDtypeStruct((8, 8), "float32"))
    with pytest.raises(ValueError, match="asks for a sharding"):
        settled(elsewhere, A)


def test_how_arguments_rest():
    """As they are committed, else nearest to their annotation, open dims aside."""
    OPEN = P.UNCONSTRAINED
    f = lambda a, b, c, d: (on(A, "x")(a), on(A, "x")(b), on(A, "x", OPEN)(c), d)  # noqa: E731
    program, found, same = found_in(f, (8, 8), (7, 8), (8, 8), (8, 8))
    rests = placements(program, [None] * 4, found, same)
    assert [p and str(p.sharding) for p in rests] == ["P('x', None)", "P(None, 'x')", None, None]
    own = Placement(program_mesh(A), Sharding(((), ("y",))))
    assert placements(program, [own, None, None, own], found, same)[::3] == [own, own]


def test_our_own_annotations_are_sites_too():
    with jax.sharding.use_abstract_mesh(A):
        _, found, _ = found_in(lambda x: sx.annotate(x, P("y")), (8, 8))
    assert [(site.annotation.role, site.mesh) for site in found] == [("inside", program_mesh(A))]
