"""Reading the annotations of a global program: our own `annotate` and JAX's `with_sharding_constraint`
alike.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardax import _jax
from shardax.annotations.annotate import Role, dims_of_entries
from shardax.annotations.user_mesh import UserMesh
from shardax.graph.graph import Node
from shardax.sharding import NOTHING_OWED, Axes, Owing, Sharding, from_spec, owing_of


@dataclass(frozen=True, slots=True)
class Annotation:
    """What an annotation says: `dims`, for each dim its axes, or None where it is open; `source`, the words
    that messages use; its `role`; `like`, the number of the argument that a result succeeds; `mesh`, whose
    axes they are (None: the program's); `on`, once all axes are the program's, the mesh that the user named,
    if another; `owing`, of which reductions the value is to be pending.
    """

    dims: tuple[Axes | None, ...]
    source: str
    role: Role
    like: int | None = None
    mesh: Mesh | AbstractMesh | None = None
    on: UserMesh | None = None
    owing: Owing = NOTHING_OWED

    @property
    def names_axes(self) -> bool:
        return any(self.dims) or bool(self.owing)

    @property
    def sharding(self) -> Sharding:
        """What it requests, open dims unsplit."""
        return Sharding(tuple(axes or () for axes in self.dims), self.owing)

    @property
    def is_inside(self) -> bool:
        """Whether the value has that sharding from then on."""
        return self.role in ("inside", "state")

    @property
    def is_of_result(self) -> bool:
        """Whether it is from out_shardings, so that the result has to be on that very mesh."""
        return self.role == "result"

    @property
    def at_rest(self) -> Owing:
        """What a result owes at rest. Only what names a result makes it owe: where the mesh is not known to
        have Explicit axes, an array can owe nothing.
        """
        return self.owing if self.role in ("result", "type") else NOTHING_OWED


def among(nodes: Iterable[Node]) -> Iterator[tuple[Node, Annotation]]:
    """The annotations among these nodes, each with its node, which has one operand and one result."""
    for node in nodes:
        if (annotation := of_node(node)) is not None:
            yield node, annotation


def of_node(node: Node) -> Annotation | None:
    """What a node says about its result, None if it is not an annotation."""
    name = node.primitive.name
    if name == "annotate":
        params = (
            node.params if not node.callers else {**node.params, "like": None}
        )  # an inlined program has other inputs
        return Annotation(**params)
    if name == "sharding_constraint" or name == "reshard" and _names_axes(node.params["dst_sharding"]):
        sharding, rank = node.params[_SHARDING_PARAM[name]], len(node.outputs[0].shape)
        return of_sharding(sharding, _USER_NAME[name], rank, node.line)
    return None


def of_equation(eqn) -> Annotation | None:
    """What an equation of a jaxpr requests of its result, None if it is not an annotation."""
    name = eqn.primitive.name
    if name == "annotate":
        return Annotation(**eqn.params)
    if name in _SHARDING_PARAM:
        return Annotation(**as_annotation(eqn))
    return None


def renames(node: Node) -> bool:
    """Whether a node is an annotation of an argument or result, which may still be read in the other
    layouts that it has.

    What is annotated inside has that sharding from then on: who annotates an activation means it to be
    computed on, and kept, so.
    """
    note = of_node(node)
    return note is not None and not note.is_inside and not node.inputs[0].is_literal


_OF_SHARDINGS = {"sharding", "dst_sharding", "in_shardings", "out_shardings", "devices"}


def shardings_of(eqn) -> Iterator[NamedSharding]:
    """The shardings that an equation of JAX's own brings with it, each with its mesh."""
    if eqn.primitive.name == "shard_map":
        yield NamedSharding(eqn.params["mesh"], PartitionSpec())
    for name in _OF_SHARDINGS & eqn.params.keys():
        value = eqn.params[name]
        for sharding in value if isinstance(value, tuple) else (value,):
            if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
                yield sharding


def meshes_of(eqn) -> Iterator[Mesh | AbstractMesh]:
    """The meshes whose axes an equation names: for its own annotation or, a jit, shard_jit or shard_map, for
    what is in it.
    """
    if eqn.primitive.name in ("annotate", "shard_jit", "shard_map") and eqn.params["mesh"] is not None:
        yield eqn.params["mesh"]
    yield from (sharding.mesh for sharding in shardings_of(eqn) if _names_axes(sharding))


def _names_axes(sharding: NamedSharding) -> bool:
    requested = from_spec(sharding.spec, len(sharding.spec))
    return bool(requested.axes or requested.owing)


def name_of(eqn) -> str:
    """What the user calls the annotation that an equation is."""
    return _USER_NAME.get(eqn.primitive.name) or eqn.primitive.name


def as_annotation(eqn) -> dict[str, Any]:
    """The parameters of the `annotate` that says the same as a with_sharding_constraint or reshard."""
    name, rank = eqn.primitive.name, len(eqn.outvars[0].aval.shape)
    annotation = of_sharding(
        eqn.params[_SHARDING_PARAM[name]], name_of(eqn), rank, _jax.user_line(eqn.source_info)
    )
    return {
        "dims": annotation.dims,
        "source": annotation.source,
        "role": annotation.role,
        "like": None,
        "mesh": annotation.mesh,
        "owing": annotation.owing,
    }


_SHARDING_PARAM = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
_USER_NAME = {"sharding_constraint": "with_sharding_constraint", "reshard": "reshard"}


def of_sharding(sharding: NamedSharding, name: str, rank: int, line: str) -> Annotation:
    """A sharding of JAX's own as an annotation, which messages call `name` at `line`."""
    dims = dims_of_entries(sharding.spec)
    role = "inside" if name == _USER_NAME["sharding_constraint"] else "implied"
    full, owing = dims + ((),) * (rank - len(dims)), owing_of(sharding.spec)
    return Annotation(full, f"{name} at {line}", role, mesh=sharding.mesh, owing=owing)
