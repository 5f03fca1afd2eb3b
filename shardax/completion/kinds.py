"""Kinds: what nodes that are alike in everything that completion and choice read of them have in common, found once."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardax import annotations
from shardax.completion.edges import Edge, edges_of
from shardax.graph import Node, Value
from shardax.spmd_rules.registry import RULES
from shardax.spmd_rules.rule import Factors


@dataclass(eq=False, slots=True)
class Tie:
    """An edge without its values: `places` says which of a node's values stand at its positions, operands first.

    `heaviest`: the positions by bytes. `memo`: what was learned from which cells.
    """

    factors: Factors
    places: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    operands: int
    levels: tuple[int, int]  # backward, forward
    heaviest: tuple[int, ...]
    memo: dict[tuple, Any]


@dataclass(eq=False, slots=True)
class Kind:
    """`factors`: of nodes with a rule and without bodies. `ties`: of their edges, those of bodies included."""

    factors: Factors | None
    ties: tuple[Tie, ...]


class Kinds:
    """The kinds of a program's nodes. Nodes with bodies are each of a kind of their own."""

    def __init__(self):
        self.found: dict[Hashable, Kind] = {}

    def of(self, node: Node) -> tuple[Kind, list[Value]]:
        """The kind of a node, and its values: inputs, outputs, then those of its bodies."""
        values = node.inputs + node.outputs
        if node.bodies:
            return self._structured(node, values)
        key = _key(node, values)
        kind = self.found.get(key)
        if kind is None:
            kind = self.found[key] = _kind(node, values)
        return kind, values

    def _structured(self, node: Node, values: list[Value]) -> tuple[Kind, list[Value]]:
        edges = list(edges_of(node))
        values = list(dict.fromkeys([*values, *(v for edge in edges for v in edge.values)]))
        return Kind(None, ties_of(edges, values)), values


def _kind(node: Node, values: Sequence[Value]) -> Kind:
    entry = RULES.get(node.name)
    return Kind(entry.factors(node) if entry else None, ties_of(edges_of(node), values))


def ties_of(edges: Iterable[Edge], values: Sequence[Value]) -> tuple[Tie, ...]:
    """The ties of edges between these values; scalars are left out, and so is what then ties nothing."""
    place = {value: i for i, value in reversed(list(enumerate(values)))}
    ties = []
    for edge in edges:
        operands, results = ([i for i, v in enumerate(side) if v.shape] for side in (edge.operands, edge.results))
        shown = [edge.operands[i] for i in operands] + [edge.results[i] for i in results]
        if len(shown) > 1:
            part = Factors(
                tuple(edge.factors.operands[i] for i in operands),
                tuple(edge.factors.results[i] for i in results),
                edge.factors.sizes,
                edge.factors.kinds,
            )
            heaviest = tuple(sorted(range(len(shown)), key=lambda i: -shown[i].nbytes))
            places, shapes = tuple(place[v] for v in shown), tuple(v.shape for v in shown)
            ties.append(Tie(part, places, shapes, len(operands), (edge.backward, edge.forward), heaviest, {}))
    return tuple(ties)


def _key(node: Node, values: Sequence[Value]) -> Hashable:
    params = node.params
    if annotations.of_node(node) is not None:
        said: Hashable = "annotation"
    else:
        said = tuple(params.values())
    types = tuple([(a.shape, a.dtype) if not v.is_literal else _literal(v) for v in values if (a := v.aval) is not None])
    key = (node.primitive, len(node.inputs), said, types, node.eqn.ctx.threefry_partitionable)
    try:
        hash(key)
    except TypeError:
        return id(node)
    return key


def _literal(value: Value) -> Hashable:
    """Rules may ask for the values of small literals."""
    aval, literal = value.aval, value.literal
    if isinstance(literal, (bool, int, float, complex, np.generic, np.ndarray)) and np.size(literal) <= 16:
        return aval.shape, aval.dtype, np.asarray(literal).tobytes()
    return aval.shape, aval.dtype, id(literal)
