"""Plain evaluation of a graph, node by node: what a program's values are without any sharding.

What a node with bodies does stands in its bodies. Its equation may still have the jaxpr from before they were
changed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardax import _jax
from shardax.graph import annotations
from shardax.graph.graph import Graph, Node, Value
from shardax.partition.emit_loops import switch


def evaluate(graph: Graph, inputs: Sequence[Any]) -> Iterator[tuple[Node, list[Any], list[Any]]]:
    """Every node of a graph with its operands and results."""
    env = dict(zip(graph.inputs, inputs, strict=True))
    for node in graph.nodes:
        operands = [_read(env, v) for v in node.inputs]
        results = (
            operands if annotations.of_node(node) or node.name == "reshard" else evaluate_node(node, operands)
        )
        env.update(zip(node.outputs, results, strict=True))
        yield node, operands, results


def run(graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a graph."""
    env = dict(zip(graph.inputs, inputs, strict=True))
    for node, _, results in evaluate(graph, inputs):
        env.update(zip(node.outputs, results, strict=True))
    return [_read(env, v) for v in graph.outputs]


def _read(env: dict[Value, Any], value: Value):
    return jnp.asarray(value.literal, value.aval.dtype) if value.is_literal else env[value]


def evaluate_node(node: Node, operands: Sequence[Any]) -> list[Any]:
    with node.eqn.ctx.manager:
        if node.name in _STRUCTURED:
            return list(_STRUCTURED[node.name](node, list(operands)))
        bound = node.primitive.bind(*operands, **node.params)
    return list(bound) if node.primitive.multiple_results else [bound]


def _scan(node: Node, operands: list[Any]) -> list[Any]:
    params, (body,) = node.params, node.bodies
    consts, carries = _jax.scan_counts(params)
    start = consts + carries

    def iteration(carry, xs):
        out = run(body, [*operands[:consts], *carry, *xs])
        return out[:carries], out[carries:]

    carry, ys = lax.scan(
        iteration, operands[consts:start], operands[start:], params["length"], params["reverse"]
    )
    return [*carry, *ys]


def _while(node: Node, operands: list[Any]) -> list[Any]:
    cond, body = node.bodies
    first, start = node.params["cond_nconsts"], node.params["cond_nconsts"] + node.params["body_nconsts"]
    return lax.while_loop(
        lambda carry: run(cond, [*operands[:first], *carry])[0],
        lambda carry: run(body, [*operands[first:start], *carry]),
        operands[start:],
    )


def _cond(node: Node, operands: list[Any]) -> list[Any]:
    return list(switch(node, [lambda *xs, body=body: run(body, xs) for body in node.bodies], *operands))


_STRUCTURED = {"cond": _cond, "scan": _scan, "while": _while}
