"""Sharding completion: every value gets a sharding, from the few that the user gave (GSPMD, section 3.5).

Shardings travel along factors, both ways, to a fixed point. A sharding is only ever refined: an axis that a dim has, it keeps.
The worklist is ordered by level, then by place in the program, so the result depends on nothing else.
"""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardax import annotations
from shardax.completion.at_rest import successors, updated_at_rest
from shardax.completion.edges import Edge, edges_of, successor_edges
from shardax.graph import Graph, Node, Value
from shardax.sharding import Axes, AxisSizes, Sharding, at_rest, replicated, round_up, shard_count
from shardax.spmd_rules.localize import project
from shardax.spmd_rules.rule import WHOLE, Factors


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the axes of a dim came from: an annotation's words, or a node and the value whose sharding it passed on."""

    source: str
    node: Node | None = None
    value: Value | None = None


@dataclass(eq=False)
class Completion:
    """The sharding of every value, which dims are fixed, where each came from, and the factors of every node with a rule."""

    sizes: AxisSizes
    dims: dict[Value, list[Axes]] = field(default_factory=dict)
    fixed: dict[Value, tuple[bool, ...]] = field(default_factory=dict)
    origins: dict[tuple[Value, int], Origin] = field(default_factory=dict)
    factors: dict[Node, Factors] = field(default_factory=dict)

    def sharding(self, value: Value) -> Sharding:
        dims = self.dims.get(value)
        return Sharding(tuple(dims)) if dims else replicated(len(value.shape))

    def why(self, value: Value, dim: int) -> tuple[Origin, ...]:
        """The chain of facts that led to the axes of a dim, from the last to the annotation."""
        chain = []
        while (origin := self.origins.get((value, dim))) is not None and origin not in chain:
            chain.append(origin)
            if origin.value is None:
                break
            value, dim = origin.value, self._dim_with(origin.value, self.dims[value][dim])
        return tuple(chain)

    def _dim_with(self, value: Value, axes: Axes) -> int:
        return next((d for d, have in enumerate(self.dims.get(value, ())) if set(have) & set(axes)), 0)


def complete(graph: Graph, arguments: Sequence[Sharding | None], sizes: AxisSizes) -> Completion:
    """Completes the shardings of a graph.

    Args:
      graph: the program, annotations in it.
      arguments: for each input the sharding that it is committed to, or None.
      sizes: the mesh's axis sizes.
    """
    done = Completion(sizes)
    edges = [*edges_of(graph, done.factors), *successor_edges(graph)]
    worklist = _Worklist(edges)
    state = _state(graph)
    given = list(_given(graph, arguments, sizes))
    for now in (False, True):
        for value, dims, source, argument in given:
            if (argument in state) == now:
                _fix(done, value, dims, source)
                worklist.touch(value)
        while (edge := worklist.pop()) is not None:
            for value in _visit(done, *edge):
                worklist.touch(value)
    _update_at_rest(done, graph, edges, arguments)
    return done


def _update_at_rest(done: Completion, graph: Graph, edges: Sequence[Edge], arguments: Sequence[Sharding | None]) -> None:
    inside = {node.inputs[0]: node.outputs[0] for node, _ in annotations.among(reversed(graph.nodes))}
    wanted = {v: done.sharding(inside.get(v, v)) for v in graph.inputs}
    resting = zip(graph.inputs, resting_shardings(graph, arguments, done.sizes), strict=True)
    rest = {v: sharding or at_rest(wanted[v], v.shape, done.sizes) for v, sharding in resting}
    fixed = {v for v, dims in done.fixed.items() if any(dims)}
    for value, sharding in updated_at_rest(graph, edges, fixed, wanted, rest).items():
        done.dims[value] = list(sharding.dims)
        done.origins |= {(value, d): Origin("state is updated as it rests") for d, axes in enumerate(sharding.dims) if axes}


def _state(graph: Graph) -> set[Value]:
    """The arguments that come back, updated or as gradients: some result has the same shape and dtype.

    Data and the annotations inside speak first, state second: where both ask for an axis, as in fully sharded data
    parallelism, the data flows split and the state is only stored split. (Shardy leaves such priorities to the user.)
    Where few arguments come back, as activations do that pass through a layer, they are no state, unless they are donated.
    """
    back = {(v.shape, v.aval.dtype) for v in graph.outputs}
    arrays = [v for v in graph.inputs if v.shape]
    alike = {v for v in arrays if (v.shape, v.aval.dtype) in back}
    return alike if 2 * len(alike) >= len(arrays) else {argument for argument, _ in successors(graph)}


def resting_shardings(graph: Graph, arguments: Sequence[Sharding | None], sizes: AxisSizes) -> list[Sharding | None]:
    """How each argument rests between calls: as it is committed, else nearest to its annotation; None where nothing says so."""
    inputs, rest = set(graph.inputs), dict(zip(graph.inputs, arguments, strict=True))
    for node, given in annotations.among(graph.nodes):
        value = node.inputs[0]
        if value in inputs and rest[value] is None and None not in given.dims:
            rest[value] = at_rest(Sharding(tuple(d or () for d in given.dims)), value.shape, sizes)
    return [rest[value] for value in graph.inputs]


def _given(
    graph: Graph, arguments: Sequence[Sharding | None], sizes: AxisSizes
) -> Iterable[tuple[Value, Sequence[Axes | None], str, Value | None]]:
    """(value, dims, source, argument that it is about) of every annotation. An annotated argument itself rests in the nearest
    sharding that divides."""
    resting = resting_shardings(graph, arguments, sizes)
    for i, (value, sharding) in enumerate(zip(graph.inputs, resting, strict=True)):
        if sharding is not None:
            yield value, sharding.dims, f"argument {i} rests in it", value
    for node, given in annotations.among(graph.walk()):
        yield node.outputs[0], given.dims, given.source, node.inputs[0]


def _fix(done: Completion, value: Value, dims: Sequence[Axes | None], source: str) -> None:
    done.dims[value] = [d or () for d in dims]
    done.fixed[value] = tuple(d is not None for d in dims)
    for d, axes in enumerate(dims):
        if axes:
            done.origins[value, d] = Origin(source)


class _Worklist:
    """Edges to visit in one direction or both, lowest level first, then in program order."""

    def __init__(self, edges: list[Edge]):
        self.edges = edges
        self.heap: list[tuple[int, int, bool]] = []
        self.waiting: set[tuple[int, bool]] = set()
        self.operand_of: dict[Value, list[int]] = {}
        self.result_of: dict[Value, list[int]] = {}
        for i, edge in enumerate(edges):
            for value in edge.operands:
                self.operand_of.setdefault(value, []).append(i)
            for value in edge.results:
                self.result_of.setdefault(value, []).append(i)

    def touch(self, value: Value) -> None:
        """Visits the edges that this value is part of: forward and backward, its siblings on the same side learn too."""
        for i in (*self.operand_of.get(value, ()), *self.result_of.get(value, ())):
            for forward in (True, False):
                self._push(i, forward)

    def _push(self, i: int, forward: bool) -> None:
        if (i, forward) not in self.waiting:
            self.waiting.add((i, forward))
            level = self.edges[i].forward if forward else self.edges[i].backward
            heapq.heappush(self.heap, (level, i, not forward))

    def pop(self) -> tuple[Edge, bool] | None:
        if not self.heap:
            return None
        _, i, backward = heapq.heappop(self.heap)
        self.waiting.discard((i, not backward))
        return self.edges[i], not backward


def _visit(done: Completion, edge: Edge, forward: bool) -> list[Value]:
    """Lets an edge pass shardings on; returns the values that learned something."""
    factors = edge.factors
    agreed = _agree(done, edge)
    if not agreed:
        return []
    values, tensors = (edge.results, factors.results) if forward else (edge.operands, factors.operands)
    return [v for v, dims in zip(values, tensors, strict=True) if _refine(done, v, dims, agreed, edge)]


def _agree(done: Completion, edge: Edge) -> dict[str, tuple[Axes, Value]]:
    """For each factor the axes that its values agree on, heaviest value first: what moving it would cost decides conflicts."""
    claims: dict[str, tuple[Axes, Value]] = {}
    factors = edge.factors
    known = [(v, dims) for v, dims in zip(edge.values, factors.tensors, strict=True) if any(done.dims.get(v, ()))]
    for value, tensor in sorted(known, key=lambda known: -known[0].nbytes):
        for dim, axes, size in zip(tensor, done.dims[value], value.shape, strict=True):
            padded = round_up(size, shard_count(axes, done.sizes))
            for factor, split in project(dim, axes, padded, factors, done.sizes).items() if axes else ():
                have = claims.get(factor)
                passes = factors.kind(factor) != WHOLE or factor in factors.restored
                if passes and (have is None or split.axes[: len(have[0])] == have[0]):
                    claims[factor] = (split.axes, value)
    for group in factors.tied:
        _agree_tied(claims, group)
    return claims


def _agree_tied(claims: dict[str, tuple[Axes, Value]], group: Sequence[str]) -> None:
    """Windowed factors are split over the same axes: what the heaviest value has, or more."""
    agreed = None
    for axes, value in [claim for factor, claim in claims.items() if factor in group]:
        if agreed is None or axes[: len(agreed[0])] == agreed[0]:
            agreed = (axes, value)
    if agreed is not None:
        claims.update(dict.fromkeys(group, agreed))


def _refine(done: Completion, value: Value, tensor, agreed: dict[str, tuple[Axes, Value]], edge: Edge) -> bool:
    """Extends the sharding of a value by what its factors agreed on; True if it learned something."""
    if value.is_literal:
        return False
    have = done.dims.get(value) or [()] * len(value.shape)
    fixed = done.fixed.get(value)
    used = {a for axes in have for a in axes}
    changed = False
    rank = {factor: i for i, factor in enumerate(agreed)}
    asked = [d for d, dim in enumerate(tensor) if any(f in agreed for f in dim) and not (fixed and fixed[d])]
    for d in sorted(asked, key=lambda d: min(rank[f] for f in tensor[d] if f in rank)):
        dim = tensor[d]
        axes = _dim_axes(dim, agreed, edge.factors, done.sizes)
        new = _free_prefix(axes[len(have[d]) :], used)
        if axes[: len(have[d])] != have[d] or not new:
            continue
        axes = have[d] + new
        if value.shape[d] < shard_count(axes, done.sizes):
            continue
        have = [*have[:d], axes, *have[d + 1 :]]
        used |= set(new)
        done.origins[value, d] = Origin("", edge.node, next(agreed[f][1] for f in dim if f in agreed))
        changed = True
    if changed:
        done.dims[value] = have
    return changed


def _free_prefix(axes: Axes, used: set[str]) -> Axes:
    return tuple(itertools.takewhile(lambda a: a not in used, axes))


def _dim_axes(dim, agreed: dict[str, tuple[Axes, Value]], factors: Factors, sizes: AxisSizes) -> Axes:
    """The axes of a dim from those of its factors: a minor one's only where the major ones are split to single positions."""
    axes: Axes = ()
    majors = 1
    for factor in dim:
        mine = agreed[factor][0] if factor in agreed else ()
        if mine and majors != shard_count(axes, sizes):
            break
        if mine and majors > 1 and factors.sizes[factor] % shard_count(mine, sizes):
            break
        axes += tuple(a for a in mine if a not in axes)
        majors *= factors.sizes[factor]
    return axes
