"""choose: for each node, which factors are split over which axes. Pure data out: the decisions, which `emit` then carries out.

Nodes are taken in program order. A node's candidates are the splits that its operands suggest (as they were made, and as
completion wants them) and its results (as completion wants them), and for pending operands both settling them and letting
them wait. A candidate's price is what it sends: operands resharded, and results brought to the shardings wanted of them. The
cheapest is taken; among equals the one that sends least at once, then the one that computes least. Where that gathers operands
over axes which then split nothing, these axes are tried on every other dim. To save collectives alone operands are not
gathered along a dim that the node merely carries: only if every other way sends more bytes.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from shardax import annotations, reshard
from shardax.completion.complete import Completion
from shardax.completion.kinds import Kinds
from shardax.cost.nominal import COLLECTIVE, FLOP, MEMORY_BYTE
from shardax.graph import Graph, Node, Value
from shardax.partition import replicated
from shardax.partition.candidates import (
    Candidate,
    Offer,
    assignments,
    candidate_of,
    compatible,
    options_of,
    project_all,
    suggest,
    waits,
)
from shardax.partition.decisions import MADE_ANYWHERE, Decision, Decisions, Move
from shardax.partition.evened import evened
from shardax.partition.loops import choose_structured
from shardax.partition.onward import Onward, Stop, price_onward
from shardax.partition.segments import Segment, segments
from shardax.partition.trials import price_of_body
from shardax.sharding import AxisSizes, Layout, Padding, shard_count, whole
from shardax.spmd_rules.linalg import MATRIX
from shardax.spmd_rules.localize import Splits
from shardax.spmd_rules.registry import RULES, Entry, Local, Split, run_whole, whole_rule
from shardax.spmd_rules.rule import Factors, tie

_MULTIPLY = ("conv_general_dilated", "dot_general", "fft", *MATRIX)
_ROOMY = 1.5  # times as large as they need be: blocks that many devices have nothing of


def choose(
    graph: Graph,
    completion: Completion,
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    spare: frozenset[str] = frozenset(),
) -> Decisions:
    """Chooses how every node of a graph runs, given the layouts that its inputs come in and its outputs must leave in.

    What `Chooser.unless_moved` moves pays where it stands, but what follows may have to move back: the program is chosen
    without these moves too, and what sends less is taken. Where there are spare axes nothing is moved so.

    `spare`: axes that nobody named, the minor parts of those that a reshape cut.
    """
    chooser = Chooser(graph, completion, spare, may_move=not spare)
    found = chooser.graph(graph, inputs, outputs)
    if not chooser.has_moved:
        return found
    still = chooser.still().graph(graph, inputs, outputs)
    return min(still, found, key=partial(price_of_body, chooser, computes=False))


Layouts = tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The decisions of a segment, and the layouts in which what it reads and what it makes is there afterwards. `moved`: as
    that of candidates, of any of its nodes."""

    steps: list[Decision]
    reads: list[Layouts]
    makes: list[Layouts]
    moved: bool


class Chooser:
    """The state of a walk over the program: in which layouts each value is there, and what was chosen for alike nodes."""

    def __init__(self, graph: Graph, completion: Completion, spare: frozenset[str] = frozenset(), may_move: bool = True):
        self.spare = spare
        self.may_move, self.has_moved = may_move, False
        self.completion = completion
        self.sizes: AxisSizes = completion.sizes
        self.kinds: Kinds = completion.items.known
        self.padding = Padding(self.sizes, frozenset(completion.splits()))
        self.stored: dict[Value, Layouts] = {}
        self.equal: dict[Layouts, Layouts] = {}
        self.anywhere = _made_anywhere(graph)
        self.uses = _count_uses(graph)
        self.onward = Onward(graph, self.uses, self.wanted)
        self.stops_of: dict[tuple[Value, frozenset[str]], tuple[Stop, ...]] = {}
        self.looped = _read_by_loops(graph)
        self.asked = {node.outputs[0]: note.dims for node, note in completion.notes if note.role == "inside"}
        self.evened = evened(graph, _MULTIPLY)
        self.memo: dict[tuple, Candidate] = {}
        self.chosen: dict[tuple, _Chosen] = {}
        self.whole = graph
        self.hidden: frozenset[str] = frozenset()

    def still(self) -> "Chooser":
        """One for the same program that moves nothing. It takes over what was chosen where that changes nothing."""
        other = Chooser(self.whole, self.completion, self.spare, may_move=False)
        other.equal, other.stops_of = self.equal, self.stops_of
        other.memo = {key: found for key, found in self.memo.items() if not found.moved}
        other.chosen = {key: found for key, found in self.chosen.items() if not found.moved}
        return other

    def graph(self, graph: Graph, inputs: Sequence[Layout], outputs: Sequence[Layout | None]) -> Decisions:
        """Decides a graph. An output that asks for no layout leaves in the one that it is in."""
        for value, layout in zip(graph.inputs, inputs, strict=True):
            self.store(value, (layout,))
        parts = segments(self.completion, self.uses, self.evened, self.stops) if graph is self.whole else [Segment(graph.nodes)]
        steps = list(itertools.chain.from_iterable(map(self.segment, parts)))
        moves = tuple(self.move(v, t or self.layouts(v)[0]) for v, t in zip(graph.outputs, outputs, strict=True))
        return Decisions(graph, tuple(inputs), steps, moves)

    def segment(self, segment: Segment) -> Sequence[Decision]:
        """Decides the nodes of a segment, or takes over what was chosen for one that is alike."""
        if segment.key is None:
            return [self.node(node) for node in segment.nodes]
        key = (segment.key, tuple([id(self.stored[v]) for v in segment.reads]))
        if key not in self.chosen:
            before, self.has_moved = self.has_moved, False
            steps = [self.node(node) for node in segment.nodes]
            reads, makes = ([self.stored[v] for v in vs] for vs in (segment.reads, segment.makes))
            self.chosen[key] = _Chosen(steps, reads, makes, self.has_moved)
            self.has_moved |= before
        chosen = self.chosen[key]
        self.stored.update(zip(segment.reads, chosen.reads, strict=True))
        self.stored.update(zip(segment.makes, chosen.makes, strict=True))
        return [step.of(node) for step, node in zip(chosen.steps, segment.nodes, strict=True)]

    def node(self, node: Node) -> Decision:
        if node.bodies:
            return choose_structured(self, node)
        entry = RULES.get(node.name) or Entry(node.name, whole_rule, run_whole)
        factors = self.kinds.of(node)[0].factors or entry.factors(node)
        best = self.best(node, entry, factors)
        moves = tuple(self.move(v, t) for v, t in zip(node.inputs, best.operands, strict=True))
        settled = self.store_results(node, best.results)
        return Decision(moves, best.operands, best.results, best.splits, factors, entry, settled, spared=best.spared)

    # What is where

    def layouts(self, value: Value) -> Layouts:
        """The layouts in which a value is there, first the one that it was made in."""
        return (whole(value.shape),) if value.is_literal else self.stored[value]

    def store(self, value: Value, layouts: Layouts) -> None:
        """Equal tuples are one: segments compare them by identity."""
        self.stored[value] = self.equal.setdefault(layouts, layouts)

    def wanted(self, value: Value) -> Layout:
        """The layout that completion wants for a value, as far as axes are not hidden."""
        sharding = self.completion.sharding(value)
        return self.padding.layout(sharding.without(self.hidden) if self.hidden else sharding, value.shape)

    @contextmanager
    def hiding(self, axes: Iterable[str]):
        """Inside, no value is split over these axes, nor pending: the devices along them do different trips of a loop."""
        around, self.hidden = self.hidden, self.hidden.union(axes)
        try:
            yield
        finally:
            self.hidden = around

    def move(self, value: Value, target: Layout) -> Move:
        """Reads a value in a layout; from then on it is there in that layout too."""
        layouts = self.layouts(value)
        if target not in layouts and not value.is_literal:
            self.store(value, (*layouts, target))
        return self.cheapest_move(value, layouts, target)

    def cheapest_move(self, value: Value, layouts: Layouts, target: Layout) -> Move:
        source = target if target in layouts else min(layouts, key=lambda source: self.price(value, source, target))
        return Move(source, target)

    def store_results(self, node: Node, layouts: Sequence[Layout]) -> dict[int, Layout]:
        """Stores results. A pending one with several uses is settled where it is made: its users would each pay again.

        An annotated value is the value itself: it is there in its old layouts too. What is made of scalars alone, as zeros are,
        every device can make whole (`MADE_ANYWHERE`).
        """
        settled = {}
        for i, (value, layout) in enumerate(zip(node.outputs, layouts, strict=True)):
            if layout.pending and self.uses[value] > 1:
                settled[i] = layout = self.destination(value, layout)
            made_whole = [whole(value.shape)] if value in self.anywhere and not layout.pending else []
            self.store(value, tuple(dict.fromkeys((layout, *made_whole))))
        if annotations.of_node(node):
            others = (x for x in self.layouts(node.inputs[0]) if x != layouts[0] and not x.pending)
            self.store(node.outputs[0], (*self.layouts(node.outputs[0]), *others))
        return settled

    def destination(self, value: Value, layout: Layout) -> Layout:
        """The layout that completion wants, with the padding that the value has where the axes are the same already."""
        wanted = self.wanted(value)
        most = _ROOMY if value in self.evened else math.inf
        same = zip(layout.dims, layout.padded, wanted.dims, wanted.padded, strict=True)
        return Layout(wanted.sharding, tuple(have if a == b and have < most * want else want for a, have, b, want in same))

    def price(self, value: Value, source: Layout, target: Layout) -> float:
        """The price, in bytes sent, of reading a value in layout `target` when it is there in `source`."""
        if source == target:
            return 0.0
        path = self.path(value, source, target)
        return path.nbytes + COLLECTIVE * sum(step.kind in reshard.COLLECTIVES for step in path.steps)

    def path(self, value: Value, source: Layout, target: Layout) -> reshard.Path:
        return reshard.plan(source, target, value.shape, value.itemsize, self.sizes)

    # Candidates and their prices

    def best(self, node: Node, entry: Entry, factors: Factors) -> Candidate:
        """The cheapest candidate; nodes that are alike in everything that matters share one answer."""
        wanted = tuple(self.wanted(v) for v in (*node.inputs, *node.outputs))
        uses = tuple((min(self.uses[v], 2), v in self.evened) for v in node.outputs)
        if factors.reduced:
            uses += (*(min(self.uses[v], 2) for v in node.inputs), *map(self.stops, node.outputs))
        there = tuple(self.layouts(v) for v in node.inputs)
        sizes = tuple(v.itemsize for v in (*node.inputs, *node.outputs))
        same = tuple(node.inputs.index(v) for v in node.inputs)
        sends = _said(node) if entry.sends or entry.ways else ()
        key = (entry.name, id(factors), wanted, uses, there, sizes, same, tuple(entry.passes_of(node)), sends, self.hidden)
        if key not in self.memo:
            self.memo[key] = self.cheapest(node, entry, factors)
        self.has_moved |= self.memo[key].moved
        return self.memo[key]

    def cheapest(self, node: Node, entry: Entry, factors: Factors) -> Candidate:
        if annotations.of_node(node):
            return candidate_of(
                factors, project_all([self.wanted(node.outputs[0])], factors.results, factors, self.sizes), (), ()
            )
        best = self.unless_moved(node, entry, factors, self.least(node, entry, factors, Offer()))
        idle = self.idle(node, entry, factors, best)
        if not idle:
            return best
        offer = Offer(idle.axes)
        other = self.carrying(node, entry, factors, self.least(node, entry, factors, offer), offer)
        return replace(other, moved=best.moved)

    def least(self, node: Node, entry: Entry, factors: Factors, offer: Offer) -> Candidate:
        """The cheapest candidate."""
        best, least = None, (math.inf,)
        for candidate in self.candidates(node, entry, factors, offer):
            order = self.order(node, entry, candidate, factors)
            if order < least:
                best, least = candidate, order
            if best is candidate and order[0] == order[2] == 0:
                break  # the first candidate is the fullest: none sends less or splits more
        assert best is not None, f"no way to run {node.name}"
        return best

    def order(
        self, node: Node, entry: Entry, candidate: Candidate, factors: Factors, patient: bool = False
    ) -> tuple[float, ...]:
        """What is compared of candidates: the least comes first. `patient`: see `reads` and `owed`."""
        reads = self.reads(node, candidate, patient) + self.sends(node, entry, candidate)
        owed = self.owed(node, candidate, patient)
        reluctance, compute = self.reluctance(node, entry, candidate, factors), self.compute(node, candidate, factors)
        return (*reluctance, reads + owed + (compute if self.spare and node.name in _MULTIPLY else 0), reads, compute)

    def unless_moved(self, node: Node, entry: Entry, factors: Factors, best: Candidate) -> Candidate:
        """A candidate, unless an all_to_all spares what it sends: of the operand that alone is split along a reduced dim.

        Candidates that others profit from are not given up: what is pending may be settled where that is cheaper, and what
        is gathered for several readers is gathered once.
        """
        may_gain = node.name in _MULTIPLY or entry.looks_up  # others reduce to less than they read
        if not self.may_move or not may_gain or not factors.reduced or entry.ways is not None:
            return best
        offer = Offer(reduced=True)
        if self.suggested(node, factors, Offer()) == self.suggested(node, factors, offer):
            return best
        patient = self.order(node, entry, best, factors, patient=True)
        if not patient[2]:
            return best
        others = ((self.order(node, entry, c, factors), c) for c in self.of_rule(node, entry, factors, offer))
        order, other = min(others, key=lambda one: one[0])
        if order >= patient or any(layout.pending for layout in other.results):
            return best
        return replace(other, moved=True)

    def carrying(self, node: Node, entry: Entry, factors: Factors, best: Candidate, offer: Offer) -> Candidate:
        """Of a candidate that gathers along dims that the node merely carries: what sends as many bytes and does not."""
        if not self.carried(node, entry, factors, best):
            return best
        most = self.reluctance(node, entry, best, factors)
        others = [c for c in self.candidates(node, entry, factors, offer) if not self.carried(node, entry, factors, c)]
        least = min(
            others, key=lambda c: (self.reluctance(node, entry, c, factors) > most, self.nbytes(node, entry, c)), default=None
        )
        if least is None:
            return replace(best, spared=math.inf)
        spared = self.nbytes(node, entry, least) - self.nbytes(node, entry, best)
        return replace(best, spared=spared) if spared > 0 or self.reluctance(node, entry, least, factors) > most else least

    def carried(self, node: Node, entry: Entry, factors: Factors, candidate: Candidate) -> float:
        """The bytes that a candidate gathers along dims that the node merely carries."""
        idle = self.idle(node, entry, factors, candidate)
        return idle.carried if idle else 0.0

    def idle(self, node: Node, entry: Entry, factors: Factors, candidate: Candidate) -> replicated.Replicated | None:
        """What a candidate gathers over axes that then split nothing, if it does."""
        pairs = zip(node.inputs, candidate.operands, strict=True)
        moves = tuple(self.cheapest_move(v, self.layouts(v), t) for v, t in pairs)
        decision = Decision(moves, candidate.operands, candidate.results, candidate.splits, factors, entry)
        return next(replicated.of_node(node, decision, self.completion), None)

    def reluctance(self, node: Node, entry: Entry, candidate: Candidate, factors: Factors) -> tuple[float, ...]:
        """What counts before bytes: indexed dims are not gathered, and multiplications are split as far as may be.

        Over an axis that nobody named products are split where that is worth it. A table that is smaller than what is read or
        written of it may be gathered.
        """
        held = 0
        if (stay := entry.factors_in_place(factors)) and whole(node.inputs[0].shape) not in self.layouts(node.inputs[0]):
            made = project_all([self.layouts(node.inputs[0])[0]], factors.operands[:1], factors, self.sizes)
            if not self.indexes_more(node, entry, candidate):
                held = sum(not set(made[f].axes) <= set(candidate.operands[0].sharding.axes) for f in stay if f in made)
        if node.name not in _MULTIPLY:
            return (held, 0)
        named = {f: tuple(a for a in s.axes if a not in self.spare) for f, s in candidate.splits.items()}
        parts = {tie(f): min(factors.sizes[f], shard_count(axes, self.sizes)) for f, axes in named.items()}
        return (held, -math.prod(parts.values()))

    def indexes_more(self, node: Node, entry: Entry, candidate: Candidate) -> bool:
        """Tells whether a device reads or writes as much as its part of the table holds, as a graph's edges do in its nodes."""
        assert entry.in_place is not None
        values, layouts = [*node.inputs, *node.outputs], [*candidate.operands, *candidate.results]
        table, payload = (math.prod(layouts[i].local_shape(self.sizes)) * values[i].itemsize for i in entry.in_place)
        return table <= payload

    def candidates(self, node: Node, entry: Entry, factors: Factors, offer: Offer) -> Iterator[Candidate]:
        found = self.of_rule(node, entry, factors, offer)
        if entry.ways is None:
            yield from found
        else:
            locals_ = (Local(node, c.operands, c.results, c.splits, self.sizes) for c in found)
            yield from (Candidate(x.splits, x.operands, x.results) for x in entry.picked(locals_, node, self.padding))

    def suggested(self, node: Node, factors: Factors, offer: Offer) -> dict[str, list[Split]]:
        """The splits that the layouts of operands and results suggest."""
        results = [[self.wanted(v)] for v in node.outputs]
        made = [[*self.layouts(v)[: None if offer.idle else 1], self.wanted(v)] for v in node.inputs]
        return suggest(results + made, factors.results + factors.operands, factors, self.padding, offer)

    def of_rule(self, node: Node, entry: Entry, factors: Factors, offer: Offer) -> Iterator[Candidate]:
        suggestions = self.suggested(node, factors, offer)
        ways = list(waits(entry.passes_of(node), [self.layouts(v) for v in node.inputs]))
        for splits in assignments(options_of(suggestions, factors, self.padding), factors, self.sizes):
            for group, pending in ways:
                if compatible(factors, splits, pending):
                    yield candidate_of(factors, splits, group, pending)

    def reads(self, node: Node, candidate: Candidate, patient: bool = False) -> float:
        """The price of bringing the operands to where a candidate wants them; `patient`: half where others read them too."""
        reads = dict.fromkeys(zip(node.inputs, candidate.operands, strict=True))
        prices = ((v, min(self.price(v, source, target) for source in self.layouts(v))) for v, target in reads)
        return sum(price / min(self.uses[v], 2) if patient and price else price for v, price in prices)

    def sends(self, node: Node, entry: Entry, candidate: Candidate) -> float:
        """The price of what the node itself sends."""
        local = Local(node, candidate.operands, candidate.results, candidate.splits, self.sizes)
        return sum(nbytes + COLLECTIVE for nbytes in entry.sent(local))

    def owed(self, node: Node, candidate: Candidate, patient: bool = False) -> float:
        """The price of bringing the results to where completion wants them, now or by those who read them; `patient`: what is
        pending waits for where that is cheapest."""
        made = [(v, r) for v, r in zip(node.outputs, candidate.results, strict=True) if self.uses[v]]
        now = [self.price(v, layout, self.destination(v, layout)) for v, layout in made]
        if not patient:
            return sum(now)
        return sum(
            price_onward(layout, self.stops(v), self.padding, price) for (v, layout), price in zip(made, now, strict=True)
        )

    def stops(self, value: Value) -> tuple[Stop, ...]:
        """Where what is pending in a value may be settled later."""
        key = value, self.hidden
        if key not in self.stops_of:
            self.stops_of[key] = tuple(self.onward.stops(value))
        return self.stops_of[key]

    def nbytes(self, node: Node, entry: Entry, candidate: Candidate) -> float:
        """The bytes that a candidate sends, however many collectives that takes."""
        reads = dict.fromkeys(zip(node.inputs, candidate.operands, strict=True))
        made = [(v, r) for v, r in zip(node.outputs, candidate.results, strict=True) if self.uses[v]]
        moves = [(v, self.cheapest_move(v, self.layouts(v), target)) for v, target in reads]
        moves += [(v, Move(layout, self.destination(v, layout))) for v, layout in made]
        local = Local(node, candidate.operands, candidate.results, candidate.splits, self.sizes)
        return sum(entry.sent(local)) + sum(self.path(v, move.source, move.target).nbytes for v, move in moves)

    def compute(self, node: Node, candidate: Candidate, factors: Factors) -> float:
        """The price, in bytes sent, of a candidate's memory traffic and multiplications."""
        values, layouts = [*node.inputs, *node.outputs], [*candidate.operands, *candidate.results]
        nbytes = sum(math.prod(lay.local_shape(self.sizes)) * v.itemsize for v, lay in zip(values, layouts, strict=True))
        flops = 0.0
        if node.name in _MULTIPLY:
            ranges = {tie(f): f for f in factors.sizes}.values()
            flops = 2.0 * math.prod(_local_size(f, factors, candidate.splits, self.sizes) for f in ranges)
        return nbytes * MEMORY_BYTE + flops * FLOP


def _said(node: Node) -> Hashable:
    """A node's parameters; where they cannot be compared, the node itself."""
    said = tuple(node.params.items())
    try:
        hash(said)
    except TypeError:
        return id(node)
    return said


def _made_anywhere(graph: Graph) -> set[Value]:
    """The values that are made of scalars alone: every device can make any part of them for nothing."""
    found: set[Value] = set()
    for node in graph.walk():
        if node.name in MADE_ANYWHERE and all(v.is_literal or not v.shape or v in found for v in node.inputs):
            found.update(node.outputs)
    return found


def _count_uses(graph: Graph) -> Counter[Value]:
    uses = Counter(itertools.chain(graph.outputs, itertools.chain.from_iterable([node.inputs for node in graph.walk()])))
    for node in graph.walk():
        for body in node.bodies:
            uses.update(body.outputs)
    return uses


def _read_by_loops(graph: Graph) -> set[Value]:
    """The values that loops and branches take, as they are or annotated."""
    nodes = list(graph.walk())
    found = {v for node in nodes if node.bodies for v in node.inputs}
    for node in reversed(nodes):
        if annotations.of_node(node) and node.outputs[0] in found:
            found.add(node.inputs[0])
    return found


def _local_size(factor: str, factors: Factors, splits: Splits, sizes: AxisSizes) -> int:
    if factor not in splits:
        return factors.sizes[factor]
    return splits[factor].padded // math.prod(sizes[a] for a in splits[factor].axes)
