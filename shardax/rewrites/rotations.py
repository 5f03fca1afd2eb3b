"""Finds rotations in a graph: `jnp.roll` and its gradient, which JAX writes as slices put together the other
way round.

    concatenate(x[k:], x[:k])              jnp.roll(x, -k), rotating buffers of a pipeline
    pad(x[:-k], low k) + pad(x[-k:])       their transpose
    concatenate(x[:k], x[k:])              x itself, rotated by nothing

Each becomes one `rotate` node, which sends a shard's rows once: as slices and a concatenation they would be
two shifts, with what goes around the end in sums over all devices. Where k is known when the program runs,
JAX writes a window of twice the array, and each becomes one `rotate_by` node:

    dynamic_slice(concatenate(x, x), k)    jnp.roll(x, -k)
    dynamic_update_slice(zeros, x, k)      its transpose: the two halves added
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardax.graph.affine import Makers
from shardax.graph.graph import Graph, Node, Value
from shardax.graph.primitives import rotate_by_p, rotate_p
from shardax.rewrites.rewrite import Context, Replacements, makers_of
from shardax.spmd_rules.registry import adds


def rotations(graph: Graph, context: Context) -> Replacements:
    """The `rotate` nodes for what rotates."""
    makers, new = makers_of(graph), {}
    for node in graph.nodes:
        parts, window = list[tuple[int, _Part] | None](), None
        if node.name == "concatenate":
            parts = _parts_in_a_row(node, makers)
        elif node.name == "dynamic_slice":
            window = _window_of_two(node, makers)
        elif adds(node):
            parts, window = [_padded_part(v, makers) for v in node.inputs], _sum_of_halves(node, makers)
        if rotation := _rotation(parts):
            value, dim, first = rotation
            params = {"dim": dim, "first": first}
            new[node] = [replace(node, primitive=rotate_p, params=params, inputs=[value])]
        elif window:
            value, first, dim, back = window
            params = {"dim": dim, "back": back}
            new[node] = [replace(node, primitive=rotate_by_p, params=params, inputs=[value, first])]
    return Replacements(new)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows `start` to before `stop` of dim `dim` of a value."""

    value: Value
    dim: int
    start: int
    stop: int


def _rotation(parts: Sequence[tuple[int, _Part] | None]) -> tuple[Value, int, int] | None:
    """(value, dim, first) where parts, side by side, are a rotation of the one value that they are all cut
    from.
    """
    if len(parts) < 2 or None in parts:
        return None
    placed = sorted((p for p in parts if p), key=lambda p: p[0])
    one, rows = placed[0][1], 0
    size, first = one.value.shape[one.dim], one.start
    for place, part in placed:
        if (part.value, part.dim, part.start) != (one.value, one.dim, (first + rows) % size) or place != rows:
            return None
        rows += part.stop - part.start
    return (one.value, one.dim, first) if rows == size else None


def _parts_in_a_row(node: Node, makers: Makers) -> list[tuple[int, _Part] | None]:
    """(row of the result, part) of the parts that a concatenation puts side by side."""
    dim, parts = node.params["dimension"], [_part(v, makers) for v in node.inputs]
    places = itertools.accumulate([0, *(v.shape[dim] for v in node.inputs[:-1])])
    return [(at, p) if p and p.dim == dim else None for at, p in zip(places, parts, strict=True)]


def _padded_part(value: Value, makers: Makers) -> tuple[int, _Part] | None:
    """The part of a value that stands among zeros, and the row at which it begins."""
    pad = makers.get(value)
    if pad is None or pad.name != "pad" or not pad.inputs[1].is_zero:
        return None
    part = _part(pad.inputs[0], makers)
    config = pad.params["padding_config"]
    if part is None or any(
        inner or ((low or high) and d != part.dim) for d, (low, high, inner) in enumerate(config)
    ):
        return None
    low, high, _ = config[part.dim]
    return (low, part) if low >= 0 and high >= 0 and value.shape == part.value.shape else None


def _part(value: Value, makers: Makers) -> _Part | None:
    node = makers.get(value)
    if node is None or node.name not in ("slice", "split"):
        return None
    if node.name == "slice":
        return _sliced(node)
    sizes, i = node.params["sizes"], node.outputs.index(value)
    start = sum(sizes[:i])
    return _Part(node.inputs[0], node.params["axis"], start, start + sizes[i])


def _sliced(node: Node) -> _Part | None:
    (x,), params = node.inputs, node.params
    cut = [d for d, (n, k) in enumerate(zip(x.shape, node.outputs[0].shape, strict=True)) if n != k]
    strides = params["strides"] or (1,) * len(x.shape)
    if len(cut) != 1 or strides[cut[0]] != 1:
        return None
    return _Part(x, cut[0], params["start_indices"][cut[0]], params["limit_indices"][cut[0]])


def _window_of_two(node: Node, makers: Makers) -> tuple[Value, Value, int, bool] | None:
    """(value, first, dim, back) where a node is a window of a value beside itself."""
    both = makers.get(node.inputs[0])
    if both is None or both.name != "concatenate" or len(both.inputs) != 2:
        return None
    (value, other), dim = both.inputs, both.params["dimension"]
    is_all = value is other and node.outputs[0].shape == value.shape
    return (value, node.inputs[1 + dim], dim, False) if is_all else None


def _sum_of_halves(node: Node, makers: Makers) -> tuple[Value, Value, int, bool] | None:
    """The same where a sum is the transpose of such a window."""
    split = makers.get(node.inputs[0])
    if split is None or split.name != "split" or len(split.outputs) != 2:
        return None
    update, dim = makers.get(split.inputs[0]), split.params["axis"]
    if update is None or update.name != "dynamic_update_slice" or not _is_zero(update.inputs[0], makers):
        return None
    value, first = update.inputs[1], update.inputs[2 + dim]
    is_all = value.shape == node.outputs[0].shape and {*split.outputs} == {*node.inputs}
    return (value, first, dim, True) if is_all else None


def _is_zero(value: Value, makers: Makers) -> bool:
    node = makers.get(value)
    number = node.inputs[0] if node is not None and node.name == "broadcast_in_dim" else value
    return number.is_zero
