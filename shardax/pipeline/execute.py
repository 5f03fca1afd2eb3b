"""Runs a cut loss by a schedule: one program, manual over the stage axis, that loops over ticks.

In each tick a stage looks its instruction up in a table, runs it as a branch of `lax.switch`, and sends what
it made to its neighbours. Devices at one stage take one branch, so those along other axes never part, and
what they send each other inside a branch meets.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardax.cost import noted
from shardax.explain import reports
from shardax.pipeline import slots
from shardax.pipeline.branches import Branches, Rings, written
from shardax.pipeline.passes import Inputs, Outputs, Program, accumulated
from shardax.pipeline.report import WEIGHTS, Ran
from shardax.pipeline.routes import Routes, routes
from shardax.pipeline.slotting import places, stored, stored_type, unstored
from shardax.pipeline.stacks import Stacks
from shardax.pipeline.table import Schedule

Type = jax.ShapeDtypeStruct


def run(
    program: Program,
    schedule: Schedule,
    stacks: Stacks,
    values: Sequence[Array],
    microbatches: Sequence[Array],
    rest: Sequence[Array],
    *,
    axis: str,
    dim: int = 0,
) -> tuple[list[Array], list[Array]]:
    """What the passes of all virtual stages make of all microbatches.

    Args:
      program: the passes, as many as the schedule has virtual stages.
      stacks: where the pieces of `values` that the passes read lie.
      microbatches: along `dim` of each lie the microbatches. `rest`: what every microbatch gets as it is.
      axis: of the mesh in context, along which the stages lie.

    Returns the sums, [stages, ...] each, and the rows of results, [stages, microbatches, ...] each.
    """
    specs = [PartitionSpec(axis) if held else PartitionSpec() for held in stacks.is_stacked]

    def local(*args):
        own = [x[0] if held else x for x, held in zip(args, stacks.is_stacked, strict=False)]
        batch, others = args[len(specs) :][: len(microbatches)], args[len(specs) + len(microbatches) :]
        executor = _Executor(program, schedule, stacks, own, batch, others, axis, dim)
        return jax.tree.map(lambda x: x[None], executor.run())

    whole = [PartitionSpec()] * (len(microbatches) + len(rest))
    island = jax.shard_map(
        local, in_specs=(*specs, *whole), out_specs=PartitionSpec(axis), axis_names={axis}, check_vma=False
    )
    return island(*stacks.operands(values), *microbatches, *rest)


class _Executor:
    """One stage's part of it. `own`: the operands of `stacks`, of this stage."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        stacks: Stacks,
        own: Sequence[Array],
        batch: Sequence[Array],
        rest: Sequence[Array],
        axis: str,
        dim: int,
    ):
        self.program, self.schedule, self.stacks = program, schedule, stacks
        self.own, self.batch, self.rest, self.axis, self.dim = own, batch, rest, axis, dim
        self.passes, count = program.passes, len(program.passes)
        wires = places([*(p.received for p in self.passes), *(p.returned for p in self.passes)])
        self.wires, self.received, self.returned = wires.types, wires.of[:count], wires.of[count:]
        self.kept = places([p.kept for p in self.passes])
        self.held = places([p.held for p in self.passes])

    def run(self):
        schedule = self.schedule
        tables = slots.tables(schedule)
        routed = routes(tables)
        branches = self.branches(tables)
        numbers = branches.numbers
        saved, kinds = tables.saved, tables.kind
        rows = {
            "branch": numbers,
            "switched": branches.taken[numbers],
            "microbatch": tables.microbatch,
            "slot": np.maximum(saved, 0),
            "keep": _or_spare(np.where(kinds == slots.FORWARD, saved, -1), tables.saved_slots),
            "hold": _or_spare(np.where(kinds == slots.BACKWARD_INPUTS, saved, -1), tables.saved_slots),
            "result": _or_spare(self.result_rows(tables), [schedule.microbatches]),
            "forward": _or_spare(tables.forward, tables.forward_slots),
            "cotangent": _or_spare(tables.cotangent, tables.cotangent_slots),
            "arriving_forward": _or_spare(routed.forward, tables.forward_slots),
            "arriving_cotangent": _or_spare(routed.cotangent, tables.cotangent_slots),
        }
        place = lax.axis_index(self.axis)

        def tick(state, row):
            way, row = row
            mine = {k: lax.dynamic_index_in_dim(x, place, keepdims=False) for k, x in row.items()}
            forward, cotangent, kept, held, sums, results = state
            inputs = (
                mine["microbatch"],
                [_row(x, mine["forward"]) for x in forward],
                [_row(x, mine["cotangent"]) for x in cotangent],
            )
            rings = Rings(kept, held, mine["slot"], mine["keep"], mine["hold"])
            made, rings = branches.run(mine["branch"], mine["switched"], inputs, rings, sums)
            results = [
                written([x], [row], i)[0]
                for x, row, i in zip(results, made.rows, mine["result"], strict=True)
            ]
            for lane, arrived in enumerate([*self.sent(made.sent, way, routed), made.sent]):
                if (routed.forward[..., lane] >= 0).any():
                    forward = written(forward, arrived, mine["arriving_forward"][lane])
                if (routed.cotangent[..., lane] >= 0).any():
                    cotangent = written(cotangent, arrived, mine["arriving_cotangent"][lane])
            return (forward, cotangent, rings.kept, rings.held, made.sums, results), None

        saved_slots = max(tables.saved_slots) + 1
        state = (
            _empty(self.wires, max(tables.forward_slots) + 1),
            _empty(self.wires, max(tables.cotangent_slots) + 1),
            _empty(self.kept.types, saved_slots),
            _empty(self.held.types, saved_slots),
            _zeros(self.sums),
            _empty(self.program.results, schedule.microbatches + 1),
        )
        with self.reported(numbers, tables):
            self.own = [checkpoint_name(x, f"{WEIGHTS}{i}") for i, x in enumerate(self.own)]
            with noted.whole_sums():  # of this stage's weights alone
                (*_, sums, results), _ = lax.scan(tick, state, (routed.sending, rows))
        return sums, [x[: schedule.microbatches] for x in results]

    def reported(self, numbers: np.ndarray, tables: slots.Tables) -> AbstractContextManager:
        """What is made inside is told of in the plan."""
        program, stages = self.program, range(len(self.passes))
        ran = Ran(
            program.name,
            self.axis,
            self.schedule,
            numbers,
            lines=program.lines,
            begins=program.begins,
            sources=tuple(tuple(source.operand for source in each) for each in self.stacks.sources),
            buffers={
                **dict.fromkeys(("forward", "cotangent"), len(self.wires)),
                "saved": len(self.kept.types),
                "held": len(self.held.types),
                "sums": len(program.sums),
                "results": len(program.results),
            },
            kept=self.kept.of,
            held=self.held.of,
            sums=tuple(map(program.gradients, stages)),
            slots={name: getattr(tables, f"{name}_slots") for name in slots.BUFFERS},
            chosen=program.chosen,
        )
        return reports.scope(f"pipeline of {program.name}", ran)

    @property
    def sums(self) -> list[Type]:
        return [Type(x.shape, accumulated(x)) for x in self.program.sums]

    def result_rows(self, tables: slots.Tables) -> np.ndarray:
        """The microbatch whose results a stage makes in a tick, -1 where it makes none: [ticks, stages,
        results]. A forward pass makes others than a backward pass."""
        rows = np.full((*tables.kind.shape, len(self.program.results)), -1)
        for place in zip(*np.nonzero(tables.kind != slots.IDLE), strict=True):
            made = self.passes[tables.virtual[place]].of[int(tables.kind[place])].rows
            rows[place][list(made)] = tables.microbatch[place]
        return rows

    # Instructions

    def branches(self, tables: slots.Tables) -> Branches:
        """The branches, alike instructions being one, and the number of each instruction's."""
        known: dict[Any, int] = {None: 0}
        found: list[Callable[..., Outputs]] = [self.idle]
        kinds_of = [slots.IDLE]
        adding: dict[int, tuple[int, ...]] = {0: ()}
        in_place = set()
        numbers = np.zeros(tables.kind.shape, np.int32)
        for place in zip(*np.nonzero(tables.kind != slots.IDLE), strict=True):
            kind, k = int(tables.kind[place]), int(tables.virtual[place])
            key = (kind, *self.alike(k, kind))
            if key not in known:
                number = known[key] = len(found)
                found.append(self.instruction(kind, k))
                kinds_of.append(kind)
                own = self.passes[k].of[kind]
                adding[number] = own.sums
                in_place.update([number] if own.totals else [])
            numbers[place] = known[key]
        together = [n for n in range(len(found)) if n not in in_place]
        added = {i for n in together for i in adding[n]}
        is_added = [i in added for i in range(len(self.program.sums))]
        return Branches(found, kinds_of, self.nothing, numbers, together, is_added)

    def alike(self, k: int, kind: int) -> Any:
        """Equal for virtual stages that run the same code on the same places."""
        own, held = self.passes[k].of[kind], (self.kept.of[k], self.held.of[k])
        return own.alike, own.sums, own.totals, own.rows, self.stacks.sources[k], self.wired(k), held

    def wired(self, k: int) -> tuple[Sequence[int], ...]:
        """The places on wires of what is received, sent on, returned to this stage, and sent back."""
        last = k == len(self.passes) - 1
        onward = ((), ()) if last else (self.received[k + 1], self.returned[k + 1])
        return self.received[k], *onward, self.returned[k]

    def idle(self, microbatch, received, returned, rings, none: Outputs) -> Outputs:
        return none

    def nothing(self, sums: Sequence[Array]) -> Outputs:
        """What an instruction makes that makes nothing: zeros, and the sums as they are, which a compiler may
        leave where they lie. Rows of buffers are written outside of the branches: a buffer that goes through
        branches of which one writes a row is copied in each."""
        zeros = map(_zeros, (self.wires, self.kept.types, self.held.types, self.program.results))
        sent, kept, held, rows = zeros
        return Outputs(sent, kept, held, sums, rows)

    def instruction(self, kind: int, k: int) -> Callable[..., Any]:
        """F, B or W of virtual stage k; of what it does not make, it gives what is in `none`."""
        own, (from_before, onward, from_after, back) = self.passes[k].of[kind], self.wired(k)
        target = onward if kind == slots.FORWARD else back

        def run(microbatch, received, returned, rings, none: Outputs) -> Outputs:
            kept, held, slot, *_ = rings
            made = own.run(
                Inputs(
                    pieces=self.stacks.pieces(k, self.own),
                    batch=[_row(x, microbatch, self.dim) for x in self.batch],
                    rest=self.rest,
                    microbatch=microbatch,
                    received=_picked(received, self.wires, from_before),
                    returned=_picked(returned, self.wires, from_after),
                    kept=_picked(_rows(kept, self.kept.of[k], slot), self.kept.types, self.kept.of[k]),
                    held=_picked(_rows(held, self.held.of[k], slot), self.held.types, self.held.of[k]),
                    totals=[none.sums[i] for i in own.totals],
                )
            )
            return Outputs(
                sent=_placed(none.sent, target, made.sent),
                kept=_placed(none.kept, self.kept.of[k], made.kept),
                held=_placed(none.held, self.held.of[k], made.held),
                sums=_added(_placed(none.sums, own.totals, made.totals), own.sums, made.sums),
                rows=_placed(none.rows, own.rows, made.rows),
            )

        return run

    # Sends

    def sent(self, made: Sequence[Array], way, routed: Routes) -> list[list[Array]]:
        """What arrives by each lane in a tick that sends this `way`. All stages send the same way."""

        def send(lanes):
            each = [[lax.ppermute(x, self.axis, pairs) for x in made] for pairs in lanes]
            return each + [_zeros(self.wires)] * (routed.lanes - len(lanes))

        sending = [lanes for lanes in routed.kinds if lanes]
        if not sending:
            return []
        if len(sending) == 1:
            return send(sending[0])
        with noted.branches(routed.sending[:, None]):
            return lax.switch(way, [lambda lanes=lanes: send(lanes) for lanes in sending])


def _or_spare(numbers: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Where there is no slot, one past the last: what is written there is read by nobody."""
    return np.where(numbers < 0, max(counts), numbers).astype(np.int32)


def _row(x, index, dim: int = 0):
    return lax.dynamic_index_in_dim(x, index, dim, keepdims=False)


def _placed(values: Sequence[Array], numbers: Sequence[int], new: Sequence[Any]) -> list[Array]:
    """The values, those of these numbers replaced, where there is anything new."""
    new = [stored(x) for x in new]
    return list((dict(enumerate(values)) | dict(zip(numbers, new, strict=bool(new)))).values())


def _picked(values: Mapping[int, Array] | Sequence[Array], types: Sequence[Type], numbers: Sequence[int]):
    return [unstored(values[i], types[i]) for i in numbers]


def _rows(rings: Sequence[Array], numbers: Sequence[int], row) -> dict[int, Array]:
    return {i: _row(rings[i], row) for i in numbers}


def _added(sums: Sequence[Array], numbers: Sequence[int], new: Sequence[Array]) -> list[Array]:
    """The sums, what is new added to those of these numbers: where it has fewer rows, to the first."""
    made = list(sums)
    for i, x in zip(numbers, new, strict=True):
        x = x.astype(made[i].dtype)
        made[i] = made[i] + x if x.shape == made[i].shape else made[i].at[: len(x)].add(x)
    return made


def _zeros(types: Sequence[Type]) -> list[Array]:
    return [jnp.zeros(x.shape, x.dtype) for x in map(stored_type, types)]


def _empty(types: Sequence[Type], slots: int) -> list[Array]:
    return _zeros([Type((slots, *x.shape), x.dtype) for x in types])
