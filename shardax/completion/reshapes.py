"""Finds reshapes that split a dim inside an axis: for 16 heads, an axis of 32 devices has to become one of 16
and one of 2.

A dim (heads h) is split over an axis, and a reshape takes it apart. The heads are split over a part of the
axis, of gcd(heads, devices) devices, and h over the rest. Without that, the whole dim would be gathered.
Heads that are annotated over more devices than there are heads need the same: a part of the axis holds
them all.
"""

import math
from collections.abc import Iterator

from shardax.completion.complete import Completion
from shardax.graph.graph import Graph
from shardax.sharding import Axes, AxisSizes
from shardax.spmd_rules.registry import RULES
from shardax.spmd_rules.rule import UNSPLIT, DimFactors, Factors


def split_inside(graph: Graph, done: Completion) -> Iterator[tuple[str, int]]:
    """(axis, size of its major part) wherever a completed sharding splits a dim of a reshape inside an axis,
    and wherever an annotation splits a dim for which a part of the axis is enough."""
    for node, note in done.notes:
        for axes, size in zip(note.dims, node.outputs[0].shape, strict=True):
            yield from _of_rows(axes or (), size, done.sizes)
    unsplit = {
        v: [axes == () for axes in note.dims]
        for node, note in done.notes
        for v in (node.inputs[0], node.outputs[0])
    }
    for node in graph.walk():
        if node.name != "reshape" or not any(done.sharding(v).axes for v in (*node.inputs, *node.outputs)):
            continue
        factors, (operand,), (result,) = RULES["reshape"].factors(node), node.inputs, node.outputs
        sides = (operand, factors.operands[0]), (result, factors.results[0])
        for (value, tensor), (other, across) in (sides, sides[::-1]):
            closed = zip(across, unsplit.get(other, ()), strict=False)
            held = {f for dim, is_unsplit in closed if is_unsplit for f in dim}
            for dim, axes in zip(tensor, done.sharding(value).dims, strict=True):
                if len(dim) > 1 and axes and not held.issuperset(dim):
                    yield from _parts(dim, axes, factors, done.sizes)


def _of_rows(axes: Axes, size: int, sizes: AxisSizes) -> Iterator[tuple[str, int]]:
    """The part of an axis that splits a dim of fewer rows than devices into single rows, the axes before it
    taken whole.
    """
    for axis in axes:
        if size % sizes[axis]:
            if sizes[axis] % size == 0 and size > 1:
                yield axis, size
            return
        size //= sizes[axis]


def _parts(dim: DimFactors, axes: Axes, factors: Factors, sizes: AxisSizes) -> Iterator[tuple[str, int]]:
    """The part of an axis that a factor takes, the major factors first, as long as they are split to single
    positions.

    An axis is cut once at a time: what is left of it is looked at when all is completed on the finer mesh.
    """
    left = list(axes)
    for factor in dim[:-1]:
        size = factors.sizes[factor]
        while left and size > 1 and factors.type_of(factor) != UNSPLIT:
            part = math.gcd(size, sizes[left[0]])
            if 1 < part < sizes[left[0]]:
                yield left[0], part
            if part < sizes[left[0]]:
                return
            size //= part
            left.pop(0)
        if size > 1:
            return
