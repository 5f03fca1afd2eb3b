"""Halo exchange: every device gets the rows of a split dim that it wants, whichever devices hold them, by ppermutes.

An operation only says what each device wants (`Wanted`): rows `firsts[i]` to `ends[i]`. All is known statically. Every device
takes equally many, one after the other; here four devices have 4 rows each and want their own and one on either side:

    rows            0  1  2  3 | 4  5  6  7 | 8  9 10 11 |12 13 14 15
    device 0    -1  0  1  2  3   4
    device 1              3      4  5  6  7   8                        two pieces sent: the last row one device
    device 2                           7      8  9 10 11  12           further on, the first row one device back
    device 3                                          11  12 13 14 15  16

There is one piece for each distance between a device and a holder of what it wants, so a halo may reach over several shards.
A piece has as many rows as the device that wants most of it (GSPMD, section 3.2: one configuration for all, then a slice
whose start depends on the device). Rows -1 and 16 are outside of the value: they are made of what fills it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.graph import Node
from shardax.sharding import Axes, Layout
from shardax.spmd_rules.registry import Local
from shardax.spmd_rules.sends import ppermute


@dataclass(frozen=True, slots=True)
class Wanted:
    """What each device along `axes` wants of dim `dim` of an operand: `rows` rows from `firsts[i]` on, of which those from
    `ends[i]` on do not matter. The dim has `size` rows. A reshape counts elements as rows, `unit` for each position."""

    operand: int
    dim: int
    axes: Axes
    firsts: tuple[int, ...]
    ends: tuple[int, ...]
    rows: int
    size: int
    unit: int = 1


def window_of(name: str, node: Node) -> str:
    """The factor of a windowed dim. Empty dims and those of random keys, which no filling is like, stay whole."""
    keys = any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in node.inputs)
    return f"{name}~{'!' * (keys or any(0 in shape for shape in (*node.in_shapes, *node.out_shapes)))}"


def wanted(
    local: Local,
    operand: int,
    dim: int,
    result: tuple[int, int],
    span: Callable[[Any, Any], tuple],
    rows: int,
) -> Wanted:
    """What the devices want of dim `dim` of an operand that make dim `result[1]` of result `result[0]`.

    `span(r, e)` gives the first and the end of the rows that positions r to before e are made of; arrays in, arrays out.
    `rows` are those that a whole block is made of.
    """
    number, to = result
    return _wanted(local, operand, dim, local.results[number], local.node.out_shapes[number], to, span, rows)


def wanted_with(
    local: Local, operand: int, dim: int, other: tuple[int, int], span: Callable[[Any, Any], tuple], rows: int
) -> Wanted:
    """What the devices want of an operand that hold blocks of dim `other[1]` of operand `other[0]`; else as `wanted`."""
    number, to = other
    return _wanted(local, operand, dim, local.operands[number], local.node.in_shapes[number], to, span, rows)


def _wanted(local: Local, operand: int, dim: int, layout: Layout, shape, to: int, span, rows: int) -> Wanted:
    axes, block = layout.dims[to], layout.local_shape(local.sizes)[to]
    starts = np.arange(local.count(axes)) * block
    firsts, ends = span(starts, np.minimum(starts + block, shape[to]))
    ends = np.where(starts < shape[to], ends, firsts)
    whole = local.node.in_shapes[operand][dim]
    return Wanted(operand, dim, axes, tuple(firsts.tolist()), tuple(ends.tolist()), rows, whole)


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


def plan(local: Local, want: Wanted) -> Exchange:
    """The exchange that brings every device what it wants."""
    split = bool(local.operands[want.operand].dims[want.dim])
    return _plan(want, local.in_shape(want.operand)[want.dim] * want.unit, split)


@lru_cache(maxsize=4096)
def _plan(want: Wanted, block: int, split: bool) -> Exchange:
    """
    >>> want = Wanted(0, 0, ("x",), (-1, 3, 7, 11), (5, 9, 13, 17), rows=6, size=16)
    >>> [(p.distance, p.rows, p.starts, p.pairs) for p in _plan(want, 4, True).pieces if p.distance]
    [(-1, 1, (3, 3, 3, 3), ((0, 1), (1, 2), (2, 3))), (1, 1, (0, 0, 0, 0), ((1, 0), (2, 1), (3, 2)))]
    """
    count, size = len(want.firsts), want.size
    needs = [(max(f, 0), min(e, size)) for f, e in zip(want.firsts, want.ends, strict=True)]
    distances = _distances(needs, block) if split else {}
    pieces = [_piece(d, distances.get(d, {}), block, count) for d in sorted({0, *distances})]
    offsets = _offsets(want, needs, pieces, block if split else 0)
    before, total = max(0, -min(offsets)), sum(p.rows for p in pieces)
    after = max(0, max(offsets) + want.rows - total)
    asked = [(f, e) for f, e in zip(want.firsts, want.ends, strict=True) if f < e]
    outside = any(f < 0 or e > size for f, e in asked)
    far = any(e <= 0 or f >= size for f, e in asked)
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


def _offsets(want: Wanted, needs, pieces: Sequence[Piece], block: int) -> list[int]:
    """Where in the pieces what each device wants begins; whoever wants nothing takes what another does."""
    held = enumerate(zip(want.firsts, needs, strict=True))
    found = [_offset(i, f, first, pieces, block) if first < end else None for i, (f, (first, end)) in held]
    usual = next((o for o in found if o is not None), 0)
    return [usual if o is None else o for o in found]


def _offset(i: int, first: int, inside: int, pieces: Sequence[Piece], block: int) -> int:
    """Where device i finds row `first` in its pieces; `inside` is the first of its rows that is in the value. Without blocks
    (`block` is 0) all rows are in its own shard.
    """
    if not block:
        return first
    holder = inside // block
    place = 0
    for piece in pieces:
        if piece.distance == holder - i:
            return place + inside - holder * block - piece.starts[holder] - (inside - first)
        place += piece.rows
    raise AssertionError(f"no piece from {holder} to {i}")


def sent(local: Local, wants: Iterable[Wanted]) -> Iterator[int]:
    """The bytes that one device sends in each ppermute, when the dims are exchanged one after the other."""
    shapes = [list(local.in_shape(i)) for i in range(len(local.operands))]
    for want in wants:
        shape = shapes[want.operand]
        row = math.prod(shape) // (shape[want.dim] * want.unit) * local.node.inputs[want.operand].itemsize
        shape[want.dim] = -(-want.rows // want.unit)
        yield from (rows * row for rows in plan(local, want).sent)


def halo_sends(wants: Callable[[Local], Iterable[Wanted]]) -> Callable[[Local], Iterator[int]]:
    """What a primitive sends whose lowering takes what `wants` says."""
    return lambda local: sent(local, wants(local))


def take(local: Local, want: Wanted, shard, fill=0):
    """The rows that this device wants, with `fill` for those outside of the value."""
    exchange, dim = plan(local, want), want.dim
    pieces = [_brought(local, want, piece, shard) for piece in exchange.pieces]
    around = [_filling(shard, rows, dim) for rows in (exchange.before, exchange.after)]
    pieces = [piece for piece in (around[0], *pieces, around[1]) if piece.shape[dim]]
    device = local.index(want.axes)
    rows = slice_by_device(
        lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0], exchange.offsets, want.rows, dim, device
    )
    return _filled(local, want, rows, fill, device) if _shows_garbage(local, want, exchange, fill) else rows


def _brought(local: Local, want: Wanted, piece: Piece, shard):
    if not piece.distance:
        return shard
    part = slice_by_device(shard, piece.starts, piece.rows, want.dim, local.index(want.axes))
    return ppermute(local, "halo", part, want.axes, piece.pairs)


def _filling(shard, rows: int, dim: int):
    return jnp.zeros((*shard.shape[:dim], rows, *shard.shape[dim + 1 :]), shard.dtype)


def _shows_garbage(local: Local, want: Wanted, exchange: Exchange, fill) -> bool:
    """Whether garbage may show. Zeros need no mask, because filling and ppermutes that bring nothing give zeros, unless the
    last shard is padded.
    """
    even = want.size == local.operands[want.operand].padded[want.dim] * want.unit
    zeros = isinstance(fill, int) and fill == 0 and even and not exchange.far
    return exchange.outside and not zeros


def _filled(local: Local, want: Wanted, rows, fill, device):
    place = lax.broadcasted_iota("int32", rows.shape, want.dim) + by_device(want.firsts, device)
    return lax.select((place >= 0) & (place < want.size), rows, jnp.broadcast_to(jnp.asarray(fill, rows.dtype), rows.shape))


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
