"""Reading the annotations of a global program: our own `annotate` and JAX's `with_sharding_constraint` alike."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from shardax.graph import Node
from shardax.sharding import Axes, entry_axes


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
    if node.name == "sharding_constraint":
        return _of_spec(node.params["sharding"].spec, "with_sharding_constraint", node)
    if node.name == "reshard" and any(map(entry_axes, node.params["dst_sharding"].spec)):
        return _of_spec(node.params["dst_sharding"].spec, "reshard", node)
    return None


def _of_spec(spec: PartitionSpec, name: str, node: Node) -> Annotation:
    dims = tuple(None if entry is PartitionSpec.UNCONSTRAINED else entry_axes(entry) for entry in spec)
    return Annotation(dims + ((),) * (len(node.outputs[0].shape) - len(dims)), f"{name} at {node.line}")
