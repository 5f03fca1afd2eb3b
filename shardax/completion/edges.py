"""Edges connect the shardings of values. Each equation with a rule has one or more.

Loops, branches and calls have data-flow edges, along which a value is simply the same (carry in = carry out =
body in = body out).
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardax import _jax
from shardax.graph import annotations
from shardax.graph.graph import Graph, Node, Value
from shardax.spmd_rules.maps import carries_of_map
from shardax.spmd_rules.registry import RULES
from shardax.spmd_rules.rule import UNSPLIT, Factors, base_name, bind, parse

ELEMENTWISE, OPERATOR, BROADCAST_BACKWARD, BROADCAST_FORWARD = LEVELS = range(4)
"""Levels, first to last: completion lets nothing of a later level happen while an earlier one has visits
due.
"""


@dataclass(eq=False, slots=True)
class Edge:
    """Values whose dims share factors. `backward` and `forward` are the levels at which it carries shardings
    from results to operands and from operands to results."""

    operands: list[Value]
    results: list[Value]
    factors: Factors
    backward: int
    forward: int
    node: Node

    @property
    def values(self) -> list[Value]:
        return self.operands + self.results


def edges_of(node: Node) -> Iterator[Edge]:
    """The edges of a node, those of its bodies included, in program order."""
    if node.bodies:
        yield from _FLOWS[node.name](node)
        for body in node.bodies:
            for inner in body.nodes:
                yield from edges_of(inner)
    elif node.name in RULES and node.outputs:
        yield from _rule_edges(node, RULES[node.name].factors(node))


def successor_edges(graph: Graph, notes: Iterable[tuple[Node, annotations.Annotation]]) -> Iterator[Edge]:
    """A result that succeeds a donated argument has the sharding of the argument."""
    for node, note in notes:
        if note.like is not None:
            yield _same([graph.inputs[note.like], node.outputs[0]], node)


def _rule_edges(node: Node, factors: Factors) -> Iterator[Edge]:
    full, stretched = _stretched(factors)
    if stretched:
        yield _part(node, factors, full, range(len(node.outputs)), ELEMENTWISE, ELEMENTWISE)
        for i in stretched:
            yield _part(node, factors, [i], range(len(node.outputs)), BROADCAST_BACKWARD, BROADCAST_FORWARD)
        return
    # What puts together or takes apart passes other dims through like what is elementwise. So the layers of a
    # stack, wherever they are put, are split as it is before what uses them says anything.
    for operands, results in _components(factors):
        part = _part(node, factors, operands, results, OPERATOR, OPERATOR)
        if RULES[node.name].of_parts or _is_same(part.factors) or _only_permutes(part.factors):
            part.backward, part.forward = ELEMENTWISE, ELEMENTWISE
        elif node.name == "broadcast_in_dim":
            part.backward, part.forward = BROADCAST_BACKWARD, BROADCAST_FORWARD
        yield part


def _components(factors: Factors) -> Iterator[tuple[list[int], list[int]]]:
    """The groups of (operands, results) that share factors, directly or through others. An optimization
    barrier, say, has a group for each operand, and scalars are in none.
    """
    count = len(factors.operands)
    groups: list[tuple[set[str], list[int]]] = []
    for i, dims in enumerate(factors.tensors):
        mine, members = {base_name(f) for dim in dims for f in dim}, [i]
        for group in [g for g in groups if g[0] & mine]:
            groups.remove(group)
            mine, members = mine | group[0], group[1] + members
        groups += [(mine, members)] if mine else []
    for _, members in sorted(groups, key=lambda group: min(group[1])):
        yield [i for i in sorted(members) if i < count], [i - count for i in sorted(members) if i >= count]


def _stretched(factors: Factors) -> tuple[list[int], list[int]]:
    """For an elementwise equation: the operands that have the result's shape or are scalars, and those with a
    dim of size one where the result has none.
    """
    result = factors.results[0] if factors.results else ()
    stretched = [
        i
        for i, dims in enumerate(factors.operands)
        if dims
        and dims != result
        and len(dims) == len(result)
        and all(dim in ((), other) for dim, other in zip(dims, result, strict=True))
    ]
    full = [i for i, dims in enumerate(factors.operands) if dims in ((), result)]
    alike = len(full) + len(stretched) == len(factors.operands) and set(factors.results) == {result}
    return (full, stretched) if alike else (full, [])


def _part(
    node: Node, factors: Factors, operands: Sequence[int], results: Sequence[int], backward: int, forward: int
) -> Edge:
    """The edge between some operands and some results."""
    tensors = tuple(factors.operands[i] for i in operands), tuple(factors.results[i] for i in results)
    part = replace(factors, operands=tensors[0], results=tensors[1])
    return Edge(
        [node.inputs[i] for i in operands], [node.outputs[i] for i in results], part, backward, forward, node
    )


def _is_same(factors: Factors) -> bool:
    """Whether all tensors but scalars have the same dims."""
    return len({dims for dims in factors.tensors if dims}) <= 1


def _only_permutes(factors: Factors) -> bool:
    """Whether every tensor has the same factors: transposes and reshapes pass shardings through like
    elementwise ones.
    """
    factor_sets = {
        frozenset(f for dim in dims for f in dim if factors.sizes[f] != 1) for dims in factors.tensors if dims
    }
    shown = {f for dims in factors.tensors for dim in dims for f in dim}
    return len(factor_sets) == 1 and not any(factors.type_of(f) == UNSPLIT for f in shown)


def _same(values: list[Value], node: Node) -> Edge:
    """The edge of one value that has several names."""
    operand, *others = values
    text = f"... -> {', '.join('...' for _ in others)}"
    factors = bind(parse(text), (operand.shape,), tuple(v.shape for v in others))
    return Edge([operand], list(others), factors, ELEMENTWISE, ELEMENTWISE, node)


def _stacked(outer: Value, inner: Value, node: Node) -> Edge:
    """The edge between a stack, of all iterations of a scan or of all places along manual axes, and one value
    of it.
    """
    stacked = " ".join(f"n{i}!" for i in range(len(outer.shape) - len(inner.shape)))
    factors = bind(parse(f"{stacked} ... -> ..."), (outer.shape,), (inner.shape,))
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
    xs, ys = node.inputs[consts + carries :], node.outputs[carries:]
    if xs and ys and carries_of_map(node) is not None:  # the stacks of a map may be split alike
        letters = (f"k{i}!" for i in range(10**6))
        operands, results = (
            ", ".join(" ".join(("trips", *itertools.islice(letters, len(v.shape) - 1))) for v in values)
            for values in (xs, ys)
        )
        rule = parse(f"{operands} -> {results}")
        factors = bind(rule, tuple(v.shape for v in xs), tuple(v.shape for v in ys))
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
    """Where every axis is manual, the annotations around it, made of its specs, do all."""
    (body,) = node.bodies
    if "partly_manual" in node.params:
        for outers, inners in ((node.inputs, body.inputs), (node.outputs, body.outputs)):
            for outer, inner in zip(outers, inners, strict=True):
                yield _stacked(outer, inner, node)


_FLOWS = {
    "cond": _cond_flow,
    "scan": _scan_flow,
    "shard_map": _island_flow,
    "while": _while_flow,
}
