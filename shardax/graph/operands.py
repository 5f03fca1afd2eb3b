"""The operands of `scan`, `while` and `cond`: which inputs of their bodies they are, and how such a node gets
others.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from shardax import _jax
from shardax.graph.graph import Graph, Node, Value

Constants = list[tuple[Value, Value]]
"""Of a body: values outside, and its inputs that they are."""


def operands_of(node: Node) -> list[Sequence[int]]:
    """For each body the operands of the node that its inputs are; none for other nodes."""
    count = len(node.inputs)
    if node.name == "scan":
        return [range(count)]
    if node.name == "while":
        first, second = node.params["cond_nconsts"], node.params["body_nconsts"]
        return [[*range(first), *range(first + second, count)], range(first, count)]
    return [range(1, count) if node.name == "cond" else ()] * len(node.bodies)


def carries_of(node: Node) -> range:
    """The operands that a loop carries: that at place r is its result r."""
    if node.name == "scan":
        consts, carries = _jax.scan_counts(node.params)
        return range(consts, consts + carries)
    if node.name == "while":
        return range(node.params["cond_nconsts"] + node.params["body_nconsts"], len(node.inputs))
    return range(0)


def constants_of(node: Node) -> list[Constants]:
    """For each body what is the same in all iterations of a loop, or what a branch is given."""
    if node.name not in ("cond", "scan", "while"):
        return [[] for _ in node.bodies]
    end = len(node.inputs) if node.name == "cond" else carries_of(node).start
    return [
        [(node.inputs[k], inner) for inner, k in zip(body.inputs, operands, strict=True) if k < end]
        for body, operands in zip(node.bodies, operands_of(node), strict=True)
    ]


def with_constants(node: Node, new: Sequence[Constants], nodes: Sequence[list[Node]]) -> Node:
    """The node with other constants and other nodes in its bodies, less the constants that no body reads. All
    branches have the same."""
    before = constants_of(node)
    read = [
        {v for one in inside for v in one.inputs}.union(body.outputs)
        for inside, body in zip(nodes, node.bodies, strict=True)
    ]
    kept = [[inner in reads for _, inner in pairs] for pairs, reads in zip(new, read, strict=True)]
    if node.name == "cond":
        kept = [list(map(any, zip(*kept, strict=True)))] * len(kept)
    new = [
        [pair for pair, keep in zip(pairs, keeps, strict=True) if keep]
        for pairs, keeps in zip(new, kept, strict=True)
    ]
    bodies = tuple(
        Graph([*(inner for _, inner in pairs), *body.inputs[len(old) :]], inside, body.outputs)
        for body, old, pairs, inside in zip(node.bodies, before, new, nodes, strict=True)
    )
    if node.name == "cond":
        return replace(node, inputs=[node.inputs[0], *(v for v, _ in new[0])], bodies=bodies)
    inputs = [*(v for v, _ in chain(*new)), *node.inputs[sum(map(len, before)) :]]
    return replace(
        node, inputs=inputs, bodies=bodies, params=_with_counts(node, [len(pairs) for pairs in new])
    )


def _with_counts(node: Node, counts: Sequence[int]) -> dict:
    """The parameters of a loop with so many constants."""
    if node.name == "while":
        return {**node.params, "cond_nconsts": counts[0], "body_nconsts": counts[1]}
    return {**scan_params(node), "num_consts": counts[0], "num_carry": len(carries_of(node))}


def scan_params(node: Node) -> dict:
    """The parameters of a scan that do not count operands."""
    return {name: node.params[name] for name in ("length", "reverse", "unroll")}
