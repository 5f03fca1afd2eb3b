"""The ways to run a node: what the layouts in which its operands may be made, and those requested for its
results, suggest.

Nodes that are alike in everything that matters share one list. A list has at most `MOST` ways, those that
look cheapest where they stand, with what it takes to make the operands so, from the beginning of the program
on, a value's price shared by its readers. And the one that splits nothing, if there is one: what is gathered
for others anyway looks dear there, and the more axes there are, the more ways stand before it. Two more may
split products over axes that no operand has. Whatever is left out is left out for all searches of that
program alike.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import Any

from shardax.completion.complete import Completion
from shardax.cost.network import PICO, network_of
from shardax.graph import annotations
from shardax.graph.graph import Graph, Node, Value
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
    whole,
)
from shardax.partition.paddings import arrays_of, is_at_host, joined_axes, paddings_of, whole_axes
from shardax.partition.sites import Layouts, Way, sums_left
from shardax.reshard import paths
from shardax.sharding import Axes, AxisSizes, Layout, shard_count
from shardax.spmd_rules.registry import RULES, Entry, Local, replicated_rule, run_replicated
from shardax.spmd_rules.rule import Factors

Made = Mapping[Layout, float]
"""The layouts in which a value may be made, and about how much more each costs than the cheapest, with all
that goes before it."""

MOST = 16
SPARED = 2  # ways over axes that no operand has, of what does at least so
HEAVY = 1000  # many FLOPs for each byte that it makes: chips do 400 to 5100 while they send one
_SMALL = 64  # what is small costs so many times less
_FUSED = 2.0**-10  # of what stands in no memory: enough that among equals it is computed in parts


class Alternatives:
    """The ways of a program's nodes. `stored`: the values that stand in memory, not fused into the one that
    reads them; `views`: those that are another one there.
    """

    def __init__(self, graph: Graph, completion: Completion):
        self.completion, self.paddings = completion, paddings_of(graph, completion)
        self.network = network_of(completion.sizes)
        self.sizes: AxisSizes = completion.sizes
        self.stored = stored(graph)
        self.views = views(graph, self.stored)
        self.whole = whole_axes(graph, completion, self.network.cut)
        self.joined = joined_axes(graph, completion)
        self.memo: dict[Hashable, tuple[Sequence[Way], Sequence[Made]]] = {}
        self.guesses: dict[Hashable, float] = {}
        self.elements: dict[Layout, int] = {}

    def of(
        self, node: Node, made: Sequence[Made], requested: Sequence[Layouts], hidden: frozenset[str]
    ) -> tuple[Sequence[Way], Sequence[Made]]:
        """The ways of a node without bodies, and how its results may be made. `made`: how each operand may;
        `requested`: the layouts that completion requests, and those that products wish for, of operands and
        results; `hidden`: axes over which nothing may be split here.
        """
        entry = RULES.get(node.name) or Entry(node.name, replicated_rule, run_replicated)
        factors = self.completion.items.node_classes.of(node)[0].factors or entry.factors(node)
        key = self._key(node, entry, factors, made, requested, hidden)
        if key not in self.memo:
            ways = self._ways(node, entry, factors, made, requested, hidden)
            self.memo[key] = ways, self.made(node, made, ways)
        return self.memo[key]

    def _key(self, node: Node, entry: Entry, factors: Factors, made, requested, hidden) -> Hashable:
        values = [*node.inputs, *node.outputs]
        note = annotations.of_node(node)
        params = (
            _params_key(node) if entry.sends or entry.ways else note and (note.owing, note.role == "stack")
        )
        same = tuple(node.inputs.index(v) for v in node.inputs)
        sizes = tuple([(v.itemsize, v in self.stored, v in self.views, is_at_host(v)) for v in values])
        return (
            entry.name,
            id(factors),
            tuple([tuple(layouts.items()) for layouts in made]),
            tuple(requested),
            sizes,
            same,
            tuple(entry.passes_of(node)),
            params,
            hidden,
            id(self.paddings.of_node(node)),
            self.whole_of(node),
            self.joined_of(node),
        )

    def whole_of(self, node: Node) -> tuple[Axes, ...]:
        """The axes that are cut, but not for the part of the program that a node is in."""
        return next((self.whole[v] for v in arrays_of(node) if v in self.whole), ()) if self.whole else ()

    def joined_of(self, node: Node) -> tuple[Axes, ...]:
        """The axes that the part of the program that a node is in uses only together, those that are cut
        aside."""
        if not self.joined:
            return ()
        whole = self.whole_of(node)
        runs = next((self.joined[v] for v in arrays_of(node) if v in self.joined), ())
        return tuple([run for run in runs if not any(set(run) <= set(axes) for axes in whole)])

    def _ways(
        self, node: Node, entry: Entry, factors: Factors, made, requested, hidden: frozenset[str]
    ) -> Sequence[Way]:
        count = len(node.inputs)
        if note := annotations.of_node(node):
            result = requested[count][0]
            pending = tuple(p for p in note.owing.pending if p[0] not in hidden)
            if not set(note.owing.unreduced).isdisjoint(result.sharding.axes):  # an open dim was split so
                result = self.paddings.of_node(node).layout(
                    result.sharding.without(note.owing.unreduced), node.outputs[0].shape
                )
            splits = project_all([result], factors.results, factors, self.sizes)
            split = result.sharding.axes
            left = (sums_left(lay) for lay in made[0] if note.role == "stack")
            sums = [owed for p in left if (owed := tuple(p for p in p if p[0] not in split))]
            each = [
                candidate_of(factors, splits, (0,) if p else (), p) for p in dict.fromkeys([pending, *sums])
            ]
            return [Way(c.operands, c.results, 0.0, (splits, factors, entry)) for c in each]
        apart = self._best(node, entry, factors, made, requested, hidden, self.whole_of(node))
        if not (joined := self.joined_of(node)):
            return apart
        cut = [axes for axes in self.whole_of(node) if not any(set(axes) <= set(run) for run in joined)]
        kept = [{lay: p for lay, p in sources.items() if _keeps(lay, joined)} or sources for sources in made]
        together = self._best(node, entry, factors, kept, requested, hidden, (*joined, *cut))
        return _merged(together, apart)

    def _best(
        self,
        node: Node,
        entry: Entry,
        factors: Factors,
        made,
        requested,
        hidden: frozenset[str],
        whole: tuple[Axes, ...],
    ) -> list[Way]:
        """The best ways of a node, in which the axes of `whole` are offered together only."""
        multiplies = entry.flops is not None
        offer = Offer(reduced=True, shared=multiplies, whole=whole)
        ways = self._ranked(node, entry, factors, made, requested, offer)
        used = _axes_of(self._best_at_hand(node, made, requested, ways))
        have = [a for sources in made if sources for a in next(iter(sources)).sharding.axes]
        if idle := tuple(dict.fromkeys(a for a in have if a not in used)):  # they would split nothing
            ways = self._ranked(node, entry, factors, made, requested, replace(offer, idle=idle))
        if not multiplies:
            return ways
        spare = self._spare(node, entry, self._best_at_hand(node, made, requested, ways), hidden)
        if not spare:
            return ways
        more = self._ranked(node, entry, factors, made, requested, replace(offer, idle=spare))
        return _merged(more[:SPARED], ways)

    def _best_at_hand(self, node: Node, made, requested, ways: Sequence[Way]) -> Way:
        """The cheapest, were all operands there in each of their layouts, as in a loop they may be from the
        beginning."""
        if not any(any(layouts.values()) for layouts in made):
            return ways[0]
        taken = self.taking(node.inputs, [dict.fromkeys(layouts, 0.0) for layouts in made])
        given = cache(partial(self.given, node.outputs, requested[len(node.inputs) :]))
        return min(ways, key=lambda way: self.guess(way, taken, given))

    def _spare(self, node: Node, entry: Entry, way: Way, hidden: Set[str]) -> Axes:
        """The axes that a way does not use, where it multiplies so much for what it makes that, split over
        them, it would take less time even with the results gathered.
        """
        used = _axes_of(way)
        unused = tuple([a for a in self.sizes if a not in used and a not in hidden])
        if not unused:
            return ()
        local = Local(node, way.operands, way.results, way.detail[0], self.sizes)
        spared = 1 - 1 / shard_count(unused, self.sizes)
        made = [self.nbytes(v, lay) for v, lay in zip(node.outputs, way.results, strict=True)]
        if (flops := entry.flops_of(local)) < HEAVY * sum(made):
            return ()
        gathers = sum([self.network.collective("all_gather", unused, spared * nbytes) for nbytes in made])
        return unused if spared * self.network.compute(flops, 0) > gathers else ()

    def _ranked(self, node: Node, entry: Entry, factors: Factors, made, requested, offer: Offer) -> list[Way]:
        """The ways that look cheapest where they stand, the cheapest first, and one that splits nothing."""
        count = len(node.inputs)
        ways_by_layout, moved = dict[Any, Way](), self.moved(node, entry)
        for candidate in self.candidates(node, entry, factors, made, requested, offer):
            way = self.way(node, entry, factors, candidate, moved)
            kept = ways_by_layout.setdefault((way.operands, way.results), way)
            if way.price < kept.price:
                ways_by_layout[way.operands, way.results] = way
        ways = list(ways_by_layout.values())
        if len(ways) > 1:
            taken = self.taking(node.inputs, made)
            given = cache(partial(self.given, node.outputs, requested[count:]))
            ways.sort(key=lambda way: self.guess(way, taken, given))
            unsplit = (way for way in ways[MOST:] if not way.detail[0])
            ways = [*ways[:MOST], *itertools.islice(unsplit, 1)]
        return ways

    def candidates(
        self, node: Node, entry: Entry, factors: Factors, made, requested, offer: Offer
    ) -> Iterator[Candidate]:
        ruled = self.of_rule(node, entry, factors, made, requested, offer)
        if any(map(is_at_host, (*node.inputs, *node.outputs))):
            ruled = self.staying(list(ruled), node, made, requested)
        if entry.ways is None:
            return ruled
        locals_ = (Local(node, c.operands, c.results, c.splits, self.sizes) for c in ruled)
        return (
            Candidate(x.splits, x.operands, x.results)
            for x in entry.picked(locals_, node, self.paddings.of_node(node))
        )

    def staying(
        self, candidates: list[Candidate], node: Node, made: Sequence[Made], requested: Sequence[Layouts]
    ) -> Iterator[Candidate]:
        """The candidates that take what is at the host as it lies there, or a part of it, and give it as it
        is to rest: nothing is sent or padded in the host's memory. All, where there are no such.
        """

        def is_cut(v: Value, layouts: Made, target: Layout) -> bool:
            each = (paths.plan(layout, target, v.shape, v.itemsize, self.sizes) for layout in layouts)
            return any(all(step.kind == "slice" for step in path.steps) for path in each)

        taken = [k for k, v in enumerate(node.inputs) if is_at_host(v)]
        given = [k for k, v in enumerate(node.outputs) if is_at_host(v)]
        wanted = requested[len(node.inputs) :]
        staying = (
            each
            for each in candidates
            if all(is_cut(node.inputs[k], made[k], each.operands[k]) for k in taken)
            and all(each.results[k] == wanted[k][0] for k in given)
        )
        return iter(list(staying) or candidates)

    def of_rule(
        self, node: Node, entry: Entry, factors: Factors, made, requested, offer: Offer
    ) -> Iterator[Candidate]:
        count = len(node.inputs)
        operands = [(*have, *requests) for have, requests in zip(made, requested, strict=False)]
        results = list(requested[count:])
        layouts, tensors = results + operands, factors.results + factors.operands
        padding = self.paddings.of_node(node)
        suggestions = suggest(layouts, tensors, factors, padding, offer)
        each = partial(whole, layouts, tensors, factors, self.sizes)
        ways = list(waits(entry.passes_of(node), made))
        options = options_of(suggestions, factors, padding)
        for splits in assignments(options, factors, self.sizes, each):
            for group, pending in ways:
                if not pending or compatible(factors, splits, pending):
                    yield candidate_of(factors, splits, group, pending)

    # Prices

    def way(
        self, node: Node, entry: Entry, factors: Factors, candidate: Candidate, moved: Sequence[float]
    ) -> Way:
        local = Local(node, candidate.operands, candidate.results, candidate.splits, self.sizes)
        sent = sum(self.network.collective(*message) for message in entry.sent(local))
        products = self.network.compute(entry.flops_of(local), 0)
        layouts = (*candidate.operands, *candidate.results)
        own = max(products, self.traffic_price(self.traffic(moved, layouts)))
        price = sent + self.network.batched(own, entry.batch_of(local))
        made = zip(node.outputs, candidate.results, strict=True)
        memory = sum(
            [self.nbytes(v, layout) for v, layout in made if v in self.stored and v not in self.views]
        )
        return Way(candidate.operands, candidate.results, price, (candidate.splits, factors, entry), memory)

    def traffic_price(self, nbytes: float) -> float:
        """The price of memory traffic. An operation takes about as long on a few bytes as on none: to split
        what is small spares next to nothing, and is not worth a message."""
        price, least = self.network.compute(0, nbytes), PICO * self.network.chip.least
        return float(round(price / _SMALL if price < least else price - least * (1 - 1 / _SMALL)))

    def traffic(self, moved: Sequence[float], layouts: Sequence[Layout]) -> float:
        """The bytes that a device moves between it and memory, if it has operands and results of these
        layouts; `moved`: for each element of each."""
        return float(sum([n * self.elements_of(lay) for n, lay in zip(moved, layouts, strict=True) if n]))

    def moved(self, node: Node, entry: Entry) -> list[float]:
        """The bytes that a node moves between it and memory for each element of its operands and results; a
        trace of that for what it takes from others or gives them.
        """
        first, count = 0, len(node.inputs) + len(node.outputs)
        if entry.reads == "none" or any(v in self.views for v in node.outputs):
            return [0] * count
        times = 1
        if entry.reads == "part":
            first, times = len(node.inputs), 2
        elif entry.in_place and not entry.looks_up:  # what is updated is not copied
            first, count, times = 1, count - 1, 2
        return [
            times * v.itemsize * (1 if v in self.stored or v in self.views else _FUSED)
            if first <= i < count and not v.is_literal
            else 0
            for i, v in enumerate((*node.inputs, *node.outputs))
        ]

    def nbytes(self, value: Value, layout: Layout) -> int:
        return self.elements_of(layout) * value.itemsize

    def elements_of(self, layout: Layout) -> int:
        """How many a device has."""
        elements = self.elements.get(layout)
        if elements is None:
            elements = self.elements[layout] = math.prod(layout.local_shape(self.sizes))
        return elements

    def guess(
        self, way: Way, taken: Callable[[int, Layout], float], given: Callable[[int, Layout], float]
    ) -> tuple[float, float]:
        """About what a way costs where it stands, its operands brought and its results as requested: only to
        rank ways. Of equals those come first that take their operands as they are made."""
        brought = sum([taken(i, layout) for i, layout in enumerate(way.operands)])
        return way.price + brought + sum([given(i, layout) for i, layout in enumerate(way.results)]), brought

    def made(self, node: Node, made: Sequence[Made], ways: Sequence[Way]) -> Sequence[Made]:
        """How the results of a node may be made, by some ways to run it."""
        taken = self.taking(node.inputs, made)
        prices = [w.price + sum([taken(i, lay) for i, lay in enumerate(w.operands)]) for w in ways]
        least, found = min(prices), tuple(dict[Layout, float]() for _ in node.outputs)
        for way, price in zip(ways, prices, strict=True):
            for layouts, layout in zip(found, way.results, strict=True):
                layouts[layout] = min(layouts.get(layout, math.inf), price - least)
        return found

    def taking(self, values: Sequence[Value], made: Sequence[Made]) -> Callable[[int, Layout], float]:
        """About what it costs to have one of several values in a layout: to make it in the best of those in
        which it may be made, and to bring it from there. What costs more to make so than this is not tried.
        """
        sources = [sorted(layouts.items(), key=itemgetter(1)) for layouts in made]

        @cache
        def taken(which: int, target: Layout) -> float:
            best = made[which].get(target, math.inf) if made[which] else 0.0
            for source, more in sources[which]:
                if more >= best:
                    break
                best = min(best, more + self.guessed(values[which], source, target))
            return best

        return taken

    def given(self, values: Sequence[Value], requested: Sequence[Layouts], which: int, have: Layout) -> float:
        """About what it costs to bring one of several values from a layout to one that is requested."""
        return min([self.guessed(values[which], have, request) for request in requested[which]])

    def guessed(self, value: Value, source: Layout, target: Layout) -> float:
        if value.is_literal or source == target:
            return 0.0
        key = source, target, value.shape, value.itemsize
        known = self.guesses.get(key)
        if known is None:
            known = self.guesses[key] = self._guessed(value, source, target)
        return known

    def _guessed(self, value: Value, source: Layout, target: Layout) -> float:
        sent, network = 0.0, self.network
        owed = tuple(a for a in source.pending_axes if a not in target.pending_axes)
        if owed:
            scattered = not set(owed).isdisjoint(target.sharding.axes)
            sent += (1 if scattered else 2) * self.nbytes(value, source)
        lost = [
            a
            for have, needed in zip(source.dims, target.dims, strict=True)
            for a in have
            if needed[: len(have)] != have
        ]
        kept = [a for a in lost if a in target.sharding.axes]
        if kept:
            sent += self.nbytes(value, source)
        if lost and len(kept) < len(lost):
            sent += self.nbytes(value, target)
        if source.padded != target.padded and not lost:
            sent += self.nbytes(value, target) / 8
        return network.collective("all_gather", (), sent) if sent else 0.0


def _axes_of(way: Way) -> set[str]:
    """The axes over which something of it is split, or owed."""
    return {a for lay in (*way.operands, *way.results) for a in (*lay.sharding.axes, *lay.pending_axes)}


def _keeps(layout: Layout, joined: Sequence[Axes]) -> bool:
    """Whether the axes of each run split one dim together or owe together, or do nothing."""
    for run in joined:
        if set(run).isdisjoint((*layout.sharding.axes, *layout.pending_axes)):
            continue
        in_dim = any(axes[i : i + len(run)] == run for axes in layout.dims for i in range(len(axes)))
        if not in_dim and len({p for p in layout.pending if p[0] in run}) < len(run):
            return False
    return True


def _merged(first: Sequence[Way], others: Sequence[Way]) -> list[Way]:
    """Some ways, and those of the others that differ from all of them."""
    known = {(way.operands, way.results) for way in first}
    return [*first, *(way for way in others if (way.operands, way.results) not in known)]


def stored(graph: Graph) -> set[Value]:
    """The values that stand in memory: all but those that are computed elementwise and used once, by what
    takes them in.
    """
    readers: dict[Value, list[Node | None]] = {}
    made: dict[Value, Node] = {}
    bodies = [graph, *(body for node in graph.walk() for body in node.bodies)]
    for one in bodies:
        for node in one.nodes:
            made.update(dict.fromkeys(node.outputs, node))
            for v in node.inputs:
                readers.setdefault(v, []).append(node)
        for v in one.outputs:
            readers.setdefault(v, []).append(None)
    values = {*made, *(v for one in bodies for v in one.inputs)}
    return {v for v in values if not _is_fused(made.get(v), readers.get(v, []))}


def views(graph: Graph, kept: Set[Value]) -> set[Value]:
    """The values that are another one in memory, without or with more dims of size 1; `kept`: those that
    stand there."""
    found: set[Value] = set()
    for one in (graph, *(body for node in graph.walk() for body in node.bodies)):
        for node in one.nodes:
            entry = RULES.get(node.name)
            if entry is not None and entry.reads == "view" and len(node.inputs) == 1:
                source, (made,) = node.inputs[0], node.outputs
                if (source in kept or source in found) and entry.is_view(source.shape, made.shape):
                    found.add(made)
    return found


def _is_fused(maker: Node | None, readers: Sequence[Node | None]) -> bool:
    entry = RULES.get(maker.name) if maker else None
    if entry is None or entry.fuses != "all" or entry.flops or len(readers) != 1 or readers[0] is None:
        return False
    reader = RULES.get(readers[0].name)
    return reader is not None and reader.fuses != "none"


def _params_key(node: Node) -> Hashable:
    """A node's parameters; where they cannot be compared, the node itself."""
    params = tuple(node.params.items())
    try:
        hash(params)
    except TypeError:
        return id(node)
    return params
