"""Runs what a step does for each microbatch, forward and backward, on stages."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from shardax import _jax
from shardax.cost.chips import NOMINAL
from shardax.cost.network import Network, network_of
from shardax.explain.live import nbytes
from shardax.options import current
from shardax.pipeline import auto, execute
from shardax.pipeline.apart import apart
from shardax.pipeline.assign import Assignment
from shardax.pipeline.begins import Begin, begins
from shardax.pipeline.cut import Cut, Lazily, Piece, Stage, allowed_places, chosen
from shardax.pipeline.flow import Flow
from shardax.pipeline.gathered import Accumulator, Gathered
from shardax.pipeline.outside import Outside
from shardax.pipeline.passes import Passes, Program
from shardax.pipeline.resting import Weights
from shardax.pipeline.schedules import make_schedule
from shardax.pipeline.simulate import Choice
from shardax.pipeline.stacks import Stacks
from shardax.pipeline.table import Schedule
from shardax.pipeline.traced import Traced

Type = jax.ShapeDtypeStruct

_SPANS = (
    "pipeline of {name}: the jax.checkpoint at {line} has layers of several stages, and one of these "
    "computes them all again, to which the weights of the others are sent in each step; put jax.checkpoint "
    "around each layer, as the function that a scan or a loop calls, or leave it out"
)


class Made(NamedTuple):
    """Of all microbatches: the sums, None of those in accumulators that were asked for; the other results,
    [microbatches, ...] each; the accumulators that were asked for, None where a part of one is made on
    another stage.
    """

    sums: list[Array | None]
    rows: list[Array | None]
    accumulators: list[Array | None]


@dataclass(frozen=True)
class Region:
    """`closed`: a jaxpr of one microbatch. It takes `params` leaves of parameters, `batched` leaves of the
    microbatch, others, and last the microbatch's number. Its first `sums` results are added up over the
    microbatches, the others are stacked. `name`: of the function, for the plan. `forward`: whether it is all
    one forward pass, be there gradients in it or not. `at`: patterns of the modules before which it is cut.
    """

    closed: Any
    params: int
    batched: int
    sums: int
    name: str = "the step"
    forward: bool = False
    at: tuple[str, ...] = ()

    @cached_property
    def flow(self) -> Flow:
        return self._flow(self.closed)

    def _flow(self, closed) -> Flow:
        return Flow(closed, self.params, self.batched, self.forward, self.at)

    @cached_property
    def outside(self) -> Outside | None:
        return Outside.of(self.flow)

    @cached_property
    def staged(self) -> "Region":
        """What the stages run."""
        found = self.outside
        if found is None:
            return self
        batched, sums = len(found.batch) + len(found.entering), found.staged_sums(self.sums)
        return replace(self, closed=found.closed, batched=batched, sums=sums)

    def schedule(
        self,
        asked: Any,
        stages: int,
        microbatches: int,
        chunks: int | None,
        axis: str = "stage",
        memory: float | None = None,
    ) -> tuple[Schedule, str]:
        """The one that was asked for; of "auto" the fastest that fits, and how it was chosen.

        Args:
          axis: of the mesh in context, along which the stages lie.
          memory: of "auto", bytes that weights, their gradients, the batch and what is kept may take on each
            device; None: those of the chip of `Options(chip=...)`, no limit where that names none.
        """
        if asked != "auto":
            made = make_schedule(asked, stages, microbatches, chunks, backward=bool(self.flow.backward))
            self._check_backward(made)
            return made, ""
        choice = self.choice(stages, microbatches, chunks, axis, memory)
        return choice.schedule, str(choice)

    def _check_backward(self, schedule: Schedule) -> None:
        """Raises ValueError where gradients would be those of no microbatch."""
        if self.flow.backward and not schedule.backward:
            raise ValueError(
                f"schedule of {self.name}: {schedule.name} has forward passes alone, and {self.name} has a "
                "backward pass; expected B (or B and W) of each microbatch: take another schedule, such as "
                "'1f1b', or, for results without gradients, sx.pipeline.apply"
            )

    def choice(
        self, stages: int, microbatches: int, chunks: int | None, axis: str, memory: float | None
    ) -> Choice:
        """What "auto" compares, and takes."""
        options, mesh = current(), _jax.context_mesh()
        sizes = mesh.shape if mesh is not None and axis in mesh.shape else {axis: stages}
        network = Network(sizes, options.priced_for or NOMINAL)
        if memory is None and options.chip is not None and options.priced_for:
            memory = options.priced_for.memory
        names = ("1f1b", "zb-h1") if (chunks or 1) == 1 else ("interleaved", "zb-eager")
        whole, halved = (self._at(make_schedule(n, stages, microbatches, chunks)) for n in names)
        costs = auto.costs(whole.passes(), halved.passes(), network, axis)
        waiting = self._waiting(stages)
        return auto.chosen(costs, whole.schedule, whole.piece_types(), waiting, network, axis, memory)

    def _waiting(self, stages: int) -> float:
        """Bytes of a microbatch that each stage has from the start to the end: what it may read, and its part
        of what goes by outside of the pipeline."""
        rows, found = sum(map(nbytes, self.staged.flow.of_batch)), self.outside
        return rows if found is None else rows + found.waiting(stages)

    def cut(self, schedule: Schedule) -> Cut:
        """What the stages read of the parameters; the program of each gives its pieces as they are."""
        return self._at(schedule).cut

    def _at(self, schedule: Schedule, asked: Sequence[Accumulator] = ()) -> "_Run":
        if self.outside is not None:
            return self.staged._at(schedule, asked)
        flow = self.flow
        if schedule.splits:
            flow = self._flow(apart(self.closed))
        places = chosen(flow, schedule.virtual_stages, network_of({}))
        pinned = {
            flow.jaxpr.outvars[part.number]: schedule.virtual_on(device)
            for each in asked
            for device, some in enumerate(() if each.anywhere else each.parts)
            for part in some
            if part.rows is None
        }
        return _Run(self, schedule, Assignment.of(flow, places, pinned), asked)

    def run(
        self,
        schedule: Schedule,
        weights: Weights,
        batch: Sequence[Array],
        rest: Sequence[Array],
        axis: str,
        *,
        asked: Sequence[Accumulator] = (),
        told: str = "",
        dim: int = 0,
    ) -> Made:
        """What the passes make of all microbatches.

        Args:
          weights: the parameters, as they rest.
          batch: along `dim` of each lie the microbatches. `rest`: the other arguments, but the number.
          axis: of the mesh in context, along which the stages lie.
          asked: accumulators; `told`: how the schedule was chosen, for the plan.
        """
        if self.outside is not None:
            how: dict[str, Any] = {"asked": asked, "told": told}
            batch = [jnp.moveaxis(x, dim, 0) for x in batch]  # beside which what it makes lies
            return self._run_outside(self.outside, schedule, weights, batch, rest, axis, how)
        return self._at(schedule, asked).run(weights, batch, rest, axis, told, dim)

    def _run_outside(
        self,
        found: Outside,
        schedule: Schedule,
        weights: Weights,
        batch,
        rest,
        axis: str,
        how: dict[str, Any],
    ) -> Made:
        accumulators = [found.accumulator(each) for each in how["asked"]]
        how["asked"] = [each for each in accumulators if each is not None]
        made: list[Made] = []

        def on_stages(batch: list[Array]) -> list[Array | None]:
            made.append(self.staged.run(schedule, weights, batch, rest, axis, **how))
            return made[0].rows[-len(found.leaving) :] if found.leaving else []

        params = weights.plain(weights.arrays)
        count, place = schedule.microbatches, (axis, schedule.stages)
        sums, rows = found.run(self.sums, params, batch, rest, on_stages, count, place)
        (staged,) = made
        accumulated = iter(staged.accumulators)
        return Made(
            found.joined(staged.sums, sums, 0, self.sums),
            found.joined(staged.rows, rows, self.sums, len(self.flow.jaxpr.outvars)),
            [None if each is None else next(accumulated) for each in accumulators],
        )


class _Run:
    """A region on the stages of a schedule."""

    def __init__(
        self, region: Region, schedule: Schedule, found: Assignment, asked: Sequence[Accumulator] = ()
    ):
        self.region, self.schedule, self.found, self.flow = region, schedule, found, found.flow
        outvars = self.flow.jaxpr.outvars
        self.sums = Gathered(found, schedule, outvars[: region.sums], asked)
        self.rows = Gathered(found, schedule, outvars[region.sums :])

    @cached_property
    def pieces(self) -> list[list[tuple[Any, Any]]]:
        """What each virtual stage reads of the parameters."""
        pairs = zip(self.found.forward, self.found.backward, strict=True)
        return [self.flow.pieces([*forward, *backward]) for forward, backward in pairs]

    @cached_property
    def cut(self) -> Cut:
        flow, hoisted = self.flow, list(dict.fromkeys(v for some in self.pieces for v, _ in some))
        number = {v: i for i, v in enumerate(hoisted)}

        def hoist(params, rest) -> list[Any]:
            env = dict(zip((*flow.of_params, *flow.rest), (*params, *rest), strict=False))
            reader = Lazily(flow, env)
            return [reader.read(v) for v in hoisted]

        def stage(pieces) -> Stage:
            own = tuple(Piece(number[v], rows) for v, rows in pieces)
            return Stage(own)

        return Cut(hoist, tuple(map(stage, self.pieces)))

    def piece_types(self) -> list[list[Type]]:
        """Of what each virtual stage reads of the parameters."""
        return [
            [
                self.flow.type_of(v) if rows is None else _rows_of(self.flow.type_of(v), rows)
                for v, rows in some
            ]
            for some in self.pieces
        ]

    def passes(
        self,
        cut: Cut | None = None,
        types: Sequence[Sequence[Type]] | None = None,
    ) -> list[Passes]:
        """Of each virtual stage. `cut`, `types`: what its pieces are taken out of, None: they are as they
        are."""
        batch, rest = ([_type(v.aval) for v in vs] for vs in (self.flow.of_batch, self.flow.rest[:-1]))
        with jax.sharding.use_abstract_mesh(
            jax.sharding.AbstractMesh((), ())
        ):  # JAX would note that of another
            found = []
            for k, own in enumerate(types or self.piece_types()):
                taken = (cut or self.cut).stages[k].taken
                found.append(Traced(self, k, taken, (own, batch, rest)).passes())
            return found

    def _check_checkpoints(self) -> None:
        """Warns of a `jax.checkpoint` that one stage computes again, with weights of others."""
        flow = self.flow
        of_stages = [set(flow.pieces(parts)) for parts in self.found.forward]
        for number, read in flow.computed_again():
            if not any({(root, None) for root in read} <= some for some in of_stages):
                line = _jax.user_line(flow.jaxpr.eqns[number].source_info) or "an unknown line"
                warnings.warn(_SPANS.format(name=self.region.name, line=line), stacklevel=2)

    def run(self, weights: Weights, batch, rest, axis: str, told: str, dim: int) -> Made:
        self._check_checkpoints()
        cut = weights.placed(self.cut, self.schedule, rest)
        values = cut.hoist(weights.arrays, rest)
        stacks = Stacks.of(cut, self.schedule, values)
        types = [stacks.piece_types(k) for k in range(self.found.stages)]
        passes = self.passes(cut, types)
        program = Program(
            tuple(passes),
            tuple(self.sums.types),
            tuple(self.rows.types),
            name=self.region.name,
            lines=self._lines(),
            begins=self._begins(),
            chosen=told,
        )
        sums, rows = execute.run(program, self.schedule, stacks, values, batch, rest, axis=axis, dim=dim)
        return Made(self.sums.whole(sums, 0), self.rows.whole(rows, 1), self.sums.accumulated(sums))

    def _lines(self) -> tuple[str, ...]:
        eqns = self.flow.jaxpr.eqns
        return tuple(_jax.user_line(eqns[parts[0].number].source_info) for parts in self.found.forward)

    def _begins(self) -> tuple[Begin, ...]:
        flow, allowed = self.flow, allowed_places(self.flow, self.found.stages)
        return tuple(begins(flow, self.found.places, allowed, flow.seconds(network_of({}))))


def _type(aval) -> Type:
    return Type(aval.shape, aval.dtype)


def _rows_of(type: Type, rows: tuple[int, int]) -> Type:
    return Type((rows[1] - rows[0], *type.shape[1:]), type.dtype)
