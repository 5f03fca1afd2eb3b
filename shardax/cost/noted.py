"""What is noted on the name of the scope around equations, because their program does not say it: FLOPs of a
lowering, so that kernels of users count too, which branches run when, which loops may keep sums whole, and
which write in place.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

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
    """The name of a scope around a `cond` in a loop, which has `taken`.

    `table`: integers [trips, groups of devices], which instruction the devices of a group run in a trip. In a
    trip all wait for one another. `taken`: of each instruction, the branch that it is. Several conds of one
    loop and one table are parts of the instructions.
    """

    table: np.ndarray
    taken: np.ndarray

    def dearest_group(self, costs: Sequence[float]) -> int:
        """The group whose instructions cost most in all trips; `costs`: of each instruction."""
        return int(np.array(costs)[self.table].sum(0).argmax())

    def dearest(self, ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(instruction, trips): in how many trips each instruction is, of those that run, the one that lasts
        longest. `ranks`: the instructions from the cheapest to the dearest.
        """
        place = np.argsort(ranks)
        last = Counter(place[self.table].max(1).tolist())
        return ((ranks[p], count) for p, count in last.items())


def branches(table: np.ndarray, taken: Sequence[int] | None = None) -> AbstractContextManager:
    """The `cond` that is made inside takes these branches, see `Branches`; `taken`, None: an instruction is
    the branch of its number."""
    taken = range(int(table.max()) + 1) if taken is None else taken
    name = Branches(f"branches {'.'.join(map(str, taken))} by table")
    name.table, name.taken = np.asarray(table), np.array(taken, int)
    return jax.named_scope(name)


def branches_of(eqn) -> Branches | None:
    """What is noted of a `cond`. One of other branches than the note counts has none."""
    names = (n for n in reversed(_jax.scope_names(eqn.source_info.name_stack)) if isinstance(n, Branches))
    found = next(names, None) if eqn.primitive.name == "cond" else None
    return found if found is not None and found.taken.max() < len(eqn.params["branches"]) else None


def parts(eqns: Iterable[Any]) -> Iterator[list[Any]]:
    """The conds of a loop's body by their tables: those of one are parts of the same instructions."""
    found: dict[tuple[int, ...], list[Any]] = {}
    for eqn in eqns:
        note = branches_of(eqn)
        if note is not None:
            found.setdefault((*note.table.shape, *note.table.flat), []).append(eqn)
    yield from found.values()


class WholeSums(str):
    """The name of a scope around a loop that may add up sums that are not reduced yet, whole on each device,
    where they are wanted split: it trades memory for sending once what is sent in each trip otherwise."""


def whole_sums() -> AbstractContextManager:
    """The loop that is made inside may keep sums whole: see `WholeSums`."""
    return jax.named_scope(WholeSums("sums"))


def keeps_whole_sums(name_stack) -> bool:
    return any(isinstance(name, WholeSums) for name in _jax.scope_names(name_stack))


class InPlace(str):
    """The name of a scope around a loop that reads and writes rows of what it carries in place, and stays so:
    one over rows would make another array of them."""


def in_place() -> AbstractContextManager:
    """The loop that is made inside writes in place: see `InPlace`."""
    return jax.named_scope(InPlace("in place"))


def is_in_place(name_stack) -> bool:
    names = _jax.scope_names(name_stack)
    return bool(names) and isinstance(names[-1], InPlace)


def without_whole_sums(jaxpr):
    """The jaxpr, closed or open, in which no loop may keep sums whole: each trip scatters them."""
    opened = _jax.closed(jaxpr).jaxpr
    return _jax.replaced_eqns(jaxpr, [_scattering(eqn) for eqn in opened.eqns])


def _scattering(eqn):
    eqn = _jax.with_bodies(eqn, without_whole_sums)
    stack = eqn.source_info.name_stack
    if not keeps_whole_sums(stack):
        return eqn
    stack = _jax.without_scopes(stack, lambda name: isinstance(name, WholeSums))
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))
