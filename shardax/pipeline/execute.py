"""Runs a cut loss by a schedule: one program, manual over the stage axis, that loops over ticks.

In each tick a stage looks its instruction up in a table, runs it as a branch of `lax.switch`, and sends what
it made to its neighbours. Devices at one stage take one branch, so those along other axes never part, and
what they send each other inside a branch meets.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardax.cost import noted
from shardax.explain import reports
from shardax.pipeline import slots
from shardax.pipeline.cut import Cut
from shardax.pipeline.halves import Halves, forward_half, halves, is_inexact
from shardax.pipeline.report import WEIGHTS, Ran
from shardax.pipeline.routes import Routes, routes
from shardax.pipeline.slotting import places
from shardax.pipeline.stacks import Stacks
from shardax.pipeline.table import Schedule

Type = jax.ShapeDtypeStruct


def run(
    cut: Cut,
    schedule: Schedule,
    values: Sequence[Array],
    microbatches: Sequence[Array],
    rest: Sequence[Array],
    *,
    axis: str,
    scale: float,
    name: str = "the loss",
    told: str = "",
) -> tuple[Array, list[Array], list[Array | None]]:
    """The loss and its gradients over all microbatches; of a schedule without backward passes, all results
    of a function.

    Args:
      cut: the loss of one microbatch, in as many stages as the schedule has virtual ones.
      values: what is hoisted. `microbatches`: [microbatches, ...] each. `rest`: as the loss has them.
      axis: of the mesh in context, along which the stages lie.
      scale: the cotangent of each microbatch's loss; the losses are added, times it.
      name: of the function, and `told`: how the schedule was chosen, for the plan.

    Returns the loss, the other results, [microbatches, ...] each, and the gradient of each value, None of one
    that is no inexact number. Gradients are added in float32 at least.
    """
    stacks = Stacks.of(cut, schedule, values)
    operands = stacks.operands(values)
    batch = [Type(x.shape[1:], x.dtype) for x in microbatches]
    others = [Type(x.shape, x.dtype) for x in rest]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # JAX would note that of another
        arguments = [(stage, stacks.piece_types(k), batch, others) for k, stage in enumerate(cut.stages)]
        passes = [
            halves(*each, last=each[0] is cut.stages[-1]) if schedule.backward else forward_half(*each)
            for each in arguments
        ]
    specs = [PartitionSpec(axis) if held else PartitionSpec() for held in stacks.is_stacked]

    def local(*args):
        own = [x[0] if held else x for x, held in zip(args, stacks.is_stacked, strict=False)]
        batch, others = args[len(specs) :][: len(microbatches)], args[len(specs) + len(microbatches) :]
        executor = _Executor(cut, schedule, passes, stacks, own, batch, others, axis, scale, name, told)
        return jax.tree.map(lambda x: x[None], executor.run())

    whole = [PartitionSpec()] * (len(microbatches) + len(rest))
    island = jax.shard_map(
        local, in_specs=(*specs, *whole), out_specs=PartitionSpec(axis), axis_names={axis}, check_vma=False
    )
    loss, results, gradients = island(*operands, *microbatches, *rest)
    last = schedule.homes[-1][0]
    sums = stacks.gradients(gradients, values) if schedule.backward else []
    return loss.sum(0), [x[last] for x in results], sums


@dataclass
class _Executor:
    """One stage's part of it."""

    cut: Cut
    schedule: Schedule
    passes: Sequence[Halves]
    stacks: Stacks
    own: Sequence[Array]  # operands of `stacks`, of this stage
    batch: Sequence[Array]
    rest: Sequence[Array]
    axis: str
    scale: float
    name: str = "the loss"
    told: str = ""

    def run(self):
        schedule, stages = self.schedule, self.cut.stages
        tables = slots.tables(schedule)
        routed = routes(tables)
        received = [stage.received for stage in stages]
        returned = [list(filter(is_inexact, types)) for types in received]
        wires = places([*received, *returned])
        self.wires, count = wires.types, len(stages)
        self.received, self.returned = wires.of[:count], wires.of[count:]
        self.kept = places([half.kept for half in self.passes])
        branches, numbers = self.branches(tables)
        rows = {
            "branch": numbers,
            "microbatch": tables.microbatch,
            "kept": np.maximum(tables.saved, 0),
            "keep": _or_spare(np.where(tables.kind == slots.FORWARD, tables.saved, -1), tables.saved_slots),
            "result": _or_spare(self.result_rows(tables), [schedule.microbatches]),
            "forward": _or_spare(tables.forward, tables.forward_slots),
            "cotangent": _or_spare(tables.cotangent, tables.cotangent_slots),
            "arriving_forward": _or_spare(routed.forward, tables.forward_slots),
            "arriving_cotangent": _or_spare(routed.cotangent, tables.cotangent_slots),
        }
        place = lax.axis_index(self.axis)

        def tick(state, row):
            kind, row = row
            mine = {k: lax.dynamic_index_in_dim(x, place, keepdims=False) for k, x in row.items()}
            forward, cotangent, kept, gradients, loss, results = state
            received = [_row(x, mine["forward"]) for x in forward]
            returned = [_row(x, mine["cotangent"]) for x in cotangent]
            held = [_row(x, mine["kept"]) for x in kept]
            with noted.branches(numbers):
                made = lax.switch(mine["branch"], branches, mine["microbatch"], received, returned, held)
            kept = _written(kept, made.kept, mine["keep"])
            results = _written(results, made.results, mine["result"])
            pairs = zip(gradients, made.gradients, strict=True)
            gradients, loss = [x + y.astype(x.dtype) for x, y in pairs], loss + made.loss
            for lane, arrived in enumerate([*self.sent(made.sent, kind, routed), made.sent]):
                if (routed.forward[..., lane] >= 0).any():
                    forward = _written(forward, arrived, mine["arriving_forward"][lane])
                if (routed.cotangent[..., lane] >= 0).any():
                    cotangent = _written(cotangent, arrived, mine["arriving_cotangent"][lane])
            return (forward, cotangent, kept, gradients, loss, results), None

        state = (
            _empty(self.wires, max(tables.forward_slots) + 1),
            _empty(self.wires, max(tables.cotangent_slots) + 1),
            _empty(self.kept.types, max(tables.saved_slots) + 1),
            [jnp.zeros(x.shape, _accumulated(x)) for x in self.moving],
            jnp.zeros((), _accumulated(stages[-1].sent[0])),
            _empty(self.result_types, schedule.microbatches + 1),
        )
        with self.reported(numbers, tables):
            self.own = [checkpoint_name(x, f"{WEIGHTS}{i}") for i, x in enumerate(self.own)]
            (_, _, _, gradients, loss, results), _ = lax.scan(tick, state, (routed.kind, rows))
        return loss, [x[: schedule.microbatches] for x in results], gradients

    def reported(self, numbers: np.ndarray, tables: slots.Tables) -> AbstractContextManager:
        """What is made inside is told of in the plan."""
        moving = [i for i, x in enumerate(self.own) if is_inexact(x)] if self.schedule.backward else []
        number = {operand: i for i, operand in enumerate(moving)}
        sources = tuple(tuple(source.operand for source in each) for each in self.stacks.sources)
        ran = Ran(
            self.name,
            self.axis,
            self.schedule,
            numbers,
            lines=tuple(stage.first_line for stage in self.cut.stages),
            begins=self.cut.begins,
            sources=sources,
            buffers={
                **dict.fromkeys(("forward", "cotangent"), len(self.wires)),
                "saved": len(self.kept.types),
                "sums": len(moving),
                "loss": 1,
                "results": len(self.result_types),
            },
            kept=self.kept.of,
            sums=tuple(tuple(number[n] for n in each if n in number) for each in sources),
            slots={name: getattr(tables, f"{name}_slots") for name in slots.BUFFERS},
            chosen=self.told,
        )
        return reports.scope(f"pipeline of {self.name}", ran)

    @property
    def moving(self) -> list[Array]:
        """The operands that have gradients."""
        return [x for x in self.own if is_inexact(x)] if self.schedule.backward else []

    @property
    def result_types(self) -> Sequence[Type]:
        return self.cut.stages[-1].sent[self.schedule.backward :]

    def result_rows(self, tables: slots.Tables) -> np.ndarray:
        """The microbatch whose results a stage makes in a tick, -1 where it makes none."""
        last = (tables.kind == slots.FORWARD) & (tables.virtual == len(self.passes) - 1)
        return np.where(last, tables.microbatch, -1)

    # Instructions

    def branches(self, tables: slots.Tables) -> tuple[list[Callable[..., Any]], np.ndarray]:
        """The branches, alike instructions being one, and the number of each instruction's."""
        known: dict[Any, int] = {None: 0}
        found: list[Callable[..., Any]] = [self.idle]
        numbers = np.zeros(tables.kind.shape, np.int32)
        for place in zip(*np.nonzero(tables.kind != slots.IDLE), strict=True):
            kind, k = int(tables.kind[place]), int(tables.virtual[place])
            key = (kind, *self.alike(k))
            if key not in known:
                known[key] = len(found)
                found.append(self.instruction(kind, k))
            numbers[place] = known[key]
        return found, numbers

    def alike(self, k: int) -> Any:
        """Equal for virtual stages that run the same code on the same places."""
        ends = k == 0, k == len(self.passes) - 1
        following = () if ends[1] else (self.received[k + 1], self.returned[k + 1])
        places = self.received[k], self.returned[k], self.kept.of[k], following
        return self.passes[k].alike, self.stacks.sources[k], places, ends

    def instruction(self, kind: int, k: int) -> Callable[..., Any]:
        return self.forward(k) if kind == slots.FORWARD else self.backward(k, kind)

    def idle(self, microbatch, received, returned, held) -> "_Made":
        return self.nothing()

    def nothing(self) -> "_Made":
        """What an instruction makes, as zeros. What the loop carries gets it outside of the branch: a buffer
        that goes through branches is copied in each."""
        loss = jnp.zeros((), _accumulated(self.cut.stages[-1].sent[0]))
        moving = [Type(x.shape, x.dtype) for x in self.moving]
        sent, kept, gradients, results = map(_zeros, (self.wires, self.kept.types, moving, self.result_types))
        return _Made(sent, kept, gradients, loss, results)

    def forward(self, k: int):
        """F of virtual stage k."""
        last = k == len(self.passes) - 1

        def run(microbatch, received, returned, held) -> "_Made":
            wires = [received[i] for i in self.received[k]]
            results, saved = self.passes[k].forward(*self.arguments(k, microbatch), wires)
            made = self.nothing()
            made = made._replace(kept=_placed(made.kept, self.kept.of[k], saved))
            if not last:
                return made._replace(sent=_placed(made.sent, self.received[k + 1], results))
            if self.schedule.backward:
                loss, *results = results
                made = made._replace(loss=loss.astype(made.loss.dtype) * self.scale)
            return made._replace(results=results)

        return run

    def backward(self, k: int, kind: int):
        """B or W of virtual stage k: what the one does not need of the whole backward pass is dead in it."""
        last = k == len(self.passes) - 1

        def run(microbatch, received, returned, held) -> "_Made":
            types = [x for x in self.cut.stages[k].sent if is_inexact(x)]
            cotangents = (
                [jnp.full((), self.scale, types[0].dtype)]
                if last
                else [returned[i] for i in self.returned[k + 1]]
            )
            kept = [held[i] for i in self.kept.of[k]]
            of_pieces, of_received = self.passes[k].backward(*self.arguments(k, microbatch), kept, cotangents)
            made = self.nothing()
            if kind != slots.BACKWARD_WEIGHTS:
                made = made._replace(sent=_placed(made.sent, self.returned[k], of_received))
            if kind != slots.BACKWARD_INPUTS:
                made = made._replace(gradients=self.stacks.added(made.gradients, k, of_pieces))
            return made

        return run

    def arguments(self, k: int, microbatch):
        return self.stacks.pieces(k, self.own), [_row(x, microbatch) for x in self.batch], self.rest

    # Sends

    def sent(self, made: list[Array], kind, routed: Routes) -> list[list[Array]]:
        """What arrives by each lane in a tick of this kind. All stages are at the same kind of tick."""

        def send(lanes):
            each = [[lax.ppermute(x, self.axis, pairs) for x in made] for pairs in lanes]
            return each + [_zeros(self.wires)] * (routed.lanes - len(lanes))

        sending = [lanes for lanes in routed.kinds if lanes]
        if not sending:
            return []
        if len(sending) == 1:
            return send(sending[0])
        with noted.branches(np.maximum(routed.kind - 1, 0)[:, None]):
            return lax.switch(lax.max(kind - 1, 0), [lambda lanes=lanes: send(lanes) for lanes in sending])


class _Made(NamedTuple):
    """What an instruction makes: what it sends, a row for the backward pass, summands of the gradients and of
    the loss, a row of results."""

    sent: list[Array]
    kept: list[Array]
    gradients: list[Array]
    loss: Array
    results: list[Array]


def _or_spare(numbers: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Where there is no slot, one past the last: what is written there is read by nobody."""
    return np.where(numbers < 0, max(counts), numbers).astype(np.int32)


def _row(x, index):
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _written(buffers: Sequence[Array], rows: Sequence[Array], index) -> list[Array]:
    """The buffers, each with a row written."""
    pairs = zip(buffers, rows, strict=True)
    return [lax.dynamic_update_index_in_dim(buffer, x, index, 0) for buffer, x in pairs]


def _placed(values: Sequence[Array], numbers: Sequence[int], new: Sequence[Array]) -> list[Array]:
    """The values, those of these numbers replaced."""
    return list((dict(enumerate(values)) | dict(zip(numbers, new, strict=True))).values())


def _zeros(types: Sequence[Type]) -> list[Array]:
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in types):
        raise ValueError(
            "pipeline: a random key made of the batch, or carried from layer to layer, would be kept or sent "
            "between stages; make it with jax.random.fold_in(key, number of the layer), of a key among the "
            "arguments"
        )
    return [jnp.zeros(x.shape, x.dtype) for x in types]


def _empty(types: Sequence[Type], slots: int) -> list[Array]:
    return _zeros([Type((slots, *x.shape), x.dtype) for x in types])


def _accumulated(x) -> Any:
    """The dtype in which numbers of this one are added up."""
    return jnp.float32 if x.dtype.itemsize < 4 else x.dtype
