"""Analysis: what follows from the facts of a plan: why each collective is sent, and what the program keeps
in memory.
"""

import functools
from dataclasses import dataclass

from shardax import _jax
from shardax.explain.because import Because
from shardax.explain.facts import Facts
from shardax.explain.memory import Memory, memory
from shardax.ledger.collectives import Collective
from shardax.validation import is_number, require


@dataclass(frozen=True, eq=False)
class Analysis(Facts):
    """The facts, and what follows from them."""

    @_jax.boundary
    def because(self, collective: Collective) -> str:
        """The facts behind one of `collectives`: which two shardings clashed and where each came from, which
        dims are summed.

        "" where nothing more is known than its `reason`.
        """
        require(
            isinstance(collective, Collective),
            "collective of Plan.because",
            collective,
            "one of Plan.collectives",
        )
        return self._because.of(collective) if self._because else ""

    @functools.cached_property
    def _because(self) -> Because | None:
        return Because(self) if self.graph else None

    @_jax.boundary
    def memory(self, threshold: int = 1 << 20) -> Memory:
        """Bytes on each device: arguments by kind, the peak and the arrays that live then, and what is
        replicated.

        Replicated arrays are listed from `threshold` bytes on. `shardax.explain.memory` says how the peak is
        computed.
        """
        require(
            is_number(threshold, 0),
            "threshold of Plan.memory",
            threshold,
            "a number of bytes, such as 1 << 20",
        )
        return memory(self, threshold)
