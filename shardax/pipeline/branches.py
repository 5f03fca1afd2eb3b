"""Runs the instruction of a stage in a tick, and writes what it makes for later ones.

    a switch        all instructions but those that add to sums in place
    kept            a row of it is written, if that was F
    conds           each B that adds in place; it reads kept
    held            a row of it is written, if that was B before a W
    conds           each W that adds in place; it reads held

Instructions that add to sums in place, in a loop over layers, are each a `lax.cond` of its own: where several
branches write in place to one buffer, XLA copies the buffer in each. They read what was written before them,
though in a tick a stage runs only one instruction: free to read a buffer as it was, they may be ordered
behind the write, and then XLA copies all of the buffer in each tick.

Where no row is made, a spare one is written. To write in a cond is no better: XLA lays the buffer out
otherwise there than the conds want that read it, which then copy all of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jax import Array, lax

from shardax.cost import noted
from shardax.pipeline import slots
from shardax.pipeline.passes import Outputs


class Rings(NamedTuple):
    """What forward passes kept, and what B held for W, [slots, ...] each. `slot`: of the instruction, of
    which those that need it read a row; `keep` and `hold`: to which one is written."""

    kept: Sequence[Array]
    held: Sequence[Array]
    slot: Any
    keep: Any
    hold: Any


@dataclass(frozen=True)
class Branches:
    """What stages run, by the `numbers` of [ticks, stages]; 0: nothing. `kinds`: of each number, as in
    `slots`. Those `together` are one switch; `is_added`: to which sums they add. The others add to sums in
    place. `nothing`: what is made where nothing is, with the sums.
    """

    all: Sequence[Callable[..., Outputs]]
    kinds: Sequence[int]
    nothing: Callable[[Sequence[Any]], Outputs]
    numbers: np.ndarray
    together: Sequence[int]
    is_added: Sequence[bool]

    @cached_property
    def taken(self) -> np.ndarray:
        """Of each number, the branch of the switch; 0 for those that are not in it."""
        places = (self.together.index(n) if n in self.together else 0 for n in range(len(self.all)))
        return np.array([*places], np.int32)

    def run(
        self, number: Array, switched: Array, inputs: Sequence[Any], rings: Rings, sums: Sequence[Array]
    ) -> tuple[Outputs, Rings]:
        """What instruction `number`, branch `switched` of the switch, makes, and the rings after it."""
        made = self._together(switched, (*inputs, rings), sums)
        rings = rings._replace(kept=written(rings.kept, made.kept, rings.keep))
        for n in self._alone_of(slots.FORWARD, slots.BACKWARD, slots.BACKWARD_INPUTS):
            made = self._alone(n, number, (*inputs, rings), made)
        rings = rings._replace(held=written(rings.held, made.held, rings.hold))
        for n in self._alone_of(slots.BACKWARD_WEIGHTS):
            made = self._alone(n, number, (*inputs, rings), made)
        return made, rings

    def _alone_of(self, *kinds: int) -> Iterator[int]:
        return (n for n, kind in enumerate(self.kinds) if kind in kinds and n not in self.together)

    def _together(self, switched: Array, inputs: Sequence[Any], sums: Sequence[Array]) -> Outputs:
        def branch(n: int) -> Callable[..., Outputs]:
            return lambda inputs, sums: self.all[n](*inputs, self.nothing(sums))

        own = [x if added else None for x, added in zip(sums, self.is_added, strict=True)]
        with noted.branches(self.numbers, self.taken.tolist()):
            made = lax.switch(switched, list(map(branch, self.together)), inputs, own)
        return made._replace(sums=[x if y is None else y for x, y in zip(sums, made.sums, strict=True)])

    def _alone(self, n: int, number: Array, inputs: Sequence[Any], made: Outputs) -> Outputs:
        """What instruction n makes, or what is `made` where another one runs."""

        def run(made: Outputs, inputs: Sequence[Any]) -> Outputs:
            return self.all[n](*inputs, made)

        with noted.branches(self.numbers, [int(i == n) for i in range(len(self.all))]):
            return lax.switch((number == n).astype("int32"), [lambda made, _: made, run], made, inputs)


def written(buffers: Sequence[Array], rows: Sequence[Array], index) -> list[Array]:
    """The buffers, each with a row written."""
    pairs = zip(buffers, rows, strict=True)
    return [lax.dynamic_update_index_in_dim(buffer, x, index, 0) for buffer, x in pairs]
