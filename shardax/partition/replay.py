"""From what a search chose to decisions: the nodes in program order, the copies of each value such that all
together cost least, whoever reads first.
"""

from collections.abc import Sequence
from functools import cached_property

from shardax.graph import annotations
from shardax.graph.graph import Graph, Node, Value
from shardax.partition.candidates import project_all
from shardax.partition.decisions import Decision, Decisions, Reshard
from shardax.partition.search import Search
from shardax.partition.sites import Way
from shardax.partition.sources import sources_of
from shardax.sharding import Layout, replicated_layout


class Replay:
    """`layouts`: those that each value has so far, first the one that it was made in. `sources`: from which
    each of its copies is made, which may be a copy for a later reader. `price`: picoseconds of all copies so
    far.
    """

    def __init__(self, search: Search):
        self.search = search
        self.layouts: dict[Value, list[Layout]] = {}
        self.structured: dict[Node, Decision] = {}
        self.sources: dict[Value, dict[Layout, Layout]] = {}
        self.price = 0.0

    def readable(self, value: Value, user_requested: bool) -> list[Layout]:
        """The layouts that a reader may take; one that the user requested, also those before an
        annotation.
        """
        before = self.search.before_annotation.get(self.search.root_of(value))
        return self.layouts[value] + (self.readable(before, True) if user_requested and before else [])

    def graph(
        self, graph: Graph, inputs: Sequence[Layout], outputs: Sequence[Layout], user_requested: bool = True
    ) -> Decisions:
        """`user_requested`: whether the user requests the layouts of the outputs, as of a whole program."""
        for value, layout in zip(graph.inputs, inputs, strict=True):
            self.layouts[value] = [layout]
        steps = [self.node(node) for node in graph.nodes]
        reshards = tuple(
            self.reshard(v, t, user_requested) for v, t in zip(graph.outputs, outputs, strict=True)
        )
        return Decisions(graph, tuple(inputs), steps, reshards)

    def node(self, node: Node) -> Decision:
        if node.bodies:
            twin = self.search.twins.get(node)
            return self.as_twin(node, twin) if twin else _STRUCTURED[node.name](self, node)
        if node in self.search.apart:
            return self.together(node, [site.chosen for site in self.search.apart[node]])
        way = self.search.site_of[node].chosen
        splits, factors, entry = way.detail
        operands, results = way.operands, way.results
        if annotations.renames(node) and not self.is_read(node.inputs[0], operands[0]):
            operands = results = (self.layouts[node.inputs[0]][0],)
            splits = {}
        return self.decision(node, operands, results, splits, factors=factors, entry=entry)

    def together(self, node: Node, ways: Sequence[Way]) -> Decision:
        """The decision of a node of which each operand was chosen by itself."""
        factors = self.search.completion.items.node_classes.of(node)[0].factors
        operands, results = ([getattr(way, side)[0] for way in ways] for side in ("operands", "results"))
        assert factors, "it has a rule, and no bodies"
        splits = project_all(operands, factors.operands, factors, self.search.sizes)
        return self.decision(node, operands, results, splits, factors=factors, entry=ways[0].detail[2])

    def is_read(self, value: Value, layout: Layout) -> bool:
        """Whether a value is read in a layout by who computes with it, and not only called by another name
        there."""
        return bool(self.search.avoided) or layout in self.reads.get(self.search.root_of(value), ())

    def as_twin(self, node: Node, twin: Node) -> Decision:
        """The decision of a node that runs as its twin does."""
        known = self.structured[twin]
        bodies = tuple(inside.of(body) for inside, body in zip(known.bodies, node.bodies, strict=True))
        how = {"bodies": bodies, "parted": known.parted}
        return self.decision(node, known.operands, known.results, known.splits, **how)

    def decision(self, node: Node, operands, results, splits=None, **rest) -> Decision:
        user_requested = annotations.of_node(node) is not None
        reshards = tuple(
            self.reshard(v, t, user_requested) for v, t in zip(node.inputs, operands, strict=True)
        )
        for value, layout in zip(node.outputs, results, strict=True):
            self.layouts[value] = [layout]
        if annotations.renames(node):
            self.layouts[node.outputs[0]] = self.layouts[node.inputs[0]]
        decision = Decision(reshards, tuple(operands), tuple(results), splits or {}, **rest)
        if node.bodies:
            self.structured[node] = decision
        return decision

    def reshard(self, value: Value, target: Layout, user_requested: bool) -> Reshard:
        """Reads a value in a layout; from then on it has that layout too."""
        if value.is_literal:
            return Reshard(replicated_layout(value.shape), target)
        layouts = self.readable(value, user_requested)
        if target in layouts:
            return Reshard(target, target)
        reshard = self.nearest(value, target, layouts)
        made = self.layouts[value][0] if value in self.search.anywhere else reshard.source
        often = self.search.scope[value] * self.search.times.get(value, 1)
        self.price += self.search.price_of(value)(made, target) * often
        self.layouts[value].append(target)
        return reshard

    def nearest(self, value: Value, target: Layout, layouts: Sequence[Layout]) -> Reshard:
        """From where a value is brought to a layout: as is best for all who read it, else from the cheapest
        of these, or whole, where each device makes what it needs."""
        root, price = self.search.root_of(value), self.search.price_of(value)
        is_anywhere = value in self.search.anywhere and not layouts[0].pending
        whole = [replicated_layout(value.shape)] if is_anywhere else []
        if root not in self.sources:
            self.sources[root] = sources_of([*self.layouts[value], *whole], self.reads.get(root, ()), price)
        source = self.sources[root].get(target)
        return Reshard(source or min([*layouts, *whole], key=lambda have: price(have, target)), target)

    @cached_property
    def reads(self) -> dict[Value, list[Layout]]:
        """The layouts in which each value is read, in order, but for readers that may also read what was
        before an annotation. Under strict mode none: it minds who reads first, and from what.
        """
        found: dict[Value, list[Layout]] = {}
        for value, site, i in () if self.search.avoided else self.search.reading:
            root = self.search.root_of(value)
            if not site.renames and not (site.user_requested and root in self.search.before_annotation):
                found.setdefault(root, []).append(site.chosen.operands[i])
        return found

    def inside(self, graph: Graph, outputs: Sequence[Layout]) -> Decisions:
        """The decisions of a body, whose inputs have the layouts of the ports."""
        inputs = []
        for value in graph.inputs:
            site, i = self.search.maker[value]
            inputs.append(site.chosen.results[i])
        return self.graph(graph, inputs, outputs, user_requested=False)


def _scan(replay: Replay, node: Node) -> Decision:
    (body,) = node.bodies
    ports = replay.search.ports[node]
    operands = [site.chosen.operands[0] for site in (*ports.operands, *ports.carries, *ports.stacks)]
    results = [site.chosen.results[-1] for site in (*ports.carries, *ports.results)]
    returned = [
        *(site.chosen.operands[1] for site in ports.carries),
        *(site.chosen.operands[0] for site in ports.results),
    ]
    inside = replay.inside(body, returned)
    return replay.decision(
        node, operands, results, {"trips": ports.split} if ports.split else {}, bodies=(inside,)
    )


def _while(replay: Replay, node: Node) -> Decision:
    cond, body = node.bodies
    ports = replay.search.ports[node]
    operands = [site.chosen.operands[0] for site in (*ports.operands, *ports.carries)]
    carry = [site.chosen.operands[1] for site in ports.carries]
    bodies = replay.inside(cond, [replicated_layout(())]), replay.inside(body, carry)
    return replay.decision(node, operands, carry, bodies=bodies, parted=ports.parted)


def _cond(replay: Replay, node: Node) -> Decision:
    ports = replay.search.ports[node]
    operands, results = (
        [site.chosen.operands[0] for site in side] for side in (ports.operands, ports.results)
    )
    bodies = tuple(replay.inside(body, results) for body in node.bodies)
    return replay.decision(node, operands, results, bodies=bodies, parted=ports.parted)


def _island(replay: Replay, node: Node) -> Decision:
    (body,), ports = node.bodies, replay.search.ports[node]
    operands = [site.chosen.operands[0] for site in ports.operands]
    results = [site.chosen.results[0] for site in ports.results]
    return replay.decision(
        node,
        operands,
        results,
        bodies=(replay.inside(body, [site.chosen.operands[0] for site in ports.results]),),
    )


_STRUCTURED = {"cond": _cond, "scan": _scan, "shard_map": _island, "while": _while}
