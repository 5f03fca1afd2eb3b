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
from shardax.spmd_rules.registry import MOVES, RULES

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
        order = _order(node)
        if order is not None and order == sorted(order):  # only dims of size one come, go or move
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
    entry = RULES.get(node.name)
    if params is None or node.bodies or node.eqn.effects or entry and entry.anew:
        return "node", node, i
    if node.name == "dot_general":
        return _dot_key(node, operands)
    if (order := _order(node)) is not None:
        places = np.argsort(np.argsort(order)).tolist()
        return "moved", operands[0], _squeezed(node.in_shapes[0]), tuple(places)
    pairs = [(x, () if 0 in shape else shape) for x, shape in zip(operands, node.in_shapes, strict=True)]
    return node.primitive, i, params, tuple(sorted(pairs) if entry and entry.commutes else pairs)


def _dot_key(node: Node, operands: Sequence[int]) -> Hashable:
    """Of a product the dims that count, those of size one left out."""
    (contracted, batch), shapes = node.params["dimension_numbers"], node.in_shapes
    places = [{d: i for i, d in enumerate(d for d, n in enumerate(s) if n != 1)} for s in shapes]

    def pairs(dims):
        return tuple((places[0][a], places[1][b]) for a, b in zip(*dims, strict=True) if a in places[0])

    how = tuple((name, node.params[name]) for name in ("precision", "preferred_element_type"))
    return "dot_general", tuple(operands), tuple(map(_squeezed, shapes)), pairs(contracted), pairs(batch), how


def _order(node: Node) -> list[int] | None:
    """The order in which a node that only moves dims reads those of more than size one. What leaves all in
    its place, as an annotation, is there for another reason, and makes another value.
    """
    entry = RULES.get(node.name)
    order = entry.order(node) if entry else None
    stays = order is not None and order == sorted(order) and node.in_shapes == node.out_shapes
    return None if stays else order


def _is_zero(node: Node, operands: Sequence[int], terms: dict[int, tuple[int, ...]]) -> bool:
    """Whether a node makes zeros of zeros: all elements are those of its operands, some of which may have
    none.
    """
    zeros = [terms.get(x) == () or 0 in shape for x, shape in zip(operands, node.in_shapes, strict=True)]
    if node.name == "add_any" or not all(zeros) or node.in_shapes == node.out_shapes:
        return node.name == "add_any" and all(zeros)
    entry, every = RULES.get(node.name), tuple(range(len(operands)))
    return bool(every) and entry is not None and MOVES(*every) in entry.passes_of(node)


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
