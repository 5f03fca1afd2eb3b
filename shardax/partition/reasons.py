"""Why emission sends: what it reshards, for whom, and what it settles."""

from dataclasses import dataclass

from shardax.graph.graph import Node, Value
from shardax.ledger.causes import Cause
from shardax.partition.decisions import Decision
from shardax.sharding import Axes, Layout


@dataclass(frozen=True, slots=True, eq=False)
class Resharded(Cause):
    """A value was resharded from layout `source` to `target`, over `axes` in this collective.

    `reader` is the node that wanted it, as operand `place`, by its `decision`. Without a reader it was result
    `place` of the program, or of a body of the node `around`.
    """

    value: Value
    source: Layout
    target: Layout
    axes: Axes
    reader: Node | None = None
    decision: Decision | None = None
    place: int = 0
    around: Node | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Settled(Cause):
    """The reduction over `axes` that a node, run by this decision, left owed was settled. Without a node it
    came in with the carry of a loop.
    """

    axes: Axes
    node: Node | None
    decision: Decision | None
