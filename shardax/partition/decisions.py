"""Decisions: what `choose` found and `emit` carries out, as plain data."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardax.graph.graph import Graph, Node
from shardax.sharding import AxisSizes, Layout, shard_count
from shardax.spmd_rules.registry import Entry, Local, Split
from shardax.spmd_rules.rule import Factors


class Reshard(NamedTuple):
    """A value is read in layout `target`, resharded from layout `source`, which it has already."""

    source: Layout
    target: Layout

    @property
    def needed(self) -> bool:
        return self.source != self.target


@dataclass(eq=False, slots=True)
class Decision:
    """How a node runs: its operands' reshards, its layouts and splits, and its bodies' decisions. `parted`:
    whether devices may be at different branches of it, or trips.

    It does not name the node: nodes that are alike in everything that matters share one.
    """

    reshards: tuple[Reshard, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    splits: Mapping[str, Split] = field(default_factory=dict)
    factors: Factors | None = None
    entry: Entry | None = None
    bodies: tuple["Decisions", ...] = ()
    parted: bool = False

    def of(self, node: Node) -> "Decision":
        """The decision of a node that is alike, whose bodies have values and lines of their own."""
        if not self.bodies:
            return self
        return replace(
            self, bodies=tuple(inside.of(body) for inside, body in zip(self.bodies, node.bodies, strict=True))
        )

    def local(self, node: Node, sizes: AxisSizes) -> Local:
        return Local(node, self.operands, self.results, self.splits, sizes)


class Origin(NamedTuple):
    """Where an equation of the local program comes from: a node of the global program, and the decision by
    which it runs. A collective that brings an operand to where a node reads it is of that node.
    """

    node: Node
    decision: Decision


@dataclass(eq=False, slots=True)
class Decisions:
    """How a graph runs: the layouts of its inputs, a decision for each of its nodes, the reshards of its
    outputs.

    `price`: of the program, in picoseconds. `gap`: how much that may be above the least.
    """

    graph: Graph
    inputs: tuple[Layout, ...]
    steps: list[Decision]
    outputs: tuple[Reshard, ...]
    price: float = 0.0
    gap: float = 0.0

    def __str__(self):
        """A line for each node: the layouts in which it reads its operands, and those in which it makes its
        results; below it what is resharded before it reads, and the bodies that it has.

            dot_general: P('x', None), P(None, 'y') -> P('x', 'y')
              operand 1 from P('y', None)
        """
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"arguments: {_texts(self.inputs)}".rstrip()
        for node, decision in self.pairs():
            yield f"{node.name}: {_texts(decision.operands)} -> {_texts(decision.results)}"
            yield from _resharded("operand", decision.reshards)
            for body in decision.bodies:
                yield from ("  " + line for line in body._lines())
        yield f"results: {_texts(reshard.target for reshard in self.outputs)}".rstrip()
        yield from _resharded("result", self.outputs)

    def of(self, graph: Graph) -> "Decisions":
        """The decisions of a graph that is alike."""
        steps = [step.of(node) for step, node in zip(self.steps, graph.nodes, strict=True)]
        return Decisions(graph, self.inputs, steps, self.outputs)

    def pairs(self) -> Iterable[tuple[Node, Decision]]:
        return zip(self.graph.nodes, self.steps, strict=True)


def _texts(layouts: Iterable[Layout]) -> str:
    return ", ".join(map(str, layouts))


def _resharded(what: str, reshards: Iterable[Reshard]) -> Iterator[str]:
    return (f"  {what} {i} from {r.source}" for i, r in enumerate(reshards) if r.needed)


def local_trip_count(node: Node, decision: Decision, sizes: AxisSizes) -> int:
    """How many iterations of a scan each device does."""
    split = decision.splits.get("trips")
    return split.padded // shard_count(split.axes, sizes) if split else node.params["length"]
