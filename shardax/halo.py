"""Halo exchange: every device gets the rows of a split dim that it wants, whichever devices hold them, by ppermutes.

Whoever needs one only says what each device wants (`Wanted`): rows `firsts[i]` to `ends[i]`. Reshards between blocks of two
sizes say it, and so does every lowering whose primitive looks across the borders of shards (`spmd_rules/halo.py`). All is
known statically. Every device takes equally many rows, one after the other; here four devices have 4 rows each and want their
own and one on either side:

    rows            0  1  2  3 | 4  5  6  7 | 8  9 10 11 |12 13 14 15
    device 0    -1  0  1  2  3   4
    device 1              3      4  5  6  7   8                        two pieces sent: the last row one device
    device 2                           7      8  9 10 11  12           further on, the first row one device back
    device 3                                          11  12 13 14 15  16

There is one piece for each distance between a device and a holder of what it wants, so a halo may reach over several shards.
A piece has as many rows as the device that wants most of it (GSPMD, section 3.2: one configuration for all, then a slice
whose start depends on the device). Rows -1 and 16 are outside of the value: they are made of what fills it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.sharding import Axes


@dataclass(frozen=True, slots=True)
class Wanted:
    """What each device along `axes` wants of dim `dim`: `rows` rows from `firsts[i]` on, of which those from `ends[i]` on do
    not matter; where it is `exact`, they are filled. The dim has `size` rows. Device i holds the `block` rows from i * block
    on; where the dim is not `split`, all devices hold the same. `operand` is the operand of a node whose dim it is.
    """

    dim: int
    axes: Axes
    firsts: tuple[int, ...]
    ends: tuple[int, ...]
    rows: int
    size: int
    block: int
    split: bool = True
    operand: int = 0
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What comes from the devices `distance` further on: `rows` rows, from row `starts[s]` of the shard of each sender s."""

    distance: int
    rows: int
    starts: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """The pieces, in order of distance, the own shard in place. Side by side, with `before` and `after` rows of filling around
    them, they hold what device i wants from row `offsets[i]` on. `outside`: some device wants what is outside of the value;
    `far`: one wants nothing else."""

    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    before: int
    after: int
    outside: bool
    far: bool

    @property
    def sent(self) -> list[int]:
        """The rows that one device sends in each ppermute."""
        return [piece.rows for piece in self.pieces if piece.distance]


@lru_cache(maxsize=4096)
def exchange_of(want: Wanted) -> Exchange:
    """The exchange that brings every device what it wants.

    >>> want = Wanted(0, ("x",), (-1, 3, 7, 11), (5, 9, 13, 17), rows=6, size=16, block=4)
    >>> [(p.distance, p.rows, p.starts, p.pairs) for p in exchange_of(want).pieces if p.distance]
    [(-1, 1, (3, 3, 3, 3), ((0, 1), (1, 2), (2, 3))), (1, 1, (0, 0, 0, 0), ((1, 0), (2, 1), (3, 2)))]
    """
    needs = [(max(f, 0), min(e, want.size)) for f, e in zip(want.firsts, want.ends, strict=True)]
    distances = _distances(needs, want.block) if want.split else {}
    pieces = [_piece(d, distances.get(d, {}), want.block, len(needs)) for d in sorted({0, *distances})]
    offsets = _offsets(want, needs, pieces)
    before, total = max(0, -min(offsets)), sum(p.rows for p in pieces)
    after = max(0, max(offsets) + want.rows - total)
    asked = [(f, e) for f, e in zip(want.firsts, want.ends, strict=True) if f < e]
    outside = any(f < 0 or e > want.size for f, e in asked)
    far = any(e <= 0 or f >= want.size for f, e in asked)
    return Exchange(tuple(pieces), tuple(o + before for o in offsets), before, after, outside, far)


def _distances(needs: Sequence[tuple[int, int]], block: int) -> dict[int, dict[int, tuple[int, int]]]:
    """For each distance the receivers, and from which row to which they want the shard of who is so far away."""
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for i, (first, end) in enumerate(needs):
        for j in range(first // block, -(-end // block)) if first < end else ():
            found.setdefault(j - i, {})[i] = (max(first - j * block, 0), min(end - j * block, block))
    return found


def _piece(distance: int, needs: dict[int, tuple[int, int]], block: int, count: int) -> Piece:
    """The piece that comes from `distance` devices further on. A device that wants less than a whole piece gets more rows
    before it if the shard ends there, else after it.
    """
    if not distance:
        return Piece(0, block, (0,) * count, ())
    rows = max(end - first for first, end in needs.values())
    starts = {i + distance: min(first, block - rows) for i, (first, _) in needs.items()}
    usual = next(iter(starts.values()))
    pairs = tuple((i + distance, i) for i in sorted(needs))
    return Piece(distance, rows, tuple(starts.get(s, usual) for s in range(count)), pairs)


def _offsets(want: Wanted, needs, pieces: Sequence[Piece]) -> list[int]:
    """Where in the pieces what each device wants begins; whoever wants nothing takes what another does."""
    held = enumerate(zip(want.firsts, needs, strict=True))
    found = [_offset(want, i, f, first, pieces) if first < end else None for i, (f, (first, end)) in held]
    usual = next((o for o in found if o is not None), 0)
    return [usual if o is None else o for o in found]


def _offset(want: Wanted, i: int, first: int, inside: int, pieces: Sequence[Piece]) -> int:
    """Where device i finds row `first` in its pieces; `inside` is the first of its rows that is in the value."""
    if not want.split:
        return first
    holder = inside // want.block
    place = 0
    for piece in pieces:
        if piece.distance == holder - i:
            return place + first - holder * want.block - piece.starts[holder]
        place += piece.rows
    raise AssertionError(f"no piece from {holder} to {i}")


# The exchange itself, inside `jax.shard_map`


Send = Callable[[Any, Axes, Sequence[tuple[int, int]]], Any]
"""`send(x, axes, pairs)` is a ppermute of x from the first to the second of each pair of devices along `axes`."""


def bring(want: Wanted, shard, device, send: Send, fill=0):
    """The rows that this device, number `device` along `want.axes`, wants, with `fill` for those outside of the value."""
    exchange = exchange_of(want)
    pieces = [_brought(want, piece, shard, device, send) for piece in exchange.pieces]
    around = [_filling(shard, rows, want.dim) for rows in (exchange.before, exchange.after)]
    pieces = [piece for piece in (around[0], *pieces, around[1]) if piece.shape[want.dim]]
    joined = lax.concatenate(pieces, want.dim) if len(pieces) > 1 else pieces[0]
    rows = slice_by_device(joined, exchange.offsets, want.rows, want.dim, device)
    return _filled(want, rows, fill, device) if _shows_garbage(want, exchange, fill) else rows


def _brought(want: Wanted, piece: Piece, shard, device, send: Send):
    if not piece.distance:
        return shard
    return send(slice_by_device(shard, piece.starts, piece.rows, want.dim, device), want.axes, piece.pairs)


def _filling(shard, rows: int, dim: int):
    """Zeros; random keys have none, so the first one stands there."""
    shape = (*shard.shape[:dim], rows, *shard.shape[dim + 1 :])
    if jnp.issubdtype(shard.dtype, jax.dtypes.extended):
        return jnp.broadcast_to(lax.slice_in_dim(shard, 0, 1, axis=dim), shape)
    return jnp.zeros(shape, shard.dtype)


def _shows_garbage(want: Wanted, exchange: Exchange, fill) -> bool:
    """Whether garbage may show. Zeros need no mask, because filling and ppermutes that bring nothing give zeros, unless the
    last shard is padded.
    """
    even = want.size == want.block * (len(want.firsts) if want.split else 1)
    zeros = isinstance(fill, int) and fill == 0 and even and not exchange.far
    cut = want.exact and any(end < first + want.rows for first, end in zip(want.firsts, want.ends, strict=True))
    return cut or exchange.outside and not zeros


def _filled(want: Wanted, rows, fill, device):
    inside = inside_of(want, device, rows.shape, want.dim)
    return lax.select(inside, rows, jnp.broadcast_to(jnp.asarray(fill, rows.dtype), rows.shape))


def inside_of(want: Wanted, device, shape: tuple[int, ...], dim: int):
    """Which of the rows that this device wants, along `dim` of `shape`, are inside of the value."""
    place = lax.broadcasted_iota("int32", shape, dim) + by_device(want.firsts, device)
    end = by_device([min(end, want.size) for end in want.ends], device) if want.exact else want.size
    return (place >= 0) & (place < end)


def slice_by_device(x, starts: Sequence[int], rows: int, dim: int, device):
    """`rows` rows of x, from `starts[device]` on."""
    start = by_device(starts, device)
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + rows, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, rows, axis=dim)


def by_device(values: Sequence[int], device):
    """`values[device]`: a number where all are equal, a formula where they grow evenly, else a lookup."""
    first, steps = values[0], set(np.diff(values).tolist())
    if len(steps) > 1:
        return jnp.asarray(np.array(values, np.int32))[device]
    step = steps.pop() if steps else 0
    return first + step * device if step else first
