"""Finds associative scans in a graph: `jax.lax.associative_scan` is a Python function, of which a jaxpr shows the expansion.

That begins with strided slices and what combines them; these are taken for the elements and for a first guess of the function.
Then JAX expands a scan with that function anew, and only where the graph goes on exactly so, equation by equation, and nothing
else reads what is between, the whole becomes one node. A function that is not elementwise, or depends on sizes, is left alone,
and so are scans of which a gradient reads what is between.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from shardax import _jax
from shardax.graph import Graph, Node, Value, from_jaxpr
from shardax.spmd_rules.associative import Combine, Constant, associative_scan_p
from shardax.spmd_rules.registry import RULES
from shardax.spmd_rules.rule import KEEP


def with_associative_scans(graph: Graph) -> Graph:
    """The graph and its bodies, each expansion of an associative scan as one node."""
    for node in graph.nodes:
        for body in node.bodies:
            with_associative_scans(body)
    at = 0
    while at < len(graph.nodes):
        found = _scan_at(graph, at)
        if found:
            node, count = found
            graph.nodes[at : at + count] = [node]
        at += 1
    _merge_reversals(graph)
    return graph


def _scan_at(graph: Graph, at: int) -> tuple[Node, int] | None:
    """The node for the scan whose expansion begins at a place, and how many nodes it takes."""
    level = _level(graph.nodes, at)
    if level is None:
        return None
    elements, dim = level
    end = next((i for i in range(at + 2 * len(elements), len(graph.nodes)) if _is_cut(graph.nodes[i], dim, 0)), None)
    below = _level(graph.nodes, end) if end else None
    if end is None or below is None or len(below[0]) != len(elements):
        return None
    combine = _combine(graph.nodes[at:end], len(elements), below[0])
    return _verified(graph, at, elements, dim, combine) if combine else None


def _level(nodes: Sequence[Node], at: int) -> tuple[list[Value], int] | None:
    """The elements of one level of the recursion, of which x[0:-1:2], then x[1::2] are cut, and their dim."""
    dim = _cut_dim(nodes[at])
    if dim is None or not _is_cut(nodes[at], dim, 0):
        return None
    cuts = list(itertools.takewhile(lambda node: _is_cut(node, dim, 0), nodes[at:]))
    elements = [node.inputs[0] for node in cuts]
    others = nodes[at + len(cuts) :][: len(cuts)]
    same = [node.inputs[0] for node in others if _is_cut(node, dim, 1)] == elements
    return (elements, dim) if same and len({v.shape for v in elements}) == 1 else None


def _cut_dim(node: Node) -> int | None:
    strides = node.params["strides"] if node.name == "slice" else None
    return strides.index(2) if strides and sorted(strides) == [*[1] * (len(strides) - 1), 2] else None


def _is_cut(node: Node, dim: int, start: int) -> bool:
    """Whether a node is x[start : -1 + start : 2]."""
    if _cut_dim(node) != dim:
        return False
    shape, params = node.inputs[0].shape, node.params
    starts, ends = [0] * len(shape), list(shape)
    starts[dim], ends[dim] = start, shape[dim] - 1 + start
    return [*params["start_indices"]] == starts and [*params["limit_indices"]] == ends


def _combine(nodes: Sequence[Node], count: int, made: Sequence[Value]) -> Combine | None:
    """The function of the nodes after the first `2 * count`, the slices that it is given."""
    numbers = {node.outputs[0]: i for i, node in enumerate(nodes[: 2 * count])}
    steps, shape = [], nodes[0].outputs[0].shape
    for node in nodes[2 * count :]:
        operands = [_operand(v, numbers) for v in node.inputs]
        if None in operands or not _is_elementwise(node, shape):
            return None
        params = tuple((name, None if name in ("sharding", "out_sharding") else p) for name, p in node.params.items())
        steps.append((node.primitive, params, tuple(operands)))
        numbers[node.outputs[0]] = len(numbers)
    results = tuple(numbers.get(v) for v in made)
    return None if None in results else Combine(tuple(steps), results)  # type: ignore[arg-type]


def _operand(value: Value, numbers: dict[Value, int]) -> int | Constant | None:
    if not value.is_literal:
        return numbers.get(value)
    if value.shape or not isinstance(value.aval.dtype, np.dtype):
        return None
    return Constant(value.aval.dtype, np.asarray(value.literal, value.aval.dtype).tobytes())


def _is_elementwise(node: Node, shape: tuple[int, ...]) -> bool:
    if node.name not in RULES or len(node.outputs) != 1 or node.outputs[0].shape != shape or node.eqn.effects:
        return False
    if node.name == "broadcast_in_dim":
        return not node.inputs[0].shape and len(node.inputs) == 1
    factors = RULES[node.name].factors(node)
    (result,) = factors.results
    kept = all(factors.kind(f) == KEEP for f in factors.sizes)
    return kept and not RULES[node.name].sends and all(dims in ((), result) for dims in factors.operands)


def _verified(graph: Graph, at: int, elements: list[Value], dim: int, combine: Combine) -> tuple[Node, int] | None:
    """The node, where the graph goes on as JAX expands this scan, for those of its results that are read."""
    types = tuple((v.shape, v.aval.dtype) for v in elements)
    for used in _subsets(len(elements)):
        match = _match(_expansion(types, dim, combine, used), graph.nodes[at:], elements)
        if match is None:
            continue
        results, count = match
        nodes = graph.nodes[at : at + count]
        if not _read_between(graph, nodes, results):
            outputs = iter(results)
            found = [next(outputs) if i in used else Value(v.aval) for i, v in enumerate(elements)]
            params = {"combine": combine, "dim": dim, "reverse": False}
            scan = replace(nodes[0], primitive=associative_scan_p, params=params, inputs=elements, outputs=found)
            return scan, count
    return None


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    """All results, then some, of a few; of many all but one, or one."""
    for size in range(count, 0, -1):
        yield from itertools.combinations(range(count), size) if count <= 4 or size in (1, count - 1, count) else ()


@lru_cache(maxsize=64)
def _expansion(types: tuple[tuple[Any, Any], ...], dim: int, combine: Combine, used: tuple[int, ...]) -> Graph:
    def scan(*elements):
        results = combine.scan(elements, dim, reverse=False)
        return [results[i] for i in used]

    return from_jaxpr(_jax.dce(jax.make_jaxpr(scan)(*(jax.ShapeDtypeStruct(*t) for t in types))))


def _match(expected: Graph, nodes: Sequence[Node], elements: Sequence[Value]) -> tuple[list[Value], int] | None:
    """The values that stand for the expected results, and how many nodes make them, where the nodes are the expected ones.

    What has no elements does not count: functions such as jnp.where treat it in ways of their own.
    """
    stands: dict[Value, Value] = dict(zip(expected.inputs, elements, strict=True))
    numbered = iter(enumerate(nodes, 1))
    count = 0
    for want in filter(_makes_elements, expected.nodes):
        count, have = next(((i, node) for i, node in numbered if _makes_elements(node)), (0, None))
        if have is None or want.primitive is not have.primitive or not _same_params(want.params, have.params):
            return None
        if len(want.inputs) != len(have.inputs):
            return None
        if not all(_stands_for(x, y, stands) for x, y in zip(have.inputs, want.inputs, strict=True)):
            return None
        stands.update(zip(want.outputs, have.outputs, strict=True))
    return [stands[v] for v in expected.outputs], count


def _makes_elements(node: Node) -> bool:
    return any(0 not in shape for shape in node.out_shapes)


def _same_params(want: dict[str, Any], have: dict[str, Any]) -> bool:
    of_explicit_meshes = ("sharding", "out_sharding")
    return all(name in have and (name in of_explicit_meshes or have[name] == p) for name, p in want.items())


def _stands_for(have: Value, want: Value, stands: dict[Value, Value]) -> bool:
    if want.is_literal or have.is_literal:
        alike = want.is_literal and have.is_literal and want.aval.dtype == have.aval.dtype and want.shape == have.shape
        return bool(alike) and np.asarray(want.literal).tobytes() == np.asarray(have.literal).tobytes()
    if 0 in want.shape:
        return have.shape == want.shape
    return stands.get(want) is have


def _read_between(graph: Graph, nodes: Sequence[Node], results: Sequence[Value]) -> bool:
    """Whether something else reads what nodes make, other than their results."""
    inside = {v for node in nodes for v in node.outputs}.difference(results)
    own = set(nodes)
    outside = itertools.chain(graph.outputs, *(node.inputs for node in graph.nodes if node not in own))
    return any(v in inside for v in outside)


def _merge_reversals(graph: Graph) -> None:
    """A scan of reversed elements, whose results are reversed: a scan from the other end."""
    makers = {v: node for node in graph.nodes for v in node.outputs}
    readers: dict[Value, list[Node | None]] = {v: [None] for v in graph.outputs}
    for node in graph.nodes:
        for v in node.inputs:
            readers.setdefault(v, []).append(node)
    dropped: set[Node] = set()
    for i, node in enumerate(graph.nodes):
        if node.primitive is associative_scan_p and (turned := _turned(node, makers, readers)):
            before, after = turned
            outputs = [after[v].outputs[0] if v in after else Value(v.aval) for v in node.outputs]
            inputs = [rev.inputs[0] for rev in before]
            graph.nodes[i] = replace(node, params={**node.params, "reverse": True}, inputs=inputs, outputs=outputs)
            dropped.update(after.values(), (rev for rev in before if readers[rev.outputs[0]] == [node]))
    graph.nodes = [node for node in graph.nodes if node not in dropped]


def _turned(
    node: Node, makers: dict[Value, Node], readers: dict[Value, list[Node | None]]
) -> tuple[list[Node], dict[Value, Node]] | None:
    """The reversals of a scan's elements and of its results, if that is all that is there."""

    def is_reversal(other: Node | None) -> bool:
        return other is not None and other.name == "rev" and tuple(other.params["dimensions"]) == (node.params["dim"],)

    before = [makers[v] for v in node.inputs if v in makers and is_reversal(makers[v])]
    read = {v: readers[v] for v in node.outputs if v in readers}
    after = {v: who[0] for v, who in read.items() if len(who) == 1 and who[0] is not None and is_reversal(who[0])}
    return (before, after) if len(before) == len(node.inputs) and len(after) == len(read) else None
