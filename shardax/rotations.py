"""Finds rotations in a graph: `jnp.roll` and its gradient, which JAX writes as slices put together the other way round.

    concatenate(x[k:], x[:k])              jnp.roll(x, -k), rotating buffers of a pipeline
    pad(x[:-k], low k) + pad(x[-k:])       their transpose

Each becomes one `rotate` node, which sends a shard's rows once: as slices and a concatenation they would be two shifts, with
what goes around the end in sums over all devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax import lax
from jax.extend.core import Primitive

from shardax.graph import Graph, Node, Value

rotate_p = Primitive("rotate")
"""rotate x: row r of the result, along dim `dim`, is row r + `first` of x, counted around its end."""


@rotate_p.def_impl
def rotated(x, *, dim: int, first: int):
    size = x.shape[dim]
    return lax.concatenate([lax.slice_in_dim(x, first, size, axis=dim), lax.slice_in_dim(x, 0, first, axis=dim)], dim)


def with_rotations(graph: Graph) -> Graph:
    """The graph and its bodies with `rotate` nodes for what rotates."""
    makers = {value: node for node in graph.nodes for value in node.outputs}
    found = {node: rotation for node in graph.nodes if (rotation := _rotation(node, makers))}
    for node in graph.nodes:
        for body in node.bodies:
            with_rotations(body)
    graph.nodes = [_rotate(node, found[node]) if node in found else node for node in graph.nodes]
    return graph


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows `start` to before `stop` of dim `dim` of a value."""

    value: Value
    dim: int
    start: int
    stop: int


Makers = dict[Value, Node]


def _rotation(node: Node, makers: Makers) -> tuple[Value, int, int] | None:
    """(value, dim, first) where a node's result is a rotation of the value."""
    parts = _placed_parts(node, makers)
    if len(parts) != 2 or None in parts:
        return None
    one, two = sorted((p for p in parts if p), key=lambda p: p[0])
    (_, first), (place, last) = one, two
    size = first.value.shape[first.dim]
    around = (first.value, first.dim, last.start, last.stop) == (last.value, last.dim, 0, first.start)
    whole = first.stop == size and place == size - first.start and 0 < first.start < size
    return (first.value, first.dim, first.start) if around and whole and one[0] == 0 else None


def _placed_parts(node: Node, makers: Makers) -> Sequence[tuple[int, _Part] | None]:
    """(row of the result, part) of the two parts that a node puts side by side."""
    if node.name == "concatenate" and len(node.inputs) == 2:
        one, two = (_part(v, makers) for v in node.inputs)
        if one and two and one.dim == two.dim == node.params["dimension"]:
            return [(0, one), (one.stop - one.start, two)]
    if node.name in ("add_any", "add"):
        return [_padded_part(v, makers) for v in node.inputs]
    return []


def _padded_part(value: Value, makers: Makers) -> tuple[int, _Part] | None:
    """The part of a value that stands among zeros, and from where on."""
    pad = makers.get(value)
    if pad is None or pad.name != "pad" or not pad.inputs[1].is_literal or pad.inputs[1].literal != 0:
        return None
    part = _part(pad.inputs[0], makers)
    config = pad.params["padding_config"]
    if part is None or any(inner or ((low or high) and d != part.dim) for d, (low, high, inner) in enumerate(config)):
        return None
    low, high, _ = config[part.dim]
    return (low, part) if low >= 0 and high >= 0 and value.shape == part.value.shape else None


def _part(value: Value, makers: Makers) -> _Part | None:
    node = makers.get(value)
    if node is None or node.name not in ("slice", "split"):
        return None
    return _sliced(node) if node.name == "slice" else _split_off(node, value)


def _sliced(node: Node) -> _Part | None:
    (x,), params = node.inputs, node.params
    cut = [d for d, (n, k) in enumerate(zip(x.shape, node.outputs[0].shape, strict=True)) if n != k]
    strides = params["strides"] or (1,) * len(x.shape)
    if len(cut) != 1 or strides[cut[0]] != 1:
        return None
    return _Part(x, cut[0], params["start_indices"][cut[0]], params["limit_indices"][cut[0]])


def _split_off(node: Node, value: Value) -> _Part:
    sizes, i = node.params["sizes"], node.outputs.index(value)
    start = sum(sizes[:i])
    return _Part(node.inputs[0], node.params["axis"], start, start + sizes[i])


def _rotate(node: Node, rotation: tuple[Value, int, int]) -> Node:
    value, dim, first = rotation
    return replace(node, primitive=rotate_p, params={"dim": dim, "first": first}, inputs=[value])
