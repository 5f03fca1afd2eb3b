"""FFTs. Batch dims are kept; what is transformed is unsplit, or one dim after the other is.

An FFT over several dims that no batch dim can split need not be gathered: each device transforms the dims
that it has unsplit, an all_to_all brings it the dim that was split, for a part of another one, and it
transforms that. (The way of distributed FFT libraries, two dims of which are unsplit at a time: Pekurovsky
2012, P3DFFT.)

    x split by rows  ->  along the columns  ->  all_to_all: split by columns  ->  along the rows
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jax import lax
from jax.lax import FftType

from shardax.cost.network import Message
from shardax.graph.graph import Node
from shardax.sharding import Axes, Layout, Padding, Sharding
from shardax.spmd_rules import flops
from shardax.spmd_rules.registry import LINEAR, Local, register_rule
from shardax.spmd_rules.sends import all_to_all

_OF_OTHER_DIMS = {FftType.RFFT: FftType.FFT, FftType.IRFFT: FftType.IFFT}
_MOST = 3  # axes that are tried in any order


def fft(node: Node) -> str:
    """ "b t0~! -> b t0~!": the transformed dims are the last ones. That of a real transform is half as long
    on one side.
    """
    dims, core = len(node.inputs[0].shape), len(node.params["fft_lengths"])
    side = " ".join([f"b{i}" for i in range(dims - core)] + [f"t{i}~!" for i in range(core)])
    return f"{side} -> {side}"


def _core(node: Node) -> range:
    """The dims that are transformed."""
    rank = len(node.inputs[0].shape)
    return range(rank - len(node.params["fft_lengths"]), rank)


def _ways(candidates: Iterator[Local], padding: Padding) -> Iterator[Local]:
    """The candidates as they are; and each with axes, which it leaves idle, that move from one transformed
    dim to another.
    """
    for local in candidates:
        yield local
        node = local.node
        layouts = (*local.operands, *local.results)
        used = {a for layout in layouts for a in (*layout.sharding.axes, *layout.pending_axes)}
        free = tuple(a for a, n in local.sizes.items() if n > 1 and a not in used)
        if 0 in node.inputs[0].shape:
            continue
        choose = itertools.permutations if len(free) <= _MOST else itertools.combinations
        orders = (axes for count in range(1, len(free) + 1) for axes in choose(free, count))
        for axes, (start, end) in itertools.product(orders, itertools.permutations(_core(node), 2)):
            fft_type, last = FftType(node.params["fft_type"]), _core(node)[-1]
            # the last dim comes first where real numbers are transformed, and last where they are made
            if fft_type == FftType.RFFT and start == last or fft_type == FftType.IRFFT and end == last:
                continue
            yield replace(
                local,
                operands=(_split(local.operands[0], start, axes, node.inputs[0].shape, padding),),
                results=(_split(local.results[0], end, axes, node.outputs[0].shape, padding),),
            )


def _split(layout: Layout, dim: int, axes: Axes, shape: tuple[int, ...], padding: Padding) -> Layout:
    dims = (*layout.dims[:dim], axes, *layout.dims[dim + 1 :])
    padded = (*layout.padded[:dim], padding.padded(shape[dim], axes), *layout.padded[dim + 1 :])
    return Layout(Sharding(dims), padded, layout.pending)


def _transposed(local: Local) -> tuple[Axes, int, int] | None:
    """The axes that move, from which dim to which."""
    core = _core(local.node)
    start = next((d for d in core if local.operands[0].dims[d]), None)
    end = next((d for d in core if local.results[0].dims[d]), None)
    return None if start is None or end is None else (local.operands[0].dims[start], start, end)


def _sends(local: Local) -> Iterator[Message]:
    transposed = _transposed(local)
    if transposed:
        axes, start, _ = transposed
        shape, node = list(local.out_shape()), local.node
        shape[start] = math.ceil(local.operands[0].padded[start] / local.count(axes))
        itemsize = max(node.inputs[0].itemsize, node.outputs[0].itemsize)  # of complex numbers
        padded = math.prod(shape) * local.count(axes)
        yield Message("all_to_all", axes, padded * itemsize * (local.count(axes) - 1) / local.count(axes))


def _local(local: Local, shard):
    transposed = _transposed(local)
    if transposed is None:
        return [_flat_fft(shard, FftType(local.params["fft_type"]), local.params["fft_lengths"])]
    axes, start, end = transposed
    node, fft_type = local.node, FftType(local.params["fft_type"])
    core = _core(node)
    lengths = dict(zip(core, node.params["fft_lengths"], strict=True))
    others = _in_turn(
        fft_type, [d for d in core if d != start and (fft_type != FftType.IRFFT or d != core[-1])]
    )
    rest = _in_turn(fft_type, [d for d in core if d not in others])
    x = _along(shard, others, fft_type, lengths)
    x = _exchanged(local, x, axes, start, end)
    x = lax.slice_in_dim(x, 0, node.inputs[0].shape[start], axis=start)
    return [_along(x, rest, fft_type, lengths)]


def _in_turn(fft_type: FftType, dims: Sequence[int]) -> list[int]:
    return sorted(dims, reverse=fft_type != FftType.IRFFT)


def _along(x, dims: Sequence[int], fft_type: FftType, lengths: dict[int, int]):
    """One transform after the other; a real one is that of the last dim."""
    for d in dims:
        real = d == x.ndim - 1
        order = [*(i for i in range(x.ndim) if i != d), d]
        x = _flat_fft(
            lax.transpose(x, order),
            fft_type if real else _OF_OTHER_DIMS.get(fft_type, fft_type),
            (lengths[d],),
        )
        x = lax.transpose(x, [order.index(i) for i in range(x.ndim)])
    return x


def _exchanged(local: Local, x, axes: Axes, start: int, end: int):
    """Splits dim `end`, padded, over the devices, and puts dim `start` together."""
    extra = local.results[0].padded[end] - x.shape[end]
    x = lax.pad(x, x.dtype.type(0), [(0, extra if d == end else 0, 0) for d in range(x.ndim)])
    return all_to_all(local, "dims", x, axes, end, start)


def _flat_fft(x, fft_type: FftType, lengths: Sequence[int]):
    """With one batch dim, in front, of a flat array and into one: XLA's CPU aborts on an FFT whose dims are
    in another order in memory, as a transpose or a gather beside it may ask for."""
    batch = x.shape[: x.ndim - len(lengths)]
    rows = (math.prod(batch), *x.shape[len(batch) :])
    result = lax.fft(lax.reshape(_flat(x), rows), fft_type, tuple(lengths))
    return lax.reshape(_flat(result), (*batch, *result.shape[1:]))


def _flat(x):
    return lax.optimization_barrier(lax.reshape(x, (x.size,)))


register_rule("fft", fft, _local, passes=(LINEAR(0),), flops=flops.fft, sends=_sends, ways=_ways)
