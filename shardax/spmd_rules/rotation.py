"""Rotations: a split dim stays split, and every device sends what it holds at most once.

The dim has blocks of b rows, and row r of the result is row r + first of x, counted around the end. With
first = q·b + s a device's new block is

    rows s.. of the block q devices on | rows ..s of the block q + 1 devices on

one ppermute each, and none where that is the device itself. (As a halo it would take twice as many, as halos
do not reach around the end.) Where the last block is padded, the dim does not end at the end of a block: the
rows before the end and those around it are then two halos.

Where `first` is only known when the program runs, blocks are sent q devices on, in steps of 1, 2, 4, ... of
which each is taken or not, and once more for the blocks after these. Where that sends no less than a gather
of the dim, the dim is gathered.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.cost.network import Message, reaches_far
from shardax.graph.graph import Node
from shardax.graph.primitives import rotated
from shardax.reshard.halo import HaloRequest
from shardax.spmd_rules.halo import request_of, sent, take
from shardax.spmd_rules.registry import MOVES, Local, register_rule
from shardax.spmd_rules.sends import all_gather, ppermute


def rotate(node: Node) -> str:
    """ "k0 k1 -> k0 k1"; nothing can be sent of random keys, which stay unsplit."""
    dim, key = node.params["dim"], jnp.issubdtype(node.inputs[0].aval.dtype, jax.dtypes.extended)
    dims = " ".join(f"k{d}{'!' if key and d == dim else ''}" for d in range(len(node.inputs[0].shape)))
    return f"{dims}{', ' * (len(node.inputs) - 1)} -> {dims}"


def _rotate_local(local: Local, shard):
    dim = local.params["dim"]
    if not local.operands[0].dims[dim] or not local.params["first"]:
        return [rotated(shard, **local.params)]
    if not _even(local):
        before, around = (take(local, request, shard) for request in _halos(local))
        row = lax.broadcasted_iota("int32", before.shape, dim) + local.start(local.results[0], dim)
        return [lax.select(row < local.node.in_shapes[0][dim] - local.params["first"], before, around)]
    pieces = [
        _from(local, distance, lax.slice_in_dim(shard, *rows, axis=dim)) for distance, rows in _pieces(local)
    ]
    return [lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]]


def _even(local: Local) -> bool:
    dim = local.params["dim"]
    return local.operands[0].padded[dim] == local.node.in_shapes[0][dim]


def _pieces(local: Local) -> list[tuple[int, tuple[int, int]]]:
    """(how many devices on, rows) of what a device's new block is made of."""
    block, count = _block(local)
    distance, start = divmod(local.params["first"], block)
    pieces = [(distance % count, (start, block)), ((distance + 1) % count, (0, start))]
    return [piece for piece in pieces if piece[1][0] < piece[1][1]]


def _block(local: Local) -> tuple[int, int]:
    dim = local.params["dim"]
    return local.in_shape()[dim], local.count(local.operands[0].dims[dim])


def _from(local: Local, distance: int, piece):
    """The piece of the device `distance` further on."""
    if not distance:
        return piece
    axes = local.operands[0].dims[local.params["dim"]]
    return ppermute(local, "rows", piece, axes, _pairs(local, distance))


def _pairs(local: Local, distance: int) -> list[tuple[int, int]]:
    _, count = _block(local)
    return [((i + distance) % count, i) for i in range(count)]


def _halos(local: Local) -> list[HaloRequest]:
    """What is before the end, and what is around it."""
    dim, first = local.params["dim"], local.params["first"]
    block, size = _block(local)[0], local.node.in_shapes[0][dim]
    return [
        request_of(local, 0, dim, (0, dim), lambda r, e, by=by: (r + by, e + by), block)
        for by in (first, first - size)
    ]


def _sends(local: Local) -> Iterator[Message]:
    if not local.operands[0].dims[local.params["dim"]] or not local.params["first"]:
        return
    if not _even(local):
        yield from sent(local, _halos(local))
        return
    for distance, (start, end) in _pieces(local):
        if distance:
            yield _to(local, distance, end - start)


def _to(local: Local, distance: int, rows: int) -> Message:
    """So many rows, which the device so far further on has."""
    axes = local.operands[0].dims[local.params["dim"]]
    far = reaches_far(_pairs(local, distance), [local.sizes[a] for a in axes])
    return Message("ppermute", axes, _row_bytes(local) * rows, far=far)


def _row_bytes(local: Local) -> int:
    shape = local.in_shape()
    return (
        math.prod(n for d, n in enumerate(shape) if d != local.params["dim"]) * local.node.inputs[0].itemsize
    )


# By what is known when the program runs


def _rotate_by_local(local: Local, shard, first):
    dim, size = local.params["dim"], local.node.in_shapes[0][local.params["dim"]]
    first = _within(first, size)
    first = lax.rem(size - first if local.params["back"] else first, np.int32(size))
    if not _hops(local):
        return [_window(local, shard, first)]
    if _even(local):
        return [_shifted(local, shard, first)]
    block, count = _block(local)
    total = block * count
    before, around = (
        _shifted(local, shard, first),
        _shifted(local, shard, lax.rem(first - size + total, np.int32(total))),
    )
    row = lax.broadcasted_iota("int32", before.shape, dim) + local.start(local.results[0], dim)
    return [lax.select(row < size - first, before, around)]


def _within(first, size: int):
    most = min(size, np.iinfo(first.dtype).max)
    return lax.convert_element_type(lax.clamp(first.dtype.type(0), first, first.dtype.type(most)), "int32")


def _window(local: Local, shard, first):
    """The rows of this device's block, cut out of the gathered dim."""
    dim, size = local.params["dim"], local.node.in_shapes[0][local.params["dim"]]
    (block, count), axes = _block(local), local.operands[0].dims[local.params["dim"]]
    if count > 1:
        shard = lax.slice_in_dim(all_gather(local, "rows", shard, axes, dim), 0, size, axis=dim)
    copies = lax.concatenate([shard] * -(-(size - 1 + block) // size), dim)
    return lax.dynamic_slice_in_dim(
        copies, lax.rem(first + local.index(axes) * block, np.int32(size)), block, axis=dim
    )


def _shifted(local: Local, shard, first):
    """The rows from `first` on behind where this device's block begins, counted around the end of the last
    block.
    """
    (block, count), dim = _block(local), local.params["dim"]
    for bit in range((count - 1).bit_length()):
        on = (lax.div(first, np.int32(block)) >> bit) & 1 == 1
        shard = lax.select(lax.broadcast(on, shard.shape), _from(local, 1 << bit, shard), shard)
    both = lax.concatenate([shard, _from(local, 1, shard)], dim)
    return lax.dynamic_slice_in_dim(both, lax.rem(first, np.int32(block)), block, axis=dim)


def _hops(local: Local) -> int:
    """How often each device sends its block; 0 where it is gathered, as that sends no more."""
    _, count = _block(local)
    hops = ((count - 1).bit_length() + 1) * (1 if _even(local) else 2)
    return hops if hops < count - 1 else 0


def _by_sends(local: Local) -> Iterator[Message]:
    block, count = _block(local)
    if not _hops(local):
        axes = local.operands[0].dims[local.params["dim"]]
        yield from [Message("all_gather", axes, _row_bytes(local) * block * (count - 1))] * (count > 1)
        return
    for _ in range(1 if _even(local) else 2):
        yield from (_to(local, 1 << bit, block) for bit in range((count - 1).bit_length()))
        yield _to(local, 1, block)


register_rule("rotate", rotate, _rotate_local, passes=(MOVES(0),), sends=_sends)
register_rule("rotate_by", rotate, _rotate_by_local, passes=(MOVES(0),), sends=_by_sends)
