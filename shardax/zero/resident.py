"""Resident: bytes of a step's state on each device, before and after ZeRO, and what could not be split."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax

from shardax.annotations.annotate import annotate_p
from shardax.explain.facts import Facts
from shardax.explain.placed import Placed
from shardax.explain.tables import Group, Row, Table
from shardax.explain.terminal import shown
from shardax.ledger.collectives import array_bytes, array_text
from shardax.ledger.words import as_one, bytes_text, form, times
from shardax.sharding import Axes, shard_count
from shardax.zero.padded import Shape, cuts
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
class Longer:
    """An array that rests padded: `array`, as `rests`, and the bytes that this adds on each device."""

    path: str
    array: str
    rests: str
    nbytes: int


@dataclass(frozen=True)
class Resident:
    """Bytes on each device, `before` and `after`: of "parameters", "gradients" and "optimizer state".
    Gradients count at the size that a step keeps until the update. `whole`: the arrays that stay as they
    were, the largest first. `padded`: those that rest with a tail of zeros, which counts after, not before.
    `hosted`: of the bytes after, those in the host's memory.
    """

    words: str
    before: dict[str, int]
    after: dict[str, int]
    whole: tuple[Whole, ...]
    hosted: dict[str, int] = field(default_factory=dict)
    padded: tuple[Longer, ...] = ()

    def __str__(self):
        return shown([self.table()])

    def table(self) -> Table:
        on_device = {name: n - self.hosted.get(name, 0) for name, n in self.after.items()}
        columns = [self.before, on_device, *[self.hosted] * bool(self.hosted)]
        summed = [{**column, "in all": sum(column.values())} for column in columns]
        rows = [Row(name, tuple(bytes_text(c.get(name, 0)) for c in summed)) for name in summed[0]]
        heads = ("without", "with it", *["at the host"] * bool(self.hosted))
        groups = filled((Group("", tuple(rows)), *self._whole(), *self._padded()), len(heads))
        return Table(f"State on each device, by {self.words}", groups, heads)

    def _whole(self) -> Iterator[Group]:
        total = bytes_text(sum(w.nbytes for w in self.whole))
        shown = [(w.path, w.array, w.nbytes) for w in self.whole]
        yield from _group(f"whole, as the axis divides none of their dims: {total}", shown)

    def _padded(self) -> Iterator[Group]:
        total = bytes_text(sum(p.nbytes for p in self.padded))
        shown = [(p.path, f"{p.array} as {p.rests}", p.nbytes) for p in self.padded]
        yield from _group(f"padded, so that the axis divides one of their dims: {total}", shown)


def filled(groups: Iterable[Group], columns: int) -> tuple[Group, ...]:
    """Groups whose rows have so many cells, the last ones empty, if they have any."""
    return tuple(
        replace(
            group,
            rows=tuple(
                replace(row, cells=(*row.cells, *[""] * (columns - len(row.cells)))) if row.cells else row
                for row in group.rows
            ),
        )
        for group in groups
    )


def _group(heading: str, arrays: Sequence[tuple[str, str, int]]) -> Iterator[Group]:
    """Arrays by path, type and bytes, alike ones in one row; nothing where there are none."""
    alike: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for path, array, nbytes in arrays:
        alike.setdefault((form(path), array), []).append((path, nbytes))
    rows = [
        Row(
            f"{as_one([path for path, _ in ones])} {times(len(ones))}{array}",
            ("", bytes_text(sum(nbytes for _, nbytes in ones))),
        )
        for (_, array), ones in alike.items()
    ]
    if rows:
        more = [Row(f"and {len(rows) - SHOWN} more")] if len(rows) > SHOWN else []
        yield Group(heading, (*rows[:SHOWN], *more))


def resident(plan: Facts, words: str, axes: Axes, stage: int) -> Resident:
    """Of a plan of the program that `Zero` of these axes made, in whose annotations `words` stand."""
    arrays = list(_arrays(plan, words, axes))
    before: dict[str, int] = dict.fromkeys(("parameters", "gradients", OPTIMIZER), 0)
    after, hosted, whole = dict(before), dict(before), []
    alone = all(x.place.mesh.shape[axis] == 1 for x in arrays for axis in axes)  # nothing is to be split
    scattered = {x.true.shape: x.resting // x.true.dtype.itemsize for x in arrays if x.is_padded}
    in_bucket = _in_bucket(arrays, scattered)
    for x in arrays:
        name = OPTIMIZER if x.role == OPTIMIZER else "parameters"
        before[name] += x.nbytes // x.was
        after[name] += x.resting
        hosted[name] += x.resting * x.place.at_host
        if x.role == PARAMETER:
            before["gradients"] += x.nbytes // x.was
            shard = scattered.get(x.true.shape, x.nbytes // x.true.dtype.itemsize // x.could)
            shard = in_bucket.get(x.path, shard)
            after["gradients"] += x.nbytes // x.was if stage == 1 else shard * x.true.dtype.itemsize
        if not alone and x.could == x.was and x.true.shape and (x.role == OPTIMIZER or stage == 3):
            whole.append(Whole(x.path, array_text(x.place.aval), x.resting))
    largest = tuple(sorted(whole, key=lambda w: -w.nbytes))
    padded = sorted((x.longer for x in arrays if x.is_padded), key=lambda p: -p.nbytes)
    return Resident(
        words, before, after, largest, {name: n for name, n in hosted.items() if n}, tuple(padded)
    )


def _in_bucket(arrays: "Sequence[_Array]", scattered: Mapping[Shape, int]) -> dict[str, int]:
    """By its path the share in elements that a device has of the gradient of each parameter that rests whole,
    where the optimizer's state has all of these in one bucket.
    """
    whole = [
        x
        for x in arrays
        if x.role == PARAMETER and x.could == x.was and x.true.size > 1 and x.true.shape not in scattered
    ]
    total = sum(x.true.size for x in whole)
    buckets = (x for x in arrays if x.role == OPTIMIZER and x.true.shape == (total,))
    bucket = next(buckets, None)
    if bucket is None or len(whole) < 2:
        return {}
    shard = bucket.resting // bucket.true.dtype.itemsize
    ends = [0, *itertools.accumulate(x.true.size for x in whole)]
    cuts = [shard * end // total for end in ends]
    return {x.path: end - start for x, start, end in zip(whole, cuts[:-1], cuts[1:], strict=True)}


@dataclass(frozen=True)
class _Array:
    """One of the state: `true`, its type without padding; `was`, into how many shards it is split without the
    axes, `could`, with them as far as they can split it.
    """

    place: Placed
    role: str
    true: jax.ShapeDtypeStruct
    was: int
    could: int

    @property
    def path(self) -> str:
        return self.place.named or self.place.path

    @property
    def nbytes(self) -> int:
        return array_bytes(self.true)

    @property
    def is_padded(self) -> bool:
        return self.true.shape != self.place.aval.shape

    @property
    def resting(self) -> int:
        return array_bytes(self.place.aval) // self.place.shards

    @property
    def longer(self) -> Longer:
        added = self.resting - self.nbytes // self.place.shards
        return Longer(self.path, array_text(self.true), array_text(self.place.aval), added)


def _arrays(plan: Facts, words: str, axes: Axes) -> Iterator[_Array]:
    for place, role, shape in _roles(plan, words):
        true = jax.ShapeDtypeStruct(shape, place.aval.dtype)
        was = shard_count(place.sharding.without(axes).axes, place.mesh.shape)
        could = place.shards if shape != place.aval.shape else _could_rest(place, axes)
        yield _Array(place, role, true, was, could)


def _could_rest(place: Placed, axes: Axes) -> int:
    """Into how many shards it is split where the axes split it as far as they can."""
    split = split_further(place.sharding.without(axes), place.aval.shape, axes, place.mesh.shape)
    return math.prod(place.mesh.shape[axis] for axis in split.axes)


def _roles(plan: Facts, words: str) -> Iterator[tuple[Placed, str, tuple[int, ...]]]:
    """The arguments that are state, each with its role, as the annotations say that `Zero` made, and with its
    true shape.
    """
    true = cuts(plan.global_jaxpr)
    places: Sequence[Placed] = list(plan.arguments())
    numbers = {v: i for i, v in enumerate(plan.global_jaxpr.jaxpr.invars)}
    for eqn in plan.global_jaxpr.jaxpr.eqns:
        if eqn.primitive is annotate_p and eqn.params["role"] == "argument":
            said, _, role = eqn.params["source"].rpartition(", ")
            if said == words:
                number = numbers[eqn.invars[0]]
                yield places[number], role, true[number] if number in true else places[number].aval.shape
