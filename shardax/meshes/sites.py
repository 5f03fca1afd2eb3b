"""Rewrites the annotations of a program, each in the axes of a mesh of its own, to the one mesh that the
program runs on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardax import _jax
from shardax.annotations.annotate import Dims, annotate_p, bind_annotation, check_devices
from shardax.annotations.explicit import memory_of, shape_of
from shardax.annotations.user_mesh import UserMesh, user_mesh
from shardax.graph import annotations
from shardax.graph.annotations import Annotation
from shardax.graph.equations import equations_of, map_equations
from shardax.graph.graph import Graph, Node
from shardax.graph.inline import Own
from shardax.meshes.refinement import Placement, Refinement
from shardax.sharding import Axes, Sharding, entry_axes, from_spec, in_mesh_order, rows_apart

AnyMesh = Mesh | AbstractMesh


@dataclass(frozen=True, slots=True)
class Site:
    """A node that names axes, with its parameters as the user's program has them; `annotation` where it is
    one.
    """

    node: Node
    params: Mapping[str, Any]
    mesh: UserMesh
    annotation: Annotation | None = None


def sites(graph: Graph, mesh: AnyMesh) -> list[Site]:
    """The annotations, islands, what is named in islands, and custom partitionings, in program order.

    Raises:
      ValueError: an annotation is on a mesh that has other devices than the program's.
    """
    return list(_sites(graph, mesh, None))


def program_mesh(mesh: AnyMesh) -> UserMesh:
    """The program's own mesh, as a mesh that the user named."""
    return UserMesh(tuple(mesh.shape.items()), None, mesh)


def _sites(graph: Graph, mesh: AnyMesh, island: UserMesh | None) -> Iterator[Site]:
    """`island` is the mesh of the shard_map around, whose axes collectives name."""
    for node in graph.nodes:
        own = _own_mesh(mesh, node.params["mesh"]) if node.name == "shard_map" else island
        for body in node.bodies:
            yield from _sites(body, mesh, own)
        if (annotation := annotations.of_node(node)) is not None:
            yield Site(node, node.params, _mesh_of(node, annotation, mesh), annotation)
        elif own is not None and (node.name == "shard_map" or named_axes(node.params)):
            yield Site(node, node.params, own)
        elif node.name == "custom_partitioning":
            yield Site(node, node.params, program_mesh(mesh))


def _mesh_of(node: Node, annotation: Annotation, mesh: AnyMesh) -> UserMesh:
    """The mesh whose axes an annotation names: its own, else that of the innermost shard_jit around it, else
    the program's.
    """
    called = next((e.params["mesh"] for e in node.callers if e.primitive.name == "shard_jit"), mesh)
    own = called if annotation.mesh is None else annotation.mesh
    if own is mesh or not annotation.names_axes and not annotation.is_of_result:
        return program_mesh(mesh)
    if user_mesh(own, mesh) is None:
        check_devices(
            own,
            annotation.sharding.spec,
            mesh,
            f"{annotation.source} asks for a sharding",
        )
    named = _own_mesh(mesh, own)
    return (
        named if annotation.names_axes or named.places else program_mesh(mesh)
    )  # what is replicated is so in any axes


def _own_mesh(mesh: AnyMesh, own: AnyMesh) -> UserMesh:
    """A mesh over the program's devices as one that the user named; the program's own if it is that."""
    named, program = user_mesh(own, mesh), program_mesh(mesh)
    assert named is not None
    return program if named == program else named


def refined_mesh(mesh: AnyMesh, refinement: Refinement, concrete: bool = False) -> Any:
    """The program's mesh with the refined axes: an AbstractMesh, unless `concrete`."""
    if refinement.is_trivial:
        return mesh if concrete or isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    axes, sizes = tuple(refinement.sizes), tuple(refinement.sizes.values())
    types = (AxisType.Auto,) * len(sizes)
    if isinstance(mesh, AbstractMesh):
        return mesh.update(sizes, axes, types)
    refined = Mesh(mesh.devices.reshape(sizes), axes, axis_types=types)
    return refined if concrete else refined.abstract_mesh


@_jax.weakly_cached
def others(jaxpr, mesh: AnyMesh) -> tuple[UserMesh, ...]:
    """The meshes besides the program's that the annotations in a jaxpr name, and that have its devices."""
    meshes = (user_mesh(own, mesh) for own in dict.fromkeys(_own_meshes(jaxpr, set())) if own is not mesh)
    return tuple(other for other in dict.fromkeys(meshes) if other not in (None, program_mesh(mesh)))


def _own_meshes(jaxpr, seen: set[int]) -> Iterator[AnyMesh]:
    for eqn in jaxpr.eqns:
        yield from annotations.meshes_of(eqn)
        for body in jaxprs_in_params(eqn.params):
            if id(body) not in seen:
                seen.add(id(body))
                yield from _own_meshes(body, seen)


def settled(jaxpr, mesh: AnyMesh):
    """The jaxpr with JAX's own annotations as ours where their meshes have the program's devices in another
    order: `jax.jit` looks into programs for shardings, and takes those of one order only.

    Raises:
      OtherDevices: a mesh has other devices than the program's.
    """

    def change(eqn):
        if eqn.primitive is annotate_p:
            return _checked(eqn, mesh)
        shardings = list(annotations.shardings_of(eqn))
        meshes = [user_mesh(sharding.mesh, mesh) for sharding in shardings]
        if all(m is not None and not m.places for m in meshes):
            return eqn
        island = eqn.primitive.name == "shard_map"
        verb = "has shards" if island else "asks for a sharding"
        words = f"{annotations.name_of(eqn)} at {_jax.user_line(eqn.source_info) or 'an unknown line'} {verb}"
        for sharding in shardings:
            check_devices(sharding.mesh, None if island else sharding.spec, mesh, words)
        return _IN_ORDER[eqn.primitive.name](eqn)

    return map_equations(jaxpr, lambda eqns: list(map(change, eqns)))


def _checked(eqn, mesh: AnyMesh):
    """An annotation of our own, which may be on a mesh of the program's devices in any order."""
    own = eqn.params["mesh"]
    if own is not None:
        spec, line = Annotation(**eqn.params).sharding.spec, _jax.user_line(eqn.source_info)
        check_devices(
            own, spec, mesh, f"{eqn.params['source']} at {line or 'an unknown line'} asks for a sharding"
        )
    return eqn


def _annotation_in_order(eqn):
    return eqn.replace(primitive=annotate_p, params=annotations.as_annotation(eqn))


def _island_in_order(eqn):
    """An island over an abstract mesh: what it computes depends only on the places on its mesh, not on
    devices.
    """
    return eqn.replace(params={**eqn.params, "mesh": eqn.params["mesh"].abstract_mesh})


def _jit_in_order(eqn):
    """A jit inside, whose shardings become annotations in its body."""
    jaxpr, line = eqn.params["jaxpr"], _jax.user_line(eqn.source_info)

    def run(*args):
        outs = jaxpr_as_fun(jaxpr)(*_annotated(args, eqn.params["in_shardings"], "jit in_shardings", line))
        return _annotated(outs, eqn.params["out_shardings"], "jit out_shardings", line)

    unspecified = {
        side: (_jax.UNSPECIFIED,) * len(eqn.params[side]) for side in ("in_shardings", "out_shardings")
    }
    return eqn.replace(
        params={**eqn.params, **unspecified, "jaxpr": jax.make_jaxpr(run)(*map(shape_of, jaxpr.in_avals))}
    )


def _put_in_order(eqn):
    """A device_put of any number of arrays, as a jit of annotations; what moves to another memory does so
    after them.
    """
    line, memories = _jax.user_line(eqn.source_info), [memory_of(v.aval) for v in eqn.outvars]

    def run(*args):
        placed = _annotated(args, eqn.params["devices"], "device_put", line)
        return [
            x if memory_of(jax.typeof(x)) is m else jax.device_put(x, m)
            for x, m in zip(placed, memories, strict=True)
        ]

    (jitted,) = jax.make_jaxpr(jax.jit(run))(*(shape_of(v.aval) for v in eqn.invars)).eqns
    return eqn.replace(primitive=jitted.primitive, params=jitted.params)


def _annotated(xs, shardings, words: str, line: str):
    requests = [
        annotations.of_sharding(s, words, x.ndim, line) if isinstance(s, NamedSharding) else None
        for x, s in zip(xs, shardings, strict=True)
    ]
    return [
        x if g is None else bind_annotation(x, g.dims, g.source, g.role, mesh=g.mesh, owing=g.owing)
        for x, g in zip(xs, requests, strict=True)
    ]


_IN_ORDER = {
    "device_put": _put_in_order,
    "jit": _jit_in_order,
    "pjit": _jit_in_order,
    "reshard": _annotation_in_order,
    "shard_map": _island_in_order,
    "sharding_constraint": _annotation_in_order,
}


def rewrite(named: Sequence[Site], refinement: Refinement) -> None:
    """Rewrites the nodes so that they name refined axes. Nodes that call the user's functions also get
    the axes that the user knows.
    """
    for site in named:
        if site.node.name == "custom_partitioning":
            own = Own(site.params["call"].jaxpr)
            site.node.params = {**site.params, "call": own, "on": (site.mesh.mesh, refinement)}
        elif site.annotation is not None:
            dims = _needed(site, refinement)
            if dims != site.annotation.dims or not refinement.is_trivial:
                site.node.primitive = annotate_p
                site.node.params = _annotation(site.annotation, dims, site.mesh, refinement)
        elif refinement.is_trivial:
            continue
        elif site.node.name == "shard_map":
            site.node.params = _island(site, refinement)
        else:
            site.node.params = _collective(site.params, site.mesh, refinement)


def _annotation(annotation: Annotation, dims: Dims, mesh: UserMesh, refinement: Refinement) -> dict[str, Any]:
    words = annotation.source if mesh == refinement.program else f"{annotation.source} on {mesh}"
    return {
        "dims": dims,
        "source": words,
        "role": annotation.role,
        "like": annotation.like,
        "mesh": None,
        "on": mesh,
        "owing": refinement.refined_owing(annotation.owing, mesh),
    }


def _needed(site: Site, refinement: Refinement) -> Dims:
    """The refined axes of an annotation. Of those of a dim, the first that split it into single rows are
    enough.

    Over the other axes its rows are replicated, for else devices would be without any. What names a result
    stays as it is.
    """
    assert site.annotation is not None
    dims, shape = refinement.refined(site.annotation.dims, site.mesh), site.node.outputs[0].shape
    if site.annotation.is_of_result or site.annotation.like is not None:
        return dims
    return tuple(axes and rows_apart(axes, n, refinement.sizes) for axes, n in zip(dims, shape, strict=True))


def _island(site: Site, refinement: Refinement) -> dict[str, Any]:
    mesh = refined_mesh(site.params["mesh"], refinement)

    def refined(spec):
        return refinement.sharding(Placement(site.mesh, from_spec(spec, len(spec)))).spec

    specs = {side: tuple(map(refined, site.params[side])) for side in ("in_specs", "out_specs")}
    manual = {sub for axis in site.params["newly_manual_axes"] for sub in refinement.axes[site.mesh][axis]}
    return {**site.params, **specs, "mesh": mesh, "newly_manual_axes": frozenset(manual)}


def in_refined_axes(jaxpr, refinement: Refinement):
    """A jaxpr over shards that names axes of the program's own mesh, rewritten to the refined ones."""

    def change(eqn) -> list[Any]:
        params = (
            _collective(eqn.params, refinement.program, refinement) if named_axes(eqn.params) else eqn.params
        )
        if eqn.primitive.name != "axis_index" or len(params["axis_name"]) == 1:
            return [eqn.replace(params=params)]
        with _jax.axes_in_scope(refinement.sizes):
            return equations_of(lambda: lax.axis_index(params["axis_name"]), [], eqn.outvars, eqn)

    if refinement.is_trivial:
        return jaxpr
    return map_equations(jaxpr, lambda eqns: [new for eqn in eqns for new in change(eqn)])


def _collective(params: Mapping[str, Any], mesh: UserMesh, refinement: Refinement) -> dict[str, Any]:
    """A collective, or index, of shards. The pairs of a ppermute count devices in the order of the mesh,
    whatever the order in which it names axes."""
    axes = refinement.axes[mesh]
    if "perm" not in params:
        return {**params, **{k: _renamed(v, axes) for k, v in named_axes(params).items()}}
    ordered = sorted(entry_axes(params["axis_name"]), key=list(axes).index)
    axes, pairs = in_mesh_order(_renamed(tuple(ordered), axes), params["perm"], refinement.sizes)
    return {**params, "axis_name": axes, "perm": tuple(pairs)}


def named_axes(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a collective that name axes."""
    named = {k: params[k] for k in ("axes", "axis_name") if k in params}
    return {
        k: v
        for k, v in named.items()
        if any(isinstance(a, str) for a in (v if isinstance(v, tuple | list) else (v,)))
    }


def _renamed(axis_name, axes: Mapping[str, Axes]) -> Axes:
    return tuple(sub for name in entry_axes(axis_name) for sub in axes.get(name, (name,)))


def placements(
    graph: Graph,
    committed: Sequence[Placement | None],
    named: Sequence[Site],
    refinement: Refinement,
):
    """How each argument rests: as it is committed, else nearest to its annotation; None where no sharding
    is requested.
    """
    rest = dict(zip(graph.inputs, committed, strict=True))
    inputs = set(graph.inputs)
    for site in named:
        note, value = site.annotation, site.node.inputs[0] if site.annotation else None
        if value in inputs and rest[value] is None and note is not None and None not in note.dims:
            dims = refinement.refined(note.dims, site.mesh)  # it comes in owing nothing, and is made to owe
            rest[value] = refinement.rest(Sharding(dims), value.shape, site.mesh)  # type: ignore[arg-type, union-attr]
    return [rest[v] for v in graph.inputs]
