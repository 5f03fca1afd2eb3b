"""What it costs to read a value in several layouts: copies that are made once and shared by its readers.

A value is made in one layout; whoever reads it in another makes a copy of it. A value with one such reader
needs a table between the two. With several, a variable of its own decides which copies are made for all:

    maker ──── (made as m, copies of S) ──── reader 1      S has at most two layouts; further ones
                         └────────────────── reader 2      each reader makes for itself
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardax.sharding import Layout

FEW = 6  # layouts of which pairs are tried
STATES, LEAST = 1024, 16  # about so many of a value; but so many copies of each layout in which it is made

Price = Callable[[Layout, Layout], float]


@dataclass(frozen=True, eq=False)
class Copies:
    """The states that may pay. `states`: the layout in which a value is made, and the copies that are made
    for all. `making`: the price of these. `reading`: for each state and each layout of `read` what a reader
    pays beside.
    """

    states: Sequence[tuple[Layout, tuple[Layout, ...]]]
    making: np.ndarray
    read: Sequence[Layout]
    reading: np.ndarray

    def maker_table(self, made: Sequence[Layout]) -> np.ndarray:
        """0 where the maker's way makes the value in the layout of the state."""
        number = {layout: i for i, layout in enumerate(dict.fromkeys(made))}
        ways, states = ([number[layout] for layout in side] for side in (made, [m for m, _ in self.states]))
        return np.where(np.equal.outer(ways, states), 0.0, np.inf)

    def reader_table(self, targets: Sequence[Layout]) -> np.ndarray:
        """What each way of a reader pays in each state."""
        place = {layout: i for i, layout in enumerate(self.read)}
        return self.reading[:, [place[t] for t in targets]]


def copies_of(made: Sequence[Layout], readers: Sequence[Sequence[Layout]], price: Price) -> Copies:
    """The states of a value. A copy is made for all where at least two readers may use it; where these are
    too many, those that stand early among the layouts of two of them.

    Args:
      made: the layouts in which the value may be made.
      readers: for each reader those in which it may read it.
      price: of a reshard from one layout to another.
    """
    read = list(dict.fromkeys(itertools.chain(*readers)))
    place = {layout: i for i, layout in enumerate(read)}
    none = len(read)  # the place of no copy is the last: it is -1 too
    prices, parts = np.zeros((len(made), none + 1)), np.full((none + 1, none), np.inf)
    prices[:, :none] = [[price(m, t) for t in read] for m in made]
    cut = np.array([[is_cut(copy, t) for t in read] for copy in read])
    for c, t in np.argwhere(cut).tolist():
        parts[c, t] = price(read[c], read[t])
    wanted = [[place[t] for t in dict.fromkeys(targets)] for targets in readers]
    shared = _shared(cut, wanted)
    most = max(LEAST, STATES // len(made))
    chosen = [(m, *some) for m, row in enumerate(prices) for some in _chosen(row, shared, cut, most)]
    makers, first, second = np.array(chosen).T
    making = prices[makers, first] + prices[makers, second]
    reading = np.minimum(prices[makers, :-1], np.minimum(parts[first], parts[second]))
    states = [(made[m], tuple([read[c] for c in some if c >= 0])) for m, *some in chosen]
    return Copies(states, making, read, reading)


def _shared(cut: np.ndarray, wanted: Sequence[Sequence[int]]) -> np.ndarray:
    """The copies that two readers may use, by number. Those come first of which two use early ones among the
    layouts in which they may read: these look cheapest to them."""
    never = cut.shape[1]
    each = [np.where(cut[:, targets], np.arange(len(targets)), never).min(axis=1) for targets in wanted]
    second = np.sort([*each, np.full(never, never)], axis=0)[1]
    order = np.argsort(second, kind="stable")
    return order[second[order] < never]


def _chosen(row: np.ndarray, shared: np.ndarray, cut: np.ndarray, most: int) -> list[tuple[int, int]]:
    """The copies that may be made for all, by number, -1 for none; `row`: what each costs; `most`: so many
    of one."""
    paid = sorted(shared[row[shared] > 0][:most].tolist())
    pairs = itertools.combinations(paid, 2) if len(paid) <= FEW else ()
    apart = [(a, b) for a, b in pairs if not (cut[a, b] or cut[b, a])]  # neither is cut out of the other
    return [(-1, -1), *((c, -1) for c in paid), *apart]


@lru_cache(maxsize=1 << 18)
def is_cut(source: Layout, target: Layout) -> bool:
    """Whether each device cuts what it holds in layout `target` out of what it holds in `source`."""
    if source == target:
        return True
    if source.pending != target.pending:
        return False
    for have, need, held, kept in zip(source.dims, target.dims, source.padded, target.padded, strict=True):
        if need[: len(have)] != have or have and held != kept:
            return False
    return not set(target.sharding.axes) & {*source.pending_axes}
