"""Halo exchange: every device gets the rows of a split dim that it needs, whichever devices hold them, by
ppermutes.

Whoever needs one only states what each device needs (`HaloRequest`): rows `firsts[i]` to `ends[i]`. Reshards
between blocks of two sizes state it, and so does every lowering whose primitive looks across the borders of
shards (`spmd_rules/halo.py`). All is known statically. Every device takes equally many rows, one after the
other; here four devices have 4 rows each and need their own and one on either side:

    rows            0  1  2  3 | 4  5  6  7 | 8  9 10 11 |12 13 14 15
    device 0    -1  0  1  2  3   4
    device 1              3      4  5  6  7   8                     two pieces sent: the last row one
    device 2                           7      8  9 10 11  12        device on, the first row one back
    device 3                                          11  12 13 14 15  16

There is one piece for each distance between a device and a holder of what it needs, so a halo may reach over
several shards. A piece has as many rows as the device that needs most of it (GSPMD, section 3.2: one
configuration for all, then a slice whose start depends on the device). Rows -1 and 16 are outside of the
value: they are made of what fills it.

The pairs of a ppermute may be any, so where less is sent so, one piece serves devices at different distances,
each of which puts it in its place among its rows. Here blocks of one row become blocks of two, in two pieces
of one row each, where there are four distances:

    before   0 | 1 | 2 | 3 | - | - | - | -      first piece    2 to 1, 4 to 2, 6 to 3
    after    0 1 | 2 3 | 4 5 | 6 7              second piece   1 to 0, 3 to 1, 5 to 2, 7 to 3
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.annotations.explicit import memory_of
from shardax.cost.network import reaches_far
from shardax.sharding import Axes

HOST = jax.memory.Space.Host


@dataclass(frozen=True, slots=True)
class HaloRequest:
    """What each device along `axes` needs of dim `dim`: `rows` rows from `firsts[i]` on, of which those from
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
    of filling around them, they hold what device i needs from row `offsets[i]` on. Pieces with places go into
    as much filling as there is before, in and after these rows. `outside`: some device needs what is outside
    of the value; `far`: one needs nothing else."""

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

    def reaches_far(self, counts: tuple[int, ...]) -> list[bool]:
        """Of each ppermute, whether it goes to other devices than neighbours, along axes of so many."""
        return [reaches_far(piece.pairs, counts) for piece in self.pieces if piece.pairs]


@lru_cache(maxsize=4096)
def exchange_of(request: HaloRequest) -> Exchange:
    """The exchange that brings every device what it needs.

    >>> request = HaloRequest(0, ("x",), (-1, 3, 7, 11), (5, 9, 13, 17), rows=6, size=16, block=4)
    >>> [(p.distance, p.rows, p.starts, p.pairs) for p in exchange_of(request).pieces if p.distance]
    [(-1, 1, (3, 3, 3, 3), ((0, 1), (1, 2), (2, 3))), (1, 1, (0, 0, 0, 0), ((1, 0), (2, 1), (3, 2)))]
    """
    needs = [(max(f, 0), min(e, request.size)) for f, e in zip(request.firsts, request.ends, strict=True)]
    distances = _distances(needs, request.block) if request.split else {}
    requested_rows = [(f, e) for f, e in zip(request.firsts, request.ends, strict=True) if f < e]
    outside = any(f < 0 or e > request.size for f, e in requested_rows)
    far = any(e <= 0 or f >= request.size for f, e in requested_rows)
    near = {
        d: [_Message(i + d, i, *rows) for i, rows in receivers.items()] for d, receivers in distances.items()
    }
    own, others = [near.pop(0)] if 0 in near else [], list(near.values())
    # Pieces of neighbours stay apart, so that what others need of them is sent once too.
    near_by = all(abs(distance) <= 1 for distance in distances)
    rounds = others if near_by else _rounds([message for messages in others for message in messages])
    if _sent(rounds) < _sent(others):
        pieces, before, after = _placed(request, own + rounds)
        return Exchange(pieces, (before,) * len(needs), before, after, outside, far)
    pieces = [_piece(d, distances.get(d, {}), request.block, len(needs)) for d in sorted({0, *distances})]
    offsets = _offsets(request, needs, pieces)
    before, total = max(0, -min(offsets)), sum(p.rows for p in pieces)
    after = max(0, max(offsets) + request.rows - total)
    return Exchange(tuple(pieces), tuple(o + before for o in offsets), before, after, outside, far)


def _distances(needs: Sequence[tuple[int, int]], block: int) -> dict[int, dict[int, tuple[int, int]]]:
    """For each distance the receivers, and from which row to which they need the shard of who is so far
    away.
    """
    distances: dict[int, dict[int, tuple[int, int]]] = {}
    for i, (first, end) in enumerate(needs):
        for j in range(first // block, -(-end // block)) if first < end else ():
            distances.setdefault(j - i, {})[i] = (max(first - j * block, 0), min(end - j * block, block))
    return distances


def _piece(distance: int, needs: dict[int, tuple[int, int]], block: int, count: int) -> Piece:
    """The piece that comes from `distance` devices further on. A device that needs less than all of a piece
    gets more rows before it if the shard ends there, else after it.
    """
    if not distance:
        return Piece(0, block, (0,) * count, ())
    rows = max(end - first for first, end in needs.values())
    starts = {i + distance: min(first, block - rows) for i, (first, _) in needs.items()}
    usual = next(iter(starts.values()))
    pairs = tuple((i + distance, i) for i in sorted(needs))
    return Piece(distance, rows, tuple(starts.get(s, usual) for s in range(count)), pairs)


def _offsets(request: HaloRequest, needs, pieces: Sequence[Piece]) -> list[int]:
    """Where in the pieces what each device needs begins; whoever needs nothing takes what another does."""
    held = enumerate(zip(request.firsts, needs, strict=True))
    offsets = [
        _offset(request, i, f, first, pieces) if first < end else None for i, (f, (first, end)) in held
    ]
    usual = next((o for o in offsets if o is not None), 0)
    return [usual if o is None else o for o in offsets]


def _offset(request: HaloRequest, i: int, first: int, inside: int, pieces: Sequence[Piece]) -> int:
    """Where device i finds row `first` in its pieces; `inside` is the first of its rows that is in the
    value.
    """
    if not request.split:
        return first
    holder = inside // request.block
    place = 0
    for piece in pieces:
        if piece.distance == holder - i:
            return place + first - holder * request.block - piece.starts[holder]
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
        round_ = next(fits, None)
        if round_ is None:
            rounds.append(round_ := [])
        round_.append(message)
    return rounds


def _sent(rounds: Sequence[Sequence[_Message]]) -> tuple[int, int]:
    """The rows that one device sends in all rounds, and how many there are."""
    return sum(map(_longest, rounds)), len(rounds)


def _longest(messages: Sequence[_Message]) -> int:
    return max(message.rows for message in messages)


def _placed(request: HaloRequest, rounds: Sequence[Sequence[_Message]]) -> tuple[tuple[Piece, ...], int, int]:
    """A piece for each round, and the rows of filling before and after those that a device needs."""
    before = max(0, -min(_place(request, m, _longest(messages)) for messages in rounds for m in messages))
    return (
        tuple(_in_place(request, messages, before) for messages in rounds),
        before,
        max(map(_longest, rounds)),
    )


def _in_place(request: HaloRequest, messages: Sequence[_Message], before: int) -> Piece:
    """The piece that brings these messages. Who gets nothing of it puts it after the rows that it needs."""
    rows, devices = _longest(messages), range(len(request.firsts))
    starts = {m.sender: _start(request, m, rows) for m in messages}
    places = {m.receiver: _place(request, m, rows) for m in messages}
    pairs = tuple((m.sender, m.receiver) for m in messages if m.sender != m.receiver)
    usual = next(iter(starts.values()))
    ends = tuple(before + places.get(i, request.rows) for i in devices)
    return Piece(None, rows, tuple(starts.get(s, usual) for s in devices), pairs, ends)


def _start(request: HaloRequest, message: _Message, rows: int) -> int:
    """The row of the sender's shard from which on a piece of so many rows holds the message."""
    return min(message.first, request.block - rows)


def _place(request: HaloRequest, message: _Message, rows: int) -> int:
    """Which of the receiver's rows the first one of the piece is."""
    return message.sender * request.block + _start(request, message, rows) - request.firsts[message.receiver]


# The exchange itself, inside `jax.shard_map`


Send = Callable[[Any, Axes, Sequence[tuple[int, int]]], Any]
"""`send(x, axes, pairs)` is a ppermute of x from the first to the second of each pair of devices along
`axes`.
"""


def bring(request: HaloRequest, shard, device, send: Send, fill=0):
    """The rows that this device, number `device` along `request.axes`, needs, with `fill` for those outside
    of the value.
    """
    exchange = exchange_of(request)
    pieces = []
    for piece in exchange.pieces:
        is_part = piece.pairs or piece.places
        rows = slice_by_device(shard, piece.starts, piece.rows, request.dim, device) if is_part else shard
        pieces.append(send(rows, request.axes, piece.pairs) if piece.pairs else rows)
    if exchange.pieces[0].places:
        rows = _put(request, exchange, pieces, device)
        return _filled(request, rows, fill, device) if _shows_garbage(request, exchange, fill) else rows
    around = [_filling(shard, rows, request.dim) for rows in (exchange.before, exchange.after)]
    pieces = [piece for piece in (around[0], *pieces, around[1]) if piece.shape[request.dim]]
    joined = lax.concatenate(pieces, request.dim) if len(pieces) > 1 else pieces[0]
    rows = slice_by_device(joined, exchange.offsets, request.rows, request.dim, device)
    return _filled(request, rows, fill, device) if _shows_garbage(request, exchange, fill) else rows


def _put(request: HaloRequest, exchange: Exchange, pieces: Sequence[Any], device):
    """The rows that this device needs, each piece in its place. Where pieces overlap they are equal."""
    rows = _filling(pieces[0], exchange.before + request.rows + exchange.after, request.dim)
    for piece, brought in zip(exchange.pieces, pieces, strict=True):
        starts = _starts(rows, request.dim, by_device(piece.places, device))
        rows = lax.dynamic_update_slice(rows, brought, starts, allow_negative_indices=False)
    return lax.slice_in_dim(rows, exchange.before, exchange.before + request.rows, axis=request.dim)


def _filling(shard, rows: int, dim: int):
    """Zeros; random keys have none, so the first one is repeated."""
    shape = (*shard.shape[:dim], rows, *shard.shape[dim + 1 :])
    if jnp.issubdtype(shard.dtype, jax.dtypes.extended):
        return jnp.broadcast_to(lax.slice_in_dim(shard, 0, 1, axis=dim), shape)
    return jnp.zeros(shape, shard.dtype)


def _shows_garbage(request: HaloRequest, exchange: Exchange, fill) -> bool:
    """Whether garbage may show. Zeros need no mask, because filling and ppermutes that bring nothing give
    zeros, unless the last shard is padded.
    """
    even = request.size == request.block * (len(request.firsts) if request.split else 1)
    zeros = isinstance(fill, int) and fill == 0 and even and not exchange.far
    cut = request.exact and any(
        end < first + request.rows for first, end in zip(request.firsts, request.ends, strict=True)
    )
    return cut or exchange.outside and not zeros


def _filled(request: HaloRequest, rows, fill, device):
    if memory_of(jax.typeof(rows)) is HOST:
        return _filled_at_host(request, rows, fill, device)
    inside = inside_of(request, device, rows.shape, request.dim)
    return lax.select(inside, rows, jnp.broadcast_to(jnp.asarray(fill, rows.dtype), rows.shape))


def _filled_at_host(request: HaloRequest, rows, fill, device):
    """The same of rows in the host's memory, to which one number for each of them is sent."""
    inside = jax.device_put(inside_of(request, device, (request.rows,), 0), HOST)
    filling = jax.device_put(jnp.asarray(fill, rows.dtype), HOST)
    whole = partial(lax.broadcast_in_dim, shape=rows.shape)
    return lax.select(
        whole(inside, broadcast_dimensions=(request.dim,)), rows, whole(filling, broadcast_dimensions=())
    )


def inside_of(request: HaloRequest, device, shape: tuple[int, ...], dim: int):
    """Which of the rows that this device needs, along `dim` of `shape`, are inside of the value."""
    place = lax.broadcasted_iota("int32", shape, dim) + by_device(request.firsts, device)
    end = (
        by_device([min(end, request.size) for end in request.ends], device) if request.exact else request.size
    )
    return (place >= 0) & (place < end)


def slice_by_device(x, starts: Sequence[int], rows: int, dim: int, device):
    """`rows` rows of x, from `starts[device]` on."""
    start = by_device(starts, device)
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + rows, axis=dim)
    shape = (*x.shape[:dim], rows, *x.shape[dim + 1 :])
    return lax.dynamic_slice(x, _starts(x, dim, start), shape, allow_negative_indices=False)


def _starts(x, dim: int, start) -> list[Any]:
    """Where a block of x begins that is cut along `dim`, from `start` on, which is never negative."""
    return [start if d == dim else np.int32(0) for d in range(x.ndim)]


def by_device(values: Sequence[int], device):
    """`values[device]`: a number where all are equal, a formula where they grow evenly, else a lookup."""
    table = np.array(values, np.int32)
    first, steps = values[0], np.diff(table)
    if (steps != steps[:1]).any():
        picked = lax.dynamic_slice(jnp.asarray(table), [device], [1], allow_negative_indices=False)
        return lax.squeeze(picked, [0])
    step = int(steps[0]) if len(steps) else 0
    return first + step * device if step else first
