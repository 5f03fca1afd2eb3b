"""Rotations: a split dim stays split, and every device sends what it holds at most once.

The dim has blocks of b rows, and row r of the result is row r + first of x, counted around the end. With first = q·b + s a
device's new block is

    rows s.. of the block q devices on | rows ..s of the block q + 1 devices on

one ppermute each, none where that is the device itself. Where the last block is padded, the end is not at the end of a block:
then what comes before it and what comes around it are two halos.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from shardax.graph import Node
from shardax.rotations import rotated
from shardax.spmd_rules.halo import Wanted, sent, take, wanted
from shardax.spmd_rules.registry import MOVES, Local, register_rule
from shardax.spmd_rules.sends import ppermute


def rotate(node: Node) -> str:
    """ "k0 k1 -> k0 k1"; nothing can be sent of random keys, which stay whole."""
    dim, key = node.params["dim"], jnp.issubdtype(node.inputs[0].aval.dtype, jax.dtypes.extended)
    names = " ".join(f"k{d}{'!' if key and d == dim else ''}" for d in range(len(node.inputs[0].shape)))
    return f"{names} -> {names}"


def _rotate_local(local: Local, shard):
    dim = local.params["dim"]
    if not local.operands[0].dims[dim]:
        return [rotated(shard, **local.params)]
    if not _even(local):
        before, around = (take(local, want, shard) for want in _halos(local))
        row = lax.broadcasted_iota("int32", before.shape, dim) + local.start(local.results[0], dim)
        return [lax.select(row < local.node.in_shapes[0][dim] - local.params["first"], before, around)]
    pieces = [_from(local, distance, lax.slice_in_dim(shard, *rows, axis=dim)) for distance, rows in _pieces(local)]
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
    _, count = _block(local)
    if not distance:
        return piece
    pairs = [((i + distance) % count, i) for i in range(count)]
    return ppermute(local, "rows", piece, local.operands[0].dims[local.params["dim"]], pairs)


def _halos(local: Local) -> list[Wanted]:
    """What is before the end, and what is around it."""
    dim, first = local.params["dim"], local.params["first"]
    block, size = _block(local)[0], local.node.in_shapes[0][dim]
    return [wanted(local, 0, dim, (0, dim), lambda r, e, by=by: (r + by, e + by), block) for by in (first, first - size)]


def _sends(local: Local) -> Iterator[float]:
    if not local.operands[0].dims[local.params["dim"]]:
        return
    if not _even(local):
        yield from sent(local, _halos(local))
        return
    row = local.node.inputs[0].itemsize
    for d, n in enumerate(local.in_shape()):
        row *= n if d != local.params["dim"] else 1
    yield from (row * (end - start) for distance, (start, end) in _pieces(local) if distance)


register_rule("rotate", rotate, _rotate_local, passes=(MOVES(0),), sends=_sends)
