"""Why emission sends: what it reshards, for whom, and what it settles."""

from dataclasses import dataclass

from shardax.graph.graph import Node, Value
from shardax.ledger.causes import Cause
from shardax.partition.decisions import Decision
from shardax.partition.owed import Owed
from shardax.sharding import Axes, Layout


@dataclass(frozen=True, slots=True, eq=False)
class Resharded(Cause):
    """A value was resharded from layout `source` to `target`, over `axes` in this collective.

    `reader` is the node that reads it, as operand `place`, by its `decision`. Without a reader it was result
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
    """What was owed over `axes` was settled: None where it came in, with the carry of a loop or, if not
    `carried`, with an argument.
    """

    axes: Axes
    owed: Owed | None
    carried: bool = True

    @property
    def also(self) -> tuple[str, ...]:
        """The lines of contributions older than the newest, which it sums too."""
        newest, *older = [origin.node.line for origin in self.owed.origins()] if self.owed else [""]
        return tuple(line for line in dict.fromkeys(older) if line not in ("", newest))
