"""Cuts a loss into virtual stages, each a program of its own.

The jaxpr of the loss of one microbatch is a list of *parts* in program order: an equation each, but of a scan
over layers (one that goes over rows of the parameters) each trip. A virtual stage is a stretch of them.

    what a value depends on     is computed                       reaches a stage as
    parameters, no batch        once per step, before (hoisted)   a piece of them: rows of layers, or all
    neither (masks, keys)       by each stage that reads it       nothing
    the batch                   in its own stage                  received, from stage to stage
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal, jaxprs_in_params

from shardax import _jax
from shardax.annotations.explicit import shape_of
from shardax.cost.network import Network, network_of
from shardax.explain.roofline import work
from shardax.graph.evaluate import bound, evaluate
from shardax.pipeline.begins import Begin, begins

_MARK = "shardax.pipeline.stage:"
_SLACK = 1.1  # of the slowest stage's time: among cuts as good, the one that sends least


def stage(x, name: str = ""):
    """Marks where a stage of a pipeline begins: with the computation that reads the array that it returns,
    which is `x`. Where marks are, cuts are made at them alone. It does nothing outside of a pipeline.

    >>> import jax.numpy as jnp
    >>> jax.grad(lambda x: stage(jnp.sin(x), "head"))(0.0)
    Array(1., dtype=float32, weak_type=True)
    """
    return checkpoint_name(x, _MARK + name)


class Piece(NamedTuple):
    """What a stage reads of a hoisted value: rows `start` to `stop`, as layers are stacked, or all of it."""

    value: int
    rows: tuple[int, int] | None = None


class Part(NamedTuple):
    """Equation `number`, or the trips `start` to `stop` of the scan that it is."""

    number: int
    start: int = 0
    stop: int = 1


@dataclass(frozen=True)
class Stage:
    """One virtual stage. `program` takes its pieces, the leaves of the microbatch, the rest of the arguments
    (as the loss has them), and what it receives; it gives what it sends: of the last stage, the results.

    `seconds`: of its forward pass, on one device, as far as its parts say.
    """

    program: Callable[..., list[Any]]
    pieces: tuple[Any, ...]  # each a Piece, or one that rests where its stage is (`stacks.Held`)
    received: tuple[jax.ShapeDtypeStruct, ...]
    sent: tuple[jax.ShapeDtypeStruct, ...]
    seconds: float
    first_line: str


@dataclass(frozen=True)
class Cut:
    """A loss in stages. `hoist(params, rest)` gives the values of which stages read pieces. `begins`: why
    each stage but the first begins where it does."""

    hoist: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    stages: tuple[Stage, ...]
    begins: tuple[Begin, ...] = ()


def cut(closed, params: int, batched: int, stages: int, network: Network | None = None) -> Cut:
    """Cuts the jaxpr of a loss, or of another function, of one microbatch.

    Args:
      closed: a ClosedJaxpr; its arguments are leaves of the parameters, leaves of the microbatch, and others.
      params, batched: how many of each there are.
      stages: how many virtual stages.
      network: whose prices count.

    Raises ValueError where there are more stages than parts, or stages and marks do not fit.
    """
    program, network = _Program(closed, params, batched), network or network_of({})
    starts = _chosen(program, stages, network)
    why = begins(program, starts, _places(program, stages), program.seconds(network))
    return replace(program.cut(starts), begins=tuple(why))


# Where to cut


def _chosen(program: "_Program", stages: int, network: Network) -> list[int]:
    """The places, among all parts, at which stages begin."""
    if stages > len(program.parts):
        raise ValueError(
            f"pipeline: {stages} virtual stages, but the program has {len(program.parts)} part"
            f"{'s' * (len(program.parts) != 1)} that depend on the batch; take fewer stages or chunks"
        )
    places = _places(program, stages)
    seconds = np.concatenate([[0.0], np.cumsum(program.seconds(network))])
    start = network.collective("ppermute", (), 0)  # of every send, wherever it is made
    send = [network.collective("ppermute", (), program.crossing(place)) - start for place in places]
    ends = [0, *places, len(program.parts)]
    time = np.array([seconds[e] for e in ends])
    leaving = np.array([0.0, *send, 0.0]) / 1e12

    def spent(last: int) -> np.ndarray:
        """Of a stretch, by where it begins: its work alone, which its weights go with."""
        return time[last] - time[:last]

    bound = _least(len(ends), stages, spent, np.maximum)[0] * _SLACK

    def price(last: int) -> np.ndarray:
        balance = spent(last) ** 2 / max(bound, 1e-30)
        return np.where(spent(last) <= bound, leaving[last] + 1e-3 * balance, np.inf)

    return [ends[i] for i in _least(len(ends), stages, price, np.add)[1]]


def _places(program: "_Program", stages: int) -> list[int]:
    """Where a stage may begin. Layers that can be dealt out evenly are: their stack rests in equal shards,
    and uneven stages would have rows of it sent in every step."""
    if marks := program.marks:
        if len(marks) < stages - 1:
            names = ", ".join(program.mark_names)
            raise ValueError(
                f"pipeline: {stages} virtual stages need {stages - 1} marks at least, and the program has "
                f"{len(marks)} ({names}); mark more places with sx.pipeline.stage, or take fewer stages"
            )
        return marks
    found = []
    for place in range(1, len(program.parts)):
        part = program.parts[place]
        length = program.trips(part.number)
        even = length % stages or part.start % (length // stages) == 0
        if even or part.start == 0:
            found.append(place)
    return found if len(found) >= stages - 1 else list(range(1, len(program.parts)))


def _least(
    count: int, stages: int, price: Callable[[int], np.ndarray], join: Callable[..., np.ndarray]
) -> tuple[float, list[int]]:
    """The cheapest way to part places 0 to `count` - 1 into stretches, and where each but the first begins.
    `price(last)`: of those that end at place `last`, by where they begin; `join` makes the price of a way of
    those of its stretches.
    """
    best, came = np.full(count, np.inf), []
    best[0] = 0.0
    prices = [price(last) for last in range(1, count)]
    for _ in range(stages):
        options = [join(best[: last + 1], each) for last, each in enumerate(prices)]
        came.append([0, *(int(np.argmin(each)) for each in options)])
        best = np.array([np.inf, *(each.min() for each in options)])
    places, at = [], count - 1
    for origins in reversed(came):
        at = origins[at]
        places.append(at)
    return float(best[-1]), places[::-1][1:]


# The program


NEITHER, PARAMS, BATCH = range(3)


class _Program:
    """The flat jaxpr of a loss, what each value depends on, and its parts."""

    def __init__(self, closed, params: int, batched: int):
        closed = _flat(closed)
        self.jaxpr, self.consts = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        invars = self.jaxpr.invars
        self.of_params, self.of_batch = invars[:params], invars[params : params + batched]
        self.rest = invars[params + batched :]
        self.depends: dict[Any, int] = dict.fromkeys((*self.rest, *self.consts), NEITHER)
        self.depends.update(dict.fromkeys(self.of_params, PARAMS) | dict.fromkeys(self.of_batch, BATCH))
        self.maker: dict[Any, int] = {}
        for number, eqn in enumerate(self.jaxpr.eqns):
            depends = max((self.kind(v) for v in eqn.invars), default=NEITHER)
            depends = BATCH if _jax.has_effects(eqn) else depends
            for v in eqn.outvars:
                self.depends[v], self.maker[v] = depends, number
            _check_marks(eqn)
        self.parts = [
            Part(number, trip, trip + 1)
            for number, eqn in enumerate(self.jaxpr.eqns)
            if self._is_part(eqn)
            for trip in range(self.trips(number))
        ]

    def _is_part(self, eqn) -> bool:
        return _jax.has_effects(eqn) or max((self.kind(v) for v in eqn.invars), default=NEITHER) == BATCH

    def kind(self, atom) -> int:
        return NEITHER if isinstance(atom, Literal) else self.depends[atom]

    def trips(self, number: int) -> int:
        """The parts of an equation: the trips of a scan over layers, else one."""
        eqn = self.jaxpr.eqns[number]
        if eqn.primitive.name != "scan":
            return 1
        consts, carries = _jax.scan_counts(eqn.params)
        over_layers = any(self.kind(v) == PARAMS for v in eqn.invars[consts + carries :])
        return eqn.params["length"] if over_layers and carries else 1

    @property
    def marks(self) -> list[int]:
        """The places of the parts that are marks."""
        return [place for place, _ in self._marked()]

    @property
    def mark_names(self) -> list[str]:
        return [name or "unnamed" for _, name in self._marked()]

    def _marked(self) -> Iterator[tuple[int, str]]:
        for place, part in enumerate(self.parts):
            eqn = self.jaxpr.eqns[part.number]
            if eqn.primitive.name == "name" and eqn.params["name"].startswith(_MARK) and place:
                yield place, eqn.params["name"].removeprefix(_MARK)

    # What it costs

    def seconds(self, network: Network) -> list[float]:
        """Of each part."""
        of_equation: dict[int, float] = {}
        for part in self.parts:
            if part.number not in of_equation:
                eqn = self.jaxpr.eqns[part.number]
                read = list(dict.fromkeys(_variables(eqn.invars)))

                def alone(*values, eqn=eqn, read=read):
                    of = dict(zip(read, values, strict=True))
                    return bound(eqn, [v.val if isinstance(v, Literal) else of[v] for v in eqn.invars])

                whole = jax.make_jaxpr(alone)(*(shape_of(v.aval) for v in read))
                each = [network.compute(w.flops, w.nbytes) * w.trips for w in work(whole)]
                of_equation[part.number] = sum(each) / 1e12
        return [of_equation[part.number] / self.trips(part.number) for part in self.parts]

    def crossing(self, place: int) -> int:
        """The bytes that cross where a stage begins at this place."""
        return sum(_nbytes(self.type_of(key)) for key in self.crossing_keys(place))

    def crossing_keys(self, place: int) -> list[Any]:
        """What parts before a place make and later ones, or the results, read."""
        part = self.parts[place]
        keys = [v for v in self.maker if self.depends[v] == BATCH and self.maker[v] < part.number]
        keys = [v for v in keys if self._last_read[v] > part.number or v in self._read_from(part)]
        if part.start:
            keys += self.writes(Part(part.number, 0, part.start))
        return keys

    def _read_from(self, part: Part) -> set[Any]:
        """The variables that an equation reads from a trip on: where that is not the first, no start of a
        carry."""
        eqn = self.jaxpr.eqns[part.number]
        if not part.start:
            return set(_variables(eqn.invars))
        consts, carries = _jax.scan_counts(eqn.params)
        return set(_variables((*eqn.invars[:consts], *eqn.invars[consts + carries :])))

    @cached_property
    def _last_read(self) -> dict[Any, int]:
        last = dict.fromkeys(self.maker, -1)
        for number, eqn in enumerate(self.jaxpr.eqns):
            last.update(dict.fromkeys(_variables(eqn.invars), number))
        return last | dict.fromkeys(_variables(self.jaxpr.outvars), len(self.jaxpr.eqns))

    def type_of(self, key: Any) -> jax.ShapeDtypeStruct:
        if not isinstance(key, tuple):
            return shape_of(key.aval)
        kind, number, i, start, stop = key
        aval = self.jaxpr.eqns[number].outvars[i].aval
        if kind == "carry":
            return shape_of(aval)
        return jax.ShapeDtypeStruct((stop - start, *aval.shape[1:]), aval.dtype)

    # What parts read and write, by keys: variables, ("carry", equation, number, 0, trip) of a scan, and rows
    # ("rows", equation, result, start, stop) of what it stacks

    def writes(self, part: Part) -> list[Any]:
        eqn, n = self.jaxpr.eqns[part.number], part.number
        if part.stop == self.trips(n):
            return list(eqn.outvars)
        _, carries = _jax.scan_counts(eqn.params)
        rows = [("rows", n, i, *_rows(eqn, 0, part.stop)) for i in range(carries, len(eqn.outvars))]
        return [("carry", n, i, 0, part.stop) for i in range(carries)] + rows

    # Cutting

    def cut(self, places: Sequence[int]) -> Cut:
        bounds = [0, *places, len(self.parts)]
        stretches = [_merged(self.parts[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
        pieces = [self._pieces(stretch) for stretch in stretches]
        hoisted = list(dict.fromkeys(v for some in pieces for v, _ in some))
        number = {v: i for i, v in enumerate(hoisted)}
        wires = [[], *map(self.crossing_keys, places), None]
        seconds = self.seconds(network_of({}))
        made = []
        for k, stretch in enumerate(stretches):
            received, sent = wires[k], wires[k + 1]
            types = (
                [shape_of(v.aval) for v in self.jaxpr.outvars] if sent is None else map(self.type_of, sent)
            )
            made.append(
                Stage(
                    program=_StageProgram(self, stretch, tuple(pieces[k]), received, sent),
                    pieces=tuple(Piece(number[v], rows) for v, rows in pieces[k]),
                    received=tuple(map(self.type_of, received)),
                    sent=tuple(types),
                    seconds=sum(seconds[bounds[k] : bounds[k + 1]]),
                    first_line=_jax.user_line(self.jaxpr.eqns[stretch[0].number].source_info),
                )
            )

        def hoist(params, rest) -> list[Any]:
            env = dict(zip((*self.of_params, *self.rest), (*params, *rest), strict=True))
            return [_Lazily(self, env).read(v) for v in hoisted]

        return Cut(hoist, tuple(made))

    def _pieces(self, stretch: Sequence[Part]) -> list[tuple[Any, tuple[int, int] | None]]:
        """The variables that depend on parameters alone, and which rows of them a stretch reads."""
        found: dict[tuple[Any, Any], None] = {}
        last = stretch[-1].number == len(self.jaxpr.eqns) - 1
        for part in stretch:
            eqn = self.jaxpr.eqns[part.number]
            for i, v in enumerate(eqn.invars):
                if self.kind(v) == PARAMS:
                    found[v, self._rows_read(part, i)] = None
        for v in self.jaxpr.outvars if last else ():
            if self.kind(v) == PARAMS:
                found[v, None] = None
        return list(found)

    def _rows_read(self, part: Part, operand: int) -> tuple[int, int] | None:
        eqn = self.jaxpr.eqns[part.number]
        if eqn.primitive.name != "scan" or self.trips(part.number) == 1:
            return None
        if operand < sum(_jax.scan_counts(eqn.params)):
            return None
        return _rows(eqn, part.start, part.stop)


def _check_marks(eqn) -> None:
    """Raises ValueError where a mark stands inside a loop, a branch or a checkpoint."""
    for inner in _inside(eqn):
        if inner.primitive.name == "name" and inner.params["name"].startswith(_MARK):
            name, line = inner.params["name"].removeprefix(_MARK), _jax.user_line(inner.source_info)
            raise ValueError(
                f"sx.pipeline.stage(x, {name!r}) at {line or 'an unknown line'} stands inside a "
                f"{eqn.primitive.name}, where no stage can begin; mark a value before or after it "
                "(the layers of a scan over stacked parameters are cut without marks)"
            )


def _inside(eqn) -> Iterator[Any]:
    for body in jaxprs_in_params(eqn.params):
        for inner in body.eqns:
            yield inner
            yield from _inside(inner)


def _rows(eqn, start: int, stop: int) -> tuple[int, int]:
    """The rows that trips of a scan read, and write."""
    length = eqn.params["length"]
    return (length - stop, length - start) if eqn.params["reverse"] else (start, stop)


def _variables(atoms: Iterable[Any]) -> Iterator[Any]:
    return (v for v in atoms if not isinstance(v, Literal))


def _merged(parts: Iterable[Part]) -> list[Part]:
    merged: list[Part] = []
    for part in parts:
        if merged and merged[-1].number == part.number:
            part = Part(part.number, merged.pop().start, part.stop)
        merged.append(part)
    return merged


def _nbytes(type: jax.ShapeDtypeStruct) -> int:
    return math.prod(type.shape) * type.dtype.itemsize


class _Lazily:
    """Reads variables, making those that do not depend on the batch as they are read."""

    def __init__(self, program: _Program, env: dict[Any, Any]):
        self.program, self.env = program, env

    def read(self, atom) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        if atom in self.program.consts:
            return self.program.consts[atom]
        if atom not in self.env:
            eqn = self.program.jaxpr.eqns[self.program.maker[atom]]
            operands = list(map(self.read, eqn.invars))
            self.env.update(zip(eqn.outvars, bound(eqn, operands), strict=True))
        return self.env[atom]


@dataclass(frozen=True, eq=False)
class _StageProgram:
    """A stretch of parts, as a function; see `Stage.program`."""

    program: _Program
    parts: Sequence[Part]
    pieces: tuple[tuple[Any, Any], ...]
    received: Sequence[Any]
    sent: Sequence[Any] | None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __call__(self, pieces, microbatch, rest, received) -> list[Any]:
        p = self.program
        rows = {key: x for key, x in zip(self.pieces, pieces, strict=True) if key[1] is not None}
        env = {key[0]: x for key, x in zip(self.pieces, pieces, strict=True) if key[1] is None}
        env.update(zip((*p.of_batch, *p.rest, *self.received), (*microbatch, *rest, *received), strict=True))
        reader = _Lazily(p, env)
        for part in self.parts:
            env.update(zip(p.writes(part), self._run(part, reader, rows), strict=True))
        return [reader.read(key) for key in (p.jaxpr.outvars if self.sent is None else self.sent)]

    def _run(self, part: Part, reader: _Lazily, rows: Mapping[Any, Any]) -> list[Any]:
        p, eqn, n = self.program, self.program.jaxpr.eqns[part.number], part.number
        length = p.trips(n)
        if length == 1:
            return bound(eqn, list(map(reader.read, eqn.invars)))
        consts, carries = _jax.scan_counts(eqn.params)
        operands = list(map(reader.read, eqn.invars[:consts]))
        operands += (
            [reader.env["carry", n, i, 0, part.start] for i in range(carries)]
            if part.start
            else map(reader.read, eqn.invars[consts : consts + carries])
        )
        mine = _rows(eqn, part.start, part.stop)
        for v in eqn.invars[consts + carries :]:
            has = (v, mine) in rows
            operands.append(rows[v, mine] if has else lax.slice_in_dim(reader.read(v), *mine))
        made = bound(eqn, operands, length=part.stop - part.start)
        if part.start:
            before = (reader.env["rows", n, i, *_rows(eqn, 0, part.start)] for i in range(carries, len(made)))
            pairs = zip(before, made[carries:], strict=True)
            made[carries:] = [lax.concatenate(x[:: -1 if eqn.params["reverse"] else 1], 0) for x in pairs]
        return made


def _flat(closed):
    """The jaxpr with calls of `jit` inlined."""
    return _jax.dce(jax.make_jaxpr(lambda *args: evaluate(closed, args))(*map(shape_of, closed.in_avals)))
