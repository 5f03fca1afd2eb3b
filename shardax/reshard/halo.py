"""Halo exchange: every device gets the rows of a split dim that it wants, whichever devices hold them, by
ppermutes.

Whoever needs one only says what each device wants (`Wanted`): rows `firsts[i]` to `ends[i]`. Reshards between
blocks of two sizes say it, and so does every lowering whose primitive looks across the borders of shards
(`spmd_rules/halo.py`). All is known statically. Every device takes equally many rows, one after the other;
here four devices have 4 rows each and want their own and one on either side:

    rows            0  1  2  3 | 4  5  6  7 | 8  9 10 11 |12 13 14 15
    device 0    -1  0  1  2  3   4
    device 1              3      4  5  6  7   8                     two pieces sent: the last row one
    device 2                           7      8  9 10 11  12        device on, the first row one back
    device 3                                          11  12 13 14 15  16

There is one piece for each distance between a device and a holder of what it wants, so a halo may reach over
several shards. A piece has as many rows as the device that wants most of it (GSPMD, section 3.2: one
configuration for all, then a slice whose start depends on the device). Rows -1 and 16 are outside of the
value: they are made of what fills it.

The pairs of a ppermute may be any, so where less is sent so, one piece serves devices at different distances,
each of which puts it in its place among its rows. Here blocks of one row become blocks of two, in two pieces
of one row each, where there are four distances:

    before   0 | 1 | 2 | 3 | - | - | - | -      first piece    2 to 1, 4 to 2, 6 to 3
    after    0 1 | 2 3 | 4 5 | 6 7              second piece   1 to 0, 3 to 1, 5 to 2, 7 to 3
"""

from collections.abc import Callable, Iterable, Sequence
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
    """What each device along `axes` wants of dim `dim`: `rows` rows from `firsts[i]` on, of which those from
    `ends[i]` on do not matter; where it is `exact`, they are filled. The dim has `size` rows. Device i holds
    the `block` rows from i * block on; where the dim is not `split`, all devices hold the same. `operand` is
    the operand of a node whose dim it is.
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
    """What comes from other devices, the `distance` further on if all are equally far: `rows` rows, from row
    `starts[s]` of the shard of each sender s. Without `pairs` it is the own shard. `places[i]`: where device
    i puts it, if not after the last one.
    """

    distance: int | None
    rows: int
    starts: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Exchange:
    """The pieces, in order of distance, the own shard in place. Side by side, with `before` and `after` rows
    of filling around them, they hold what device i wants from row `offsets[i]` on. Pieces with places go into
    as much filling as there is before, in and after these rows. `outside`: some device wants what is outside
    of the value; `far`: one wants nothing else."""

    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    before: int
    after: int
    outside: bool
    far: bool

    @property
    def sent(self) -> list[int]:
        """The rows that one device sends in each ppermute."""
        return [piece.rows for piece in self.pieces if piece.pairs]


@lru_cache(maxsize=4096)
def exchange_of(want: Wanted) -> Exchange:
    """The exchange that brings every device what it wants.

    >>> want = Wanted(0, ("x",), (-1, 3, 7, 11), (5, 9, 13, 17), rows=6, size=16, block=4)
    >>> [(p.distance, p.rows, p.starts, p.pairs) for p in exchange_of(want).pieces if p.distance]
    [(-1, 1, (3, 3, 3, 3), ((0, 1), (1, 2), (2, 3))), (1, 1, (0, 0, 0, 0), ((1, 0), (2, 1), (3, 2)))]
    """
    needs = [(max(f, 0), min(e, want.size)) for f, e in zip(want.firsts, want.ends, strict=True)]
    distances = _distances(needs, want.block) if want.split else {}
    asked = [(f, e) for f, e in zip(want.firsts, want.ends, strict=True) if f < e]
    outside = any(f < 0 or e > want.size for f, e in asked)
    far = any(e <= 0 or f >= want.size for f, e in asked)
    near = {
        d: [_Message(i + d, i, *rows) for i, rows in receivers.items()] for d, receivers in distances.items()
    }
    own, others = [near.pop(0)] if 0 in near else [], list(near.values())
    rounds = (
        _rounds([message for messages in others for message in messages])
        if _reaches_far(distances)
        else others
    )
    if _sent(rounds) < _sent(others):
        pieces, before, after = _placed(want, own + rounds)
        return Exchange(pieces, (before,) * len(needs), before, after, outside, far)
    pieces = [_piece(d, distances.get(d, {}), want.block, len(needs)) for d in sorted({0, *distances})]
    offsets = _offsets(want, needs, pieces)
    before, total = max(0, -min(offsets)), sum(p.rows for p in pieces)
    after = max(0, max(offsets) + want.rows - total)
    return Exchange(tuple(pieces), tuple(o + before for o in offsets), before, after, outside, far)


def _distances(needs: Sequence[tuple[int, int]], block: int) -> dict[int, dict[int, tuple[int, int]]]:
    """For each distance the receivers, and from which row to which they want the shard of who is so far
    away.
    """
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for i, (first, end) in enumerate(needs):
        for j in range(first // block, -(-end // block)) if first < end else ():
            found.setdefault(j - i, {})[i] = (max(first - j * block, 0), min(end - j * block, block))
    return found


def _piece(distance: int, needs: dict[int, tuple[int, int]], block: int, count: int) -> Piece:
    """The piece that comes from `distance` devices further on. A device that wants less than a whole piece
    gets more rows before it if the shard ends there, else after it.
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
    """Where device i finds row `first` in its pieces; `inside` is the first of its rows that is in the
    value.
    """
    if not want.split:
        return first
    holder = inside // want.block
    place = 0
    for piece in pieces:
        if piece.distance == holder - i:
            return place + first - holder * want.block - piece.starts[holder]
        place += piece.rows
    raise AssertionError(f"no piece from {holder} to {i}")


# Pieces that serve devices at different distances


@dataclass(frozen=True, slots=True)
class _Message:
    """Rows `first` to `end` of the sender's shard."""

    sender: int
    receiver: int
    first: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.first


def _reaches_far(distances: Iterable[int]) -> bool:
    """Whether not only neighbours send. Pieces of neighbours stay apart, so that what others want of them is
    sent once too.
    """
    return any(abs(distance) > 1 for distance in distances)


def _rounds(messages: Sequence[_Message]) -> list[list[_Message]]:
    """The messages in rounds, in each of which a device sends and receives at most one: the longest first, or
    in the order of their rows, whichever sends less.
    """
    orders = (lambda m: (-m.rows, m.sender, m.receiver)), (lambda m: (m.sender, m.first, m.receiver))
    return min((_first_fit(sorted(messages, key=order)) for order in orders), key=_sent)


def _first_fit(messages: Sequence[_Message]) -> list[list[_Message]]:
    rounds: list[list[_Message]] = []
    for message in messages:
        fits = (
            r for r in rounds if all(m.sender != message.sender and m.receiver != message.receiver for m in r)
        )
        found = next(fits, None)
        if found is None:
            rounds.append(found := [])
        found.append(message)
    return rounds


def _sent(rounds: Sequence[Sequence[_Message]]) -> tuple[int, int]:
    """The rows that one device sends in all rounds, and how many there are."""
    return sum(map(_longest, rounds)), len(rounds)


def _longest(messages: Sequence[_Message]) -> int:
    return max(message.rows for message in messages)


def _placed(want: Wanted, rounds: Sequence[Sequence[_Message]]) -> tuple[tuple[Piece, ...], int, int]:
    """A piece for each round, and the rows of filling before and after those that a device wants."""
    before = max(0, -min(_place(want, m, _longest(messages)) for messages in rounds for m in messages))
    return tuple(_in_place(want, messages, before) for messages in rounds), before, max(map(_longest, rounds))


def _in_place(want: Wanted, messages: Sequence[_Message], before: int) -> Piece:
    """The piece that brings these messages. Who gets nothing of it puts it after the rows that it wants."""
    rows, devices = _longest(messages), range(len(want.firsts))
    starts = {m.sender: _start(want, m, rows) for m in messages}
    places = {m.receiver: _place(want, m, rows) for m in messages}
    pairs = tuple((m.sender, m.receiver) for m in messages if m.sender != m.receiver)
    usual = next(iter(starts.values()))
    ends = tuple(before + places.get(i, want.rows) for i in devices)
    return Piece(None, rows, tuple(starts.get(s, usual) for s in devices), pairs, ends)


def _start(want: Wanted, message: _Message, rows: int) -> int:
    """The row of the sender's shard from which on a piece of so many rows holds the message."""
    return min(message.first, want.block - rows)


def _place(want: Wanted, message: _Message, rows: int) -> int:
    """Which of the receiver's rows the first one of the piece is."""
    return message.sender * want.block + _start(want, message, rows) - want.firsts[message.receiver]


# The exchange itself, inside `jax.shard_map`


Send = Callable[[Any, Axes, Sequence[tuple[int, int]]], Any]
"""`send(x, axes, pairs)` is a ppermute of x from the first to the second of each pair of devices along
`axes`.
"""


def bring(want: Wanted, shard, device, send: Send, fill=0):
    """The rows that this device, number `device` along `want.axes`, wants, with `fill` for those outside of
    the value.
    """
    exchange = exchange_of(want)
    pieces = [_brought(want, piece, shard, device, send) for piece in exchange.pieces]
    if exchange.pieces[0].places:
        rows = _put(want, exchange, pieces, device)
        return _filled(want, rows, fill, device) if _shows_garbage(want, exchange, fill) else rows
    around = [_filling(shard, rows, want.dim) for rows in (exchange.before, exchange.after)]
    pieces = [piece for piece in (around[0], *pieces, around[1]) if piece.shape[want.dim]]
    joined = lax.concatenate(pieces, want.dim) if len(pieces) > 1 else pieces[0]
    rows = slice_by_device(joined, exchange.offsets, want.rows, want.dim, device)
    return _filled(want, rows, fill, device) if _shows_garbage(want, exchange, fill) else rows


def _brought(want: Wanted, piece: Piece, shard, device, send: Send):
    if not piece.pairs and not piece.places:
        return shard
    rows = slice_by_device(shard, piece.starts, piece.rows, want.dim, device)
    return send(rows, want.axes, piece.pairs) if piece.pairs else rows


def _put(want: Wanted, exchange: Exchange, pieces: Sequence[Any], device):
    """The rows that this device wants, each piece in its place. Where pieces overlap they are equal."""
    rows = _filling(pieces[0], exchange.before + want.rows + exchange.after, want.dim)
    for piece, brought in zip(exchange.pieces, pieces, strict=True):
        rows = lax.dynamic_update_slice_in_dim(rows, brought, by_device(piece.places, device), axis=want.dim)
    return lax.slice_in_dim(rows, exchange.before, exchange.before + want.rows, axis=want.dim)


def _filling(shard, rows: int, dim: int):
    """Zeros; random keys have none, so the first one stands there."""
    shape = (*shard.shape[:dim], rows, *shard.shape[dim + 1 :])
    if jnp.issubdtype(shard.dtype, jax.dtypes.extended):
        return jnp.broadcast_to(lax.slice_in_dim(shard, 0, 1, axis=dim), shape)
    return jnp.zeros(shape, shard.dtype)


def _shows_garbage(want: Wanted, exchange: Exchange, fill) -> bool:
    """Whether garbage may show. Zeros need no mask, because filling and ppermutes that bring nothing give
    zeros, unless the last shard is padded.
    """
    even = want.size == want.block * (len(want.firsts) if want.split else 1)
    zeros = isinstance(fill, int) and fill == 0 and even and not exchange.far
    cut = want.exact and any(
        end < first + want.rows for first, end in zip(want.firsts, want.ends, strict=True)
    )
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
