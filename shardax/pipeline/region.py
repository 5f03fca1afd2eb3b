"""Runs what a step does for each microbatch, forward and backward, on stages."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from shardax import _jax
from shardax.cost.network import network_of
from shardax.graph.evaluate import evaluate
from shardax.pipeline import execute, slots
from shardax.pipeline.apart import apart
from shardax.pipeline.assign import BACKWARD, FORWARD, Assignment
from shardax.pipeline.begins import Begin, begins
from shardax.pipeline.cut import Cut, Lazily, Part, Piece, Stage, allowed_places, chosen
from shardax.pipeline.flow import Flow
from shardax.pipeline.passes import Inputs, Outputs, Pass, Passes, Program
from shardax.pipeline.schedules import make_schedule
from shardax.pipeline.simulate import Costs, choose
from shardax.pipeline.stacks import Stacks
from shardax.pipeline.table import Schedule

Type = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Region:
    """`closed`: a jaxpr of one microbatch. It takes `params` leaves of parameters, `batched` leaves of the
    microbatch, others, and last the microbatch's number. Its first `sums` results are added up over the
    microbatches, the others are stacked.
    """

    closed: Any
    params: int
    batched: int
    sums: int

    @cached_property
    def flow(self) -> Flow:
        return Flow(self.closed, self.params, self.batched)

    def schedule(self, asked: Any, stages: int, microbatches: int, chunks: int | None) -> Schedule:
        """The one that was asked for; of "auto" that which takes the fewest seconds, ticks as long as their
        longest instruction. B and W count as much as a forward pass."""
        if asked != "auto":
            return make_schedule(asked, stages, microbatches, chunks, backward=bool(self.flow.backward))
        pieces = stages * (chunks or 1)
        bounds = [0, *chosen(self.flow, pieces, network_of({})), len(self.flow.parts)]
        time = np.concatenate([[0.0], np.cumsum(self.flow.seconds(network_of({})))])
        each = [float(time[b] - time[a]) for a, b in zip(bounds, bounds[1:], strict=False)]
        costs = Costs(forward=each, inputs=each, weights=each, backward=[2 * seconds for seconds in each])
        return choose(stages, microbatches, pieces, costs, chunks=chunks or 1).schedule

    def run(
        self,
        schedule: Schedule,
        params: Sequence[Array],
        batch: Sequence[Array],
        rest: Sequence[Array],
        axis: str,
    ) -> tuple[list[Array], list[Array]]:
        """The sums over all microbatches, and the other results, [microbatches, ...] each.

        Args:
          batch: [microbatches, ...] each. `rest`: the other arguments, but the number.
          axis: of the mesh in context, along which the stages lie.
        """
        flow = self.flow
        if any(kind == "W" for kind, *_ in schedule.where):
            flow = Flow(apart(self.closed), self.params, self.batched)
        places = chosen(flow, schedule.virtual_stages, network_of({}))
        return _Run(self, schedule, Assignment.of(flow, places)).run(params, batch, rest, axis)


@dataclass(frozen=True)
class _Result:
    """A part of a result: of the `number`th, the value of `key`, which the pass makes on virtual stage
    `stage`."""

    number: int
    key: Any
    name: str
    stage: int

    @property
    def rows(self) -> tuple[int, int] | None:
        return self.key[3:] if isinstance(self.key, tuple) else None


class _Run:
    def __init__(self, region: Region, schedule: Schedule, found: Assignment):
        self.region, self.schedule, self.found, self.flow = region, schedule, found, found.flow
        outvars = self.flow.jaxpr.outvars
        self.summed = self._results(outvars[: region.sums])
        self.stacked = self._results(outvars[region.sums :])
        self.sum_places, self.sum_types = self._places(self.summed)
        self.row_places, self.row_types = self._places(self.stacked)

    def _results(self, variables: Sequence[Any]) -> list[_Result]:
        """What is made of no parameters, as what is an argument, the first stage gives."""
        of = self.found.made
        return [
            _Result(n, key, *of.get(key, (FORWARD, 0)))
            for n, v in enumerate(variables)
            for key in self.found.keys(v)
        ]

    def _places(self, results: Sequence[_Result]) -> tuple[dict[_Result, int], tuple[Type, ...]]:
        """In which accumulator each lies: those of one type share one, where they are on different devices;
        what several devices have parts of has its own."""
        device = {k: d for k, (d, _) in enumerate(self.schedule.homes)}
        taken: defaultdict[Any, list[list[_Result]]] = defaultdict(list)
        for result in results:
            type = self.flow.type_of(result.key)
            shape = type.shape if result.rows is None else ("rows", result.number, *type.shape[1:])
            places = taken[shape, type.dtype]
            free = (p for p in places if device[result.stage] not in {device[r.stage] for r in p})
            place = next(free, None)
            if place is None:
                places.append(place := [])
            place.append(result)
        found, types = {}, []
        for (shape, dtype), places in taken.items():
            for place in places:
                found.update(dict.fromkeys(place, len(types)))
                rows = max(map(_count, place))
                types.append(Type((rows, *shape[2:]) if shape[:1] == ("rows",) else shape, dtype))
        return found, tuple(types)

    def run(self, params, batch, rest, axis: str):
        flow = self.flow
        pieces = [flow.pieces([*f, *b]) for f, b in zip(self.found.forward, self.found.backward, strict=True)]
        hoisted = list(dict.fromkeys(v for some in pieces for v, _ in some))
        number = {v: i for i, v in enumerate(hoisted)}
        env = dict(zip((*flow.of_params, *flow.rest), (*params, *rest), strict=False))
        reader = Lazily(flow, env)
        values = [reader.read(v) for v in hoisted]
        stages = [self._stage([Piece(number[v], rows) for v, rows in some]) for some in pieces]
        stacks = Stacks.of(Cut(_never, tuple(stages)), self.schedule, values)
        types = [Type(x.shape[1:], x.dtype) for x in batch], [Type(x.shape, x.dtype) for x in rest]
        with jax.sharding.use_abstract_mesh(
            jax.sharding.AbstractMesh((), ())
        ):  # JAX would note that of another
            passes = [
                _Traced(self, k, pieces[k], (stacks.piece_types(k), *types)).passes()
                for k in range(self.found.stages)
            ]
        program = Program(
            tuple(passes), self.sum_types, self.row_types, lines=self._lines(), begins=self._begins()
        )
        sums, rows = execute.run(program, self.schedule, stacks, values, batch, rest, axis=axis)
        return (
            self._whole(self.summed, self.sum_places, sums, 0),
            self._whole(self.stacked, self.row_places, rows, 1),
        )

    def _lines(self) -> tuple[str, ...]:
        eqns = self.flow.jaxpr.eqns
        return tuple(_jax.user_line(eqns[parts[0].number].source_info) for parts in self.found.forward)

    def _begins(self) -> tuple[Begin, ...]:
        flow, allowed = self.flow, allowed_places(self.flow, self.found.stages)
        return tuple(begins(flow, self.found.places, allowed, flow.seconds(network_of({}))))

    def _stage(self, pieces: Sequence[Piece]) -> Stage:
        return Stage(_never, tuple(pieces), (), (), 0.0, "")

    def _whole(
        self, results: Sequence[_Result], places: dict[_Result, int], made: Sequence[Array], dim: int
    ) -> list[Array]:
        """Each result, of its parts, [stages, ...] each; rows lie along `dim`."""
        parts: defaultdict[int, list[_Result]] = defaultdict(list)
        for result in results:
            parts[result.number].append(result)
        return [self._joined(some, [made[places[r]] for r in some], dim) for _, some in sorted(parts.items())]

    def _joined(self, some: Sequence[_Result], made: Sequence[Array], dim: int) -> Array:
        homes = [self.schedule.homes[r.stage][0] for r in some]
        if some[0].rows is None:
            return made[0][homes[0]]
        order = sorted(range(len(some)), key=lambda i: some[i].rows or ())
        counts = [_count(some[i]) for i in order]
        in_order = [homes[i] for i in order] == list(range(self.schedule.stages))
        if in_order and len(set(counts)) == 1 and not dim:
            return made[0].reshape(-1, *made[0].shape[2:])
        slices = [
            jax.lax.slice_in_dim(made[i][homes[i]], 0, n, axis=dim)
            for i, n in zip(order, counts, strict=True)
        ]
        return jnp.concatenate(slices, dim)


def _count(result: _Result) -> int:
    return result.rows[1] - result.rows[0] if result.rows else 0


def _never(*_):
    raise AssertionError("a stage of a step has its passes")


class _Traced:
    """The passes of virtual stage `k`, as programs. `types`: of its pieces, the microbatch, the rest."""

    def __init__(self, run: _Run, k: int, pieces: Sequence[tuple[Any, Any]], types: Sequence[Sequence[Type]]):
        self.run, self.k, self.pieces, self.types = run, k, pieces, types
        self.flow, self.found, ways = run.flow, run.found, run.found.ways
        self.received, self.returned, self.kept = ways.received[k], ways.returned[k], ways.kept[k]
        last = k == self.found.stages - 1
        self.onward, self.from_after = ([], []) if last else (ways.received[k + 1], ways.returned[k + 1])
        self.inputs, self.weights = self.found.split(k)
        arriving = {*self.kept, *self.from_after}
        made = {key for part in self.inputs for key in self.flow.writes(part)}
        read = dict.fromkeys(self.found.reads(self.weights))
        self.held = [key for key in read if key in made and key not in arriving]

    def passes(self) -> Passes:
        back, held = self.found.backward[self.k], self.held
        of = {
            slots.FORWARD: self.traced(FORWARD, self.found.forward[self.k], self.onward, self.kept, []),
            slots.BACKWARD: self.traced(BACKWARD, back, self.returned, [], []),
            slots.BACKWARD_INPUTS: self.traced(BACKWARD, self.inputs, self.returned, [], held),
            slots.BACKWARD_WEIGHTS: self.traced(BACKWARD, self.weights, [], [], [], held),
        }
        types = (
            tuple(map(self.flow.type_of, keys)) for keys in (self.received, self.returned, self.kept, held)
        )
        return Passes(of, *types)

    def traced(
        self,
        name: str,
        parts: Sequence[Part],
        sent: Sequence[Any],
        kept: Sequence[Any],
        held: Sequence[Any],
        reads_held: Sequence[Any] = (),
    ) -> Pass:
        summed, stacked = (self._own(results, name, parts) for results in (self.run.summed, self.run.stacked))
        forward = name == FORWARD
        arriving = [self.received, [], []] if forward else [[], self.from_after, self.kept]
        keys = [*arriving, list(reads_held)]
        lists = [
            *self.types,
            [Type((), "int32")],
            *([self.flow.type_of(key) for key in some] for some in keys),
        ]
        wanted = [sent, kept, held, [r.key for r in summed], [r.key for r in stacked]]

        def body(*args):
            left = iter(args)
            pieces, batch, rest, number, *values = [[next(left) for _ in types] for types in lists]
            env, rows = self._env(pieces, batch, [*rest, *number])
            for some, given in zip(keys, values, strict=True):
                env.update(zip(some, given, strict=True))
            reader = self.flow.run(parts, env, rows)
            return [reader.value(key) for some in wanted for key in some]

        closed = _jax.dce(jax.make_jaxpr(body)(*(type for types in lists for type in types)))
        counts = list(map(len, wanted))

        def run(x: Inputs) -> Outputs:
            own = [x.received, [], []] if forward else [[], x.returned, x.kept]
            args = [*x.pieces, *x.batch, *x.rest, x.microbatch]
            args += [v for some in own for v in some] + list(x.held if reads_held else [])
            made = iter(evaluate(closed, args))
            return Outputs(*([next(made) for _ in range(n)] for n in counts))

        sums = tuple(self.run.sum_places[r] for r in summed)
        rows = tuple(self.run.row_places[r] for r in stacked)
        return Pass(run, sums, rows, (str(closed.jaxpr), *map(id, closed.consts)))

    def _own(self, results: Sequence[_Result], name: str, parts: Sequence[Part]) -> list[_Result]:
        made = {key for part in parts for key in self.flow.writes(part)}
        of_nobody = name == FORWARD and self.k == 0
        return [r for r in results if r.key in made or of_nobody and r.key not in self.found.made]

    def _env(self, pieces, batch, rest) -> tuple[dict[Any, Any], dict[Any, Any]]:
        flow = self.flow
        pairs = list(zip(self.pieces, pieces, strict=True))
        env = {v: x for (v, rows), x in pairs if rows is None}
        env.update(zip((*flow.of_batch, *flow.rest), (*batch, *rest), strict=True))
        return env, {piece: x for piece, x in pairs if piece[1] is not None}
