"""Reads the function of an associative scan off the nodes of one application of it: its steps, and which dims
it ties together.

A scan may run on blocks only if the function makes row i of its result of rows i of its operands. The rules
of the steps tell whether it does, and which other dims may be split: dims that a rule ties together are one
class, and a class may be split if every step keeps it.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardax.annotations.explicit import SHARDING_PARAMS
from shardax.graph.graph import Node, Value
from shardax.spmd_rules.associative import Combine, Constant, Operand, Size
from shardax.spmd_rules.registry import RULES
from shardax.spmd_rules.rule import KEEP

_SHAPES = dict(broadcast_in_dim="shape", iota="shape", reshape="new_sizes", slice="limit_indices")
"""Which parameter holds sizes."""
_SIZELESS = {"concatenate", "dot_general", "pad", "reduce_max", "reduce_min", "reduce_sum"}
_SIZELESS |= {"squeeze", "transpose"}

Dim = tuple[Value, int]


def combine_of(
    lefts: Sequence[Value], rights: Sequence[Value], nodes: Sequence[Node], made: Sequence[Value], dim: int
):
    """The function of the nodes that make `made` of two lists of values, row by row along `dim`; None where
    they are no such function.
    """
    nodes = _needed(nodes, made)
    numbers = {v: i for i, v in enumerate([*lefts, *rights, *(node.outputs[0] for node in nodes)])}
    operands = [[_operand(v, numbers) for v in node.inputs] for node in nodes]
    known = None not in itertools.chain(*operands) and numbers.keys() >= {*made}
    if not known or not all(map(_is_plain, nodes)):
        return None
    classes = _Classes(nodes)
    for left, right, value in zip(lefts, rights, made, strict=True):
        for d in range(len(left.shape)):
            classes.join((left, d), (right, d))
            classes.join((left, d), (value, d))
    if not _is_by_row(classes, lefts, dim):
        return None
    places = {
        classes.of((v, d)): Size(i, d) for i, v in reversed([*enumerate(lefts)]) for d in range(len(v.shape))
    }
    sizes = {c: size for c, size in places.items() if c not in classes.mixed}
    steps = tuple(
        (n.primitive, _params(n, classes, sizes), tuple(row)) for n, row in zip(nodes, operands, strict=True)
    )
    return Combine(steps, tuple(numbers[v] for v in made), _words(classes, lefts))  # type: ignore[arg-type]


def _needed(nodes: Sequence[Node], made: Sequence[Value]) -> list[Node]:
    """The nodes that `made` needs: in a gradient, nodes for the way back stand among them."""
    needed, kept = set(made), []
    for node in reversed(nodes):
        if any(v in needed for v in node.outputs):
            needed.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def _is_plain(node: Node) -> bool:
    """Whether a node's parameters hold no sizes but those that `_params` knows."""
    if node.name not in RULES or len(node.outputs) != 1 or node.bodies or node.eqn.effects:
        return False
    if node.name in _SHAPES or node.name in _SIZELESS:
        return True
    factors = RULES[node.name].factors(node)
    (result,) = factors.results
    elementwise = all(dims in ((), result) for dims in factors.operands)
    return elementwise and not RULES[node.name].sends


def _operand(value: Value, numbers: dict[Value, int]) -> Operand | None:
    if not value.is_literal:
        return numbers.get(value)
    if value.shape or not isinstance(value.aval.dtype, np.dtype):
        return None
    return Constant(value.aval.dtype, np.asarray(value.literal, value.aval.dtype).tobytes())


class _Classes:
    """Classes of dims that rules tie together. `mixed` holds the dims whose positions some step does not keep
    apart.
    """

    def __init__(self, nodes: Sequence[Node]):
        self.parent: dict[Dim, Dim] = {}
        self.mixed: set[Dim] = set()
        for node in nodes:
            self._add(node)

    def of(self, dim: Dim) -> Dim:
        while dim in self.parent:
            dim = self.parent[dim]
        return dim

    def join(self, one: Dim, two: Dim) -> None:
        one, two = self.of(one), self.of(two)
        if one != two:
            self.parent[one] = two
            if one in self.mixed:
                self.mixed.add(two)

    def mix(self, dim: Dim) -> None:
        self.mixed.add(self.of(dim))

    def _add(self, node: Node) -> None:
        factors = RULES[node.name].factors(node)
        values = [*node.inputs, *node.outputs]
        places: dict[str, list[Dim]] = {}
        for value, tensor in zip(values, factors.tensors, strict=True):
            for d, dim in enumerate(tensor):
                for f in dim:
                    places.setdefault(f, []).append((value, d))
                if len(dim) != 1:
                    self.mix((value, d))
        for f, dims in places.items():
            for dim in dims[1:]:
                self.join(dims[0], dim)
            is_read = any(f in dim for tensor in factors.operands for dim in tensor)
            repeats = node.name == "broadcast_in_dim"  # all along the dim is the same
            if factors.type_of(f) != KEEP or "~" in f or not (is_read or repeats):
                self.mix(dims[0])


def _is_by_row(classes: _Classes, lefts: Sequence[Value], dim: int) -> bool:
    rows = classes.of((lefts[0], dim))
    others = [(v, d) for v in lefts for d in range(len(v.shape)) if d != dim]
    alike = all(classes.of((v, dim)) == rows for v in lefts)
    return alike and rows not in classes.mixed and all(classes.of(other) != rows for other in others)


def _params(node: Node, classes: _Classes, sizes: dict[Dim, Size]) -> tuple[tuple[str, Any], ...]:
    """The parameters of a node, in which sizes of its shape refer to the sizes of the function's operands."""
    params: dict[str, Any] = {name: None if name in SHARDING_PARAMS else p for name, p in node.params.items()}
    if node.name in _SHAPES:
        (out,), name = node.outputs, _SHAPES[node.name]
        params[name] = tuple(sizes.get(classes.of((out, d)), n) for d, n in enumerate(params[name]))
    return tuple(params.items())


def _words(classes: _Classes, lefts: Sequence[Value]) -> tuple[str, ...]:
    """The dims of each element as factors of a rule: one factor for each class of dims, unsplit where a step
    mixes its positions.
    """
    factors: dict[Dim, str] = {}
    dims = [[classes.of((v, d)) for d in range(len(v.shape))] for v in lefts]
    unsplit = classes.mixed.union(c for own in dims for c in own if own.count(c) > 1)
    for own in dims:
        for c in own:
            factors.setdefault(c, f"k{len(factors)}")
    words = [
        [f"w{i}_{d}!" if c in unsplit else factors[c] for d, c in enumerate(own)]
        for i, own in enumerate(dims)
    ]
    return tuple(map(" ".join, words))
