"""The passes of one virtual stage, traced: what each reads, makes, keeps and sends."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardax import _jax
from shardax.graph.evaluate import evaluate
from shardax.pipeline import slots
from shardax.pipeline.assign import BACKWARD, FORWARD
from shardax.pipeline.cut import Part
from shardax.pipeline.gathered import Result
from shardax.pipeline.passes import Inputs, Outputs, Pass, Passes

Type = jax.ShapeDtypeStruct


class Traced:
    """The passes of virtual stage `k`, as programs.

    Args:
      run: the region on its stages.
      taken: gives its pieces of the parameters, of what it reads at rest.
      types: of what it reads at rest, of the microbatch, of the rest.
    """

    def __init__(
        self,
        run: Any,
        k: int,
        taken: Callable[..., list[Any]],
        types: Sequence[Sequence[Type]],
    ):
        self.run, self.k, self.taken, self.types = run, k, taken, types
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
        """B and W apart where the schedule has them so, else B alone."""
        back = self.found.backward[self.k]
        of = {slots.FORWARD: self.traced(FORWARD, self.found.forward[self.k], self.onward, self.kept, [])}
        if self.run.schedule.splits:
            of[slots.BACKWARD_INPUTS] = self.traced(BACKWARD, self.inputs, self.returned, [], self.held)
            of[slots.BACKWARD_WEIGHTS] = self.traced(BACKWARD, self.weights, [], [], [], self.held)
        of[slots.BACKWARD] = self.traced(BACKWARD, back, self.returned, [], [])
        held = self.held if self.run.schedule.splits else []
        keys = self.received, self.returned, self.kept, held
        return Passes(of, *(tuple(map(self.flow.type_of, some)) for some in keys))

    def traced(
        self,
        name: str,
        parts: Sequence[Part],
        sent: Sequence[Any],
        kept: Sequence[Any],
        held: Sequence[Any],
        reads_held: Sequence[Any] = (),
    ) -> Pass:
        made = {key for part in parts for key in self.flow.writes(part)}
        summed, stacked = (some.of_pass(self.k, name, made) for some in (self.run.sums, self.run.rows))
        read = {*self.found.reads(parts), *sent, *kept, *held, *(r.key for r in stacked)}
        added = self._added(summed, read)
        summed = [r for r in summed if r not in added]
        totals = tuple(self.run.sums.places[r] for r in added)
        forward = name == FORWARD
        arriving = [self.received, [], []] if forward else [[], self.from_after, self.kept]
        keys = [*arriving, list(reads_held)]
        lists = [
            *self.types,
            [Type((), "int32")],
            *([self.flow.type_of(key) for key in some] for some in keys),
            [self.run.sums.total(place) for place in totals],
        ]
        places: list[int] = []

        def body(*args):
            left = iter(args)
            pieces, batch, rest, number, *values, sums = [[next(left) for _ in types] for types in lists]
            env, rows = self._env(self.taken(pieces), batch, [*rest, *number])
            for some, given in zip(keys, values, strict=True):
                env.update(zip(some, given, strict=True))
            reader = self.flow.run(parts, env, rows, dict(zip((r.key for r in added), sums, strict=True)))
            sums = list(self.run.sums.values(summed, [reader.value(r.key) for r in summed]))
            places[:] = [place for place, _ in sums]
            wanted = [*sent, *kept, *held], [r.key for r in stacked]
            first, last = ([reader.value(key) for key in some] for some in wanted)
            last = [self.run.rows.padded(r, x) for r, x in zip(stacked, last, strict=True)]
            return [*first, *(x for _, x in sums), *last, *(env[r.key] for r in added)]

        closed = _jax.dce(jax.make_jaxpr(body)(*(type for types in lists for type in types)))
        counts = [len(sent), len(kept), len(held), len(places), len(stacked), len(totals)]

        def run(x: Inputs) -> Outputs:
            own = [x.received, [], []] if forward else [[], x.returned, x.kept]
            args = [*x.pieces, *x.batch, *x.rest, x.microbatch]
            args += [v for some in own for v in some] + list(x.held if reads_held else [])
            args += list(x.totals)
            made = iter(evaluate(closed, args))
            return Outputs(*([next(made) for _ in range(n)] for n in counts))

        rows = tuple(self.run.rows.places[r] for r in stacked)
        alike = str(closed.jaxpr), *map(id, closed.consts)
        return Pass(run, tuple(places), rows, alike, closed, totals)

    def _added(self, summed: Sequence[Result], read: set[Any]) -> list[Result]:
        """Of what is summed, what a scan stacks and nobody else reads."""
        sums = self.run.sums
        keys, places = (Counter(map(of, summed)) for of in (lambda r: r.key, sums.places.get))
        return [
            r
            for r in summed
            if r.rows and r.key not in read and keys[r.key] == places[sums.places[r]] == 1
            if sums.takes_rows(r)
        ]

    def _env(self, pieces, batch, rest) -> tuple[dict[Any, Any], dict[Any, Any]]:
        flow = self.flow
        pairs = list(zip(self.run.pieces[self.k], pieces, strict=True))
        env = {v: x for (v, rows), x in pairs if rows is None}
        env.update(zip((*flow.of_batch, *flow.rest), (*batch, *rest), strict=True))
        return env, {piece: x for piece, x in pairs if piece[1] is not None}
