"""Finds indices that only count, as in `x[jnp.arange(8), i]`, and makes the dim that they index a batch dim.

    gather x[8, 64] at indices[8, 2], row r is (r, i[r])    gather x at i[8, 1], dims 0 of both being batched
    x.at[jnp.arange(8), i].set(y)                           likewise

XLA's partitioner calls such dims index-parallel. Counts are followed from iotas through operations that leave
them unchanged, and into the bodies of loops, because caches are often appended to at an iota from outside the
loop.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from shardax.graph.graph import Graph, Node, Value
from shardax.graph.operands import constants_of
from shardax.rewrites.rewrite import Context, Replacements, makers_of

_INDEXED = ("gather", "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub")
Counts = dict[Value, int]
"""The dim along which an array of integers counts from zero: its elements are their own positions there."""


def batched_indices(graph: Graph, context: Context) -> Replacements:
    """The gathers and scatters whose indices count along a dim, with a batch dim instead."""
    indexed = [node for node in graph.nodes if node.name in _INDEXED]
    if not indexed:
        return Replacements()
    makers, counts = makers_of(graph), _counts(context)
    new = {node: _batched(node, makers, counts) for node in indexed}
    return Replacements({node: made for node, made in new.items() if made != [node]})


# Which values count


def _counts(context: Context) -> Counts:
    """What counts in a graph, or around it."""
    counts, unsigned = {} if context.outer is None else _counts(context.outer), set()
    if context.node is not None:
        pairs = itertools.chain.from_iterable(constants_of(context.node))
        counts.update({inner: counts[v] for v, inner in pairs if v in counts})
    for node in context.graph.nodes:
        _follow(node, counts, unsigned)
    return counts


def _follow(node: Node, counts: Counts, unsigned: set[Value]) -> None:
    """Notes whether a node's result counts; `unsigned` are the flags of what is never below zero."""
    if node.name == "lt" and node.inputs[0] in counts and _is(node.inputs[1], 0):
        unsigned.add(node.outputs[0])
    elif node.name == "broadcast_in_dim" and _is(node.inputs[0], False):
        unsigned.add(node.outputs[0])
    elif node.name == "select_n" and node.inputs[0] in unsigned:
        _note(node, counts, counts.get(node.inputs[1]))
    elif node.name == "add" and _is(node.inputs[1], 0):
        _note(node, counts, counts.get(node.inputs[0]))
    elif node.name == "optimization_barrier":
        counts.update(
            {new: counts[old] for new, old in zip(node.outputs, node.inputs, strict=True) if old in counts}
        )
    elif node.name in _KEEPS:
        _note(node, counts, _KEEPS[node.name](node, counts.get(node.inputs[0]) if node.inputs else None))


def _note(node: Node, counts: Counts, dim: int | None) -> None:
    if dim is not None:
        counts[node.outputs[0]] = dim


def _is(value: Value, number: int) -> bool:
    return value.is_literal and not np.shape(value.literal) and value.literal == number


def _iota(node: Node, _: int | None) -> int | None:
    return _if_it_fits(node, node.params["dimension"])


def _broadcast_in_dim(node: Node, dim: int | None) -> int | None:
    if dim is None:
        return None
    to = node.params["broadcast_dimensions"][dim]
    return to if node.out_shapes[0][to] == node.in_shapes[0][dim] else None


def _if_it_fits(node: Node, dim: int | None) -> int | None:
    """Counts only where the dtype of the result can hold all positions."""
    dtype = node.outputs[0].aval.dtype
    fits = (
        dim is not None
        and np.issubdtype(dtype, np.integer)
        and node.out_shapes[0][dim] - 1 <= np.iinfo(dtype).max
    )
    return dim if fits else None


def _reshape(node: Node, dim: int | None) -> int | None:
    """Follows a count through a reshape that adds or drops dims of size one."""
    kept = [[d for d, n in enumerate(shape) if n != 1] for shape in (*node.in_shapes, *node.out_shapes)]
    sizes = [
        [shape[d] for d in dims]
        for shape, dims in zip((*node.in_shapes, *node.out_shapes), kept, strict=True)
    ]
    return kept[1][kept[0].index(dim)] if dim in kept[0] and sizes[0] == sizes[1] else None


_KEEPS: dict[str, Callable[[Node, int | None], int | None]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "convert_element_type": _if_it_fits,
    "copy": lambda node, dim: dim,
    "iota": _iota,
    "reshape": _reshape,
    "squeeze": _reshape,
}


# Gathers and scatters


def _batched(node: Node, makers: dict[Value, Node], counts: Counts) -> list[Node]:
    """The node with a batch dim, and without the indices that count; and, if indices are left, the nodes that
    make them.
    """
    columns = makers.get(node.inputs[1])
    if (
        columns is None
        or columns.name != "concatenate"
        or columns.params["dimension"] != len(node.in_shapes[1]) - 1
    ):
        return [node]
    kept, params = list(columns.inputs), node.params
    for part, dim, along in _counted(node, columns, counts):
        if len(kept) > 1:
            kept.remove(part)
            params = {**params, "dimension_numbers": _with_batch(params["dimension_numbers"], dim, along)}
    if params is node.params:
        return [node]
    indices, made = (kept[0], []) if len(kept) == 1 else _side_by_side(columns, kept)
    inputs = [node.inputs[0], indices, *node.inputs[2:]]
    return [*made, replace(node, params={**params, "indices_are_sorted": False}, inputs=inputs)]


def _counted(node: Node, columns: Node, counts: Counts) -> Iterator[tuple[Value, int, int]]:
    """(column of the indices, dim of the operand, dim of the indices along which the column counts)"""
    _, collapsed, indexed, batch, index_batch = node.params["dimension_numbers"]
    taken, place = set(index_batch), 0
    for part in columns.inputs:
        dim, along = indexed[place], counts.get(part)
        place += part.shape[-1]
        alone = part.shape[-1] == 1 and dim in collapsed and columns.inputs.count(part) == 1
        if (
            alone
            and along is not None
            and along not in taken
            and part.shape[along] == node.in_shapes[0][dim] > 1
        ):
            taken.add(along)
            yield part, dim, along


def _with_batch(numbers, dim: int, along: int):
    """The dimension numbers of a gather or scatter with dim `dim` of the operand and `along` of the indices
    as batch dims.
    """
    window, collapsed, indexed, batch, index_batch = numbers
    pairs = sorted([*zip(batch, index_batch, strict=True), (dim, along)])
    gone = (tuple(d for d in dims if d != dim) for dims in (collapsed, indexed))
    return type(numbers)(window, *gone, *map(tuple, zip(*pairs, strict=True)))


def _side_by_side(columns: Node, parts: list[Value]) -> tuple[Value, list[Node]]:
    (whole,) = columns.outputs
    indices = Value(whole.aval.update(shape=(*whole.shape[:-1], sum(part.shape[-1] for part in parts))))
    return indices, [replace(columns, inputs=parts, outputs=[indices])]
