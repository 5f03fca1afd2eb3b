"""Which scans are maps: iterations that do not depend on each other, so that each device can run some of
them.

A carry does not tie iterations together where its value after some of them is known without running them in
order:

    same      the body gives it back as it takes it
    steps     the body adds a literal integer to it, as loop counters do: before iteration t it is
              start + t * step
    reduced   the body only adds to it (or takes the maximum, or minimum), and nothing else reads it: c + f(x)
    last      the body does not read it: what the last iteration gives is the result
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from shardax import _jax
from shardax.graph.affine import step_of_counter
from shardax.graph.graph import Graph, Node, Value
from shardax.graph.operands import carries_of, operands_of
from shardax.spmd_rules.registry import RULES, Entry, happens_once

SAME, STEPS, REDUCED, LAST = "same", "steps", "reduced", "last"


@dataclass(frozen=True, slots=True)
class Carry:
    """How a carry of a map goes from iteration to iteration; `reduction` is "sum", "max" or "min", `step`
    what is added to a counter.
    """

    kind: str
    reduction: str = ""
    step: int = 0


def carries_of_map(node: Node) -> tuple[Carry, ...] | None:
    """How each carry of a scan goes on; None where iterations depend on each other, or all devices must run
    each of them.
    """
    consts, count = _jax.scan_counts(node.params)
    (body,) = node.bodies
    if not node.params["length"]:
        return None
    # What calls Python, or is written for all devices of a mesh, needs all of them.
    if any(n.eqn.effects or n.name == "shard_map" or happens_once(n) for n in body.walk()):
        return None
    flow = _Flow()
    inputs = body.inputs[consts : consts + count]
    carries = [
        flow.carry(body, taken, returned) for taken, returned in zip(inputs, body.outputs, strict=False)
    ]
    known = tuple(c for c in carries if c is not None)
    return known if len(known) == count else None


def has_open_loop(node: Node) -> bool:
    """Whether some loop inside may go on for long, or forever, on values that are garbage."""
    return any(inner.name == "while" for body in node.bodies for inner in body.walk())


def reads(graph: Graph, value: Value) -> bool:
    return value in graph.outputs or any(value in node.inputs for node in graph.nodes)


Reader = tuple[Node | None, int]  # (node, operand) or (None, output)


@dataclass(eq=False, slots=True)
class _Flow:
    """Follows values through graphs, and remembers who reads what."""

    readers: dict[Graph, dict[Value, list[Reader]]] = field(default_factory=dict)

    def of(self, graph: Graph, value: Value) -> list[Reader]:
        if graph not in self.readers:
            self.readers[graph] = readers = {}
            for node, values in (*((node, node.inputs) for node in graph.nodes), (None, graph.outputs)):
                for i, read in enumerate(values):
                    readers.setdefault(read, []).append((node, i))
        return self.readers[graph].get(value, [])

    def carry(self, body: Graph, taken: Value, returned: Value) -> Carry | None:
        if returned is taken:
            return Carry(SAME)
        if (step := self.step(body, taken, returned)) is not None:
            return Carry(STEPS, step=step)
        dtype = returned.aval.dtype
        if not isinstance(dtype, np.dtype) or dtype == np.bool_:  # keys and booleans cannot be pending
            return None
        if not self.of(body, taken):
            return Carry(LAST)
        reduction = self.reduction(body, taken, returned)
        return Carry(REDUCED, reduction) if reduction not in (None, SAME) else None

    def step(self, body: Graph, taken: Value, returned: Value) -> int | None:
        """The integer that the body adds to a scalar carry."""
        if taken.shape or not jnp.issubdtype(taken.aval.dtype, jnp.integer):
            return None
        adds = [node for node, _ in self.of(body, taken) if node is not None and node.outputs[0] is returned]
        return step_of_counter(taken, adds[0]) if adds else None

    def reduction(self, graph: Graph, taken: Value, returned: Value) -> str | None:
        """The reduction that makes `returned` of `taken` and nothing else of it; SAME where it only passes
        through.
        """
        reductions, value = {SAME}, taken
        while len(self.of(graph, value)) == 1:
            ((node, i),) = self.of(graph, value)
            if node is None:
                return _one(reductions) if value is returned else None
            value, reduction = self.through(node, i) or (None, None)
            if value is None or reduction is None:
                return None
            reductions.add(reduction)
        return None

    def through(self, node: Node, i: int) -> tuple[Value, str] | None:
        """The result of a node in which operand i goes on, and what it is reduced with there; None where it
        is read otherwise.
        """
        entry = RULES.get(node.name)
        if entry and entry.accumulates and i in entry.accumulates[1]:
            return node.outputs[0], entry.accumulates[0]
        if entry and _passes_on(entry, node):
            return node.outputs[0], SAME
        for result, bodies in _routes(node, i):
            reduction = _one({SAME, *(self.reduction(*body) for body in bodies)})
            if reduction is not None and not self.is_condition(node, i):
                return node.outputs[result], reduction
        return None

    def is_condition(self, node: Node, i: int) -> bool:
        """Whether the condition of a `while` reads operand i."""
        if node.name != "while":
            return False
        cond = node.bodies[0]
        return reads(cond, cond.inputs[i - node.params["body_nconsts"]])


def _passes_on(entry: Entry, node: Node) -> bool:
    """Whether the result of a node is its operand."""
    if len(node.inputs) != 1 or len(node.outputs) != 1:
        return False
    (before,), (after,) = node.inputs, node.outputs
    same = (before.shape, before.aval.dtype) == (after.shape, after.aval.dtype)
    order = entry.order(node) if same else None
    return order is not None and order == sorted(order)


def _one(reductions: Set[str | None]) -> str | None:
    """The reduction on which all agree; passing through agrees with each."""
    others = [*(reductions - {SAME}), SAME]
    return others[0] if len(others) <= 2 else None


def _routes(node: Node, i: int) -> Iterator[tuple[int, list[tuple[Graph, Value, Value]]]]:
    """(result, the bodies that make it, each with where it takes operand i and gives the result) for each
    result that may.
    """
    if node.name == "cond" and i:
        for r in range(len(node.outputs)):
            yield r, [(body, body.inputs[i - 1], body.outputs[r]) for body in node.bodies]
    elif i in (carries := carries_of(node)):
        body, r = node.bodies[-1], i - carries.start
        yield r, [(body, body.inputs[operands_of(node)[-1].index(i)], body.outputs[r])]
