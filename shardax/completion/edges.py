"""Edges: what ties the shardings of values together. One for each equation with a rule, and the data-flow edges of loops,
branches and calls, along which a value is simply the same (carry in = carry out = body in = body out)."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardax import _jax, annotations
from shardax.graph import Graph, Node, Value
from shardax.spmd_rules.registry import RULES
from shardax.spmd_rules.rule import WHOLE, Factors, TensorFactors, bind, parse
from shardax.trips import carries_of_map

ELEMENTWISE, OPERATOR, BROADCAST_BACKWARD, BROADCAST_FORWARD = range(4)
"""Levels, first to last: completion lets nothing of a later level happen while an earlier one has something to say."""


@dataclass(eq=False, slots=True)
class Edge:
    """Values whose dims share factors. `backward` and `forward` are the levels at which it carries shardings from results
    to operands and from operands to results."""

    operands: list[Value]
    results: list[Value]
    factors: Factors
    backward: int
    forward: int
    node: Node

    @property
    def values(self) -> list[Value]:
        return self.operands + self.results


def edges_of(graph: Graph, factors: dict[Node, Factors]) -> Iterator[Edge]:
    """The edges of a graph and of its bodies, in program order. Fills `factors` for the nodes that have a rule."""
    for node in graph.nodes:
        if node.bodies:
            yield from _FLOWS[node.name](node)
            for body in node.bodies:
                yield from edges_of(body, factors)
        elif node.name in RULES:
            factors[node] = RULES[node.name].factors(node)
            yield from _rule_edges(node, factors[node]) if node.outputs else ()


def _rule_edges(node: Node, factors: Factors) -> Iterator[Edge]:
    full, stretched = _stretched(factors)
    if not stretched:
        backward, forward = _levels(node, factors)
        yield Edge(node.inputs, node.outputs, factors, backward, forward, node)
        return
    yield _part(node, factors, full, ELEMENTWISE, ELEMENTWISE)
    for i in stretched:
        yield _part(node, factors, [i], BROADCAST_BACKWARD, BROADCAST_FORWARD)


def _stretched(factors: Factors) -> tuple[list[int], list[int]]:
    """Of an elementwise equation: the operands of the result's shape (or scalars), and those of size one where it is not."""
    result = factors.results[0] if factors.results else ()
    stretched = [i for i, dims in enumerate(factors.operands) if dims and dims != result and _stretches(dims, result)]
    full = [i for i, dims in enumerate(factors.operands) if dims in ((), result)]
    alike = len(full) + len(stretched) == len(factors.operands) and set(factors.results) == {result}
    return (full, stretched) if alike else (full, [])


def _stretches(dims: TensorFactors, result: TensorFactors) -> bool:
    return len(dims) == len(result) and all(dim in ((), other) for dim, other in zip(dims, result, strict=True))


def _part(node: Node, factors: Factors, operands: list[int], backward: int, forward: int) -> Edge:
    """The edge between some operands and the results."""
    part = replace(factors, operands=tuple(factors.operands[i] for i in operands))
    return Edge([node.inputs[i] for i in operands], node.outputs, part, backward, forward, node)


def _levels(node: Node, factors: Factors) -> tuple[int, int]:
    if node.name == "broadcast_in_dim":
        return BROADCAST_BACKWARD, BROADCAST_FORWARD
    dims = {dims for dims in factors.tensors if dims}
    return (ELEMENTWISE, ELEMENTWISE) if len(dims) <= 1 or _only_moves(factors) else (OPERATOR, OPERATOR)


def _only_moves(factors: Factors) -> bool:
    """Whether every tensor has the same factors: transposes and reshapes pass shardings through like elementwise ones."""
    names = {frozenset(f for dim in dims for f in dim if factors.sizes[f] != 1) for dims in factors.tensors if dims}
    return len(names) == 1 and WHOLE not in factors.kinds.values()


def successor_edges(graph: Graph) -> Iterator[Edge]:
    """A result that succeeds a donated argument lies as the argument does."""
    for node, given in annotations.among(graph.nodes):
        if given.like is not None:
            yield _same([graph.inputs[given.like], node.outputs[0]], node)


def _same(values: list[Value], node: Node) -> Edge:
    """One value under several names."""
    operand, *others = values
    text = f"... -> {', '.join('...' for _ in others)}"
    factors = bind(parse(text), (operand.shape,), tuple(v.shape for v in others))
    return Edge([operand], list(others), factors, ELEMENTWISE, ELEMENTWISE, node)


def _stacked(outer: Value, inner: Value, node: Node) -> Edge:
    """The values of all trips of a scan, and that of one."""
    factors = bind(parse("trips! ... -> ..."), (outer.shape,), (inner.shape,))
    return Edge([outer], [inner], factors, ELEMENTWISE, ELEMENTWISE, node)


def _scan_flow(node: Node) -> Iterator[Edge]:
    consts, carries = _jax.scan_counts(node.params)
    (body,) = node.bodies
    for i, (outer, inner) in enumerate(zip(node.inputs, body.inputs, strict=True)):
        if i < consts:
            yield _same([outer, inner], node)
        elif i < consts + carries:
            yield _same([outer, inner, body.outputs[i - consts], node.outputs[i - consts]], node)
        else:
            yield _stacked(outer, inner, node)
    for outer, inner in zip(node.outputs[carries:], body.outputs[carries:], strict=True):
        yield _stacked(outer, inner, node)
    yield from _map_flow(node, node.inputs[consts + carries :], node.outputs[carries:])


def _map_flow(node: Node, xs: list[Value], ys: list[Value]) -> Iterator[Edge]:
    """The stacks of a map may be split alike over its trips."""
    if xs and ys and carries_of_map(node) is not None:
        names = (f"k{i}!" for i in range(10**6))
        operands, results = (
            ", ".join(" ".join(("trips", *itertools.islice(names, len(v.shape) - 1))) for v in values) for values in (xs, ys)
        )
        factors = bind(parse(f"{operands} -> {results}"), tuple(v.shape for v in xs), tuple(v.shape for v in ys))
        yield Edge(xs, ys, factors, ELEMENTWISE, ELEMENTWISE, node)


def _while_flow(node: Node) -> Iterator[Edge]:
    cond, body = node.bodies
    cond_consts, body_consts = node.params["cond_nconsts"], node.params["body_nconsts"]
    for outer, inner in zip(node.inputs[:cond_consts], cond.inputs[:cond_consts], strict=True):
        yield _same([outer, inner], node)
    for outer, inner in zip(node.inputs[cond_consts:][:body_consts], body.inputs[:body_consts], strict=True):
        yield _same([outer, inner], node)
    carries = (node.inputs[cond_consts + body_consts :], cond.inputs[cond_consts:], body.inputs[body_consts:])
    for values in zip(*carries, body.outputs, node.outputs, strict=True):
        yield _same(list(values), node)


def _cond_flow(node: Node) -> Iterator[Edge]:
    for values in zip(node.inputs[1:], *(body.inputs for body in node.bodies), strict=True):
        yield _same(list(values), node)
    for values in zip(node.outputs, *(body.outputs for body in node.bodies), strict=True):
        yield _same(list(values), node)


def _island_flow(node: Node) -> Iterator[Edge]:
    """Nothing flows into a shard_map: its specs are annotations around it."""
    return iter(())


_FLOWS = {"cond": _cond_flow, "scan": _scan_flow, "shard_map": _island_flow, "while": _while_flow}
