"""Reading the annotations of a global program: our own `annotate` and JAX's `with_sharding_constraint` alike."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from shardax.graph import Node
from shardax.sharding import Axes, AxisSizes, entry_axes


@dataclass(frozen=True, slots=True)
class Annotation:
    """Per dim the axes, or None where it is open; the words that messages use; the input that a result succeeds."""

    dims: tuple[Axes | None, ...]
    source: str
    like: int | None = None


def among(nodes: Iterable[Node]) -> Iterator[tuple[Node, Annotation]]:
    """The annotations among these nodes; each has one operand and one result."""
    for node in nodes:
        if (given := of_node(node)) is not None:
            yield node, given


def of_node(node: Node) -> Annotation | None:
    """What a node says about its result, None if it is not an annotation."""
    if node.name == "annotate":
        like = None if node.callers else node.params["like"]  # an inlined program's inputs are not this one's
        return Annotation(node.params["dims"], node.params["source"], like)
    if node.name == "sharding_constraint" or node.name == "reshard" and any(map(entry_axes, node.params["dst_sharding"].spec)):
        return _of_spec(node.params[_SHARDING_PARAM[node.name]].spec, _NAMES[node.name], node)
    return None


def check_meshes(nodes: Iterable[Node], sizes: AxisSizes) -> None:
    """Whether JAX's own annotations are on the program's mesh.

    Raises:
      ValueError: one names axes of another.
    """
    for node in nodes:
        sharding = node.params.get(_SHARDING_PARAM.get(node.name, ""))
        if sharding is not None and any(map(entry_axes, sharding.spec)) and dict(sharding.mesh.shape) != dict(sizes):
            theirs, ours = (", ".join(f"{a}={n}" for a, n in shape.items()) for shape in (sharding.mesh.shape, sizes))
            raise ValueError(
                f"{_NAMES[node.name]} at {node.line or 'an unknown line'} asks for {sharding.spec} on the mesh ({theirs}), "
                f"but the program's mesh is ({ours}): name axes of that mesh. Programs on several meshes are not supported yet"
            )


_SHARDING_PARAM = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
_NAMES = {"sharding_constraint": "with_sharding_constraint", "reshard": "reshard"}


def _of_spec(spec: PartitionSpec, name: str, node: Node) -> Annotation:
    dims = tuple(None if entry is PartitionSpec.UNCONSTRAINED else entry_axes(entry) for entry in spec)
    return Annotation(dims + ((),) * (len(node.outputs[0].shape) - len(dims)), f"{name} at {node.line}")
