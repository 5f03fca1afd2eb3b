"""Which scans are maps: trips that do not depend on each other, so that each device can run some of them.

A carry does not tie trips together where its value after some trips is known without running them in order:

    same      the body gives it back as it takes it
    steps     the body adds a literal integer to it, as loop counters do: before trip t it is start + t * step
    reduced   the body only adds to it (or takes the maximum, or minimum), and nothing else reads it: c + f(x)
    last      the body does not read it: what the last trip gives is the result
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from shardax import _jax
from shardax.graph.affine import step_of_counter
from shardax.graph.graph import Graph, Node, Value
from shardax.graph.operands import carries_of, operands_of

SAME, STEPS, REDUCED, LAST = "same", "steps", "reduced", "last"


@dataclass(frozen=True, slots=True)
class Carry:
    """How a carry of a map goes from trip to trip; `reduction` is "sum", "max" or "min", `step` what a
    counter moves by.
    """

    kind: str
    reduction: str = ""
    step: int = 0


def carries_of_map(node: Node) -> tuple[Carry, ...] | None:
    """How each carry of a scan goes on; None where trips depend on each other, or all devices must run each
    of them.
    """
    consts, count = _jax.scan_counts(node.params)
    (body,) = node.bodies
    if not node.params["length"] or any(map(_needs_all_devices, body.walk())):
        return None
    flow = _Flow()
    inputs = body.inputs[consts : consts + count]
    carries = [
        flow.carry(body, taken, returned) for taken, returned in zip(inputs, body.outputs, strict=False)
    ]
    found = tuple(c for c in carries if c is not None)
    return found if len(found) == count else None


def has_open_loop(node: Node) -> bool:
    """Whether some loop inside may go on for long, or forever, on values that are garbage."""
    return any(inner.name == "while" for body in node.bodies for inner in body.walk())


def reads(graph: Graph, value: Value) -> bool:
    return value in graph.outputs or any(value in node.inputs for node in graph.nodes)


def _needs_all_devices(node: Node) -> bool:
    """What calls Python, or is written for all devices of a mesh."""
    return bool(node.eqn.effects) or node.name == "shard_map" or "callback" in node.name


def _can_wait(value: Value) -> bool:
    """Whether values of this type may be pending: random keys and booleans cannot be added."""
    dtype = value.aval.dtype
    return isinstance(dtype, np.dtype) and dtype != np.bool_


Reader = tuple[Node | None, int]  # (node, operand) or (None, output)
_KINDS = {"add": "sum", "add_any": "sum", "max": "max", "min": "min"}
_NAMES = {"annotate", "convert_element_type", "copy", "name", "sharding_constraint"}
"""The same value under another name."""


@dataclass(eq=False, slots=True)
class _Flow:
    """Follows values through graphs, and remembers who reads what."""

    readers: dict[Graph, dict[Value, list[Reader]]] = field(default_factory=dict)

    def of(self, graph: Graph, value: Value) -> list[Reader]:
        if graph not in self.readers:
            self.readers[graph] = found = {}
            for node, values in (*((node, node.inputs) for node in graph.nodes), (None, graph.outputs)):
                for i, read in enumerate(values):
                    found.setdefault(read, []).append((node, i))
        return self.readers[graph].get(value, [])

    def carry(self, body: Graph, taken: Value, returned: Value) -> Carry | None:
        if returned is taken:
            return Carry(SAME)
        if (step := self.step(body, taken, returned)) is not None:
            return Carry(STEPS, step=step)
        if not _can_wait(returned):
            return None
        if not self.of(body, taken):
            return Carry(LAST)
        kind = self.reduction(body, taken, returned)
        return Carry(REDUCED, kind) if kind not in (None, SAME) else None

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
        kinds, value = {SAME}, taken
        while len(self.of(graph, value)) == 1:
            ((node, i),) = self.of(graph, value)
            if node is None:
                return _one(kinds) if value is returned else None
            value, kind = self.through(node, i) or (None, None)
            if value is None or kind is None:
                return None
            kinds.add(kind)
        return None

    def through(self, node: Node, i: int) -> tuple[Value, str] | None:
        """The result of a node in which operand i goes on, and what it is reduced with there; None where it
        is read otherwise.
        """
        if node.name in _KINDS or (node.name == "sub" and i == 0):
            return node.outputs[0], _KINDS.get(node.name, "sum")
        if node.name in _NAMES and node.outputs[0].aval.dtype == node.inputs[0].aval.dtype:
            return node.outputs[0], SAME
        for result, bodies in _routes(node, i):
            kind = _one({SAME, *(self.reduction(*body) for body in bodies)})
            if kind is not None and not self.is_condition(node, i):
                return node.outputs[result], kind
        return None

    def is_condition(self, node: Node, i: int) -> bool:
        """Whether the condition of a `while` reads operand i."""
        if node.name != "while":
            return False
        cond = node.bodies[0]
        return reads(cond, cond.inputs[i - node.params["body_nconsts"]])


def _one(kinds: Set[str | None]) -> str | None:
    """The kind on which all agree; passing through agrees with every kind."""
    others = [*(kinds - {SAME}), SAME]
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
