"""Roles: which arguments of a train step are parameters, which are optimizer state, read off its program.

    state        a result succeeds it: the donated argument of its path and type, or one that comes back
    parameter    state from which something is computed that JAX differentiates, before any gradient is met
    optimizer    the state besides: moments, accumulators, averages, master weights

JAX notes on the scope of each equation that it differentiated or transposed it, and this is what is looked
for: neither names nor any optimizer's structure count, so that moments which only scale a gradient are none
of the parameters, and a step may run several updates, or have them in a loop or under `cond`. A step whose
backward pass is written by hand has no such scopes. There a parameter is state on which results depend that
are no state, such as the loss.
"""

import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardax.differentiated import is_differentiated, is_transposed
from shardax.graph.graph import Graph, Node, Value
from shardax.graph.operands import carries_of, operands_of
from shardax.zero.mixed import mixed_dims
from shardax.zero.padded import is_cut_or_tail, is_tail


@dataclass(frozen=True)
class Roles:
    """Numbers of arguments: `parameters`, `optimizer` state, each with the number of the result that succeeds
    it; `scanned`, the shapes of the parameters over whose first dim a loop goes, layer by layer;
    `accumulators`: scans, by the `id` of their equations, with those of their carries that gradients are
    added to; `mixed`: of optimizer state the dims along which the update needs it whole.
    """

    parameters: Mapping[int, int]
    optimizer: Mapping[int, int]
    scanned: frozenset[tuple[int, ...]]
    accumulators: Mapping[int, Sequence[int]]
    mixed: Mapping[int, Collection[int]]

    @property
    def state(self) -> Mapping[int, int]:
        return {**self.parameters, **self.optimizer}


def roles(graph: Graph, succeeded: Mapping[int, int]) -> Roles:
    """The roles of a program's arguments; `succeeded` has its state, with the results that succeed it."""
    succeeded = {i: r for i, r in succeeded.items() if graph.inputs[i].shape}
    state = {graph.inputs[i]: 1 << i for i in succeeded}
    reach = _Reach()
    reach.run(graph, state)
    read = reach.differentiated if reach.gradients else _read_by_others(graph, state, succeeded.values())
    parameters = {i: r for i, r in succeeded.items() if read >> i & 1}
    own = _passed_on(graph, [graph.inputs[i] for i in parameters])
    scanned = {v.shape for v in own} & reach.scanned
    optimizer = {i: r for i, r in succeeded.items() if i not in parameters}
    accumulators = dict(_accumulators(graph, reach))
    return Roles(parameters, optimizer, frozenset(scanned), accumulators, mixed_dims(graph, optimizer))


def is_update(graph: Graph, succeeded: Mapping[int, int]) -> bool:
    """Whether any new state is made of state, and not by a backward pass alone, as gradients are."""
    made = {v for node in graph.nodes if is_differentiated(node.scope) for v in node.outputs}
    reach = _Reach(end=made, through=True)
    reach.run(graph, {graph.inputs[i]: 1 for i in succeeded})
    unchanged = _passed_on(graph, graph.inputs)
    return bool(reach.of(v for r in succeeded.values() if (v := graph.outputs[r]) not in unchanged))


def _passed_on(graph: Graph, arguments: Iterable[Value]) -> set[Value]:
    """The arguments, as they are: annotated, cut to their true shapes, or padded again."""
    found = set(arguments)
    for node in graph.nodes:
        if (node.name == "annotate" or is_cut_or_tail(node.name, node.scope)) and node.inputs[0] in found:
            found.update(node.outputs)
    return found


def _read_by_others(graph: Graph, state: Mapping[Value, int], numbers: Collection[int]) -> int:
    """The state on which other results depend than the new state, and not through that."""
    new = {graph.outputs[r] for r in numbers}
    for node in reversed(graph.nodes):
        if (node.name == "annotate" or is_tail(node.name, node.scope)) and node.outputs[0] in new:
            new.add(node.inputs[0])
    reach = _Reach(new)
    reach.run(graph, state)
    return reach.of(v for r, v in enumerate(graph.outputs) if r not in numbers)


def _accumulators(graph: Graph, reach: "_Reach") -> Iterator[tuple[int, list[int]]]:
    """In loops with a backward pass inside: the carries that are no state, depend on gradients, and are not
    differentiated.
    """
    for node in graph.walk():
        if node.name == "scan" and not is_differentiated(node.scope):
            (body,), carries = node.bodies, carries_of(node)
            inner = _Reach()
            inner.run(
                body,
                {v: 1 << k for k, v in zip(carries, body.inputs[carries.start : carries.stop], strict=True)},
            )
            own = [
                k for k in carries if not reach.bits.get(node.inputs[k]) and not inner.differentiated >> k & 1
            ]
            found = [k - carries.start for k in own if body.outputs[k - carries.start] in inner.gradients]
            if found:
                yield id(node.eqn), found


@dataclass
class _Reach:
    """What depends on which state, a bit each, and on gradients. One pass in program order: not round a loop,
    whose state is that of the step before, and not through the values `end`; `through` gradients, or not.
    """

    end: Collection[Value] = ()
    through: bool = False
    differentiated: int = 0  # the state that is read where JAX differentiates
    gradients: set[Value] = field(default_factory=set)
    scanned: set[tuple[int, ...]] = field(
        default_factory=set
    )  # shapes of what depends on state, and is scanned over
    bits: dict[Value, int] = field(default_factory=dict)

    def of(self, values: Iterable[Value]) -> int:
        return functools.reduce(operator.or_, (self.bits.get(v, 0) for v in values), 0)

    def run(self, graph: Graph, bits: Mapping[Value, int]) -> None:
        self.bits.update(bits)
        for node in graph.nodes:
            self._read(node)
            reads = self.of(node.inputs)
            for value in node.outputs if reads else ():
                if value not in self.end and (self.through or value not in self.gradients):
                    self.bits[value] = reads

    def _read(self, node: Node) -> None:
        if node.name == "scan":
            rows = node.inputs[carries_of(node).stop :]
            self.scanned.update(v.shape for v in rows if self.bits.get(v))
        if is_differentiated(node.scope):
            self.differentiated |= self.of(node.inputs)
        else:
            self._run_bodies(node)
        if is_transposed(node.scope) or not self.gradients.isdisjoint(node.inputs):
            self.gradients.update(node.outputs)

    def _run_bodies(self, node: Node) -> None:
        island = node.name == "shard_map"  # over some of the axes
        places = [range(len(node.inputs))] * len(node.bodies) if island else operands_of(node)
        for body, operands in zip(node.bodies, places, strict=True):
            outside = {body.inputs[place]: node.inputs[k] for place, k in enumerate(operands)}
            self.gradients.update(inner for inner, outer in outside.items() if outer in self.gradients)
            self.run(
                body, {inner: self.bits[outer] for inner, outer in outside.items() if outer in self.bits}
            )
            results = zip(node.outputs, body.outputs, strict=False)  # those of a while's test are one
            self.gradients.update(outer for outer, inner in results if inner in self.gradients)
