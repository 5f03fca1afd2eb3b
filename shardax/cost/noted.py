"""What is noted on the name of the scope around equations, because their program does not say it: FLOPs of a
lowering, so that kernels of users count too, and which branches run when.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import jax
import numpy as np

from shardax import _jax


class Noted(str):
    """The name of a scope around all equations of one lowering, with their FLOPs on one device."""

    flops: float


def scope(name: str, flops: float) -> AbstractContextManager:
    """What is made inside does so many FLOPs in all, once."""
    noted = Noted(name.replace("/", "\\"))
    noted.flops = flops
    return jax.named_scope(noted)


def of(name_stack) -> Noted | None:
    """The outermost note around an equation. Each lowering has a note of its own."""
    return next((name for name in _jax.scope_names(name_stack) if isinstance(name, Noted)), None)


class Branches(str):
    """The name of a scope around a `cond` in a loop. `table`: integers [trips, groups of devices], which
    branch the devices of a group take in a trip. In a trip all wait for one another.
    """

    table: np.ndarray

    def dearest_group(self, cost: Callable[[int], float]) -> int:
        """The group whose branches cost most in all trips."""
        costs = np.array([cost(b) for b in range(self.table.max() + 1)])
        return int(costs[self.table].sum(0).argmax())

    def dearest(self, ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(branch, trips): in how many trips each branch is, of those that run, the one that lasts longest.
        `ranks`: the branches from the cheapest to the dearest.
        """
        place = np.argsort(ranks)
        last = Counter(place[self.table].max(1).tolist())
        return ((ranks[p], count) for p, count in last.items())


def branches(table: np.ndarray) -> AbstractContextManager:
    """The `cond` that is made inside takes these branches: see `Branches`."""
    name = Branches("branches by table")
    name.table = np.array(table)
    return jax.named_scope(name)


def branches_of(eqn) -> Branches | None:
    """What is noted of a `cond`. One of other branches than the note counts has none."""
    names = (n for n in reversed(_jax.scope_names(eqn.source_info.name_stack)) if isinstance(n, Branches))
    found = next(names, None) if eqn.primitive.name == "cond" else None
    return found if found is not None and found.table.max() < len(eqn.params["branches"]) else None
