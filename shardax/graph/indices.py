"""Which reads and writes in the body of a scan are of the row that the index of the scan points to.

The index is first + t in iteration t, or an integer less that (`affine.py`). Where it is inside of a dim in
all iterations, nothing is clamped, wrapped or dropped there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from shardax.graph.affine import Affines, Iteration, Makers
from shardax.graph.graph import Node, Value

READS = {"dynamic_slice", "gather"}
SCATTERS = {"scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"}
WRITES = {"dynamic_update_slice", *SCATTERS}


@dataclass(frozen=True, slots=True)
class Line:
    """The number first + t * step in iteration t, where step is 1 or -1."""

    first: int
    step: int = 1

    def within(self, trip_count: int) -> range:
        """The numbers of so many iterations, in ascending order."""
        first = self.first if self.step > 0 else self.first - trip_count + 1
        return range(first, first + trip_count)

    def reversed(self, trip_count: int) -> "Line":
        """The same numbers from the last to the first."""
        return Line(self.first + self.step * (trip_count - 1), -self.step)


@dataclass(frozen=True, slots=True)
class Place:
    """Row `line` of dim `dim`."""

    dim: int
    line: Line


@dataclass(frozen=True, eq=False)
class Index:
    """The index in a body of so many iterations, and in the bodies in it; `iteration` is that of its scan.

    The iterations are numbered by what a scan goes over: one that is reversed begins with the last.
    `reversed`: the scan goes the other way than it did when its values were looked at.
    """

    affines: Affines
    iteration: Iteration
    reversed: bool = False

    @property
    def length(self) -> int:
        return self.iteration.length

    @property
    def makers(self) -> Makers:
        return self.affines.makers

    def line(self, value: Value) -> Line | None:
        """The index that a value is, if it is one."""
        form = self.affines.of(value)
        if form is None or [*form.steps] != [self.iteration] or abs(form.steps[self.iteration]) != 1:
            return None
        line = Line(form.first, form.steps[self.iteration])
        return line.reversed(self.length) if self.reversed else line

    def accesses(self, node: Node) -> Iterator[Place]:
        """The places at which a node reads or writes its first operand, and nowhere else: one for each dim
        that the index is in."""
        for dim, start in _starts(node, self.makers):
            line = self.line(start)
            if line is not None and _fits(line.within(self.length), node.in_shapes[0][dim]):
                yield Place(dim, line)

    def of_row(self, node: Node, row: Value, place: Place) -> list[Node]:
        """A node that reads or writes at a place, of that row by itself; last the one that gives the
        result.
        """
        if node.name in ("dynamic_slice", "dynamic_update_slice"):
            at = place.dim + (1 if node.name == "dynamic_slice" else 2)
            made, inputs = [], [row, *node.inputs[1:]]
            inputs[at] = zeros(inputs[at])
        else:
            made, indices = self._without_column(node, place.dim)
            inputs = [row, indices, *node.inputs[2:]]
        outputs = [Value(row.aval)] if node.name in WRITES else node.outputs
        return [*made, replace(node, inputs=inputs, outputs=outputs)]

    def _without_column(self, node: Node, dim: int) -> tuple[list[Node], Value]:
        """Indices that are zero in the column of a dim."""
        indices, column = node.inputs[1], node.params["dimension_numbers"][2].index(dim)
        if indices.shape[-1] == 1:
            return [], zeros(indices)
        columns, part = self.makers[indices], _columns(indices, self.makers)[column]
        at = sum(np.cumsum([v.shape[-1] for v in columns.inputs]) <= column)
        inputs = [zeros(part) if i == at else v for i, v in enumerate(columns.inputs)]
        made = replace(columns, inputs=inputs, outputs=[Value(indices.aval)])
        return [made], made.outputs[0]

    def is_zero(self, value: Value) -> bool:
        return self.affines.element(value).is_zero


def zeros(value: Value) -> Value:
    return Value(value.aval, np.zeros(value.shape, value.aval.dtype), True)


def _fits(numbers: range, size: int) -> bool:
    return not numbers or (0 <= numbers[0] and numbers[-1] < size)


def _starts(node: Node, makers: Makers) -> Iterator[tuple[int, Value]]:
    """(dim, where it begins) of the dims of which a window takes one row."""
    if node.name in ("dynamic_slice", "dynamic_update_slice"):
        sizes, starts = (node.out_shapes[0], 1) if node.name == "dynamic_slice" else (node.in_shapes[1], 2)
        yield from ((d, node.inputs[starts + d]) for d, size in enumerate(sizes) if size == 1)
    elif node.name in READS | WRITES:
        columns, indexed = _columns(node.inputs[1], makers), node.params["dimension_numbers"][2]
        yield from ((d, columns[c]) for c, d in enumerate(indexed) if c in columns and _takes_one(node, d))


def _takes_one(node: Node, dim: int) -> bool:
    """Whether the windows of a gather or scatter have one row of a dim of the operand."""
    if node.name == "gather":
        return node.params["slice_sizes"][dim] == 1
    in_updates, inserted, _, batch, _ = node.params["dimension_numbers"]
    gone = {*inserted, *batch}
    return dim in gone or node.in_shapes[2][in_updates[dim - sum(d < dim for d in gone)]] == 1


def _columns(indices: Value, makers: Makers) -> dict[int, Value]:
    """The columns of indices that are values of their own."""
    if indices.shape[-1] == 1:
        return {0: indices}
    node, columns, place = makers.get(indices), {}, 0
    if node is None or node.name != "concatenate" or node.params["dimension"] != len(indices.shape) - 1:
        return {}
    for part in node.inputs:
        columns |= {place: part} if part.shape[-1] == 1 else {}
        place += part.shape[-1]
    return columns
