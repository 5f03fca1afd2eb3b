"""Where sums over microbatches are added up, if not each in a place of its own: as the gradients of packed
weights rest, and all summands of one gradient in one place.

    d embed of the first use   ── + ── pack     added up where the array at rest has the leaf
    d embed of the second use  ──┘
    d w of one use             ── + ── update   added up in one place, if one stage makes both
    d w of another use         ──┘
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardax.pipeline.cut import variables
from shardax.pipeline.gathered import Accumulator, Summand
from shardax.pipeline.origins import Origin, origins_of, text
from shardax.pipeline.repacking import pack_p
from shardax.pipeline.resting import accumulators
from shardax.pipeline.virtual import is_sent
from shardax.spmd_rules.equations import is_sum

Chain = tuple[Any, ...]  # equations of one operand, done to what was added up


@dataclass(frozen=True)
class Adding:
    """`after`: the equations that run after all microbatches, `sums`: what is added up over them, `results`:
    of the program."""

    after: Sequence[Any]
    sums: Sequence[Any]
    results: Sequence[Any]

    def origins(self, v) -> list[Origin]:
        """Of which sums a value is the sum, moved, cast or scaled; empty where it is none, or where others
        are made of the same."""
        makers, leaves = self._made
        if v in self._makers and v not in self._once:
            makers = makers | {v: self._makers[v]}
        return origins_of(v, makers, leaves)

    @cached_property
    def packed(self) -> list[tuple[Any, dict[int, tuple[Accumulator, Chain]]]]:
        """The equations that pack sums, and in which accumulators the arrays are added up, by their
        numbers."""
        found = []
        for eqn in self.after:
            if eqn.primitive is pack_p:
                origins = [self.origins(v) if v in self._once else [] for v in eqn.invars]
                found.append((eqn, accumulators(eqn.params["packing"], origins)))
        return found

    @cached_property
    def together(self) -> list[tuple[Any, Accumulator, Chain]]:
        """The values that are of several sums, and in which accumulator these are added up."""
        places = (place for _, some in self.packed for place, _ in some.values())
        taken = {part.number for place in places for parts in place.parts for part in parts}
        found = []
        for eqn in reversed(self.after):
            origins = self.origins(eqn.outvars[0]) if is_sum(eqn) else []
            numbers = {origin.leaf for origin in origins}
            if len(numbers) < 2 or numbers & taken or len({text(o.elementwise) for o in origins}) > 1:
                continue
            taken |= numbers
            parts = tuple(Summand(origin.leaf, moves=origin.moves) for origin in origins)
            shape = tuple(eqn.outvars[0].aval.shape)
            found.append(
                (eqn.outvars[0], Accumulator((parts,), shape, anywhere=True), origins[0].elementwise)
            )
        return found

    @cached_property
    def _makers(self) -> dict[Any, Any]:
        return {v: eqn for eqn in self.after for v in eqn.outvars}

    @cached_property
    def _once(self) -> set[Any]:
        """What is read once, after all microbatches."""
        uses = Counter(variables(v for eqn in self.after for v in eqn.invars))
        uses.update(variables(self.results))
        return {v for v, count in uses.items() if count == 1}

    @cached_property
    def _made(self) -> tuple[dict[Any, Any], dict[Any, int]]:
        """Of what is read once: the equations that make it, through what joins microbatches; the numbers of
        sums."""
        makers = {v: eqn for v, eqn in self._makers.items() if v in self._once}
        leaves = {v: i for i, v in enumerate(self.sums) if v in self._once}
        for eqn in filter(is_sent, self.after):
            for after, before in zip(eqn.outvars, eqn.invars, strict=True):
                makers.pop(after, None)
                if after in self._once:
                    makers |= {after: makers[before]} if before in makers else {}
                    leaves |= {after: leaves[before]} if before in leaves else {}
        return makers, leaves
