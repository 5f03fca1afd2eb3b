"""Finds the first equation of a partitioned program whose value on the devices is not that of plain
evaluation.

The program runs as it was decided, on operands with garbage in their padding, and gives all its intermediates
as the devices hold them. These are put together on the host and compared, in program order, with those of
plain evaluation. If the first difference is in a loop or branch, that is searched too, iteration by
iteration, from carries that are right.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardax import _jax
from shardax.check.evaluate import evaluate, run
from shardax.check.shards import difference, gather, is_key, scatter, words
from shardax.graph.graph import Node, Value
from shardax.partition.decisions import Decision, Decisions
from shardax.partition.emit import emit_values
from shardax.sharding import Layout

MAX_ITERATIONS = 64  # of a loop, at most, in which an equation is looked for
_ARBITRARY = ("empty", "empty2")  # their elements are nobody's business until they are written


@dataclass(frozen=True)
class First:
    """The equation, or the reshard of one of its operands, whose value is wrong although its operands are
    right.
    """

    primitive: str
    line: str
    what: str
    operands: tuple[str, ...]
    problem: str
    rule: str = ""
    within: tuple[str, ...] = ()

    def __str__(self):
        place = "".join(f", in {loop}" for loop in self.within)
        rule = f"\n  its rule: {self.rule}" if self.rule else ""
        operands = "".join(f"\n  operand {i}: {text}" for i, text in enumerate(self.operands))
        return (
            f"{self.primitive} at {self.line or 'an unknown line'}{place}{rule}{operands}\n  {self.what}: "
            f"{self.problem}"
        )


def first_difference(decisions: Decisions, inputs: Sequence[Any], mesh: Mesh, slack: float) -> First | None:
    """The first equation of a decided program that gives another value than under plain evaluation of
    `inputs`.
    """
    return _Search(mesh, slack).graph(decisions, inputs)


class _Search:
    def __init__(self, mesh: Mesh, slack: float):
        self.mesh, self.slack = mesh, slack
        self.sizes = dict(mesh.shape)
        self.compiled: dict[int, Callable[..., Any]] = {}

    def graph(self, decisions: Decisions, inputs: Sequence[Any]) -> First | None:
        held = self.run(decisions, inputs)
        expected = dict(zip(decisions.graph.inputs, inputs, strict=True))
        for decision, (node, operands, results) in zip(
            decisions.steps, evaluate(decisions.graph, inputs), strict=True
        ):
            first = self.reshards(node, decision, held, expected)
            expected.update(zip(node.outputs, results, strict=True))
            first = first or (
                self.results(node, decision, operands, held, expected)
                if node.name not in _ARBITRARY
                else None
            )
            if first:
                return first
        return None

    def reshards(self, node: Node, decision: Decision, held, expected) -> First | None:
        """Whether an operand was right where it was made, and is wrong where it is read."""
        for i, (value, reshard) in enumerate(zip(node.inputs, decision.reshards, strict=True)):
            if reshard.source != reshard.target and (
                problem := self.problem(value, reshard.target, held, expected)
            ):
                return self.first(
                    node,
                    decision,
                    f"operand {i}, resharded from {reshard.source} to {reshard.target}",
                    problem,
                )
        return None

    def results(self, node: Node, decision: Decision, operands, held, expected) -> First | None:
        for i, (value, layout) in enumerate(zip(node.outputs, decision.results, strict=True)):
            if problem := self.problem(value, layout, held, expected):
                first = self.first(node, decision, f"result {i}, {_type(value)} in {layout}", problem)
                return self.inside(node, decision, operands) or first
        return None

    def problem(self, value: Value, layout: Layout, held, expected) -> str:
        """What is wrong with a value in a layout, "" if nothing is, or it was not kept."""
        if (value, layout) not in held:
            return ""
        got, disagreement = gather(held[value, layout], layout, value.shape, self.sizes)
        return difference(got, np.asarray(words(expected[value])), self.slack) or disagreement

    def first(self, node: Node, decision: Decision, what: str, problem: str) -> First:
        entry = decision.entry
        operands = [
            f"{_type(v)} in {reshard.target}"
            for v, reshard in zip(node.inputs, decision.reshards, strict=True)
        ]
        rule = str(entry.rule_of(node)) if entry else ""
        return First(node.name, node.line, what, tuple(operands), problem, rule)

    def inside(self, node: Node, decision: Decision, operands: Sequence[Any]) -> First | None:
        for words_, body, inputs in _bodies(node, decision, operands):
            if first := self.graph(body, inputs):
                loop = f"{words_} of the {node.name} at {node.line or 'an unknown line'}"
                return replace(first, within=(*first.within, loop))
        return None

    def run(self, decisions: Decisions, inputs: Sequence[Any]) -> dict[tuple[Value, Layout], np.ndarray]:
        """Every value of a graph, bodies left out, in every layout that it is read in, as the devices hold
        it, stacked.
        """
        pairs = zip(inputs, decisions.inputs, strict=True)
        stacked = [scatter(np.asarray(words(x)), layout, self.sizes) for x, layout in pairs]
        if id(decisions) not in self.compiled:
            self.compiled[id(decisions)] = self.recorder(decisions, inputs)
        return self.compiled[id(decisions)](stacked)

    def recorder(self, decisions: Decisions, inputs: Sequence[Any]) -> Callable[..., Any]:
        impls = [jax.random.key_impl(x) if is_key(x) else None for x in inputs]
        own = [*decisions.graph.inputs, *(v for node in decisions.graph.nodes for v in node.outputs)]
        keys: list[tuple[Value, Layout]] = []

        def on_shards(shards):
            shards = [
                x[0] if impl is None else jax.random.wrap_key_data(x[0], impl=impl)
                for x, impl in zip(shards, impls, strict=True)
            ]
            values = emit_values(decisions, shards, self.sizes)
            kept = {
                (v, layout): x
                for v in own
                for layout, x in values.get(v, {}).items()
                if 0 not in jnp.shape(x)
            }
            keys[:] = kept
            return [words(jnp.asarray(x))[None] for x in kept.values()]

        everywhere = P(tuple(self.sizes))
        mapped = jax.shard_map(
            on_shards, mesh=self.mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
        )
        jitted = jax.jit(mapped)
        return lambda stacked: (
            dict(zip(keys, map(np.asarray, out), strict=True)) if (out := jitted(stacked)) else {}
        )


def _type(value: Value) -> str:
    return value.aval.str_short()


def _bodies(
    node: Node, decision: Decision, operands: Sequence[Any]
) -> Iterator[tuple[str, Decisions, list[Any]]]:
    """The bodies that an equation runs, in order, each with its inputs by plain evaluation and words that say
    which it is.
    """
    return _BODIES.get(node.name, lambda *_: iter(()))(node, decision, list(operands))


def _scan(node: Node, decision: Decision, operands: list[Any]):
    params, (body,) = node.params, decision.bodies
    consts, carries = _jax.scan_counts(params)
    start = consts + carries
    carry, places = operands[consts:start], range(params["length"])
    for i in (list(reversed(places)) if params["reverse"] else list(places))[:MAX_ITERATIONS]:
        inputs = [*operands[:consts], *carry, *(x[i] for x in operands[start:])]
        yield f"iteration {i}", body, inputs
        carry = run(body.graph, inputs)[:carries]


def _while(node: Node, decision: Decision, operands: list[Any]):
    params, (cond, body) = node.params, decision.bodies
    first, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = operands[start:]
    for iteration in range(MAX_ITERATIONS):
        inputs = [*operands[:first], *carry]
        yield f"the condition of iteration {iteration}", cond, inputs
        if not run(cond.graph, inputs)[0]:
            return
        inputs = [*operands[first:start], *carry]
        yield f"iteration {iteration}", body, inputs
        carry = run(body.graph, inputs)


def _cond(node: Node, decision: Decision, operands: list[Any]):
    index = int(np.clip(int(operands[0]), 0, len(decision.bodies) - 1))
    yield f"branch {index}", decision.bodies[index], operands[1:]


_BODIES: dict[str, Callable[[Node, Decision, list[Any]], Iterator[Any]]] = {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
