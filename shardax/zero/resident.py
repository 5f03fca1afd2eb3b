"""Resident: bytes of a step's state on each device, before and after ZeRO, and what could not be split."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardax.annotations.annotate import annotate_p
from shardax.explain.facts import Facts
from shardax.explain.placed import Placed
from shardax.explain.tables import Group, Row, Table
from shardax.explain.terminal import shown
from shardax.ledger.collectives import array_bytes, array_text
from shardax.ledger.words import as_one, bytes_text, form, times
from shardax.sharding import Axes, shard_count
from shardax.zero.rest import split_further

PARAMETER, OPTIMIZER = "parameter", "optimizer state"
SHOWN = 8  # arrays that stay whole


@dataclass(frozen=True)
class Whole:
    """An array that no dim of its shape allows to split further, and its bytes on each device."""

    path: str
    array: str
    nbytes: int


@dataclass(frozen=True)
class Resident:
    """Bytes on each device, `before` and `after`: of "parameters", "gradients" and "optimizer state".
    Gradients count at the size that a step keeps until the update. `whole`: the arrays that stay as they
    were, the largest first. `hosted`: of the bytes after, those in the host's memory.
    """

    words: str
    before: dict[str, int]
    after: dict[str, int]
    whole: tuple[Whole, ...]
    hosted: dict[str, int] = field(default_factory=dict)

    def __str__(self):
        return shown([self.table()])

    def table(self) -> Table:
        on_device = {name: n - self.hosted.get(name, 0) for name, n in self.after.items()}
        columns = [self.before, on_device, *[self.hosted] * bool(self.hosted)]
        summed = [{**column, "in all": sum(column.values())} for column in columns]
        rows = [Row(name, tuple(bytes_text(c.get(name, 0)) for c in summed)) for name in summed[0]]
        heads = ("without", "with it", *["at the host"] * bool(self.hosted))
        return Table(
            f"State on each device, by {self.words}", (Group("", tuple(rows)), *self._whole()), heads
        )

    def _whole(self) -> Iterator[Group]:
        alike: dict[tuple[str, str], list[Whole]] = {}
        for one in self.whole:
            alike.setdefault((form(one.path), one.array), []).append(one)
        rows = [
            Row(
                f"{as_one([w.path for w in ones])} {times(len(ones))}{ones[0].array}",
                ("", bytes_text(sum(w.nbytes for w in ones))),
            )
            for ones in alike.values()
        ]
        if rows:
            more = [Row(f"and {len(rows) - SHOWN} more")] if len(rows) > SHOWN else []
            total = bytes_text(sum(w.nbytes for w in self.whole))
            yield Group(f"whole, as the axis divides none of their dims: {total}", (*rows[:SHOWN], *more))


def resident(plan: Facts, words: str, axes: Axes, stage: int) -> Resident:
    """Of a plan of the program that `Zero` of these axes made, in whose annotations `words` stand."""
    before: dict[str, int] = dict.fromkeys(("parameters", "gradients", OPTIMIZER), 0)
    after, hosted, whole = dict(before), dict(before), []
    for place, role in _roles(plan, words):
        rests, was = place.shards, shard_count(place.sharding.without(axes).axes, place.mesh.shape)
        name, nbytes = OPTIMIZER if role == OPTIMIZER else "parameters", array_bytes(place.aval)
        before[name] += nbytes // was
        after[name] += nbytes // rests
        hosted[name] += nbytes // rests * place.at_host
        could = _could_rest(place, axes)
        if role == PARAMETER:
            before["gradients"] += nbytes // was
            after["gradients"] += nbytes // (could if stage > 1 else was)
        if could == was and place.aval.shape and (role == OPTIMIZER or stage == 3):
            whole.append(Whole(place.named or place.path, array_text(place.aval), nbytes // rests))
    largest = tuple(sorted(whole, key=lambda w: -w.nbytes))
    return Resident(words, before, after, largest, {name: n for name, n in hosted.items() if n})


def _could_rest(place: Placed, axes: Axes) -> int:
    """Into how many shards it is split where the axes split it as far as they can."""
    split = split_further(place.sharding.without(axes), place.aval.shape, axes, place.mesh.shape)
    return math.prod(place.mesh.shape[axis] for axis in split.axes)


def _roles(plan: Facts, words: str) -> Iterator[tuple[Placed, str]]:
    """The arguments that are state, each with its role, as the annotations say that `Zero` made."""
    places: Sequence[Placed] = list(plan.arguments())
    numbers = {v: i for i, v in enumerate(plan.global_jaxpr.jaxpr.invars)}
    for eqn in plan.global_jaxpr.jaxpr.eqns:
        if eqn.primitive is annotate_p and eqn.params["role"] == "argument":
            said, _, role = eqn.params["source"].rpartition(", ")
            if said == words:
                yield places[numbers[eqn.invars[0]]], role
