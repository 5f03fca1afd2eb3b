"""From what a search chose to decisions: the nodes in program order, each operand read from the cheapest
layout that it has by then.
"""

from collections.abc import Sequence

from shardax.graph import annotations
from shardax.graph.graph import Graph, Node, Value
from shardax.partition.decisions import Decision, Decisions, Reshard
from shardax.partition.search import Search
from shardax.sharding import Layout, replicated_layout


class Replay:
    """`layouts`: those that each value has so far, first the one that it was made in."""

    def __init__(self, search: Search):
        self.search = search
        self.layouts: dict[Value, list[Layout]] = {}
        self.structured: dict[Node, Decision] = {}

    def readable(self, value: Value, user_requested: bool) -> list[Layout]:
        """The layouts that a reader may take; one that the user requested, also those before an
        annotation.
        """
        before = self.search.before_annotation.get(value)
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
            twin = self.search.patterns.twin(node)
            return self.as_twin(node, twin) if twin else _STRUCTURED[node.name](self, node)
        way = self.search.site_of[node].chosen
        splits, factors, entry = way.detail
        return self.decision(node, way.operands, way.results, splits, factors=factors, entry=entry)

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
            if value in self.search.anywhere and not layout.pending:
                self.layouts[value].append(replicated_layout(value.shape))
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
        self.layouts[value].append(target)
        return Reshard(min(layouts, key=lambda source: self.search.sent(value, source, target)), target)

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
