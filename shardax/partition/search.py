"""The search: which way every node runs, so that the program as a whole costs least.

Sites (`sites.py`) are the variables. Each has a table of what its ways cost by themselves; for every value
that someone reads there are tables of what it costs to bring it from the layout in which it is made to those
in which it is read (`copies.py`). All prices are picoseconds, times the trip counts of the loops around.
`solve.py` finds the cheapest choice of all sites together.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from shardax.completion.complete import Completion
from shardax.cost import noted
from shardax.cost.network import network_of
from shardax.graph import annotations
from shardax.graph.graph import Graph, Node, Value
from shardax.partition import copies
from shardax.partition.alternatives import Alternatives
from shardax.partition.guesses import Made
from shardax.partition.ports import Ports, iteration_splits, lay_out
from shardax.partition.sites import Layouts, Site, Way, sums_left
from shardax.partition.solve import Solution, solve
from shardax.partition.tables import Problem
from shardax.partition.twins import twins
from shardax.reshard import paths
from shardax.sharding import AxisSizes, Layout, replicated_layout, trivial_axes
from shardax.spmd_rules.registry import RULES, Split
from shardax.spmd_rules.rule import Factors

Kind = tuple[tuple[int, ...], int, bool, bool]
"""Of a value, all on which the prices of its reshards depend but the layouts."""

Reads = list[tuple[Site, int]]
"""Who reads a value, as which operand."""

CARRIED = 16  # layouts in which a loop may give back what it carries, and that it does not take
ALMOST = 1e-2  # the share of the gap by which what is chosen may cost more than was known
_FIRST_WAY = 2.0**-10  # picoseconds: a power of two, so that sums stay exact
_UNREQUESTED = 1e13  # picoseconds, at least: under strict mode, for a reshard that nobody requested
_COLLECTIVE_OF = {
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "halo": "ppermute",
    "ppermute": "ppermute",
}


class Search:
    """A program laid out as sites.

    `layouts`: in which each value may be made; `maker`: by which site, as which of its results. `reading`:
    who reads what, as which operand. `root`: of a renamed value, the one that it is; `before_annotation`: of
    one annotated inside, that before, which other annotations and results may still read. `anywhere`: what
    every device can make any part of. `scope`: how often the code runs that holds a value; `times`: in how
    many alike blocks. `maps`: how the iterations of each map may be split, `splits`: how they are. `left`:
    the layouts in which bodies give carries back; `returned`: those of the last time. `avoided`: the steps of
    reshards that strict mode avoids. `excess`: how much more it costs to make a value in each layout than in
    the cheapest; `readers`: how many share that; `reader`: the only one. `outside`: as what a node gives what
    its bodies give back. `byte_price`: picoseconds for each byte that is stored.
    `trivial`: the axes of one device, which no layout has.
    """

    def __init__(
        self,
        graph: Graph,
        completion: Completion,
        alternatives: Alternatives,
        splits: dict[Node, Split | None],
        returned: dict[Hashable, Layouts],
        allowed: Callable[..., bool] | None = None,
        byte_price: float = 0.0,
    ):
        self.completion, self.alternatives, self.paddings = completion, alternatives, alternatives.paddings
        self.network = network_of(completion.sizes)
        self.sizes: AxisSizes = completion.sizes
        self.nbytes = alternatives.nbytes
        self.splits, self.returned, self.allowed, self.byte_price = splits, returned, allowed, byte_price
        self.avoided = {step for step in _COLLECTIVE_OF if allowed and not allowed(_COLLECTIVE_OF[step])}
        self.maps: dict[Node, list[Split]] = {}
        self.sites: list[Site] = []
        self.site_of: dict[Node, Site] = {}
        self.apart: dict[Node, list[Site]] = {}
        self.ports: dict[Node, Ports] = {}
        self.maker: dict[Value, tuple[Site, int]] = {}
        self.root: dict[Value, Value] = {}
        self.before_annotation: dict[Value, Value] = {}
        self.scope: dict[Value, float] = {}
        self.layouts: dict[Value, Layouts] = {}
        self.anywhere: set[Value] = set()
        self.times: dict[Value, int] = {}
        self.reading: list[tuple[Value, Site, int]] = []
        self.twins = twins(completion, self.said_of)
        self.whole_sums = False
        self.open_carries: dict[Site, tuple[Hashable, frozenset[str], bool]] = {}
        self.left: dict[Hashable, Layouts] = {}
        self.annotated = {
            node.outputs[0]: (*(note.dims if note.is_inside else ()), note.owing.unreduced)
            for node, note in completion.notes
            if note.is_inside or note.owing
        }
        self.excess: dict[Value, Made] = {}
        nodes = list(graph.walk())
        self.readers = Counter(v for node in nodes for v in node.inputs)
        self.outside: dict[Value, Value] = {}
        self.reader = {v: node for node in nodes for v in node.inputs if self.readers[v] == 1}
        self.trivial = trivial_axes(self.sizes)
        self.all_exact = bool(self.avoided) or len(self.sizes) - len(self.trivial) <= paths.FEW
        self.tables: dict[tuple[Kind, int, tuple[int, ...]], _Tables | None] = {}
        self.prices: dict[Kind, copies.Price] = {}
        self.columns: dict[tuple[int, int, bool], Layouts] = {}
        self.interned: dict[Layouts, Layouts] = {}
        self.unrequested = _UNREQUESTED  # picoseconds of a reshard that is avoided

    # Laying out

    def program(self, graph: Graph, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> None:
        for value, layout in zip(graph.inputs, inputs, strict=True):
            self.add(Site([], [value], [Way((), (layout,))]))
        self.body(graph, 1.0, frozenset())
        for value, layout in zip(graph.outputs, outputs, strict=True):
            self.add(Site([value], [], [Way((layout,), ())], user_requested=True))

    def body(self, graph: Graph, runs: float, hidden: frozenset[str]) -> None:
        """Lays out a graph whose inputs are made already."""
        self.scope.update(dict.fromkeys(graph.inputs, runs))
        for node in graph.nodes:
            twin = self.twins.get(node)
            if twin is None:
                self.add_node(node, runs, hidden)
            else:
                self.add_as_twin(node, twin)

    def add_node(self, node: Node, runs: float, hidden: frozenset[str]) -> None:
        self.scope.update(dict.fromkeys(node.outputs, runs))
        if node.bodies:
            around, self.whole_sums = self.whole_sums, self.whole_sums or noted.keeps_whole_sums(node.scope)
            self.ports[node] = lay_out(self, node, runs, hidden)
            self.whole_sums = around
        elif each := _apart(node, self.completion.items.node_classes.of(node)[0].factors):
            self.alternatives.most.update(dict.fromkeys(each, self.alternatives.most[node]))
            self.apart[node] = [self.node(one, runs, hidden) for one in each]
        else:
            self.site_of[node] = self.node(node, runs, hidden)

    def add_as_twin(self, node: Node, twin: Node) -> None:
        """Adds a node that runs as its twin in an alike block does: they are one site."""
        pairs = list(zip((*twin.inputs, *twin.outputs), (*node.inputs, *node.outputs), strict=True))
        same = dict(pairs)
        if node.bodies:
            self.ports[node] = ports = self.ports[twin]
            for site in ports.sites:
                for i, value in enumerate(site.reads):
                    if value in same:
                        self.reading.append((same[value], site, i))
            self.count_bodies_again(twin)
        elif twin in self.apart:
            self.apart[node] = self.apart[twin]
            for value, site in zip(node.inputs, self.apart[node], strict=True):
                self.reading.append((value, site, 0))
                site.times += 1
        else:
            self.site_of[node] = site = self.site_of[twin]
            self.reading += [(value, site, i) for i, value in enumerate(node.inputs)]
            site.times += 1
            if site.renames:
                self.root[node.outputs[0]] = self.root_of(node.inputs[0])
            elif twin.outputs and twin.outputs[0] in self.before_annotation:
                self.before_annotation[node.outputs[0]] = node.inputs[0]
        for value, other in pairs[len(node.inputs) :]:
            self.scope[other], self.layouts[other] = self.scope[value], self.layouts[value]
            if value in self.maker:
                self.maker[other] = self.maker[value]
            if value in self.excess:
                self.excess[other] = self.excess[value]
            if value in self.anywhere:
                self.anywhere.add(other)

    def count_bodies_again(self, twin: Node) -> None:
        """Counts what is in a twin's bodies once more."""
        inner = {id(site): site for node in _inside(twin) for site in self.sites_of(node)}
        for site in inner.values():
            site.times += 1
        for value in {
            v for body in _bodies(twin) for v in (*body.inputs, *(v for n in body.nodes for v in n.outputs))
        }:
            self.times[value] = self.times.get(value, 1) + 1

    def sites_of(self, node: Node) -> Sequence[Site]:
        if node.bodies:
            return self.ports[node].sites
        return self.apart.get(node) or [self.site_of[node]]

    def node(self, node: Node, runs: float, hidden: frozenset[str]) -> Site:
        made = [self.made_at(v, runs) for v in node.inputs]
        requested = [self.requests(v, hidden) for v in (*node.inputs, *node.outputs)]
        ways, results = self.alternatives.of(node, made, requested, hidden)
        self.excess.update(zip(node.outputs, results, strict=True))
        note = annotations.of_node(node)
        renames = annotations.renames(node)
        if renames:
            self.root[node.outputs[0]] = self.root_of(node.inputs[0])
        elif note and not node.inputs[0].is_literal:
            self.before_annotation[node.outputs[0]] = node.inputs[0]
        entry = RULES.get(node.name)
        if (
            entry
            and entry.made_anywhere
            and all(v.is_literal or not v.shape or v in self.anywhere for v in node.inputs)
        ):
            self.anywhere.update(node.outputs)
        elif note and node.inputs[0] in self.anywhere:
            self.anywhere.add(node.outputs[0])
        allowed = self.allowed is not None and self.allowed(node.name, node.line)
        return self.add(
            Site(
                node.inputs,
                node.outputs,
                ways,
                runs,
                user_requested=note is not None,
                allowed=allowed,
                renames=renames,
                may_owe=note is not None and note.role == "stack",
            )
        )

    def add(self, site: Site) -> Site:
        self.sites.append(site)
        self.reading += [(value, site, i) for i, value in enumerate(site.reads)]
        for i, value in enumerate(site.makes):
            made = dict.fromkeys(way.results[i] for way in site.ways)
            if site.renames:
                others = (lay for lay in self.made(site.reads[0]) if not lay.pending or site.may_owe)
                made.update(dict.fromkeys(others))
            elif value not in self.maker:
                self.maker[value] = (site, i)
            self.layouts[value] = tuple(made)
        return site

    def close_carry(self, port: Site) -> None:
        """Notes in which layouts a body gives a carry back: in the next round it may be carried so."""
        key, hidden, may_owe = self.open_carries[port]
        taken, returned = port.makes[0], port.reads[1]
        requested = self.requested(taken, hidden)
        made = self.made(returned)
        back = [lay for lay in made if not lay.pending]
        if may_owe:
            back += self.owing(requested, taken, made)[1:]
        known = {way.results[0] for way in port.ways}
        # a key is of one carry of one node, and so of all that holds around it, `whole_sums` for one
        assert key not in self.left, "each node is laid out once, also for those that run as it does"
        self.left[key] = tuple(
            dict.fromkeys([*self.returned.get(key, ()), *(lay for lay in back if lay not in known)])
        )[:CARRIED]
        result = port.makes[1]
        self.layouts[result] = tuple(
            dict.fromkeys([*self.layouts[result], *(lay for lay in back if lay.pending)])
        )

    # What is known of nodes and values

    def said_of(self, node: Node) -> Hashable:
        """What the user says of a node, or of what is in its bodies, that its class does not tell."""
        if not self.allowed and not node.bodies:
            return None
        return tuple(
            [
                (noted.keeps_whole_sums(each.scope), self.allowed and self.allowed(each.name, each.line))
                for each in _inside(node)
            ]
        )

    def root_of(self, value: Value, user_requested: bool = False) -> Value:
        root = self.root.get(value, value)
        return (
            self.root_of(self.before_annotation[root], True)
            if user_requested and root in self.before_annotation
            else root
        )

    def made(self, value: Value) -> Layouts:
        """The layouts in which a value may be made; replicated, if every device can make it so."""
        if value.is_literal:
            return (replicated_layout(value.shape),)
        layouts = self.layouts[value]
        return (
            tuple(dict.fromkeys([*layouts, replicated_layout(value.shape)]))
            if value in self.anywhere
            else layouts
        )

    def made_at(self, value: Value, runs: float) -> Made:
        """The same, with how much more each layout costs, for one run of one of the value's readers."""
        excess, layouts = self.excess.get(value), self.made(value)
        if excess is None:
            return dict.fromkeys(layouts, 0.0)
        share = self.scope[value] / runs / self.readers[value]
        return {layout: roughly(excess.get(layout, 0.0) * share) for layout in layouts}

    def at_hand(self, value: Value, hidden: frozenset[str]) -> list[Layout]:
        """Those of them in which nothing is owed, and that split nothing over hidden axes."""
        return [lay for lay in self.made(value) if not lay.pending and hidden.isdisjoint(lay.sharding.axes)]

    def requested(self, value: Value, hidden: frozenset[str] = frozenset()) -> Layout:
        """The layout that completion requests for a value, as far as axes are not hidden."""
        sharding = self.completion.sharding(value)
        return self.paddings.of(value).layout(sharding.without(hidden) if hidden else sharding, value.shape)

    def requests(self, value: Value, hidden: frozenset[str]) -> Layouts:
        """That layout, and the one that products wish for, where they do."""
        first, wished = self.requested(value, hidden), self.completion.wished.get(value)
        if wished is None:
            return (first,)
        other = self.paddings.of(value).layout(wished.without(hidden), value.shape)
        return (first, other) if other != first else (first,)

    def owing(self, requested: Layout, value: Value, made: Iterable[Layout]) -> Layouts:
        """The layout that is requested of a value, and those that owe the sums that are left as it is made:
        unless they are over axes that it is split over, for it would take more memory; but in loops that may
        keep sums whole.
        """
        left = dict.fromkeys([requested])
        for owed in dict.fromkeys(sums_left(lay) for lay in made):
            sharding = requested.sharding.without([a for a, _ in owed])
            if owed and (self.whole_sums or sharding == requested.sharding):
                left[self.paddings.of(value).layout(sharding, value.shape, owed)] = None
        return tuple(left)

    def split_of(self, node: Node, hidden: frozenset[str]) -> Split | None:
        """How the iterations of a scan are split in this search."""
        options = self.maps[node] = iteration_splits(self, node, hidden)
        split = self.splits.get(node, options[0] if options else None)
        return split if split in options else None

    def price(self, value: Value, source: Layout, target: Layout, strict: bool = False) -> float:
        """Picoseconds to bring a value from one layout to another, once. What every device can make, it makes
        unsplit.
        """
        price = self.sent(value, source, target)
        if strict and price:
            path = paths.plan(source, target, value.shape, value.itemsize, self.sizes)
            price += self.unrequested if any(step.kind in self.avoided for step in path.steps) else 0.0
        if price and value in self.anywhere:
            made = self.alternatives.traffic_price(self.nbytes(value, replicated_layout(value.shape)))
            price = min(price, made + self.sent(value, replicated_layout(value.shape), target))
        copied = self.byte_price and source != target
        return price + self.byte_price * self.nbytes(value, target) if copied else price

    def sent(self, value: Value, source: Layout, target: Layout) -> float:
        """The same, where no device makes for itself what it needs. A part is read and written."""
        if source == target:
            return 0.0
        if copies.is_cut(source, target):
            return self.alternatives.traffic_price(2 * self.nbytes(value, target))
        price = paths.price if self.is_exact(value, source, target) else paths.least
        return price(source, target, value.shape, value.itemsize, self.sizes)

    def is_exact(self, value: Value, source: Layout, target: Layout) -> bool:
        """Whether the price of a reshard is looked for. A search begins with lower bounds."""
        return self.all_exact or (source, target, value.shape, value.itemsize) in self.alternatives.exact

    # The tables

    def solve(self) -> Solution:
        """Chooses a way for each site. Prices of reshards over many axes take long to find, so they are lower
        bounds at first: what is chosen is cheapest where those that it takes are exact.
        """
        if self.avoided:
            self.unrequested = max(_UNREQUESTED, self._most_saved())
        solution = self._solved()
        while not self.all_exact and self._rise() > max(0.0, ALMOST * solution.gap):
            solution = self._solved()
        if not self.all_exact:  # whoever reads copies from each other asks for further ones
            self.all_exact = True
            self.prices.clear()
        return solution

    def _most_saved(self) -> float:
        """More than it can save to run sites in other ways and to send all that is read otherwise, for what
        happens least often: no reshard that nobody requested pays for itself, however slow the chip."""
        prices = (([way.price for way in site.ways], site.runs * site.times) for site in self.sites)
        computed = sum((max(each) - min(each)) * weight for each, weight in prices)
        axes = tuple([a for a in self.sizes if a not in self.trivial])
        all_reduced = cache(lambda nbytes: self.network.collective("all_reduce", axes, 2 * nbytes))
        read = (value for value, _, _ in self.reading if not value.is_literal)
        sent = sum(
            all_reduced(self.nbytes(value, replicated_layout(value.shape)))
            * self.scope[value]
            * self.times.get(value, 1)
            for value in read
        )
        return 2 * (computed + sent) / min(filter(None, self.scope.values()), default=1.0)

    def _rise(self) -> float:
        """Finds the prices of the reshards that were chosen, and by how much they are more than was known,
        those among it that are taken only where others are not."""
        risen, rise = set[tuple[tuple[int, ...], int]](), 0.0
        for value, reads, weight in self._readers():
            maker, result = self.maker[value]
            read = dict.fromkeys(site.chosen.operands[i] for site, i in reads)
            whole = [replicated_layout(value.shape)] if value in self.anywhere else []
            for source, target in itertools.product([maker.chosen.results[result], *read, *whole], read):
                if (more := self._settle(value, source, target)) > 0:
                    rise += more * weight
                    risen.add((value.shape, value.itemsize))
                    self._settle_others(value, reads, source, target)
        self.prices = {kind: price for kind, price in self.prices.items() if kind[:2] not in risen}
        self.tables = {key: known for key, known in self.tables.items() if key[0][:2] not in risen}
        return rise

    def _settle(self, value: Value, source: Layout, target: Layout) -> float:
        """Finds the price of a reshard; by how much it is more than was known."""
        if self.is_exact(value, source, target):
            return 0.0
        known = self.sent(value, source, target)
        self.alternatives.exact.add((source, target, value.shape, value.itemsize))
        return self.sent(value, source, target) - known

    def _settle_others(self, value: Value, reads, source: Layout, target: Layout) -> None:
        """The same of those that looked cheaper, of another way of who makes the value or of who reads it:
        else they would be chosen next."""
        maker, result = self.maker[value]
        price = self.sent(value, source, target)
        pairs = [(way.results[result], target) for way in maker.ways]
        pairs += [(source, way.operands[i]) for site, i in reads for way in site.ways]
        for other in dict.fromkeys(pairs):
            if self.sent(value, *other) < price:
                self._settle(value, *other)

    def _solved(self) -> Solution:
        problem, read = Problem(), list[_Read]()
        for value, reads, weight in self._readers():
            for strict in (False, True) if self.avoided else (False,):
                some = (
                    [(site, i) for site, i in reads if (site.user_requested or site.allowed) != strict]
                    if self.avoided
                    else reads
                )
                if tables := self._tables_of(value, some, strict):
                    read.append(_Read(self.maker[value][0], some, weight, tables))
        self._number(problem, read)
        self.constant = 0.0
        for site in self.sites:
            self._own(problem, site)
        for each in read:
            self._add_read(problem, each)
        solution = solve(problem)
        for site in self.sites:
            site.chosen = site.ways[solution.ways[self.variable[site]] if site in self.variable else 0]
        return Solution(solution.ways, solution.price + self.constant, solution.bound + self.constant)

    def own_price(self) -> float:
        """Picoseconds of the ways that are chosen, without what is brought to them."""
        each = ((site.chosen, site.runs, site.times) for site in self.sites)
        return sum((way.price * runs + way.memory * self.byte_price) * times for way, runs, times in each)

    def _own(self, problem: Problem, site: Site) -> None:
        """The prices of the ways; among equals those that stand first are taken, by far less than a
        picosecond. Memory is taken once, however often a loop runs."""
        prices = (
            np.array([way.price * site.runs + way.memory * self.byte_price for way in site.ways]) * site.times
        )
        self._add(problem, [site], prices + np.arange(len(prices)) * _FIRST_WAY)

    def _add(self, problem: Problem, ends: Sequence["Site | int"], prices: np.ndarray) -> None:
        """Adds a table; sites with one way are no variables."""
        if not np.count_nonzero(prices):
            return
        scope = []
        for dim in reversed(range(len(ends))):
            end = ends[dim]
            variable = end if isinstance(end, int) else self.variable.get(end)
            if variable is None:
                prices = prices.take(0, axis=dim)
            else:
                scope.insert(0, variable)
        if scope:
            problem.add(scope, prices)
        else:
            self.constant += float(prices)

    def _readers(self) -> list[tuple[Value, list[tuple[Site, int]], float]]:
        """Who reads each value, those that read it by another name among them, and how often. Values of the
        same sites, as those of alike blocks are, count together; of who has no choice, only the layout
        matters."""
        readers: dict[Value, list[tuple[Site, int]]] = {}
        for value, site, i in self.reading:
            if not value.is_literal and (self.avoided or not site.renames):
                readers.setdefault(self.root_of(value, site.user_requested), []).append((site, i))
        alike: dict[Hashable, list] = {}
        for value, reads in readers.items():
            maker, result = self.maker[value]
            made = (id(maker), result) if len(maker.ways) > 1 else maker.ways[0].results[result]
            key = (
                made,
                value in self.anywhere,
                value.itemsize,
                value.shape,
                tuple([self._reader(*read) for read in reads]),
            )
            weight = self.scope[value] * self.times.get(value, 1)
            one = alike.setdefault(key, [value, reads, 0.0])
            one[2] += weight
        return [(value, reads, weight) for value, reads, weight in alike.values()]

    def _reader(self, site: Site, i: int) -> Hashable:
        """What distinguishes a reader."""
        return (
            (id(site), i)
            if len(site.ways) > 1
            else (site.ways[0].operands[i], site.user_requested, site.allowed)
        )

    def _tables_of(self, value: Value, reads: Reads, strict: bool) -> "_Tables | None":
        """The tables of one value and its readers, None where it is brought to them for nothing; `strict`:
        they did not request what is resharded for them.
        """
        maker, result = self.maker[value]
        made = self._layouts_of(maker, result, made=True)
        targets = tuple([self._layouts_of(site, i, made=False) for site, i in reads])
        key = (self._kind(value, strict), id(made), tuple(map(id, targets)))
        if key not in self.tables:
            self.tables[key] = self._make_tables(value, made, targets, strict)
        return self.tables[key]

    def _number(self, problem: Problem, read: Sequence["_Read"]) -> None:
        """Makes the variables: of sites in program order, and of copies behind who makes the value, so that
        messages go the way of the data."""
        of_maker: dict[Site, list[tuple[_Read, int]]] = {}
        for each in read:
            if (copying := each.tables.copying) is not None:
                of_maker.setdefault(each.maker, []).append((each, len(copying)))
        self.variable = {}
        for site in self.sites:
            if len(site.ways) > 1:
                self.variable[site] = problem.variable(len(site.ways))
            for each, states in of_maker.get(site, ()):
                each.copies = problem.variable(states)

    def _add_read(self, problem: Problem, read: "_Read") -> None:
        tables, end = read.tables, read.maker
        if tables.copying is not None:
            end = read.copies
            self._add(problem, [end], tables.copying * read.weight)
            self._add(problem, [read.maker, end], tables.making)
        for (site, _), table in zip(read.reads, tables.reading, strict=True):
            if table is not None:
                self._add(problem, [end, site], table * read.weight)

    def price_of(self, value: Value, strict: bool = False) -> copies.Price:
        """`price` of a value, and of all that are like it."""
        key = self._kind(value, strict)
        if key not in self.prices:
            self.prices[key] = cache(partial(self.price, value, strict=strict))
        return self.prices[key]

    def _kind(self, value: Value, strict: bool) -> Kind:
        return value.shape, value.itemsize, value in self.anywhere, strict

    def _layouts_of(self, site: Site, place: int, made: bool) -> Layouts:
        """The layouts that the ways of a site give to one of its results, or operands; equal ones are one
        object.
        """
        key = (id(site.ways), place, made)
        if key not in self.columns:
            layouts = tuple([(way.results if made else way.operands)[place] for way in site.ways])
            self.columns[key] = self.interned.setdefault(layouts, layouts)
        return self.columns[key]

    def _make_tables(
        self, value: Value, made: Layouts, targets: tuple[Layouts, ...], strict: bool
    ) -> "_Tables | None":
        price = self.price_of(value, strict)
        sources, read = _Distinct(made), _Distinct(tuple(itertools.chain(*targets)))
        prices = np.array([[price(m, t) for t in read.layouts] for m in sources.layouts])
        ends = itertools.pairwise(itertools.accumulate(map(len, targets), initial=0))
        tables = [prices[:, read.places[start:end]] for start, end in ends]
        paying = [bool((table > 0).any()) for table in tables]
        if not any(paying):
            return None
        if sum(paying) == 1:
            each = zip(tables, paying, strict=True)
            return _Tables(None, None, [table[sources.places] if pays else None for table, pays in each])
        some = [ts for ts, pays in zip(targets, paying, strict=True) if pays]
        shared = copies.copies_of(sources.layouts, some, price)
        tables = [shared.reader_table(ts) if pays else None for ts, pays in zip(targets, paying, strict=True)]
        return _Tables(shared.making, shared.maker_table(made), tables)


class _Tables(NamedTuple):
    """What it costs to bring a value to its readers. `copying`: each set of copies of it; `making`: to make
    it in the layout of which these are; both None where one reader pays, from the layout in which it is made.
    `reading`: for each reader, None if it never pays.
    """

    copying: np.ndarray | None
    making: Any
    reading: Sequence[Any]


@dataclass(eq=False)
class _Read:
    """A value that its readers share: `copies` is the variable of which copies it has."""

    maker: Site
    reads: "Reads"
    weight: float
    tables: _Tables
    copies: int = -1


class _Distinct:
    """The layouts among some that differ, and the place of each of them all among these."""

    def __init__(self, layouts: Layouts):
        numbers: dict[Layout, int] = {}
        self.places = [numbers.setdefault(layout, len(numbers)) for layout in layouts]
        self.layouts = list(numbers)


def roughly(price: float) -> float:
    """A price to a 64th, so that what stands alike has equal ones; no less, so that of equals those go first
    that cost nothing to make.

    >>> roughly(1024.0), roughly(1025.0), roughly(0.0)
    (1024.0, 1056.0, 0.0)
    """
    part, exponent = math.frexp(price)
    return math.ldexp(math.ceil(part * 64), exponent - 6)


def _inside(node: Node) -> Iterator[Node]:
    yield node
    for body in node.bodies:
        yield from body.walk()


def _bodies(node: Node) -> Iterator[Graph]:
    for body in node.bodies:
        yield body
        for inner in body.nodes:
            yield from _bodies(inner)


def _apart(node: Node, factors: Factors | None) -> list[Node]:
    """Where each result is one operand in memory, as of a barrier, and they share no factor, a node for each:
    they have nothing to do with each other.
    """
    entry, pairs = RULES.get(node.name), list(zip(node.inputs, node.outputs, strict=False))
    if factors is None or entry is None or entry.reads != "none":
        return []
    if not len(node.inputs) == len(node.outputs) > 1:
        return []
    each = [
        {f for dim in (*operand, *result) for f in dim}
        for operand, result in zip(factors.operands, factors.results, strict=True)
    ]
    if sum(map(len, each)) > len(set().union(*each)):
        return []
    return [replace(node, inputs=[v], outputs=[made]) for v, made in pairs]
