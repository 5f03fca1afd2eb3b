"""Numbers the values of a graph so that equal computations have equal numbers. This finds a known program
inside of another.

The values that a known program computes are looked up equation by equation, whatever their order, and
whatever else the graph has among them. A number stands for the elements of a value; dims of size one do not
count, because functions treat a single row differently. Sums of gradients count as sets without zeros,
products and maxima are commutative, and all values without elements are equal.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from shardax.annotations.explicit import SHARDING_PARAMS
from shardax.graph.graph import Graph, Node, Value

_COMMUTATIVE = frozenset({"add", "and", "max", "min", "mul", "or", "xor"})
_MOVES_DIMS = frozenset({"broadcast_in_dim", "expand_dims", "reduce_sum", "reshape", "squeeze", "transpose"})

Shape = tuple[int, ...]


class Numbers:
    """The numbers of a graph's values. `values[n]` are those with the number n."""

    def __init__(self, graph: Graph):
        self.table: dict[Hashable, int] = {}
        self.terms: dict[int, tuple[int, ...]] = {}  # of sums of gradients, and none of zeros
        self.values: list[list[Value]] = []
        self.of: dict[Value, int] = {}
        for value in graph.inputs:
            self._note(value, self._new())
        for node in graph.nodes:
            results = self._results(node, [self.number(v) for v in node.inputs])
            for value, number in zip(node.outputs, results, strict=True):
                self._note(value, number)

    def number(self, value: Value) -> int:
        if value not in self.of:
            self._note(value, self._leaf(value))
        return self.of[value]

    def same(self, number: int, shape: Shape) -> list[Value]:
        """The graph's values of a number and shape."""
        return [v for v in self.values[number] if v.shape == shape]

    def find(self, graph: Graph, inputs: Sequence[int]) -> dict[Value, int]:
        """The number of each value of a known program, its inputs being those given; new ones for what this
        graph has not.
        """
        known = dict(zip(graph.inputs, inputs, strict=True))
        for node in graph.nodes:
            operands = [
                known.get(v) if not v.is_literal and 0 not in v.shape else self._leaf(v) for v in node.inputs
            ]
            if None not in operands:
                known.update(zip(node.outputs, self._results(node, operands), strict=True))  # type: ignore[arg-type]
        return known

    def _results(self, node: Node, operands: list[int]) -> list[int]:
        return [self._result(node, i, value, operands) for i, value in enumerate(node.outputs)]

    def _result(self, node: Node, i: int, value: Value, operands: list[int]) -> int:
        if 0 in value.shape:
            return self._leaf(value)
        if node.name in _MOVES_DIMS and _squeezed(node.in_shapes[0]) == _squeezed(node.out_shapes[0]):
            order = _squeezed_order(node)
            if order == sorted(order):  # only dims of size one come, go or move
                return operands[0]
        if _is_zero(node, operands, self.terms):
            return self._numbered(("zeros", _squeezed(value.shape), value.aval.dtype), ())
        if node.name == "add_any":
            terms = tuple(sorted(term for x in operands for term in self.terms.get(x, (x,))))
            return terms[0] if len(terms) == 1 else self._numbered(("add_any", terms), terms)
        return self._numbered(_key(node, i, operands))

    def _leaf(self, value: Value) -> int:
        dtype = value.aval.dtype
        if 0 in value.shape:
            return self._numbered(("empty", dtype))
        if value.is_literal and not value.shape and isinstance(dtype, np.dtype):
            content = np.asarray(value.literal, dtype).tobytes()
            return self._numbered(("literal", dtype, content), None if any(content) else ())
        return self._numbered(("value", value))

    def _numbered(self, key: Hashable, terms: tuple[int, ...] | None = None) -> int:
        if key not in self.table:
            self.table[key] = self._new()
            if terms is not None:
                self.terms[self.table[key]] = terms
        return self.table[key]

    def _new(self) -> int:
        self.values.append([])
        return len(self.values) - 1

    def _note(self, value: Value, number: int) -> None:
        self.of[value] = number
        self.values[number].append(value)


def _key(node: Node, i: int, operands: Sequence[int]) -> Hashable:
    """What result i of a node computes. What has effects or bodies, or cannot be compared, only equals
    itself.
    """
    params = params_key(node.params)
    if params is None or node.bodies or node.eqn.effects or node.name == "rng_uniform":
        return "node", node, i
    if node.name == "dot_general":
        return _dot_key(node, operands)
    if node.name == "transpose":
        order = np.argsort(np.argsort(_squeezed_order(node))).tolist()
        return "transpose", operands[0], _squeezed(node.in_shapes[0]), tuple(order)
    pairs = [(x, () if 0 in shape else shape) for x, shape in zip(operands, node.in_shapes, strict=True)]
    return node.primitive, i, params, tuple(sorted(pairs) if node.name in _COMMUTATIVE else pairs)


def _dot_key(node: Node, operands: Sequence[int]) -> Hashable:
    """Of a product the dims that count, those of size one left out."""
    (contracted, batch), shapes = node.params["dimension_numbers"], node.in_shapes
    places = [{d: i for i, d in enumerate(d for d, n in enumerate(s) if n != 1)} for s in shapes]

    def pairs(dims):
        return tuple((places[0][a], places[1][b]) for a, b in zip(*dims, strict=True) if a in places[0])

    how = tuple((name, node.params[name]) for name in ("precision", "preferred_element_type"))
    return "dot_general", tuple(operands), tuple(map(_squeezed, shapes)), pairs(contracted), pairs(batch), how


def _squeezed_order(node: Node) -> list[int]:
    """The order in which dims of more than size one are read."""
    order = node.params.get("permutation", node.params["dimensions"] if node.name == "reshape" else None)
    return [d for d in order or () if node.in_shapes[0][d] != 1]


def _is_zero(node: Node, operands: Sequence[int], terms: dict[int, tuple[int, ...]]) -> bool:
    """Whether a node makes zeros of zeros, or pads what has no elements with zeros."""
    zeros = [terms.get(x) == () for x in operands]
    if node.name == "broadcast_in_dim":
        return zeros[0]
    if node.name == "pad":
        return zeros[1] and (zeros[0] or 0 in node.in_shapes[0])
    return node.name == "add_any" and all(zeros)


def _squeezed(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


def params_key(params: dict[str, Any]) -> Hashable | None:
    """Parameters as one value, those aside that only matter on Explicit meshes; None where they cannot be
    compared.
    """
    key = tuple((name, p) for name, p in sorted(params.items()) if name not in SHARDING_PARAMS)
    try:
        hash(key)
    except TypeError:
        return None
    return key
