"""What it costs to read a value in several layouts: copies that are made once and shared by its readers.

A value is made in one layout; whoever reads it in another makes a copy, from the value or from another copy. A value with one
reader needs a table between the two. With several, a variable of its own says which copies are made for all:

    maker ──── (made as m, copies of S) ──── reader 1        S has at most `TOGETHER` layouts; further ones each reader makes
                         └────────────────── reader 2        for itself
"""

import itertools
from collections.abc import Callable, Sequence
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


def states(made: Sequence[Layout], read: Sequence[Layout], price: Price) -> list[State]:
    """The states that may pay."""
    found = []
    for m in made:
        paid = [t for t in read if price(m, t) > 0]
        found.append(State(m, ()))
        found += [State(m, (t,)) for t in paid]
        if 2 < len(paid) <= FEW:
            found += [State(m, pair) for pair in itertools.combinations(paid, TOGETHER)]
    return found


def making(state: State, price: Price) -> float:
    """The price of the copies of a state, each from whatever is there."""
    if len(state.copies) < 2:
        return sum(price(state.made, t) for t in state.copies)
    a, b = state.copies
    m = state.made
    return min(price(m, a) + min(price(m, b), price(a, b)), price(m, b) + price(b, a))


def reading(state: State, target: Layout, price: Price) -> float:
    """The price of reading a value in a layout, given its copies."""
    if target in state.copies:
        return 0.0
    return min([price(state.made, target), *(price(copy, target) for copy in state.copies)])


def maker_table(found: Sequence[State], made: Sequence[Layout]) -> np.ndarray:
    """0 where the maker's way makes the value as the state says."""
    return np.array([[0.0 if state.made == m else np.inf for state in found] for m in made])


def reader_table(found: Sequence[State], read: Sequence[Layout], price: Price) -> np.ndarray:
    column = {t: [reading(state, t, price) for state in found] for t in dict.fromkeys(read)}
    return np.array([column[t] for t in read]).T
