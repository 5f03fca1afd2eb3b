"""The index of a scan: which integers in its body are it, and which reads and writes are of the row that it
points to.

The index is a counter that is carried, or an iota that is scanned, plus an integer: first + t in trip t; or
an integer less that. Where it lies inside of a dim in all trips, nothing is clamped, wrapped or dropped
there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from shardax.graph.graph import Node, Value
from shardax.graph.operands import constants_of

READS = {"dynamic_slice", "gather"}
WRITES = {
    "dynamic_update_slice",
    "scatter",
    "scatter-add",
    "scatter-max",
    "scatter-min",
    "scatter-mul",
    "scatter-sub",
}

Makers = dict[Value, Node]


@dataclass(frozen=True, slots=True)
class Line:
    """The number first + t * step in trip t, where step is 1 or -1."""

    first: int
    step: int = 1

    def within(self, trips: int) -> range:
        """The numbers of so many trips, in ascending order."""
        return (
            range(self.first, self.first + trips)
            if self.step > 0
            else range(self.first - trips + 1, self.first + 1)
        )

    def turned(self, trips: int) -> "Line":
        """The same numbers from the last to the first."""
        return Line(self.first + self.step * (trips - 1), -self.step)


@dataclass(frozen=True, slots=True)
class Place:
    """Row `line` of dim `dim`."""

    dim: int
    line: Line


@dataclass(eq=False, slots=True)
class Index:
    """What is the index, and so a `Line`, in a body of so many trips and in the bodies in it; `makers` are of
    all their values.

    The trips are numbered by what a scan goes over: one that is reversed begins with the last.
    """

    length: int
    makers: Makers
    lines: dict[Value, Line] = field(default_factory=dict)
    flags: dict[Value, bool] = field(default_factory=dict)  # what is the same in all trips

    def note(self, value: Value, line: Line | None) -> None:
        """Notes that a value is the index, if its dtype holds all of it."""
        if line is not None and holds(value, line.within(self.length)):
            self.lines[value] = line

    def note_counter(self, taken: Value, given: Value, first: int | None, reverse: bool) -> None:
        """Notes a carry that the body moves by one."""
        step = step_of_counter(taken, self.makers.get(given))
        if first is not None and step in (1, -1):
            line = Line(first, step)
            self.note(taken, line.turned(self.length) if reverse else line)

    def follow(self, node: Node) -> None:
        """Notes whether a node's results are the index too, and what its bodies know of it."""
        if node.name == "cond":
            self._follow_branches(node)
        elif node.name == "optimization_barrier":
            for given, taken in zip(node.inputs, node.outputs, strict=True):
                self.note(taken, self.lines.get(given))
        elif node.bodies:
            self._follow_bodies(node)
        elif node.name == "lt" and node.inputs[0] in self.lines and whole_number(node.inputs[1]) == 0:
            self._note_sign(node)
        elif node.name == "select_n" and node.inputs[0] in self.flags:
            self.note(node.outputs[0], self.lines.get(node.inputs[1 + self.flags[node.inputs[0]]]))
        elif node.name in _LINES:
            self.note(node.outputs[0], _LINES[node.name](self, node))

    def _follow_bodies(self, node: Node) -> None:
        for body, constants in zip(node.bodies, constants_of(node), strict=True):
            for outer, inner in constants:
                self.note(inner, self.lines.get(outer))
            for one in body.nodes:
                self.follow(one)

    def _follow_branches(self, node: Node) -> None:
        """A result is the index where all branches give the same of it; what may be anything, as what one
        branch saves for its way back is in the others, agrees with all."""
        self._follow_bodies(node)
        for result, *given in zip(node.outputs, *(body.outputs for body in node.bodies), strict=True):
            lines = {self.lines.get(v) for v in given if not self._is_anything(v)}
            self.note(result, lines.pop() if len(lines) == 1 else None)

    def _is_anything(self, value: Value) -> bool:
        node = self.makers.get(self._element(value))
        return node is not None and node.name == "empty2"

    def _element(self, value: Value) -> Value:
        """What all elements of a value are, if it was made of a scalar."""
        while (node := self.makers.get(value)) is not None and node.name in ("broadcast_in_dim", "reshard"):
            (value, *_) = node.inputs
        return value

    def _note_sign(self, node: Node) -> None:
        within = self.lines[node.inputs[0]].within(self.length)
        if within.start >= 0 or within.stop <= 0:
            self.flags[node.outputs[0]] = within.start < 0

    def _same(self, node: Node) -> Line | None:
        return self.lines.get(node.inputs[0])

    def _moved(self, node: Node) -> Line | None:
        return _moved(node, self.lines.get, whole_number)

    def _negative(self, node: Node) -> Line | None:
        line = self.lines.get(node.inputs[0])
        return line and Line(-line.first, -line.step)

    def _clamped(self, node: Node) -> Line | None:
        low, high = map(whole_number, node.inputs[::2])
        if node.inputs[1] not in self.lines or low is None or high is None:
            return None
        return self.lines[node.inputs[1]] if self._fits(node.inputs[1], low, high) else None

    def _fits(self, value: Value, low: int, high: int) -> bool:
        within = self.lines[value].within(self.length)
        return low <= within.start and within.stop - 1 <= high

    def accesses(self, node: Node) -> Iterator[Place]:
        """The places at which a node reads or writes its first operand, and nowhere else: one for each dim
        that the index is in."""
        for dim, start in _starts(node, self.makers):
            if start in self.lines and self._fits(start, 0, node.in_shapes[0][dim] - 1):
                yield Place(dim, self.lines[start])

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
        number = self._element(value)
        return number.is_literal and not number.shape and number.literal == 0


def zeros(value: Value) -> Value:
    return Value(value.aval, np.zeros(value.shape, value.aval.dtype), True)


def whole_number(value: Value) -> int | None:
    known = value.is_literal and not value.shape and jnp.issubdtype(value.aval.dtype, jnp.integer)
    return int(value.literal) if known else None


def number_behind(value: Value, makers: Makers) -> int | None:
    """The whole number that a value is, under whatever type."""
    while value in makers and makers[value].name == "convert_element_type":
        value = makers[value].inputs[0]
    return whole_number(value)


def step_of_counter(taken: Value, node: Node | None) -> int | None:
    """What a node adds to a value to make it anew."""
    if node is None or node.name not in ("add", "sub") or taken not in node.inputs:
        return None
    by = whole_number(node.inputs[1] if node.inputs[0] is taken else node.inputs[0])
    if node.name == "sub":
        return -by if by is not None and node.inputs[0] is taken else None
    return by


def line_of_stack(value: Value, makers: Makers) -> Line | None:
    """What an array of one dim counts up or down by one."""
    node, line = makers.get(value), None
    if node is None or len(value.shape) != 1:
        return None
    if node.name == "iota":
        line = Line(0)
    elif node.name == "rev":
        line = line_of_stack(node.inputs[0], makers)
        line = line and line.turned(*value.shape)
    elif node.name in ("convert_element_type", "copy"):
        line = line_of_stack(node.inputs[0], makers)
    elif node.name in ("add", "sub"):
        line = _moved(node, lambda v: line_of_stack(v, makers), lambda v: _number_everywhere(v, makers))
    return line if line and holds(value, line.within(*value.shape)) else None


def _moved(
    node: Node, line_of: Callable[[Value], Line | None], number_of: Callable[[Value], int | None]
) -> Line | None:
    """What a line and a number add up to, or differ by."""
    one, two = node.inputs
    sign = 1 if node.name == "add" else -1
    if (line := line_of(one)) and (by := number_of(two)) is not None:
        return Line(line.first + sign * by, line.step)
    if (line := line_of(two)) and (by := number_of(one)) is not None:
        return Line(by + sign * line.first, sign * line.step)
    return None


def holds(value: Value, numbers: range) -> bool:
    """Whether a value's dtype holds all of these, in ascending order, without wrapping."""
    dtype = value.aval.dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        return False
    return not numbers or (jnp.iinfo(dtype).min <= numbers[0] and numbers[-1] <= jnp.iinfo(dtype).max)


def _number_everywhere(value: Value, makers: Makers) -> int | None:
    if value in makers and makers[value].name == "broadcast_in_dim":
        value = makers[value].inputs[0]
    return whole_number(value)


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
    node, found, place = makers.get(indices), {}, 0
    if node is None or node.name != "concatenate" or node.params["dimension"] != len(indices.shape) - 1:
        return {}
    for part in node.inputs:
        found |= {place: part} if part.shape[-1] == 1 else {}
        place += part.shape[-1]
    return found


_LINES: dict[str, Callable[[Index, Node], Line | None]] = {
    "add": Index._moved,
    "broadcast_in_dim": Index._same,
    "clamp": Index._clamped,
    "convert_element_type": Index._same,
    "copy": Index._same,
    "neg": Index._negative,
    "reshape": Index._same,
    "squeeze": Index._same,
    "sub": Index._moved,
}
