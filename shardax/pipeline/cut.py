"""Where a program is cut into virtual stages.

The jaxpr of one microbatch is a list of *parts* in program order: an equation each, but of a scan
over layers (one that goes over rows of the parameters) each trip. A virtual stage is a stretch of them.

    what a value depends on     is computed                       reaches a stage as
    parameters, no batch        once per step, before (hoisted)   a piece of them: rows of layers, or all
    neither (masks, keys)       by each stage that reads it       nothing
    the batch                   in its own stage                  received, from stage to stage
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal, jaxprs_in_params

from shardax import _jax
from shardax.annotations.explicit import shape_of
from shardax.cost.network import Network
from shardax.explain.live import bodies, traffic
from shardax.explain.roofline import work
from shardax.graph.evaluate import bound, evaluate, is_call
from shardax.pipeline import scopes
from shardax.validation import require

CHECKPOINTS = frozenset({"checkpoint", "remat2"})
AGAIN = CHECKPOINTS | {"optimization_barrier"}  # with which that begins, where a step is partitioned
_MARK = "shardax.pipeline.stage:"
_WHOLE = 1.5  # times as slow may the slowest stage be so that none begins within what is computed again: its
# backward pass, three quarters of its time, is on one stage all the same
_SLACK = 1.1  # of the slowest stage's time: among cuts as good, the one that sends least


def stage(x, name: str = ""):
    """Marks where a stage of a pipeline begins: with the computation that reads the array that it returns,
    which is `x`. Where marks are, cuts are made at them alone. It does nothing outside of a pipeline.

    >>> import jax.numpy as jnp
    >>> jax.grad(lambda x: stage(jnp.sin(x), "head"))(0.0)
    Array(1., dtype=float32, weak_type=True)
    """
    require(isinstance(name, str), "name of stage", name, "a text, such as 'decoder'")
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
    """What a virtual stage reads of the parameters: `taken` makes what its passes read of its pieces, each a
    `Piece`, or one that rests where its stage is (`stacks.Held`).
    """

    pieces: tuple[Any, ...]
    taken: Callable[[Sequence[Any]], list[Any]] = list


@dataclass(frozen=True)
class Cut:
    """What all stages read. `hoist(params, rest)` gives the values that their pieces are of."""

    hoist: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    stages: tuple[Stage, ...]


# Where to cut


def chosen(program: "Parts", stages: int, network: Network) -> list[int]:
    """The places, among all parts, at which stages begin."""
    if stages > len(program.parts):
        raise ValueError(
            f"pipeline: {stages} virtual stages, but the program has {len(program.parts)} part"
            f"{'s' * (len(program.parts) != 1)} that depend on the batch; take fewer stages or chunks"
        )
    seconds = np.concatenate([[0.0], np.cumsum(program.seconds(network))])
    start = network.collective("ppermute", (), 0)  # of every send, wherever it is made

    def slowest(places: Sequence[int]) -> float:
        """The least time of the slowest stage: its work alone, which its weights go with."""
        time = seconds[[0, *places, len(program.parts)]]
        return _least(len(time), stages, lambda last: time[last] - time[:last], np.maximum)[0]

    places = allowed_places(program, stages)
    bound, apart = slowest(places), [place for place in places if place not in program.within]
    if len(apart) >= stages - 1 and slowest(apart) <= _WHOLE * bound:
        places, bound = apart, slowest(apart)
    ends = [0, *places, len(program.parts)]
    send = [network.collective("ppermute", (), program.crossing(place)) - start for place in places]
    leaving, bound = np.array([0.0, *send, 0.0]) / 1e12, bound * _SLACK

    def price(last: int) -> np.ndarray:
        """Of a stretch, by where it begins."""
        spent = seconds[ends[last]] - seconds[ends[:last]]
        balance = spent**2 / max(bound, 1e-30)
        return np.where(spent <= bound, leaving[last] + 1e-3 * balance, np.inf)

    return [ends[i] for i in _least(len(ends), stages, price, np.add)[1]]


def allowed_places(program: "Parts", stages: int) -> list[int]:
    """Where a stage may begin. Layers that can be dealt out evenly are: their stack rests in equal shards,
    and uneven stages would have rows of it sent in every step."""
    if program.at:
        return _of_modules(program, stages)
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


def _of_modules(program: "Parts", stages: int) -> list[int]:
    found, names = program.marks, scopes.names_of([program.jaxpr.eqns[part.number] for part in program.parts])
    if len(found) >= stages - 1:
        return found
    at = " and ".join(map(repr, program.at))
    if not found:
        told = f"has scopes {', '.join(names)}" if names else "has no named scopes, as Flax nnx makes none"
        raise ValueError(
            f"pipeline: at is {at}, and nothing that begins after the start of the program matches it, which "
            f"{told}; name modules of it, put jax.named_scope around them, or mark places with "
            "sx.pipeline.stage"
        )
    raise ValueError(
        f"pipeline: {stages} virtual stages need {stages - 1} places to begin at least, and modules that "
        f"match {at} begin at {len(found)} ({', '.join(program.mark_names)}), not counting the start of the "
        "program; name more modules, or take fewer stages"
    )


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


class Parts:
    """The flat jaxpr of one microbatch, what each value depends on, and its parts. `at`: patterns of the
    modules before which it may be cut."""

    def __init__(self, closed, params: int, batched: int, at: Sequence[str] = ()):
        self.at = at
        closed = flat(closed)
        self.jaxpr, self.consts = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        invars = self.jaxpr.invars
        self.of_params, self.of_batch = invars[:params], invars[params : params + batched]
        self.rest = invars[params + batched :]
        self.depends: dict[Any, int] = dict.fromkeys((*self.rest, *self.consts), NEITHER)
        self.depends.update(dict.fromkeys(self.of_params, PARAMS) | dict.fromkeys(self.of_batch, BATCH))
        self.maker: dict[Any, int] = {}
        check_marks(closed)
        for number, eqn in enumerate(self.jaxpr.eqns):
            depends = self.depends_on(eqn)
            for v in eqn.outvars:
                self.depends[v], self.maker[v] = depends, number
        self.parts = [
            Part(number, trip, trip + 1)
            for number, eqn in enumerate(self.jaxpr.eqns)
            if self.is_part(eqn)
            for trip in range(self.trips(number))
        ]

    @property
    def within(self) -> Set[int]:
        """The places within what a backward pass computes again, all at once."""
        return frozenset()

    def depends_on(self, eqn) -> int:
        if _jax.has_effects(eqn):
            return BATCH
        return max((self.kind(v) for v in eqn.invars), default=NEITHER)

    def is_part(self, eqn) -> bool:
        return self.depends_on(eqn) == BATCH

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
        """The places of the parts that are marks, or at which modules begin that are named."""
        return [place for place, _ in self._marked()]

    @property
    def mark_names(self) -> list[str]:
        return [name or "unnamed" for _, name in self._marked()]

    def _marked(self) -> Iterator[tuple[int, str]]:
        yield from sorted({**dict(self._begun()), **dict(self._named())}.items())

    def _begun(self) -> Iterator[tuple[int, str]]:
        """Where modules begin: at their first parts, and where layers of a scan are some, at each layer."""
        seen: set[Any] = {None}
        for place, part in enumerate(self.parts if self.at else ()):
            module = scopes.modules(self.jaxpr.eqns[part.number], self.at)
            if place and (module not in seen or module and self.trips(part.number) > 1):
                yield place, (module or ("",))[-1]
            seen.add(module)

    def _named(self) -> Iterator[tuple[int, str]]:
        for place, part in enumerate(self.parts):
            eqn = self.jaxpr.eqns[part.number]
            if eqn.primitive.name == "name" and eqn.params["name"].startswith(_MARK) and place:
                yield place, eqn.params["name"].removeprefix(_MARK)

    # What it costs

    def seconds(self, network: Network) -> list[float]:
        """Of each part. What is fused into what reads it is not written and read again."""
        of_equation: dict[int, float] = {}
        traffic_of = {id(eqn): nbytes for eqn, nbytes in traffic(self.jaxpr)}
        for part in self.parts:
            if part.number not in of_equation:
                eqn = self.jaxpr.eqns[part.number]
                read = list(dict.fromkeys(variables(eqn.invars)))

                def alone(*values, eqn=eqn, read=read):
                    of = dict(zip(read, values, strict=True))
                    return bound(eqn, [v.val if isinstance(v, Literal) else of[v] for v in eqn.invars])

                whole = jax.make_jaxpr(alone)(*(shape_of(v.aval) for v in read))
                works = list(work(whole))
                if not any(True for _ in bodies(eqn)):
                    works = [replace(w, nbytes=traffic_of.get(id(eqn), 0)) for w in works]
                each = [network.compute(w.flops, w.nbytes) * w.trips for w in works]
                of_equation[part.number] = sum(each) / 1e12
        return [of_equation[part.number] / self.trips(part.number) for part in self.parts]

    def crossing(self, place: int) -> int:
        """The bytes that cross where a stage begins at this place."""
        return sum(_nbytes(self.type_of(key)) for key in self.crossing_keys(place))

    def crossing_keys(self, place: int) -> list[Any]:
        """What parts before a place make and later ones read."""
        raise NotImplementedError

    def _read_from(self, part: Part) -> set[Any]:
        """The variables that an equation reads from a trip on: where that is not the first, no start of a
        carry."""
        eqn = self.jaxpr.eqns[part.number]
        if not part.start:
            return set(variables(eqn.invars))
        consts, carries = _jax.scan_counts(eqn.params)
        return set(variables((*eqn.invars[:consts], *eqn.invars[consts + carries :])))

    def type_of(self, key: Any) -> jax.ShapeDtypeStruct:
        if not isinstance(key, tuple):
            return shape_of(key.aval)
        kind, number, i, start, stop = key
        aval = self.jaxpr.eqns[number].outvars[i].aval
        if kind == "carry":
            return shape_of(aval)
        return jax.ShapeDtypeStruct((stop - start, *aval.shape[1:]), aval.dtype)


def check_marks(closed) -> None:
    """Raises ValueError where a mark stands inside a loop, a branch or a checkpoint of a flat program."""
    for eqn in closed.jaxpr.eqns:
        for inner in inside(eqn):
            if inner.primitive.name == "name" and inner.params["name"].startswith(_MARK):
                name, line = inner.params["name"].removeprefix(_MARK), _jax.user_line(inner.source_info)
                raise ValueError(
                    f"sx.pipeline.stage(x, {name!r}) at {line or 'an unknown line'} stands inside a "
                    f"{eqn.primitive.name}, where no stage can begin; mark a value before or after it "
                    "(the layers of a scan over stacked parameters are cut without marks)"
                )


def inside(eqn) -> Iterator[Any]:
    """The equations of its bodies, at all depths."""
    for body in jaxprs_in_params(eqn.params):
        for inner in body.eqns:
            yield inner
            yield from inside(inner)


def rows_of(eqn, start: int, stop: int) -> tuple[int, int]:
    """The rows that trips of a scan read, and write."""
    length = eqn.params["length"]
    return (length - stop, length - start) if eqn.params["reverse"] else (start, stop)


def variables(atoms: Iterable[Any]) -> Iterator[Any]:
    return (v for v in atoms if not isinstance(v, Literal))


def merged(parts: Iterable[Part]) -> list[Part]:
    found: list[Part] = []
    for part in parts:
        if found and found[-1].number == part.number and found[-1].stop == part.start:
            part = Part(part.number, found.pop().start, part.stop)
        found.append(part)
    return found


def _nbytes(type: jax.ShapeDtypeStruct) -> int:
    return math.prod(type.shape) * type.dtype.itemsize


class Lazily:
    """Reads variables, making those that do not depend on the batch as they are read."""

    def __init__(self, program: Parts, env: dict[Any, Any]):
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


def flat(closed, inlines: Callable[[Any], bool] | None = None):
    """The jaxpr with what it `inlines` inlined: calls of `jit`, and what `jax.checkpoint` has in a forward
    pass."""

    def run(*args):
        return evaluate(closed, args, inlines=inlines or _is_forward)

    return _jax.dce(jax.make_jaxpr(run)(*map(shape_of, closed.in_avals)))


def _is_forward(eqn) -> bool:
    return is_call(eqn) or eqn.primitive.name in CHECKPOINTS and not eqn.params["differentiated"]
