"""Sites: what a search decides. A site reads values, makes values, and has ways to do so; most sites are
nodes of the program.

A loop or branch is not one site but several, its *ports*: one for each operand, carry and result of its
bodies. A port reads on one side and makes on the other, so bodies are in the same search as what is around
them. A carry is one port: its layout is the same where it comes in, where the body takes and gives it, and
where it leaves.

    init ──┐                ┌── result
           ├── carry port ──┤
    body ──┘   (a layout)   └── body's input
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardax.graph.graph import Value
from shardax.sharding import Layout

Layouts = tuple[Layout, ...]


def sums_left(made: Layout) -> tuple[tuple[str, str], ...]:
    """The sums that a value owes as it is made.

    >>> from shardax.sharding import Sharding
    >>> sums_left(Layout(Sharding(((),)), (8,), (("x", "sum"), ("y", "max"))))
    (('x', 'sum'),)
    """
    return tuple(p for p in made.pending if p[1] == "sum")


@dataclass(eq=False, frozen=True, slots=True)
class Way:
    """One way of a site: the layouts in which it reads and makes its values, and its price, in picoseconds,
    for one run. `detail`: what the decision needs beside. `memory`: the bytes that what it makes takes on
    each device, if it is stored."""

    operands: Layouts
    results: Layouts
    price: float = 0.0
    detail: Any = None
    memory: int = 0


@dataclass(eq=False, slots=True)
class Site:
    """Values that are read and made, and the ways to do so. `runs`: how often the site itself runs."""

    reads: Sequence[Value]
    makes: Sequence[Value]
    ways: Sequence[Way]
    runs: float = 1.0
    times: int = 1  # in how many alike blocks it is
    user_requested: bool = False  # whether the user requests what it reads: an annotation, or a result
    allowed: bool = False  # whether strict mode lets what it reads be resharded for it unrequested
    renames: bool = False  # the value that it makes is the one that it reads, and keeps its other layouts
    may_owe: bool = False  # those that owe a sum among them
    chosen: Way = field(init=False)
