"""Finds indices that only count, as in `x[jnp.arange(8), i]`, and makes the dim that they index a batch dim.

    gather x[8, 64] at indices[8, 2], row r is (r, i[r])    gather x at i[8, 1], dims 0 of both being batched
    x.at[jnp.arange(8), i].set(y)                           likewise

XLA's partitioner calls such dims index-parallel. What counts is known into the bodies of loops (`affine.py`),
because caches are often appended to at an iota from outside the loop.
"""

from collections.abc import Iterator
from dataclasses import replace

from shardax.graph.affine import Affine, Affines, Makers
from shardax.graph.graph import Graph, Node, Value
from shardax.graph.indices import SCATTERS
from shardax.rewrites.rewrite import Context, Replacements, makers_of


def batched_indices(graph: Graph, context: Context) -> Replacements:
    """The gathers and scatters whose indices count along a dim, with a batch dim instead."""
    makers, names = makers_of(graph), {"gather", *SCATTERS}
    indexed = (node for node in graph.nodes if node.name in names)
    return Replacements({node: made for node in indexed if (made := _batched(node, makers, context))})


def _batched(node: Node, makers: Makers, context: Context) -> list[Node]:
    """The node with a batch dim, and without the indices that count, behind what makes the others; nothing
    where no indices count.
    """
    columns, last = makers.get(node.inputs[1]), len(node.in_shapes[1]) - 1
    if columns is None or columns.name != "concatenate" or columns.params["dimension"] != last:
        return []
    kept, params = list(columns.inputs), node.params
    for part, dim, along in _counting_columns(node, columns, context.affines):
        if len(kept) > 1:
            kept.remove(part)
            params = {**params, "dimension_numbers": _with_batch(params["dimension_numbers"], dim, along)}
    if params is node.params:
        return []
    indices, made = kept[0], []
    if len(kept) > 1:
        (stacked,) = columns.outputs
        indices = Value(stacked.aval.update(shape=(*stacked.shape[:-1], sum(v.shape[-1] for v in kept))))
        made = [replace(columns, inputs=kept, outputs=[indices])]
    inputs = [node.inputs[0], indices, *node.inputs[2:]]
    return [*made, replace(node, params={**params, "indices_are_sorted": False}, inputs=inputs)]


def _counting_columns(node: Node, columns: Node, affines: Affines) -> Iterator[tuple[Value, int, int]]:
    """(column of the indices, dim of the operand, dim of the indices along which the column counts)"""
    _, collapsed, indexed, batch, index_batch = node.params["dimension_numbers"]
    taken, place = set(index_batch), 0
    for part in columns.inputs:
        dim, along = indexed[place], _counts_along(affines.of(part))
        place += part.shape[-1]
        alone = part.shape[-1] == 1 and dim in collapsed and columns.inputs.count(part) == 1
        if not alone or along is None or along in taken:
            continue
        if part.shape[along] == node.in_shapes[0][dim] > 1:
            taken.add(along)
            yield part, dim, along


def _counts_along(form: Affine | None) -> int | None:
    """The dim along which integers count from zero: they are their own positions there."""
    if form is None or form.first != 0 or [*form.steps.values()] != [1]:
        return None
    (place,) = form.steps
    return place if isinstance(place, int) else None


def _with_batch(numbers, dim: int, along: int):
    """The dimension numbers of a gather or scatter with dim `dim` of the operand and `along` of the indices
    as batch dims.
    """
    window, collapsed, indexed, batch, index_batch = numbers
    pairs = sorted([*zip(batch, index_batch, strict=True), (dim, along)])
    gone = (tuple(d for d in dims if d != dim) for dims in (collapsed, indexed))
    return type(numbers)(window, *gone, *map(tuple, zip(*pairs, strict=True)))
