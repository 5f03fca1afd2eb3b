"""Where what passes make is gathered: sums in accumulators, rows in stacks, and the results made of them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from shardax.pipeline.assign import FORWARD, Assignment
from shardax.pipeline.flow import Rows
from shardax.pipeline.origins import run
from shardax.pipeline.passes import accumulated
from shardax.pipeline.table import Schedule

Type = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Result:
    """A part of a result: of the `number`th, the value of `key`, which the pass makes on virtual stage
    `stage`."""

    number: int
    key: Any
    name: str
    stage: int

    @property
    def rows(self) -> Rows | None:
        return self.key[3:] if isinstance(self.key, tuple) else None

    @property
    def count(self) -> int:
        return self.rows[1] - self.rows[0] if self.rows else 0


class Summand(NamedTuple):
    """Sum `number`, or rows of it, as a part of an array at rest, after `moves`, equations that move its
    elements; of a flat one from number `start` on."""

    number: int
    rows: Rows | None = None
    start: int = 0
    moves: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Accumulator:
    """An array [stages, *shape] to which sums are added where their stages are. `parts`: for each stage those
    that it has. `flat`: whether it is a flat one. `anywhere`: it is one of [*shape], on the stage that has
    all sums of its one part, whichever that is."""

    parts: tuple[tuple[Summand, ...], ...]
    shape: tuple[int, ...]
    flat: bool = False
    anywhere: bool = False


class Gathered:
    """Results by the places in which they lie: those of one type share one, where they are on different
    devices; what several devices have parts of has its own, and so have accumulators that are asked for.
    """

    def __init__(
        self,
        found: Assignment,
        schedule: Schedule,
        variables: Sequence[Any],
        asked: Sequence[Accumulator] = (),
    ):
        self.found, self.flow, self.schedule = found, found.flow, schedule
        self.results = [
            Result(n, key, *found.made.get(key, (FORWARD, 0)))  # the first stage gives what is an argument
            for n, v in enumerate(variables)
            for key in found.keys(v)
        ]
        self.places: dict[Result, int] = {}
        self.parts: dict[Result, Summand] = {}  # of accumulators that are asked for
        self.flat: set[int] = set()  # places of flat ones
        self.types: list[Type] = []
        self.accumulators, self.asked = asked, self._place_asked(asked)

    def device(self, result: Result) -> int:
        return self.schedule.homes[result.stage][0]

    @cached_property
    def by_number(self) -> dict[int, list[Result]]:
        found: defaultdict[int, list[Result]] = defaultdict(list)
        for result in self.results:
            found[result.number].append(result)
        return found

    # Places

    def _place_asked(self, asked: Sequence[Accumulator]) -> list[int | None]:
        """The place of each; None where something of it is made elsewhere, be it in another of them."""
        parts = [self._parts_of(accumulator) for accumulator in asked]
        while True:
            placed = {result for some in parts for result in some or ()}
            fits = [some is not None and self._with_all(some) <= placed for some in parts]
            if sum(fits) == sum(some is not None for some in parts):
                break
            parts = [some if fit else None for some, fit in zip(parts, fits, strict=True)]
        for accumulator, some in zip(asked, parts, strict=True):
            self.parts.update(some or {})
            if some is not None and not accumulator.anywhere:
                self.places.update(dict.fromkeys(some, len(self.types)))
                self.flat.update({len(self.types)} if accumulator.flat else ())
                self.types.append(Type(accumulator.shape, self._dtype(some)))
        self._place_others(
            [
                (list(some), accumulator.shape)
                for accumulator, some in zip(asked, parts, strict=True)
                if some is not None and accumulator.anywhere
            ]
        )
        return [None if some is None else self.places[next(iter(some))] for some in parts]

    def _dtype(self, results: Iterable[Result]) -> Any:
        return self.flow.type_of(next(iter(results)).key).dtype

    def _parts_of(self, accumulator: Accumulator) -> dict[Result, Summand] | None:
        found: dict[Result, Summand] = {}
        for device, parts in self._on_devices(accumulator):
            for part in parts:
                own = [r for r in self.by_number[part.number] if r.rows == part.rows]
                if not own or any(self.device(r) != device for r in own):
                    return None
                found.update(dict.fromkeys(own, part))
        return found if len({self.flow.type_of(r.key).dtype for r in found}) == 1 else None

    def _on_devices(self, accumulator: Accumulator) -> Iterator[tuple[int, tuple[Summand, ...]]]:
        if not accumulator.anywhere:
            yield from enumerate(accumulator.parts)
            return
        (parts,) = accumulator.parts
        yield self.device(self.by_number[parts[0].number][0]), parts

    def _with_all(self, results: Iterable[Result]) -> set[Result]:
        """They, and all other parts of the same sums."""
        return {r for number in {r.number for r in results} for r in self.by_number[number]}

    def _place_others(self, together: Sequence[tuple[list[Result], tuple[int, ...]]]) -> None:
        """Those of one type on different devices in one place; `together`: those that are added up in one,
        and its shape."""
        placed = {*self.places, *(result for some, _ in together for result in some)}
        units: list[tuple[list[Result], tuple[Any, ...]]] = [*together]
        for result in self.results:
            if result not in placed:
                shape = self.flow.type_of(result.key).shape
                units.append(
                    ([result], shape if result.rows is None else ("rows", result.number, *shape[1:]))
                )
        taken: defaultdict[Any, list[list[Result]]] = defaultdict(list)
        for some, shape in units:
            places = taken[shape, self._dtype(some)]
            free = (p for p in places if self.device(some[0]) not in set(map(self.device, p)))
            place = next(free, None)
            if place is None:
                places.append(place := [])
            place += some
        for (shape, dtype), places in taken.items():
            for place in places:
                self.places.update(dict.fromkeys(place, len(self.types)))
                rows = max(result.count for result in place)
                self.types.append(Type((rows, *shape[2:]) if shape[:1] == ("rows",) else shape, dtype))

    # In passes

    def of_pass(self, k: int, name: str, made: set[Any]) -> list[Result]:
        """The results that a pass of virtual stage k gives, which makes these keys."""
        of_nobody = name == FORWARD and k == 0
        return [r for r in self.results if r.key in made or of_nobody and r.key not in self.found.made]

    def values(self, results: Sequence[Result], values: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Where each of these goes, and as what: those of a flat accumulator together."""
        flat: dict[int, Any] = {}
        for result, x in zip(results, values, strict=True):
            place, part = self.places[result], self.parts.get(result)
            moved = run(part.moves, x) if part else x
            if place not in self.flat:
                yield place, moved
                continue
            assert part is not None
            own = flat.get(place, jnp.zeros(self.types[place].shape, x.dtype))
            flat[place] = own.at[part.start : part.start + x.size].add(moved.reshape(-1))
        yield from flat.items()

    def padded(self, result: Result, x: Array) -> Array:
        """Rows of a result as many as its place has, where another stage makes more."""
        missing = self.types[self.places[result]].shape[0] - result.count if result.rows else 0
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x

    def takes_rows(self, result: Result) -> bool:
        """Whether the first rows of its place are those of the result, as it is made."""
        place, type, part = self.places[result], self.flow.type_of(result.key), self.parts.get(result)
        if place in self.flat or part and part.moves:
            return False
        return self.types[place].shape[1:] == type.shape[1:]

    def total(self, place: int) -> Type:
        """What is added up there."""
        return Type(self.types[place].shape, accumulated(self.types[place]))

    # After the loop

    def accumulated(self, made: Sequence[Array]) -> list[Array | None]:
        """What was added up in the accumulators that were asked for."""
        found = []
        for accumulator, place in zip(self.accumulators, self.asked, strict=True):
            x = None if place is None else made[place]
            if x is not None and accumulator.anywhere:
                ((device, _),) = self._on_devices(accumulator)
                x = x[device]
            found.append(x)
        return found

    def whole(self, made: Sequence[Array], dim: int) -> list[Array | None]:
        """Each result, of its parts, [stages, ...] each; rows lie along `dim`. None: it is in accumulators
        that were asked for."""
        pairs = sorted(self.by_number.items())
        return [None if some[0] in self.parts else self._joined(some, made, dim) for _, some in pairs]

    def _joined(self, some: Sequence[Result], made: Sequence[Array], dim: int) -> Array:
        if some[0].rows is None:
            return self._part(some[0], made, dim)
        order = sorted(some, key=lambda r: r.rows or ())
        counts, place = {r.count for r in order}, self.places[order[0]]
        devices, stages = list(map(self.device, order)), list(range(self.schedule.stages))
        if devices in (stages, stages[::-1]) and counts == {self.types[place].shape[0]} and not dim:
            x = made[place] if devices == stages else jax.lax.rev(made[place], (0,))
            return x.reshape(-1, *x.shape[2:])
        return jnp.concatenate([self._part(r, made, dim) for r in order], dim)

    def _part(self, result: Result, made: Sequence[Array], dim: int) -> Array:
        x = made[self.places[result]][self.device(result)]
        return x if result.rows is None else jax.lax.slice_in_dim(x, 0, result.count, axis=dim)
