"""Why stages begin where they do: beside each place the next best one, for the plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardax import _jax


@dataclass(frozen=True)
class Place:
    """Where a stage may begin: the user's `line`, and of a scan over layers which `layer` of how many. If it
    began there, `crossing` bytes of a microbatch would be sent to it, and the slower of it and the stage
    before would take `slower` seconds, forward, on one device.
    """

    line: str
    layer: tuple[int, int] | None
    crossing: int
    slower: float


@dataclass(frozen=True)
class Begin:
    """`here`: where a stage begins. `other`: the next best place between those of its neighbours, None where
    there is none. `marked`: places are those that the user marked."""

    here: Place
    other: Place | None
    marked: bool = False


def begins(program: Any, starts: Sequence[int], allowed: Sequence[int], seconds: Sequence[float]) -> list:
    """Of each stage but the first why it begins where it does.

    Args:
      program: the parts of a loss, and what crosses between them (`shardax.pipeline.cut`).
      starts: of all stages but the first, the numbers of the parts with which they begin; `allowed`: all with
        which one may.
      seconds: of each part.
    """
    ends = [0, *starts, len(program.parts)]
    slowest = max(sum(seconds[a:b]) for a, b in zip(ends, ends[1:], strict=False))

    def place(first: int, at: int, last: int) -> Place:
        part = program.parts[at]
        trips = program.trips(part.number)
        return Place(
            _jax.user_line(program.jaxpr.eqns[part.number].source_info) or "",
            (part.start, trips) if trips > 1 else None,
            program.crossing(at),
            max(sum(seconds[first:at]), sum(seconds[at:last])),
        )

    def rank(other: Place) -> tuple[float, float]:
        """As the cut is chosen: nothing slower than now, then the least sent."""
        return max(other.slower, slowest), other.crossing

    found = []
    for first, at, last in zip(ends, ends[1:], ends[2:], strict=False):
        others = [place(first, i, last) for i in allowed if first < i < last and i != at]
        found.append(Begin(place(first, at, last), min(others, key=rank, default=None), bool(program.marks)))
    return found
