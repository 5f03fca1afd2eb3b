"""The ways to run a node: over all axes of the mesh, along any dim that it keeps, and as the layouts in which
its operands may be made, and those requested for its results, suggest.

Nodes that are alike in everything that matters share one list. A list has at most `MOST` ways, in large
programs fewer (`lengths`): those that look cheapest where they stand, with what it takes to make the operands
so, from the beginning of the program on, a value's price shared by its readers; but of those that make the
results alike only `ALIKE`, as long as there are others, since readers know them by their results. And the
best of each further sort (`Offered.sort`): what is gathered for others anyway looks dear there, and the more
axes there are, the more ways stand before it. Whatever is left out is left out for all searches of that
program alike.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

from shardax.completion.complete import Completion
from shardax.cost.network import PICO, Message, network_of
from shardax.graph import annotations
from shardax.graph.connected import connected_nodes
from shardax.graph.graph import Graph, Node, Value
from shardax.partition.candidates import (
    Candidate,
    Offer,
    Options,
    assignments,
    candidate_of,
    compatible,
    in_order,
    is_many,
    options_of,
    project_all,
    suggest,
    waits,
    whole,
)
from shardax.partition.guesses import Guesses, Made, Taking
from shardax.partition.paddings import arrays_of, is_at_host, joined_axes, paddings_of, whole_axes
from shardax.partition.sites import Layouts, Way, sums_left
from shardax.reshard import paths
from shardax.sharding import Axes, AxisSizes, Layout, trivial_axes
from shardax.spmd_rules.localize import Pending, Splits
from shardax.spmd_rules.registry import RULES, Entry, Local, replicated_rule, run_replicated
from shardax.spmd_rules.rule import Factors

MOST, FEWEST = 96, 16  # ways of a node: in small programs, and in large ones
ENOUGH, MORE = 16000, 6000  # ways of all nodes of a small program; of a large one, beside the fewest of each
ALIKE = 3  # ways with the same results, before others
_SMALL = 64  # what is small costs so many times less
_MASKED = 1.0  # picoseconds of a constant that but one device adds: none of equals has it
_FUSED = 2.0**-10  # of what stands in no memory: enough that among equals it is computed in parts


class Around(NamedTuple):
    """A node, and what stands around it: how each operand may be made, the layouts requested of operands and
    results, and about what it costs to have an operand in a layout. `kind`: equal for all that run alike, in
    the same layouts for the same price; `likeness`: and have the same ways, in another order where operands
    cost otherwise.
    """

    node: Node
    entry: Entry
    factors: Factors
    made: Sequence[Made]
    requested: Sequence[Layouts]
    taken: Taking
    kind: int
    likeness: Hashable


class Offered(NamedTuple):
    """A way, and about what it costs with its results brought to where they are requested. `sort`: whether it
    splits nothing, whether its operands are as completion requests them, and which sums these and its results
    owe.
    """

    way: Way
    price: float
    sort: tuple[bool, bool, tuple[Pending, ...]]


class Alternatives:
    """The ways of a program's nodes. `most`: how many each node may have. `stored`: the values that stand in
    memory, not fused into the one that reads them; `views`: those that are another one there; `brought`:
    those that come from the host's. `idle_axes`: as of `Options`. `exact`: the reshards (from, to, shape,
    bytes of an element) whose prices its searches have found, over many axes.
    """

    def __init__(self, graph: Graph, completion: Completion, idle_axes: bool | str = True):
        self.completion, self.paddings = completion, paddings_of(graph, completion)
        self.network = network_of(completion.sizes)
        self.sizes: AxisSizes = completion.sizes
        self.most = lengths(graph)
        self.brought = brought(graph)
        self.stored = stored(graph)
        self.views = views(graph, self.stored)
        self.whole = whole_axes(graph, completion, self.network.cut)
        self.joined = joined_axes(graph, completion)
        self.idle_axes = idle_axes
        self.guesses = Guesses(self.network, self.nbytes)
        self.kinds: dict[Hashable, int] = {}
        self.likenesses: dict[Hashable, int] = {}
        self.candidates_of: dict[Hashable, Candidate] = {}
        self.way_of: dict[tuple[int, int], tuple[Candidate, Way]] = {}
        self.memo: dict[Hashable, tuple[Sequence[Way], Sequence[Made]]] = {}
        self.offers: dict[Hashable, Sequence[Offered]] = {}
        self.trivial = trivial_axes(completion.sizes)
        self.ruled: dict[Hashable, Sequence[Candidate]] = {}
        self.priced_of: dict[Hashable, tuple[Sequence[Candidate], Sequence[Way]]] = {}
        self.elements: dict[Layout, int] = {}
        self.exact: set[tuple[Layout, Layout, tuple[int, ...], int]] = set()

    def of(
        self, node: Node, made: Sequence[Made], requested: Sequence[Layouts], hidden: frozenset[str]
    ) -> tuple[Sequence[Way], Sequence[Made]]:
        """The ways of a node without bodies, and how its results may be made. `made`: how each operand may;
        `requested`: the layouts that completion requests, and those that products wish for, of operands and
        results; `hidden`: axes over which nothing may be split here.
        """
        entry = RULES.get(node.name) or Entry(node.name, replicated_rule, run_replicated)
        factors = self.completion.items.node_classes.of(node)[0].factors or entry.factors(node)
        kind = self._kind(node, entry, factors)
        likeness = self._likeness(node, entry, kind, made, requested, hidden)
        key = likeness, self.most[node], tuple([tuple(layouts.values()) for layouts in made])
        if key not in self.memo:
            taken = self.guesses.taking(node.inputs, made)
            ways = self._ways(Around(node, entry, factors, made, requested, taken, kind, likeness), hidden)
            self.memo[key] = ways, self.made(node, taken, ways)
        return self.memo[key]

    def _kind(self, node: Node, entry: Entry, factors: Factors) -> int:
        """A number for all that decides what a node costs, given the layouts of its operands and results."""
        values = [*node.inputs, *node.outputs]
        note = annotations.of_node(node)
        params = (
            _params_key(node) if entry.sends or entry.ways else note and (note.owing, note.role == "stack")
        )
        same = tuple(node.inputs.index(v) for v in node.inputs)
        sizes = tuple(
            [
                (
                    v.itemsize,
                    v.is_literal,
                    v in self.stored,
                    v in self.views,
                    v in self.brought,
                    is_at_host(v),
                )
                for v in values
            ]
        )
        key = entry.name, id(factors), sizes, same, params
        return self.kinds.setdefault(key, len(self.kinds))

    def _likeness(self, node: Node, entry: Entry, kind: int, made, requested, hidden) -> int:
        """A number for all that decides which ways a node has, but what its operands cost."""
        key = (
            kind,
            tuple(map(tuple, made)),
            tuple(requested),
            tuple(entry.passes_of(node)),
            hidden,
            id(self.paddings.of_node(node)),
            self.whole_of(node),
            self.joined_of(node),
        )
        return self.likenesses.setdefault(key, len(self.likenesses))

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

    def _ways(self, around: Around, hidden: frozenset[str]) -> Sequence[Way]:
        node, made = around.node, around.made
        if note := annotations.of_node(node):
            return self._annotated(around, note, hidden)
        apart = self._best(around, hidden, self.whole_of(node))
        if not (joined := self.joined_of(node)):
            return apart
        cut = [axes for axes in self.whole_of(node) if not any(set(axes) <= set(run) for run in joined)]
        kept = [{lay: p for lay, p in sources.items() if _keeps(lay, joined)} or sources for sources in made]
        together = around._replace(
            made=kept, taken=self.guesses.taking(node.inputs, kept), likeness=(around.likeness, joined)
        )
        return _merged(self._best(together, hidden, (*joined, *cut)), apart)

    def _annotated(
        self, around: Around, note: annotations.Annotation, hidden: frozenset[str]
    ) -> Sequence[Way]:
        """The layout that a user requests, and that owing the sums that a stack is made with."""
        node, factors = around.node, around.factors
        result = around.requested[len(node.inputs)][0]
        pending = tuple(p for p in note.owing.pending if p[0] not in hidden)
        if not set(note.owing.unreduced).isdisjoint(result.sharding.axes):  # an open dim was split so
            padding, sharding = self.paddings.of_node(node), result.sharding.without(note.owing.unreduced)
            result = padding.layout(sharding, node.outputs[0].shape)
        splits = project_all([result], factors.results, factors, self.sizes)
        split = result.sharding.axes
        left = (sums_left(lay) for lay in around.made[0] if note.role == "stack")
        sums = [owed for p in left if (owed := tuple(p for p in p if p[0] not in split))]
        each = [candidate_of(factors, splits, (0,) if p else (), p) for p in dict.fromkeys([pending, *sums])]
        return [Way(c.operands, c.results, 0.0, (splits, factors, around.entry)) for c in each]

    def _best(self, around: Around, hidden: frozenset[str], whole: tuple[Axes, ...]) -> list[Way]:
        """The best ways of a node, in which the axes of `whole` go together only."""
        axes = tuple([a for a in self.sizes if a not in hidden and a not in self.trivial])
        if around.entry.as_suggested or self.idle_axes is False or self.has_host(around):
            axes = ()
        elif self.idle_axes == "near":
            axes = None
        return [each.way for each in self._ranked(around, Offer(axes, whole))]

    def has_host(self, around: Around) -> bool:
        """Whether the host has an operand or a result, or looks up what this one looks up, or casts before
        it does: no price knows that the table need not come (`passes/lookups.py`)."""
        node, entry = around.node, around.entry
        table = node.inputs[:1] if entry.casts or entry.looks_up else []
        return any(map(is_at_host, (*node.inputs, *node.outputs))) or not self.brought.isdisjoint(table)

    def _ranked(self, around: Around, offer: Offer) -> Sequence[Offered]:
        """The ways that look cheapest where they stand, the cheapest first, and of each sort one. Of equals
        those come first that take their operands as they are made."""
        key = around.likeness, offer
        if key not in self.offers:
            self.offers[key] = self._offered(around, offer)
        offered = self.offers[key]
        if len(offered) < 2:
            return offered
        kept, others = varied(sorted(offered, key=partial(_looks, around.taken)), self.most[around.node])
        sorts = {each.sort for each in kept}
        for each in others:
            if each.sort not in sorts:
                sorts.add(each.sort)
                kept.append(each)
        return kept

    def _offered(self, around: Around, offer: Offer) -> Sequence[Offered]:
        node = around.node
        given = self.guesses.giving(node.outputs, around.requested[len(node.inputs) :])
        requested = [{layout.sharding for layout in each} for each in around.requested[: len(node.inputs)]]

        def offered(way: Way) -> Offered:
            price = way.price + sum([given(i, layout) for i, layout in enumerate(way.results)])
            asked = all([x.sharding in each for x, each in zip(way.operands, requested, strict=True)])
            owed = tuple([x.pending for x in (*way.operands, *way.results)])
            return Offered(way, price, (not way.detail[0], asked, owed))

        return list(map(offered, self.priced(around, self.candidates(around, offer))))

    def priced(self, around: Around, candidates: Sequence[Candidate]) -> Sequence[Way]:
        """The ways, of those with the same layouts the cheapest."""
        key = around.kind, id(candidates)
        if key not in self.priced_of:
            moved, ways = self.moved(around.node, around.entry), dict[Any, Way]()
            for candidate in candidates:
                way = self.way(around, candidate, moved)
                kept = ways.setdefault((way.operands, way.results), way)
                if way.price < kept.price:
                    ways[way.operands, way.results] = way
            self.priced_of[key] = candidates, list(ways.values())
        return self.priced_of[key][1]

    def candidates(self, around: Around, offer: Offer) -> Sequence[Candidate]:
        node, entry = around.node, around.entry
        ruled = self.of_rule(around, offer)
        if any(map(is_at_host, (*node.inputs, *node.outputs))):
            ruled = self.staying(ruled, node, around.made, around.requested)
        if entry.ways is None:
            return ruled
        locals_ = (Local(node, c.operands, c.results, c.splits, self.sizes) for c in ruled)
        return [
            Candidate(x.splits, x.operands, x.results)
            for x in entry.picked(locals_, node, self.paddings.of_node(node))
        ]

    def staying(
        self, candidates: Sequence[Candidate], node: Node, made: Sequence[Made], requested: Sequence[Layouts]
    ) -> Sequence[Candidate]:
        """The candidates that take what is at the host as it lies there, or a part of it, and give it as it
        is to rest: nothing is sent or padded in the host's memory. All, where there are no such.
        """

        def is_cut(v: Value, layouts: Made, target: Layout) -> bool:
            each = (paths.plan(layout, target, v.shape, v.itemsize, self.sizes) for layout in layouts)
            return any(all(step.kind == "slice" for step in path.steps) for path in each)

        taken = [k for k, v in enumerate(node.inputs) if is_at_host(v)]
        given = [k for k, v in enumerate(node.outputs) if is_at_host(v)]
        wanted = requested[len(node.inputs) :]
        staying = [
            each
            for each in candidates
            if all(is_cut(node.inputs[k], made[k], each.operands[k]) for k in taken)
            and all(each.results[k] == wanted[k][0] for k in given)
        ]
        return staying or candidates

    def of_rule(self, around: Around, offer: Offer) -> Sequence[Candidate]:
        """Those of the same factors, suggestions and sums that may wait are the same, unless there are too
        many."""
        node, entry, factors, made, requested, *_ = around
        operands = [(*have, *requests) for have, requests in zip(made, requested, strict=False)]
        results = list(requested[len(node.inputs) :])
        layouts, tensors = results + operands, factors.results + factors.operands
        padding = self.paddings.of_node(node)
        suggestions = suggest(layouts, tensors, factors, padding, offer)
        waiting = tuple(waits(entry.passes_of(node), list(map(tuple, made))))
        suggested = frozenset([(factor, frozenset(splits)) for factor, splits in suggestions.items()])
        key = id(factors), id(padding), suggested, waiting
        if key in self.ruled:
            return self.ruled[key]
        options = options_of(in_order(suggestions), factors, padding)
        if is_many(options):
            options = options_of(suggestions, factors, padding)
            each = partial(whole, layouts, tensors, factors, self.sizes)
            return list(self._ruled(factors, options, waiting, each))
        self.ruled[key] = list(self._ruled(factors, options, waiting, list))
        return self.ruled[key]

    def _ruled(
        self,
        factors: Factors,
        options: Options,
        waiting: Sequence[tuple[tuple[int, ...], Pending]],
        each: Callable[[], Sequence[Splits]],
    ) -> Iterator[Candidate]:
        for splits in assignments(options, factors, self.sizes, each):
            for group, pending in waiting:
                if not pending or compatible(factors, splits, pending):
                    yield self._candidate(factors, splits, group, pending)

    def _candidate(
        self, factors: Factors, splits: Splits, group: tuple[int, ...], pending: Pending
    ) -> Candidate:
        key = id(factors), tuple(splits.items()), group, pending
        if key not in self.candidates_of:
            self.candidates_of[key] = candidate_of(factors, splits, group, pending)
        return self.candidates_of[key]

    # Prices

    def way(self, around: Around, candidate: Candidate, moved: Sequence[float]) -> Way:
        key = around.kind, id(candidate)
        if key not in self.way_of:
            self.way_of[key] = candidate, self._way(around, candidate, moved)
        _, way = self.way_of[key]
        return way

    def _way(self, around: Around, candidate: Candidate, moved: Sequence[float]) -> Way:
        node, entry, factors = around.node, around.entry, around.factors
        local = Local(node, candidate.operands, candidate.results, candidate.splits, self.sizes)
        messages = entry.sent(local)
        sent = sum([self.network.collective(*message) for message in messages])
        products = self.network.compute(entry.flops_of(local), 0)
        layouts = (*candidate.operands, *candidate.results)
        lands = len(messages) == 1 and self._lands(node, candidate, messages[0])
        traffic = 0 if lands else self.traffic_price(self.traffic(moved, layouts))
        own = max(products, traffic, self.placing(entry, candidate.operands))
        masked = sum([v.is_literal and bool(x.pending) for v, x in zip(node.inputs, layouts, strict=False)])
        price = sent + self.network.batched(own, entry.batch_of(local)) + masked * _MASKED
        made = zip(node.outputs, candidate.results, strict=True)
        memory = sum(
            [self.nbytes(v, layout) for v, layout in made if v in self.stored and v not in self.views]
        )
        return Way(candidate.operands, candidate.results, price, (candidate.splits, factors, entry), memory)

    def _lands(self, node: Node, candidate: Candidate, message: Message) -> bool:
        """Whether a device receives all of the result, and copies it no more: whole shards shift."""
        made = [self.nbytes(v, layout) for v, layout in zip(node.outputs, candidate.results, strict=True)]
        return message.kind == "ppermute" and bool(message.axes) and sum(made) == message.nbytes

    def traffic_price(self, nbytes: float) -> float:
        """The price of memory traffic. An operation takes about as long on a few bytes as on none: to split
        what is small spares next to nothing, and is not worth a message."""
        price, least = self.network.compute(0, nbytes), PICO * self.network.chip.least
        return float(round(price / _SMALL if price < least else price - least * (1 - 1 / _SMALL)))

    def traffic(self, moved: Sequence[float], layouts: Sequence[Layout]) -> float:
        """The bytes that a device moves between it and memory, if it has operands and results of these
        layouts; `moved`: for each element of each."""
        return float(sum([n * self.elements_of(lay) for n, lay in zip(moved, layouts, strict=True) if n]))

    def placing(self, entry: Entry, operands: Sequence[Layout]) -> float:
        """The price of putting rows of a payload into a table one after the other, where indices say."""
        if entry.in_place is None or entry.looks_up or not self.network.chip.placing:
            return 0
        indices = [x.local_shape(self.sizes)[:-1] for i, x in enumerate(operands) if i not in entry.in_place]
        return float(round(PICO * self.network.chip.placing * max(map(math.prod, indices), default=0)))

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
        elif entry.looks_up:  # of the table what is found
            first, times = 1, 2
        elif entry.in_place:  # what is updated is not copied
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

    def made(self, node: Node, taken: Taking, ways: Sequence[Way]) -> Sequence[Made]:
        """How the results of a node may be made, by some ways to run it."""
        prices = [w.price + sum([taken(i, lay) for i, lay in enumerate(w.operands)]) for w in ways]
        least, found = min(prices), tuple(dict[Layout, float]() for _ in node.outputs)
        for way, price in zip(ways, prices, strict=True):
            for layouts, layout in zip(found, way.results, strict=True):
                layouts[layout] = min(layouts.get(layout, math.inf), price - least)
        return found


def _looks(taken: Taking, offered: Offered) -> tuple[float, float]:
    """About what a way costs where it stands, and what of it brings its operands: only to rank ways."""
    brought = sum([taken(i, layout) for i, layout in enumerate(offered.way.operands)])
    return offered.price + brought, brought


def varied(ranked: Sequence[Offered], most: int) -> tuple[list[Offered], list[Offered]]:
    """The first `most` in their order, and all others: of those with the same results `ALIKE` come first."""
    if len(ranked) <= most:
        return list(ranked), []
    times, late = Counter[tuple[Layout, ...]](), list[bool]()
    for each in ranked:
        late.append(times[each.way.results] >= ALIKE)
        times[each.way.results] += 1
    kept = set(sorted(range(len(ranked)), key=late.__getitem__)[:most])
    return [x for i, x in enumerate(ranked) if i in kept], [x for i, x in enumerate(ranked) if i not in kept]


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


def lengths(graph: Graph) -> dict[Node, int]:
    """How many ways each node may have: the fewer, the more nodes there are in that part of a program."""
    found: dict[Node, int] = {}
    for nodes in connected_nodes(graph):
        within = [
            inner for node in nodes for inner in (node, *(n for body in node.bodies for n in body.walk()))
        ]
        each = max(ENOUGH // len(within), FEWEST + MORE // len(within))
        found.update(dict.fromkeys(within, min(MOST, each)))
    return found


def brought(graph: Graph) -> set[Value]:
    """What comes from the host's memory, as it is or cast."""
    found: set[Value] = set()
    for node in graph.walk():
        entry = RULES.get(node.name)
        casts = entry is not None and entry.casts and node.inputs[0] in found
        if casts or any(map(is_at_host, node.inputs)):
            found.update(v for v in node.outputs if not is_at_host(v))
    return found


def stored(graph: Graph) -> set[Value]:
    """The values that stand in memory: all but those that are computed elementwise and used once, by what
    takes them in, and products of which only a transpose is used.
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
    reader = readers[0] if len(readers) == 1 else None
    if maker is None or reader is None:
        return False
    entry, taking = RULES.get(maker.name), RULES.get(reader.name)
    return entry is not None and taking is not None and entry.is_fused(taking, lambda: reader)


def _params_key(node: Node) -> Hashable:
    """A node's parameters; where they cannot be compared, the node itself."""
    params = tuple(node.params.items())
    try:
        hash(params)
    except TypeError:
        return id(node)
    return params
