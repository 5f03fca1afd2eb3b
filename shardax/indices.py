"""The index of a scan: which integers in its body are it, and which reads and writes are of the row that it points to.

The index is a counter that is carried, or an iota that is scanned, plus an integer: first + t in trip t. Where that lies inside
of a dim in all trips, nothing is clamped, wrapped or dropped there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from shardax.graph import Node, Value

READS = {"dynamic_slice", "gather"}
WRITES = {"dynamic_update_slice", "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"}

Makers = dict[Value, Node]


@dataclass(frozen=True, slots=True)
class Place:
    """Row first + t of dim `dim` in trip t."""

    dim: int
    first: int


@dataclass(eq=False, slots=True)
class Index:
    """What is the index in a body of so many trips, by what `first` is; `makers` are of the body's values."""

    length: int
    makers: Makers
    firsts: dict[Value, int] = field(default_factory=dict)
    never: set[Value] = field(default_factory=set)  # flags that are always false

    def note(self, value: Value, first: int | None) -> None:
        """Notes that a value is the index, if its dtype holds all of it."""
        dtype = value.aval.dtype
        if first is None or not jnp.issubdtype(dtype, jnp.integer):
            return
        if jnp.iinfo(dtype).min <= first and first + self.length - 1 <= jnp.iinfo(dtype).max:
            self.firsts[value] = first

    def note_counter(self, taken: Value, given: Value, first: int | None) -> None:
        """Notes a carry that the body adds one to."""
        node = self.makers.get(given)
        if node is not None and node.name == "add" and taken in node.inputs and 1 in map(whole_number, node.inputs):
            self.note(taken, first)

    def follow(self, node: Node) -> None:
        """Notes whether a node's result is the index too."""
        firsts = self.firsts
        if node.name == "lt" and firsts.get(node.inputs[0], -1) >= 0 and whole_number(node.inputs[1]) == 0:
            self.never.add(node.outputs[0])
        elif node.name == "select_n" and node.inputs[0] in self.never:
            self.note(node.outputs[0], firsts.get(node.inputs[1]))
        elif node.name in ("add", "sub"):
            self.note(node.outputs[0], self._shifted(node))
        elif node.name in ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"):
            self.note(node.outputs[0], firsts.get(node.inputs[0]))
        elif node.name == "clamp" and node.inputs[1] in firsts:
            low, high = map(whole_number, node.inputs[::2])
            self.note(node.outputs[0], firsts[node.inputs[1]] if self._fits(node.inputs[1], low, high) else None)

    def _shifted(self, node: Node) -> int | None:
        one, two = node.inputs
        if node.name == "add" and two in self.firsts:
            one, two = two, one
        by = whole_number(two)
        return None if by is None or one not in self.firsts else self.firsts[one] + (by if node.name == "add" else -by)

    def _fits(self, value: Value, low: int | None, high: int | None) -> bool:
        first = self.firsts[value]
        return low is not None and high is not None and low <= first and first + self.length - 1 <= high

    def accesses(self, node: Node) -> Iterator[Place]:
        """The places at which a node reads or writes its first operand, and nowhere else: one for each dim that the index is
        in."""
        for dim, start in _starts(node, self.makers):
            if start in self.firsts and self._fits(start, 0, node.in_shapes[0][dim] - 1):
                yield Place(dim, self.firsts[start])

    def of_row(self, node: Node, row: Value, place: Place) -> list[Node]:
        """A node that reads or writes at a place, of that row by itself; last the one that gives the result."""
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
        node = self.makers.get(value)
        number = node.inputs[0] if node is not None and node.name == "broadcast_in_dim" else value
        return number.is_literal and not number.shape and number.literal == 0


def zeros(value: Value) -> Value:
    return Value(value.aval, np.zeros(value.shape, value.aval.dtype), True)


def whole_number(value: Value) -> int | None:
    known = value.is_literal and not value.shape and jnp.issubdtype(value.aval.dtype, jnp.integer)
    return int(value.literal) if known else None


def first_of_iota(value: Value, makers: Makers) -> int | None:
    """What an array of one dim counts up from."""
    node = makers.get(value)
    if node is None or len(value.shape) != 1:
        return None
    if node.name == "iota":
        return 0
    if node.name in ("convert_element_type", "copy"):
        return first_of_iota(node.inputs[0], makers)
    return _sum_of_first(node, makers) if node.name == "add" else None


def _sum_of_first(node: Node, makers: Makers) -> int | None:
    one, two = node.inputs if node.inputs[0].shape else node.inputs[::-1]
    if two in makers and makers[two].name == "broadcast_in_dim":
        two = makers[two].inputs[0]
    first, by = first_of_iota(one, makers), whole_number(two)
    return None if first is None or by is None else first + by


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
