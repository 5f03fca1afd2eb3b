"""Finds associative scans in a graph. `jax.lax.associative_scan` is a Python function, so a jaxpr only has
its expansion.

An expansion begins with strided slices and the nodes that combine them: these give the elements, and a first
guess of the function. JAX then expands a scan with that function anew, and differentiates it. Only where the
graph has exactly these equations does a node for the scan, and one for its gradient, take their place. A scan
is left as it is where something else reads its intermediates, and where its function is not associative,
because then only JAX's own order of steps gives the result that JAX gives.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from shardax import _jax
from shardax.graph.graph import Graph, Node, Value
from shardax.graph.inline import from_jaxpr
from shardax.rewrites.associativity import has_associative_gradient, is_associative
from shardax.rewrites.combines import combine_of
from shardax.rewrites.numbering import Numbers, params_key
from shardax.rewrites.rewrite import Context, Replacements, makers_of, replaced
from shardax.spmd_rules.associative import Combine, associative_scan_p, associative_scan_vjp_p


def associative_scans(graph: Graph, context: Context) -> Replacements:
    """A node for the first expansion of an associative scan, and one for its gradient."""
    numbers = None
    for at in range(len(graph.nodes)):
        if guess := _guess_at(graph, at):
            numbers = numbers or Numbers(graph)
            if replacements := _replacements(graph, _matches(graph, numbers, guess), numbers):
                return replacements
    return Replacements()


def reversed_scans(graph: Graph, context: Context) -> Replacements:
    """Scans from the other end, for scans of reversed elements whose results are reversed again."""
    scans = [n for n in graph.nodes if n.primitive in (associative_scan_p, associative_scan_vjp_p)]
    if not scans:
        return Replacements()
    makers, readers, new = makers_of(graph), _readers(graph), {}
    for node in scans:
        ends = _reversals(node, makers, readers)
        if ends is None:
            continue
        before, after = ends
        outputs = [after[v].outputs[0] if v in after else Value(v.aval) for v in node.outputs]
        inputs, params = [rev.inputs[0] for rev in before], {**node.params, "reverse": True}
        new[node] = [replace(node, params=params, inputs=inputs, outputs=outputs)]
        new |= {rev: [] for rev in after.values()}
    return Replacements(new)


# A first guess


@dataclass(frozen=True)
class _Guess:
    elements: tuple[Value, ...]
    dim: int
    combine: Combine

    @property
    def params(self) -> dict[str, Any]:
        return {"combine": self.combine, "dim": self.dim, "reverse": False}

    @property
    def types(self) -> tuple[tuple[Any, Any], ...]:
        return tuple((v.shape, v.aval.dtype) for v in self.elements)


def _guess_at(graph: Graph, at: int) -> _Guess | None:
    """The scan whose expansion may begin at a node."""
    level = _level(graph.nodes, at)
    if level is None:
        return None
    elements, dim = level
    count = len(elements)
    end = next((i for i in range(at + 2 * count, len(graph.nodes)) if _is_cut(graph.nodes[i], dim, 0)), None)
    below = _level(graph.nodes, end) if end else None
    if below is None or len(below[0]) != count:
        return None
    lefts, rights = ([node.outputs[0] for node in graph.nodes[at + i * count :][:count]] for i in (0, 1))
    combine = combine_of(lefts, rights, graph.nodes[at + 2 * count : end], below[0], dim)
    return _Guess(tuple(elements), dim, combine) if combine else None


def _level(nodes: Sequence[Node], at: int) -> tuple[list[Value], int] | None:
    """The elements of one level of the recursion, and their dim: those from which x[0:-1:2], then x[1::2] are
    cut.
    """
    dim = _cut_dim(nodes[at])
    if dim is None or not _is_cut(nodes[at], dim, 0):
        return None
    cuts = list(itertools.takewhile(lambda node: _is_cut(node, dim, 0), nodes[at:]))
    elements = [node.inputs[0] for node in cuts]
    others = nodes[at + len(cuts) :][: len(cuts)]
    same = [node.inputs[0] for node in others if _is_cut(node, dim, 1)] == elements
    return (elements, dim) if same and len({v.shape[dim] for v in elements}) == 1 else None


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


# What the graph computes of it


@dataclass(frozen=True)
class _Match:
    """A node, the numbers of its results in the graph (None: nothing computes it), and of what is between."""

    node: Node
    results: list[int | None]
    between: set[int]


def _matches(graph: Graph, numbers: Numbers, guess: _Guess) -> list[_Match]:
    """The scan and its gradients, as far as the graph computes them."""
    expected = _expansion(guess.types, guess.dim, guess.combine)
    params = guess.params
    scan = _computed(graph, numbers, expected, list(guess.elements), (associative_scan_p, params))
    if scan is None or not is_associative(guess.combine, guess.types, guess.dim):
        return []
    if not has_associative_gradient(guess.combine, guess.types, guess.dim):
        return [scan]
    matches, covered = [scan], set[int | None]([None])
    for gradient in sorted(_gradients(graph, numbers, guess), key=lambda match: match.results.count(None)):
        if not covered.issuperset(gradient.results):  # else a larger one gives these results too
            covered.update(gradient.results)
            matches.append(gradient)
    return matches


def _computed(
    graph: Graph, numbers: Numbers, expected: Graph, inputs: list[Value], what: tuple[Any, Any]
) -> _Match | None:
    """A node in the place of a known program, if the graph computes one of its results of `inputs`."""
    operands = [numbers.number(v) for v in inputs]
    known = numbers.find(expected, operands)
    new = ((known[v] not in operands and bool(numbers.same(known[v], v.shape)), v) for v in expected.outputs)
    results = [known[v] if is_known else None for is_known, v in new]
    if all(n is None for n in results):
        return None
    zeros = {n for v, n in known.items() if 0 in v.shape or numbers.terms.get(n) == ()}  # or without elements
    # What is made of pieces of inputs and of constants alone is no intermediate.
    outer = (n for n in expected.nodes if all(v.is_literal or v in expected.inputs for v in n.inputs))
    near = {v for node in outer for v in node.outputs}
    between = {n for v, n in known.items() if v not in near} - {*operands, *results} - zeros
    first = next(node for node in graph.nodes if any(numbers.of[v] in results for v in node.outputs))
    (primitive, params), outputs = what, [Value(v.aval) for v in expected.outputs]
    node = replace(first, primitive=primitive, params=params, inputs=inputs, outputs=outputs)
    return _Match(node, results, between)


@lru_cache(maxsize=64)
def _expansion(types: tuple[tuple[Any, Any], ...], dim: int, combine: Combine) -> Graph:
    return _traced(lambda *elements: combine.scan(elements, dim, reverse=False), types)


def _traced(function: Callable[..., Any], types) -> Graph:
    """Traces under no mesh, because under one JAX would note the shardings of gradients."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return from_jaxpr(_jax.dce(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(*t) for t in types))))


def _gradients(graph: Graph, numbers: Numbers, guess: _Guess) -> Iterator[_Match]:
    """For some of the results, and what may be their cotangents: the cotangents of the elements."""
    inexact = tuple(i for i, (_, dtype) in enumerate(guess.types) if jnp.issubdtype(dtype, jnp.inexact))
    for seeds in _subsets(inexact):
        expected = _gradient(guess.types, guess.dim, guess.combine, seeds, inexact)
        what = associative_scan_vjp_p, {**guess.params, "seeds": seeds, "argnums": inexact}
        unknown = expected.inputs[len(guess.elements) :]
        candidates = [_candidates(graph, numbers, expected, ct) for ct in unknown]
        for cts in itertools.islice(itertools.product(*candidates), 64):
            if match := _computed(graph, numbers, expected, [*guess.elements, *cts], what):
                yield match


def _subsets(which: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Subsets of `which`, the largest first: of up to four all subsets, of more only all, all but one, and
    single ones.
    """
    count = len(which)
    for size in range(count, 0, -1):
        yield from itertools.combinations(which, size) if count <= 4 or size in (1, count - 1, count) else ()


@lru_cache(maxsize=64)
def _gradient(types, dim: int, combine: Combine, seeds: tuple[int, ...], inexact: tuple[int, ...]) -> Graph:
    def gradient(*args):
        elements, cts = args[: len(types)], args[len(types) :]

        def scan(*differentiated):
            scanned = dict(zip(inexact, differentiated, strict=True))
            results = combine.scan([scanned.get(i, x) for i, x in enumerate(elements)], dim, reverse=False)
            return [results[i] for i in seeds]

        return jax.vjp(scan, *(elements[i] for i in inexact))[1](list(cts))

    return _traced(gradient, (*types, *(types[i] for i in seeds)))


def _candidates(graph: Graph, numbers: Numbers, expected: Graph, ct: Value) -> list[Value]:
    """The values to which the graph does all that is expected to be done to a cotangent at first."""
    candidates: dict[int, Value] | None = None
    for node in expected.nodes:
        if ct in node.inputs:
            at, key = node.inputs.index(ct), params_key(node.params)
            what = node.primitive, node.in_shapes
            alike = (n for n in graph.nodes if (n.primitive, n.in_shapes) == what)
            read = (n.inputs[at] for n in alike if params_key(n.params) == key)
            values = {numbers.of[v]: v for v in read if not v.is_literal}
            known = values if candidates is None else candidates
            candidates = {n: v for n, v in known.items() if n in values}
    return list((candidates or {}).values())


# Putting it in


def _replacements(graph: Graph, matches: Sequence[_Match], numbers: Numbers) -> Replacements | None:
    """Nodes in the place of what they compute, unless something would still read an intermediate."""
    if not matches:
        return None
    results = {
        old: new
        for one in matches
        for new, number in zip(one.node.outputs, one.results, strict=True)
        for old in (numbers.same(number, new.shape) if number is not None else ())
    }
    replacements = Replacements(_inserted(graph.nodes, matches), results, again=True)
    between = set().union(*(one.between for one in matches)) - {n for one in matches for n in one.results}
    new = replaced(graph, replacements)
    left = any(numbers.of.get(v) in between for node in new.nodes for v in node.outputs)
    return None if left or not _in_order(new) else replacements


def _inserted(nodes: Sequence[Node], matches: Sequence[_Match]) -> dict[Node, list[Node]]:
    """Each new node right after the nodes that make what it reads; before the first, if none do."""
    makers = {v: i for i, node in enumerate(nodes) for v in node.outputs}
    placed: dict[Node, list[Node]] = {}
    for one in matches:
        last = max(makers.get(v, -1) for v in one.node.inputs)
        group = placed.setdefault(nodes[max(last, 0)], [nodes[max(last, 0)]])
        group.insert(len(group) if last >= 0 else group.index(nodes[0]), one.node)
    return placed


def _in_order(graph: Graph) -> bool:
    made = set(graph.inputs)
    for node in graph.nodes:
        if any(v not in made and not v.is_literal for v in node.inputs):
            return False
        made.update(node.outputs)
    return True


# Scans of reversed elements

Readers = Mapping[Value, Sequence[Node | None]]
"""The nodes that read a value, and None for the result of a graph."""


def _readers(graph: Graph) -> Readers:
    readers: dict[Value, list[Node | None]] = {v: [None] for v in graph.outputs}
    for node in graph.nodes:
        for v in node.inputs:
            readers.setdefault(v, []).append(node)
    return readers


def _reversals(
    node: Node, makers: Mapping[Value, Node], readers: Readers
) -> tuple[list[Node], dict[Value, Node]] | None:
    """The reversals of a scan's elements and of its results, if nothing else reads either."""

    def is_reversal(other: Node | None) -> bool:
        dims = other.params["dimensions"] if other is not None and other.name == "rev" else ()
        return tuple(dims) == (node.params["dim"],)

    before = [makers[v] for v in node.inputs if v in makers and is_reversal(makers[v])]
    read = {v: readers[v] for v in node.outputs if v in readers}
    after = {v: one for v, (one, *others) in read.items() if not others and one and is_reversal(one)}
    return (before, after) if len(before) == len(node.inputs) and len(after) == len(read) else None
