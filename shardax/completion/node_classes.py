"""Classes of nodes. Nodes are of one class if all that completion and choice read of them is equal; what
follows is computed once.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from shardax import _jax
from shardax.completion.edges import Edge, edges_of
from shardax.graph import annotations
from shardax.graph.graph import Node, Value
from shardax.spmd_rules.registry import RULES
from shardax.spmd_rules.rule import Factors


@dataclass(eq=False, slots=True)
class EdgePattern:
    """An edge without its values. `places`: which of a node's values are at its positions, operands
    first; `heaviest` are the positions by bytes; `memo` is what was learned from which cells.
    """

    factors: Factors
    places: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    operands: int
    levels: tuple[int, int]  # backward, forward
    heaviest: tuple[int, ...]
    memo: dict[tuple, Any]


@dataclass(eq=False, slots=True)
class NodeClass:
    """What alike nodes share: `factors`, of nodes with a rule and without bodies; `edges`, of their edges,
    those of bodies included; `tensors`, which picks those of a node's values that have dims and are no
    literals.
    """

    number: int
    factors: Factors | None
    edges: tuple[EdgePattern, ...]
    tensors: Callable[[Sequence[Value]], Sequence[Value]]


class NodeClasses:
    """The classes of a program's nodes. Nodes with bodies are of one class where these are the same node by
    node.
    """

    def __init__(self):
        self.classes: dict[Hashable, NodeClass] = {}
        self.types: dict[Hashable, int] = {}
        self.type_of: dict[Value, int] = {}
        self.structured: dict[Hashable, tuple[NodeClass, list[int]]] = {}
        self.known: dict[Node, tuple[NodeClass, list[Value]]] = {}

    def of(self, node: Node) -> tuple[NodeClass, list[Value]]:
        """The class of a node, and its values: inputs, outputs, then those of its bodies."""
        if node not in self.known:
            self.known[node] = self._structured(node) if node.bodies else self._plain(node)
        return self.known[node]

    def _plain(self, node: Node) -> tuple[NodeClass, list[Value]]:
        values = node.inputs + node.outputs
        key = self._key(node, values)
        try:
            node_class = self.classes.get(key)
        except TypeError:
            key = id(node)  # it has parameters that cannot be compared
            node_class = self.classes.get(key)
        if node_class is None:
            entry, apart = RULES.get(node.name), _with_operands_apart(node)
            factors = entry.factors(node) if entry else None
            node_class = self.add(key, factors, edges_of(apart), apart.inputs + apart.outputs)
        return node_class, values

    def _structured(self, node: Node) -> tuple[NodeClass, list[Value]]:
        """Of a node with bodies: which of all values in it the edges connect is found once for each class."""
        numbers: dict[Value, int] = {}
        key = self._structure(node, numbers)
        known = self.structured.get(key) if _can_be_compared(key) else None
        if known is None:
            edges = list(edges_of(node))
            values = list(
                dict.fromkeys([*node.inputs, *node.outputs, *(v for edge in edges for v in edge.values)])
            )
            key = key if _can_be_compared(key) else id(node)
            known = self.structured[key] = self.add(key, None, edges, values), [numbers[v] for v in values]
        node_class, places = known
        values = list(numbers)
        return node_class, [values[place] for place in places]

    def _structure(self, node: Node, numbers: dict[Value, int]) -> Hashable:
        """What a node does, its bodies node by node. In it every value is a number, in the order in which
        values are met.
        """

        def met(values: Sequence[Value]) -> tuple[tuple[int, int], ...]:
            return tuple((numbers.setdefault(v, len(numbers)), self._type_number(v)) for v in values)

        params: Hashable = tuple(
            (name, p)
            for name, p in sorted(node.params.items())
            if not _jax.is_jaxpr(p) and not (isinstance(p, tuple) and any(map(_jax.is_jaxpr, p)))
        )
        if (note := annotations.of_node(node)) is not None:
            params = note.dims, note.owing
        flag = node.name.startswith("random") and node.eqn.ctx.threefry_partitionable
        ends = met(node.inputs), met(node.outputs)
        bodies = (
            (met(b.inputs), tuple(self._structure(n, numbers) for n in b.nodes), met(b.outputs))
            for b in node.bodies
        )
        return node.primitive, params, flag, *ends, *bodies

    def add(
        self, key: Hashable, factors: Factors | None, edges: Iterable[Edge], values: Sequence[Value]
    ) -> NodeClass:
        tensors = [i for i, v in enumerate(values) if v.shape and not v.is_literal]
        pick = itemgetter(*tensors) if len(tensors) > 1 else lambda values: [values[i] for i in tensors]
        node_class = NodeClass(len(self.classes), factors, edge_patterns(edges, values), pick)
        return self.classes.setdefault(key, node_class)

    def _key(self, node: Node, values: Sequence[Value]) -> Hashable:
        name, params = node.primitive.name, node.params.values()
        if name in _ANNOTATIONS and (note := annotations.of_node(node)) is not None:
            params = (note.owing,)  # completion reads the annotation itself
        elif name.startswith("random"):
            params = (*params, node.eqn.ctx.threefry_partitionable)
        return (name, len(node.inputs), *params, *map(self._type_number, values))

    def _type_number(self, value: Value) -> int:
        if value not in self.type_of:
            self.type_of[value] = self.types.setdefault(_type(value), len(self.types))
        return self.type_of[value]


def _with_operands_apart(node: Node) -> Node:
    """The same with a value of its own for each operand: which of them are one is no matter of the class."""
    if len({*node.inputs}) == len(node.inputs):
        return node
    return replace(node, inputs=[Value(v.aval, v.literal, v.is_literal) for v in node.inputs])


def _can_be_compared(key: Hashable) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


_ANNOTATIONS = frozenset(("annotate", "sharding_constraint", "reshard"))


def _type(value: Value) -> Hashable:
    """The type of a value, with its number if it is a small literal, because rules may read that."""
    aval, literal = value.aval, value.literal
    if not value.is_literal:
        return aval.shape, aval.dtype
    if isinstance(literal, (bool, int, float, complex, np.generic, np.ndarray)) and np.size(literal) <= 16:
        return aval.shape, aval.dtype, np.asarray(literal).tobytes()
    return aval.shape, aval.dtype, id(literal)


def edge_patterns(edges: Iterable[Edge], values: Sequence[Value]) -> tuple[EdgePattern, ...]:
    """The patterns of edges between these values; scalars are left out, and so are edges that then connect
    nothing."""
    place = {value: i for i, value in reversed(list(enumerate(values)))}
    patterns = []
    for edge in edges:
        operands, results = (
            [i for i, v in enumerate(side) if v.shape] for side in (edge.operands, edge.results)
        )
        shown = [edge.operands[i] for i in operands] + [edge.results[i] for i in results]
        if len(shown) > 1:
            part = Factors(
                tuple(edge.factors.operands[i] for i in operands),
                tuple(edge.factors.results[i] for i in results),
                edge.factors.sizes,
                edge.factors.types,
            )
            heaviest = tuple(sorted(range(len(shown)), key=lambda i: -shown[i].nbytes))
            places, shapes = tuple(place[v] for v in shown), tuple(v.shape for v in shown)
            levels = edge.backward, edge.forward
            patterns.append(EdgePattern(part, places, shapes, len(operands), levels, heaviest, {}))
    return tuple(patterns)
