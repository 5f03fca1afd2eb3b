"""choose: for each node, which factors are split over which axes. Pure data out: the decisions, which `emit` then carries out.

Nodes are taken in program order. A node's candidates are the splits that its operands suggest (as they were made, and as
completion wants them) and its results (as completion wants them), and for pending operands both settling them and letting
them wait. A candidate's price is what it sends: operands resharded, and results brought to the shardings wanted of them. The
cheapest is taken; among equals the one that sends least at once, then the one that computes least.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardax import annotations, reshard
from shardax.completion.complete import Completion
from shardax.cost.nominal import COLLECTIVE, FLOP, MEMORY_BYTE
from shardax.graph import Graph, Node, Value
from shardax.sharding import Axes, AxisSizes, Layout, Padding, whole
from shardax.spmd_rules.localize import Pending, Splits, fits, project, reduced_pending, tensor_layout
from shardax.spmd_rules.registry import RULES, Entry, Local, Passes, Split, whole_rule
from shardax.spmd_rules.rule import WHOLE, Factors, tie

_MULTIPLY = ("conv_general_dilated", "dot_general")


@dataclass(frozen=True, slots=True)
class Move:
    """A value is read in layout `target`, made from layout `source`, in which it was there already."""

    source: Layout
    target: Layout


@dataclass(eq=False, slots=True)
class Decision:
    """How one node runs: its operands' moves, its layouts and splits, results settled at once, and its bodies' decisions."""

    node: Node
    moves: tuple[Move, ...]
    local: Local
    factors: Factors | None = None
    entry: Entry | None = None
    settled: dict[int, Layout] = field(default_factory=dict)
    bodies: tuple["Decisions", ...] = ()


@dataclass(eq=False, slots=True)
class Decisions:
    """How a graph runs: the layouts of its inputs, a decision for each node, the moves of its outputs."""

    graph: Graph
    inputs: tuple[Layout, ...]
    steps: list[Decision]
    outputs: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    splits: Splits
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


def choose(graph: Graph, completion: Completion, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Decisions:
    """Chooses how every node of a graph runs, given the layouts that its inputs come in and its outputs must leave in."""
    return Chooser(graph, completion).graph(graph, inputs, outputs)


class Chooser:
    """The state of a walk over the program: in which layouts each value is there, and what was chosen for alike nodes."""

    def __init__(self, graph: Graph, completion: Completion):
        self.completion = completion
        self.sizes: AxisSizes = completion.sizes
        self.padding = Padding(self.sizes, _splits(completion))
        self.stored: dict[Value, list[Layout]] = {}
        self.uses = _count_uses(graph)
        self.memo: dict[tuple, _Candidate] = {}

    def graph(self, graph: Graph, inputs: Sequence[Layout], outputs: Sequence[Layout | None]) -> Decisions:
        """Decides a graph. An output that asks for no layout leaves in the one that it is in."""
        for value, layout in zip(graph.inputs, inputs, strict=True):
            self.stored[value] = [layout]
        steps = [self.node(node) for node in graph.nodes]
        moves = tuple(self.move(v, t or self.layouts(v)[0]) for v, t in zip(graph.outputs, outputs, strict=True))
        return Decisions(graph, tuple(inputs), steps, moves)

    def node(self, node: Node) -> Decision:
        if node.bodies:
            from shardax.partition.loops import choose_structured

            return choose_structured(self, node)
        entry = RULES.get(node.name) or Entry(node.name, whole_rule)
        factors = self.completion.factors.get(node) or entry.factors(node)
        best = self.best(node, entry, factors)
        moves = tuple(self.move(v, t) for v, t in zip(node.inputs, best.operands, strict=True))
        local = Local(node, best.operands, best.results, best.splits, self.sizes)
        return Decision(node, moves, local, factors, entry, self.store_results(node, best.results))

    # What is where

    def layouts(self, value: Value) -> list[Layout]:
        """The layouts in which a value is there, first the one that it was made in."""
        return [whole(value.shape)] if value.is_literal else self.stored[value]

    def wanted(self, value: Value) -> Layout:
        """The layout that completion wants for a value."""
        return self.padding.layout(self.completion.sharding(value), value.shape)

    def move(self, value: Value, target: Layout) -> Move:
        """Reads a value in a layout; from then on it is there in that layout too."""
        layouts = self.layouts(value)
        if target in layouts:
            return Move(target, target)
        source = min(layouts, key=lambda source: self.price(value, source, target))
        if not value.is_literal:
            layouts.append(target)
        return Move(source, target)

    def store_results(self, node: Node, layouts: Sequence[Layout]) -> dict[int, Layout]:
        """Stores results. A pending one with several uses is settled where it is made: its users would each pay again.

        An annotated value is the value itself: it is there in its old layouts too.
        """
        settled = {}
        for i, (value, layout) in enumerate(zip(node.outputs, layouts, strict=True)):
            if layout.pending and self.uses[value] > 1:
                settled[i] = layout = self.destination(value, layout)
            self.stored[value] = [layout]
        if annotations.of_node(node):
            self.stored[node.outputs[0]] += [x for x in self.layouts(node.inputs[0]) if x != layouts[0] and not x.pending]
        return settled

    def destination(self, value: Value, layout: Layout) -> Layout:
        """The layout that completion wants, with the padding that the value has where the axes are the same already."""
        wanted = self.wanted(value)
        same = zip(layout.dims, layout.padded, wanted.dims, wanted.padded, strict=True)
        return Layout(wanted.sharding, tuple(have if a == b else want for a, have, b, want in same))

    def price(self, value: Value, source: Layout, target: Layout) -> float:
        """The price, in bytes sent, of reading a value in layout `target` when it is there in `source`."""
        if source == target:
            return 0.0
        path = reshard.plan(source, target, value.shape, _itemsize(value), self.sizes)
        return path.nbytes + COLLECTIVE * sum(step.kind in reshard.COLLECTIVES for step in path.steps)

    # Candidates and their prices

    def best(self, node: Node, entry: Entry, factors: Factors) -> _Candidate:
        """The cheapest candidate; nodes that are alike in everything that matters share one answer."""
        wanted = tuple(self.wanted(v) for v in node.outputs)
        uses = tuple(min(self.uses[v], 2) for v in node.outputs)
        there = tuple(tuple(self.layouts(v)) for v in node.inputs)
        sizes = tuple(map(_itemsize, node.inputs)) + tuple(map(_itemsize, node.outputs))
        same = tuple(node.inputs.index(v) for v in node.inputs)
        sends = tuple(node.params.items()) if entry.sends else ()
        key = (entry.name, id(factors), wanted, uses, there, sizes, same, tuple(entry.passes_of(node)), sends)
        if key not in self.memo:
            self.memo[key] = self.cheapest(node, entry, factors)
        return self.memo[key]

    def cheapest(self, node: Node, entry: Entry, factors: Factors) -> _Candidate:
        if annotations.of_node(node):
            return _candidate(factors, _project([self.wanted(node.outputs[0])], factors.results, factors, self.sizes), (), ())
        best, least = None, (math.inf,)
        for candidate in self.candidates(node, entry, factors):
            reads = self.reads(node, candidate) + self.sends(node, entry, candidate)
            owed = self.owed(node, candidate)
            reluctance = self.reluctance(node, entry, candidate, factors)
            order = (*reluctance, reads + owed, reads, self.compute(node, candidate, factors))
            if order < least:
                best, least = candidate, order
            if best is candidate and not reads + owed + reluctance[0]:
                break  # the first candidate is the fullest: none sends less or splits more
        assert best is not None, f"no way to run {node.name}"
        return best

    def reluctance(self, node: Node, entry: Entry, candidate: _Candidate, factors: Factors) -> tuple[float, ...]:
        """What counts before bytes: indexed dims stay split in place, and multiplications are split as far as may be."""
        held = 0
        if stay := entry.factors_in_place(factors):
            made = _project([self.layouts(node.inputs[0])[0]], factors.operands[:1], factors, self.sizes)
            held = sum(f in made and f not in candidate.splits for f in stay)
        tied = {tie(factor): split.axes for factor, split in candidate.splits.items()}
        ways = math.prod(self.sizes[a] for axes in tied.values() for a in axes)
        return (held, -ways if node.name in _MULTIPLY else 0)

    def candidates(self, node: Node, entry: Entry, factors: Factors) -> Iterator[_Candidate]:
        results = [[self.wanted(v)] for v in node.outputs]
        made = [[self.layouts(v)[0], self.wanted(v)] for v in node.inputs]
        suggestions = _suggestions(results + made, factors.results + factors.operands, factors, self.sizes)
        waits = list(_waits(entry.passes_of(node), [self.layouts(v) for v in node.inputs]))
        for splits in _assignments(_options(suggestions, factors, self.padding), factors, self.sizes):
            for group, pending in waits:
                if _compatible(factors, splits, pending):
                    yield _candidate(factors, splits, group, pending)

    def reads(self, node: Node, candidate: _Candidate) -> float:
        """The price of bringing the operands to where a candidate wants them."""
        reads = dict.fromkeys(zip(node.inputs, candidate.operands, strict=True))
        return sum(min(self.price(v, source, target) for source in self.layouts(v)) for v, target in reads)

    def sends(self, node: Node, entry: Entry, candidate: _Candidate) -> float:
        """The price of what the node itself sends."""
        local = Local(node, candidate.operands, candidate.results, candidate.splits, self.sizes)
        return sum(nbytes + COLLECTIVE for nbytes in entry.sends(local)) if entry.sends else 0.0

    def owed(self, node: Node, candidate: _Candidate) -> float:
        """The price of bringing the results to where completion wants them, now or by those who read them."""
        made = [(v, r) for v, r in zip(node.outputs, candidate.results, strict=True) if self.uses[v]]
        return sum(self.price(v, layout, self.destination(v, layout)) for v, layout in made)

    def compute(self, node: Node, candidate: _Candidate, factors: Factors) -> float:
        """The price, in bytes sent, of a candidate's memory traffic and multiplications."""
        values, layouts = [*node.inputs, *node.outputs], [*candidate.operands, *candidate.results]
        nbytes = sum(math.prod(lay.local_shape(self.sizes)) * _itemsize(v) for v, lay in zip(values, layouts, strict=True))
        flops = 0.0
        if node.name in _MULTIPLY:
            ranges = {tie(f): f for f in factors.sizes}.values()
            flops = 2.0 * math.prod(_local_size(f, factors, candidate.splits, self.sizes) for f in ranges)
        return nbytes * MEMORY_BYTE + flops * FLOP


def _splits(completion: Completion) -> frozenset:
    return frozenset(
        (n, axes) for value, dims in completion.dims.items() for n, axes in zip(value.shape, dims, strict=True) if axes
    )


def _count_uses(graph: Graph) -> Counter[Value]:
    uses = Counter(graph.outputs)
    for node in graph.walk():
        uses.update(node.inputs)
        for body in node.bodies:
            uses.update(body.outputs)
    return uses


def _itemsize(value: Value) -> int:
    return getattr(value.aval.dtype, "itemsize", 4)


def _local_size(factor: str, factors: Factors, splits: Splits, sizes: AxisSizes) -> int:
    if factor not in splits:
        return factors.sizes[factor]
    return splits[factor].padded // math.prod(sizes[a] for a in splits[factor].axes)


def _candidate(factors: Factors, splits: Splits, group: Sequence[int], pending: Pending) -> _Candidate:
    """Layouts from splits; the operands of `group` come in owing `pending`, and so leave the results."""
    owed = tuple(sorted({*reduced_pending(factors, splits), *pending}))
    operands = tuple(
        tensor_layout(dims, factors, splits, pending if i in group else ()) for i, dims in enumerate(factors.operands)
    )
    return _Candidate(splits, operands, tuple(tensor_layout(dims, factors, splits, owed) for dims in factors.results))


def _project(layouts: Sequence[Layout], tensors, factors: Factors, sizes: AxisSizes) -> dict[str, Split]:
    splits: dict[str, Split] = {}
    for layout, dims in zip(layouts, tensors, strict=True):
        for dim, axes, padded in zip(dims, layout.dims, layout.padded, strict=True):
            splits.update(project(dim, axes, padded, factors, sizes) if axes else {})
    return splits


def _suggestions(layouts: Sequence[Sequence[Layout]], tensors, factors: Factors, sizes: AxisSizes) -> dict[str, list[Split]]:
    """For each factor the splits that some layout of some tensor suggests, first suggested first."""
    suggestions: dict[str, list[Split]] = {}
    for alternatives, dims in zip(layouts, tensors, strict=True):
        for layout in alternatives:
            for factor, split in _project([layout], [dims], factors, sizes).items():
                have = suggestions.setdefault(factor, [])
                if factors.kind(factor) != WHOLE and split not in have:
                    have.append(split)
    return suggestions


_MOST_CANDIDATES = 256
_MOST_BLOCKS = 12  # ways to lay out the blocks of one group of windowed factors
Options = list[list[Splits]]  # for each factor, or group of tied ones, the ways to split it


def _options(suggestions: dict[str, list[Split]], factors: Factors, padding: Padding) -> Options:
    groups = {factor: group for group in factors.tied for factor in group}
    options: dict[tuple[str, ...], list[Splits]] = {}
    for factor, splits in suggestions.items():
        group = groups.get(factor)
        if group is None:
            options[factor,] = [{factor: split} for split in splits]
        elif group not in options:
            options[group] = list(_tied(group, suggestions, factors, padding))
    return [ways for ways in options.values() if ways]


def _tied(group: Sequence[str], suggestions: dict[str, list[Split]], factors: Factors, padding: Padding) -> Iterator[Splits]:
    """The ways to split windowed factors over the same axes: each in blocks of its own, or in those of another where these
    are not much too large. What only operands have may also stay whole, its parts being cut out, but not what is reduced."""
    shown = {f for tensor in factors.results for dim in tensor for f in dim}.union(factors.reduced)
    for axes in dict.fromkeys(split.axes for f in group for split in suggestions.get(f, ())):
        sizes = {f: [s.padded for s in suggestions.get(f, ()) if s.axes == axes] for f in group}
        ways = [_blocks(f, factors.sizes[f], axes, sizes, padding) + [None] * (f not in shown) for f in group]
        for chosen in itertools.islice(itertools.product(*ways), _MOST_BLOCKS):
            yield {f: split for f, split in zip(group, chosen, strict=True) if split}


def _blocks(factor: str, size: int, axes: Axes, padded: dict[str, list[int]], padding: Padding) -> list[Split | None]:
    own = [*padded[factor], padding.padded(size, axes)]
    others = (p for sizes in padded.values() for p in sizes if size <= p <= 2 * size)
    return [Split(axes, p) for p in dict.fromkeys((*own, *others))]


def _assignments(options: Options, factors: Factors, sizes: AxisSizes) -> Iterator[dict[str, Split]]:
    """Ways to split each factor as suggested or not at all: first as many as fit, one after the other; then every way, the
    fullest first, as far as there is patience; last, none."""
    yield _greedy(options, factors, sizes)
    for chosen in itertools.islice(itertools.product(*([*ways, {}] for ways in options)), _MOST_CANDIDATES):
        splits = {f: split for way in chosen for f, split in way.items()}
        if _compatible(factors, splits, ()) and fits(factors, splits, sizes):
            yield splits
    yield {}


def _greedy(options: Options, factors: Factors, sizes: AxisSizes) -> dict[str, Split]:
    splits: dict[str, Split] = {}
    for ways in options:
        for way in ways:
            more = {**splits, **way}
            if _compatible(factors, more, ()) and fits(factors, more, sizes):
                splits = more
                break
    return splits


def _compatible(factors: Factors, splits: Splits, pending: Pending) -> bool:
    """Whether no tensor is split twice by one axis, and no axis over which a result owes a reduction splits it too."""
    owed = [axis for axis, _ in (*reduced_pending(factors, splits), *pending)]
    if len(set(owed)) != len(owed):
        return False
    for i, dims in enumerate(factors.tensors):
        axes = [a for dim in dims for f in dim if f in splits for a in splits[f].axes]
        if i >= len(factors.operands) or pending:
            axes += owed if i >= len(factors.operands) else [axis for axis, _ in pending]
        if len(set(axes)) != len(axes):
            return False
    return True


def _waits(passes: Sequence[Passes], operands: Sequence[Sequence[Layout]]) -> Iterator[tuple[tuple[int, ...], Pending]]:
    """The ways to let pending operands wait: (operands that come in pending, what they owe); last, that none does."""
    for group in passes:
        owed = [tuple(p for p in lay.pending if p[1] in group.kinds) for i in group.operands for lay in operands[i]]
        together = tuple(sorted(set(itertools.chain(*owed))))
        if len({axis for axis, _ in together}) == len(together):
            owed.insert(0, together)
        for pending in dict.fromkeys(filter(None, owed)):
            yield group.operands, pending
    yield (), ()
