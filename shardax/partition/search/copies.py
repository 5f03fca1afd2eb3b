"""What it costs to read a value in several layouts: copies that are made once and shared by its readers.

A value is made in one layout; whoever reads it in another makes a copy, from the value or from another copy. A value with one
reader needs a table between the two. With several, a variable of its own says which copies are made for all:

    maker ──── (made as m, copies of S) ──── reader 1        S has at most `TOGETHER` layouts; further ones each reader makes
                         └────────────────── reader 2        for itself
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from shardax.sharding import Layout

TOGETHER = 2
FEW = 6  # layouts of which pairs are tried

Price = Callable[[Layout, Layout], float]


@dataclass(frozen=True, slots=True)
class State:
    """The layout in which a value is made, and the copies that are made for all of its readers."""

    made: Layout
    copies: tuple[Layout, ...]


def states(made: Sequence[Layout], readers: Sequence[Collection[Layout]], price: Price) -> list[State]:
    """The states that may pay: a copy is made for all where at least two readers may use it.

    Args:
      made: the layouts in which the value may be made.
      readers: for each reader those in which it may read it.
    """
    read = list(dict.fromkeys(t for targets in readers for t in targets))
    useful = {t: sum(any(is_cut(t, other) for other in targets) for targets in readers) > 1 for t in read}
    found = []
    for m in made:
        paid = [t for t in read if useful[t] and price(m, t) > 0]
        found.append(State(m, ()))
        found += [State(m, (t,)) for t in paid]
        if TOGETHER <= len(paid) <= FEW:
            found += [State(m, pair) for pair in itertools.combinations(paid, TOGETHER) if not is_part(*pair)]
    return found


def is_part(first: Layout, second: Layout) -> bool:
    """Whether one of two layouts is cut out of the other without sending."""
    return is_cut(first, second) or is_cut(second, first)


def making(state: State, price: Price) -> float:
    """The price of the copies of a state, each made from the value."""
    return sum(price(state.made, t) for t in state.copies)


def reading(state: State, target: Layout, price: Price) -> float:
    """The price of reading a value in a layout, given its copies: cut out of one of them, or made for this reader."""
    if any(is_cut(copy, target) for copy in state.copies):
        return 0.0
    return price(state.made, target)


def is_cut(source: Layout, target: Layout) -> bool:
    """Whether each device cuts what it holds in layout `target` out of what it holds in `source`."""
    if source == target:
        return True
    if source.pending != target.pending:
        return False
    for have, want, held, kept in zip(source.dims, target.dims, source.padded, target.padded, strict=True):
        if want[: len(have)] != have or have and held != kept:
            return False
    return not set(target.sharding.axes) & {*source.pending_axes}


def maker_table(found: Sequence[State], made: Sequence[Layout]) -> np.ndarray:
    """0 where the maker's way makes the value as the state says."""
    return np.array([[0.0 if state.made == m else np.inf for state in found] for m in made])


def reader_table(found: Sequence[State], read: Sequence[Layout], price: Price) -> np.ndarray:
    """What each way of a reader pays in each state."""
    column = {t: [reading(state, t, price) for state in found] for t in dict.fromkeys(read)}
    return np.array([column[t] for t in read]).T
