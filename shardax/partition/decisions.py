"""Decisions: what `choose` found and `emit` carries out, as plain data."""

from dataclasses import dataclass, field

from shardax.graph import Graph, Node
from shardax.sharding import Layout
from shardax.spmd_rules.registry import Entry, Local
from shardax.spmd_rules.rule import Factors


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
