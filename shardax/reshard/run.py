"""Reshards as they run on the local shard, inside `jax.shard_map`: one function for each kind of step of
`reshard.plan`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.cost.network import network_of
from shardax.reshard.halo import bring, by_device, slice_by_device
from shardax.reshard.paths import Path
from shardax.reshard.steps import Swap, next_blocks, pairs, swap_of
from shardax.sharding import Axes, AxisSizes, in_mesh_order, shard_count


def apply(path: Path, x: jax.Array, shape: tuple[int, ...], sizes: AxisSizes) -> jax.Array:
    """Runs `path` on the local shard `x`, inside `jax.shard_map`; positions past the true `shape` hold
    garbage afterwards.
    """
    for step in path.steps:
        to = step.to
        if to is not None and not step.source.dims[to]:  # axes arrive at an unsplit dim
            x = _fit(x, (*x.shape[:to], step.layout.padded[to], *x.shape[to + 1 :]))
        x = RUN[step.kind](x, step, shape, sizes)
        x = _fit(x, step.layout.local_shape(sizes))
    return x


def _run_all_to_all(x, step, shape, sizes):
    if step.dim is None:
        return _run_exchange(x, step, sizes)
    return lax.all_to_all(x, step.axes, split_axis=step.to, concat_axis=step.dim, tiled=True)


def _run_exchange(x, step, sizes):
    """An all_to_all between several dims: each axis that comes to a dim cuts it, and these cuts, in front of
    all dims, go to the devices; what comes from them is put in front of the rows of the dims that the axes
    leave.
    """
    before, after = step.source.dims, step.layout.dims
    gathered = [n if have else p for n, have, p in zip(x.shape, before, step.layout.padded, strict=True)]
    gathered = [p if axes else n for n, p, axes in zip(x.shape, gathered, after, strict=True)]
    coming = [
        axes[len(have) :] if axes[: len(have)] == have else ()
        for have, axes in zip(before, after, strict=True)
    ]
    leaving = [
        axes[len(left) :] if axes[: len(left)] == left else ()
        for axes, left in zip(before, after, strict=True)
    ]
    rows = [n // shard_count(axes, sizes) for n, axes in zip(gathered, coming, strict=True)]
    cuts = [sizes[a] for a in step.axes]
    labels, order = _labels(coming), [*step.axes, *range(len(rows))]
    x = _fit(x, gathered).reshape([rows[a] if isinstance(a, int) else sizes[a] for a in labels])
    x = lax.transpose(x, [labels.index(label) for label in order])
    x = lax.all_to_all(x.reshape(-1, *rows), step.axes, split_axis=0, concat_axis=0, tiled=True)
    x = lax.transpose(x.reshape(*cuts, *rows), [order.index(label) for label in _labels(leaving)])
    return x.reshape([n * shard_count(axes, sizes) for n, axes in zip(rows, leaving, strict=True)])


def _run_swap(x, step, shape, sizes):
    swap = swap_of(step.source, step.layout, step.dim, step.to, step.axes, network_of(sizes))
    place = axis_position(swap.axes, sizes)
    rows = [x.shape[d] // cut for d, cut in zip(swap.dims, swap.cuts, strict=True)]

    def pieces() -> Iterator[Any]:
        for permuted, sent, _ in swap.rounds:
            piece = x
            for dim, n, which in zip(swap.dims, rows, sent, strict=True):
                if n != x.shape[dim]:
                    piece = slice_by_device(piece, [n * i for i in which], n, dim, place)
            yield _permuted(piece, swap.axes, permuted, sizes)

    whole = step.layout.local_shape(sizes)
    cut = {dim: k for k, dim in enumerate(swap.dims) if x.shape[dim] // swap.cuts[k] != whole[dim]}
    return _put_together(pieces(), swap, cut, whole, place)


def _put_together(pieces: Iterator[Any], swap: Swap, cut: Mapping[int, int], shape: tuple[int, ...], place):
    """The shard of this shape made of the pieces that come in the rounds; `cut`: the dims of which one is a
    part, and their places in the swap. Two are chosen between for each half, which compilers make part of
    what reads it; more are written into zeros, one after the other.
    """
    if len(swap.rounds) == 2:
        ((dim, k),), (first, second) = cut.items(), pieces
        is_later = lax.ne(by_device(swap.rounds[0].put[k], place), np.int32(0))
        halves = [lax.select(is_later, second, first), lax.select(is_later, first, second)]
        return lax.concatenate(halves, dim)
    whole = None
    for piece, (_, _, put) in zip(pieces, swap.rounds, strict=True):
        whole = lax.full(shape, 0, piece.dtype) if whole is None else whole
        starts: list[Any] = [np.int32(0)] * len(shape)
        for dim, k in cut.items():
            starts[dim] = by_device([piece.shape[dim] * i for i in put[k]], place)
        whole = lax.dynamic_update_slice_p.bind(whole, piece, *starts)
    return whole


def _labels(axes):
    """What a shape consists of in which each dim has these axes in front: axes by name, dims by number."""
    return [label for dim, some in enumerate(axes) for label in (*some, dim)]


def ppermute(x, axes, pairs, sizes):
    """`lax.ppermute`, where `pairs` are numbered along `axes` in the order given; JAX takes them in mesh
    order.
    """
    return _permuted(x, *in_mesh_order(axes, pairs, sizes), sizes)


_apart: ContextVar[bool] = ContextVar("apart", default=False)


@contextmanager
def apart(devices_part: bool = True) -> Iterator[None]:
    """What is made inside may run on some devices and not on others, as the branches do that stages of a
    pipeline take. XLA has all devices meet at a ppermute, but only those of a group at an all_gather."""
    token = _apart.set(devices_part or _apart.get())
    try:
        yield
    finally:
        _apart.reset(token)


def _permuted(x, axes: Axes, perm: Iterable[tuple[int, int]], sizes: AxisSizes):
    if not _apart.get():
        return lax.ppermute(x, axes, perm)
    sender = np.full(shard_count(axes, sizes), -1, "int32")
    for source, target in perm:
        sender[target] = source
    mine = jnp.asarray(sender)[axis_position(axes, sizes)]
    rows = lax.all_gather(x, axes)
    got = lax.dynamic_index_in_dim(rows, lax.max(mine, np.int32(0)), keepdims=False)
    return got if (sender >= 0).all() else lax.select(mine >= 0, got, lax.full_like(got, 0))


def block_of(x, place, block: int, dim: int):
    """`block` rows of x along `dim`, from `place · block` on. (`lax.dynamic_slice` would look for negative
    starts.)
    """
    starts = [np.int32(0)] * x.ndim
    starts[dim] = lax.mul(place, np.int32(block))
    return lax.dynamic_slice_p.bind(x, *starts, slice_sizes=(*x.shape[:dim], block, *x.shape[dim + 1 :]))


def axis_position(axes: Axes, sizes: AxisSizes):
    """This device's position along `axes`, major to minor: an int32 scalar, 0 where there are none."""
    if not axes:
        return 0
    place = lax.axis_index(axes[0])
    for axis in axes[1:]:
        place = lax.add(lax.mul(place, np.int32(sizes[axis])), lax.axis_index(axis))
    return place


def _run_owe(x, step, shape, sizes):
    reductions = dict(step.layout.pending)
    for axis in step.axes:
        x = lax.select(lax.axis_index(axis) == 0, x, lax.full_like(x, identity(reductions[axis], x.dtype)))
    return x


def _run_halo(x, step, shape, sizes):
    dim, axes, count = step.dim, step.axes, shard_count(step.axes, sizes)
    old, new = step.source.padded[dim] // count, step.layout.padded[dim] // count
    request = next_blocks(dim, axes, old, new, count, shape[dim])
    return bring(
        request, x, axis_position(axes, sizes), lambda rows, axes, pairs: ppermute(rows, axes, pairs, sizes)
    )


RUN: dict[str, Callable] = {
    "all_gather": lambda x, step, shape, sizes: lax.all_gather(x, step.axes, axis=step.dim, tiled=True),
    "all_reduce": lambda x, step, shape, sizes: REDUCE[dict(step.source.pending)[step.axes[0]]](x, step.axes),
    "all_to_all": _run_all_to_all,
    "crop": lambda x, step, shape, sizes: x,
    "empty": lambda x, step, shape, sizes: jnp.zeros(step.layout.local_shape(sizes), x.dtype),
    "halo": _run_halo,
    "owe": _run_owe,
    "ppermute": lambda x, step, shape, sizes: _permuted(
        x, step.axes, pairs(step.source, step.layout, step.axes, sizes), sizes
    ),
    "reduce_scatter": lambda x, step, shape, sizes: lax.psum_scatter(
        x, step.axes, scatter_dimension=step.to, tiled=True
    ),
    "slice": lambda x, step, shape, sizes: block_of(
        x, axis_position(step.axes, sizes), step.layout.local_shape(sizes)[step.to], step.to
    ),
    "swap": _run_swap,
}


def _extremum(reduce: Callable, reduction: str) -> Callable:
    """The maximum or minimum of floats over devices, taken of integers that have the same order, with NaN
    beyond all others, as XLA has it within a device. Collectives on floats may lose a NaN.
    """

    def reduced(x, axes):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return reduce(x, axes)
        if x.dtype.itemsize == 1:  # some of these have no integer to spare for NaN
            return reduced(x.astype(jnp.bfloat16), axes).astype(x.dtype)
        integers = jnp.iinfo(f"int{8 * x.dtype.itemsize}")
        beyond = np.asarray(integers.max if reduction == "max" else integers.min, integers.dtype)
        bits = lax.select(
            jnp.isnan(x),
            lax.full(x.shape, beyond),
            _ordered_bits(lax.bitcast_convert_type(x, integers.dtype)),
        )
        bits = reduce(bits, axes)
        nan = lax.full(x.shape, np.asarray(np.nan).astype(x.dtype))
        return lax.select(bits == beyond, nan, lax.bitcast_convert_type(_ordered_bits(bits), x.dtype))

    return reduced


def _ordered_bits(bits):
    """The bits of floats as integers in the same order, and back. (The greater the bits of a negative float,
    the less the float.)
    """
    low = np.asarray(jnp.iinfo(bits.dtype).max, bits.dtype)
    return lax.select(bits < 0, bits ^ low, bits)


REDUCE: dict[str, Callable] = {
    "sum": lax.psum,
    "max": _extremum(lax.pmax, "max"),
    "min": _extremum(lax.pmin, "min"),
}


def identity(reduction: str, dtype) -> Any:
    """What leaves a reduction of this kind unchanged: 0, the least, or the greatest value of the dtype.

    >>> float(identity("max", "float32"))
    -inf
    """
    dtype = np.dtype(dtype)
    if reduction == "sum":
        return np.zeros((), dtype)
    if dtype == np.bool_:
        return np.asarray(reduction == "min")
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return np.asarray(info.min if reduction == "max" else info.max, dtype)
    endless, info = np.asarray(-np.inf if reduction == "max" else np.inf).astype(dtype), jnp.finfo(dtype)
    if np.isinf(np.real(endless).astype("float32")):
        return endless
    return np.asarray(
        info.min if reduction == "max" else info.max, dtype
    )  # some floats of one byte have no infinity


def _fit(x, shape):
    """`x` cropped or padded at the end of each dim to `shape`."""
    if x.shape == tuple(shape):
        return x
    x = lax.slice(x, (0,) * x.ndim, tuple(map(min, x.shape, shape)))
    if x.shape == tuple(shape):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # random keys have no zero to pad with
        for dim, (n, new) in enumerate(zip(x.shape, shape, strict=True)):
            last = lax.slice_in_dim(x, n - 1, n, axis=dim)
            x = lax.concatenate([x] + [last] * (new - n), dim) if new > n else x
        return x
    return lax.pad(x, _garbage(x.dtype), [(0, new - n, 0) for n, new in zip(x.shape, shape, strict=True)])


def _garbage(dtype):
    """What padding is filled with. Its value must not matter to anybody: tests fill it with NaN."""
    return jnp.zeros((), dtype)
