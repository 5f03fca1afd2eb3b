"""Primitives that only place elements: transpose, broadcast, slice, pad, concatenate, iota and the like."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.cost.network import FAR, Message
from shardax.graph.graph import Node
from shardax.reshard.halo import HaloRequest, slice_by_device
from shardax.sharding import Axes
from shardax.spmd_rules.halo import halo_sends, request_of, sent, take, window_of
from shardax.spmd_rules.indexing import owner_mark
from shardax.spmd_rules.registry import MOVES, Local, Passes, register_rule, replicated_rule
from shardax.spmd_rules.rule import Shape
from shardax.spmd_rules.sends import ppermute


def bitcast_convert_type(node: Node) -> str:
    """Where the widths differ, the minor-most dim of one side holds the pieces of an element."""
    (old,), (new,) = node.in_shapes, node.out_shapes
    kept = " ".join(f"k{d}" for d in range(min(len(old), len(new))))
    return f"{kept}{' p!' * (len(old) > len(new))} -> {kept}{' p!' * (len(new) > len(old))}"


def broadcast_in_dim(node: Node) -> str:
    """ "k0 1 -> n0 k0 n2": dims that are new or stretched may be split freely."""
    (old, *_), (new,) = node.in_shapes, node.out_shapes
    result = [f"n{d}" for d in range(len(new))]
    operand = ["1"] * len(old)
    for d, at in enumerate(node.params["broadcast_dimensions"]):
        if old[d] == new[at]:
            operand[d] = result[at] = f"k{d}"
    return f"{' '.join(operand)} -> {' '.join(result)}"


def _broadcast_in_dim_local(local: Local, shard):
    return local.bind(shard, shape=local.out_shape(), sharding=None)


def concatenate(node: Node) -> str:
    """ "k0 c~, k0 c~ -> k0 c~"."""
    dim, window = node.params["dimension"], window_of("c", node)
    operands = [" ".join(_kept(shape, {dim: window})) for shape in node.in_shapes]
    return f"{', '.join(operands)} -> {' '.join(_kept(node.out_shapes[0], {dim: window}))}"


def _concatenate_requests(local: Local) -> Iterator[HaloRequest]:
    """What each operand gives to this device's part of the result; `before` is where the operand begins
    there.
    """
    dim, before = local.params["dimension"], 0
    for i, shape in enumerate(local.node.in_shapes if local.results[0].dims[dim] else ()):
        size, start = shape[dim], before
        span = lambda r, e, start=start, size=size: _clipped(r - start, e - start, size)  # noqa: E731
        yield request_of(local, i, dim, (0, dim), span, local.out_shape()[dim])
        before += size


def _clipped(first, end, size: int):
    """Rows from `first` on; those before `end` matter, as far as there are any."""
    return first, np.where((end > 0) & (first < size), np.minimum(end, size), first)


def _concatenate_local(local: Local, *shards):
    requests = list(_concatenate_requests(local))
    if not requests:
        return local.bind(*shards)
    dim, parts = (
        local.params["dimension"],
        [take(local, request, x) for request, x in zip(requests, shards, strict=True)],
    )
    place = lax.broadcasted_iota("int32", local.out_shape(), dim) + local.start(local.results[0], dim)
    ends = itertools.accumulate(shape[dim] for shape in local.node.in_shapes)
    result = parts[-1]
    for part, end in reversed(list(zip(parts[:-1], ends, strict=False))):
        result = lax.select(place < end, part, result)
    return [result]


def _kept(shape: Shape, others: dict[int, str], letter: str = "k") -> list[str]:
    """A factor for each dim, `others` where they say so."""
    return [others.get(d, f"{letter}{d}") for d in range(len(shape))]


def empty(node: Node) -> str:
    return f" -> {' '.join(_kept(node.out_shapes[0], {}))}"


def _empty_local(local: Local):
    return local.bind(shape=local.out_shape(), out_sharding=None)


def iota(node: Node) -> str:
    """ " -> k0 k1": each shard counts from its own start."""
    return f" -> {' '.join(_kept(node.out_shapes[0], {}))}"


def _iota_local(local: Local):
    """Counted in integers: floats would be rounded twice."""
    dim, shape = local.params["dimension"], local.out_shape()
    if not local.results[0].dims[dim]:
        return local.bind(shape=shape, sharding=None)
    positions = lax.broadcasted_iota("int32", shape, dim) + local.start(local.results[0], dim)
    return [lax.convert_element_type(positions, local.params["dtype"])]


def optimization_barrier(node: Node) -> str:
    """Operand i is result i. Nothing may stay pending: `Passes` cannot say that each operand passes by
    itself.
    """
    values = ", ".join(" ".join(_kept(shape, {}, f"k{i}_")) for i, shape in enumerate(node.in_shapes))
    return f"{values} -> {values}"


def pad(node: Node) -> str:
    """ "k0 w1~ 1, -> k0 w1~ n2": unpadded dims are kept; what surrounds a single position may be split
    freely.
    """
    dims = [_pad_dim(node, d) for d in range(len(node.in_shapes[0]))]
    return f"{' '.join(a for a, _ in dims)}, -> {' '.join(b for _, b in dims)}"


def _pad_dim(node: Node, d: int) -> tuple[str, str]:
    old, (low, high, interior) = node.in_shapes[0][d], node.params["padding_config"][d]
    if low == high == 0 and (interior == 0 or old <= 1):
        return f"k{d}", f"k{d}"
    if old == 1 and low >= 0 and high >= 0:
        return "1", f"n{d}"
    return window_of(f"w{d}", node), window_of(f"w{d}", node)


def _pad_requests(local: Local) -> Iterator[HaloRequest]:
    for d, (low, _, interior) in enumerate(local.params["padding_config"]):
        if local.results[0].dims[d] and _pad_dim(local.node, d)[0][0] == "w":
            step, block = interior + 1, local.out_shape()[d]
            span = lambda r, e, low=low, step=step: (-((low - r) // step), (e - 1 - low) // step + 1)  # noqa: E731
            yield request_of(local, 0, d, (0, d), span, -(-block // step))


def _pad_local(local: Local, shard, value):
    """In a dim that surrounds a single position, each shard puts it where the owner has it; the others take
    it out again.
    """
    config, layout, inside = list(local.params["padding_config"]), local.results[0], True
    fill = 0 if _pads_zero(local.node) else value
    for request in _pad_requests(local):
        shard = _padded_inside(local, request, take(local, request, shard, fill), value)
        config[request.dim] = (0, 0, 0)
    for d, (low, high, _) in enumerate(config):
        if layout.dims[d] and (low, high) != (0, 0):
            owner, position = divmod(low, local.out_shape()[d])
            config[d] = (position, local.out_shape()[d] - 1 - position, 0)
            inside &= local.index(layout.dims[d]) == owner
    (padded,) = local.bind(shard, value, padding_config=tuple(config))
    return [padded if inside is True else lax.select(inside, padded, jnp.broadcast_to(value, padded.shape))]


def _padded_inside(local: Local, request: HaloRequest, rows, value):
    """This device's rows with the padding that is between them: row `firsts` stands `skipped` places into the
    block.
    """
    low, _, interior = local.params["padding_config"][request.dim]
    block, step = local.out_shape()[request.dim], interior + 1
    if step == 1:
        return rows
    skipped = np.array(request.firsts) * step + low - np.arange(len(request.firsts)) * block
    config = [(0, 0, 0)] * rows.ndim
    config[request.dim] = (step - 1, block, interior)
    starts = (step - 1 - skipped).tolist()
    return slice_by_device(
        lax.pad(rows, value, config), starts, block, request.dim, local.index(request.axes)
    )


def _pad_passes(node: Node) -> tuple[Passes, ...]:
    """Maxima may wait where the padding is a fixed value, and sums where it is zero."""
    return (MOVES(0, 1), MOVES(0) if _pads_zero(node) else Passes(("max", "min"), (0,)))


def _pads_zero(node: Node) -> bool:
    return node.inputs[1].is_literal and not node.inputs[1].literal


def rev(node: Node) -> str:
    """ "k0 r1~ -> k0 r1~"."""
    dims = " ".join(
        _kept(node.in_shapes[0], {d: window_of(f"r{d}", node) for d in node.params["dimensions"]})
    )
    return f"{dims} -> {dims}"


def _rev_requests(local: Local) -> Iterator[HaloRequest]:
    """What is left to send after each shard has changed places with the opposite one: the padding is now in
    front. (That is one ppermute, over all reversed dims; as a halo, every device would want a piece from
    another distance.)
    """
    layout = local.operands[0]
    for d in local.params["dimensions"]:
        size, behind = local.node.in_shapes[0][d], layout.padded[d] - local.node.in_shapes[0][d]
        if layout.dims[d] and behind:
            request = request_of(
                local, 0, d, (0, d), lambda r, e, by=behind: (r + by, e + by), local.out_shape()[d]
            )
            yield replace(request, size=size + behind)


def _rev_axes(local: Local) -> Axes:
    """The axes of all reversed dims. To count back along each of them is to count back along all."""
    return tuple(a for d in local.params["dimensions"] for a in local.operands[0].dims[d])


def _rev_sends(local: Local) -> Iterator[Message]:
    shard = math.prod(local.in_shape()) * local.node.inputs[0].aval.dtype.itemsize
    if axes := _rev_axes(local):
        yield Message("ppermute", axes, shard, far=max(local.sizes[a] for a in axes) >= FAR)
    yield from sent(local, _rev_requests(local))


def _rev_local(local: Local, shard):
    if axes := _rev_axes(local):
        last = local.count(axes) - 1
        shard = ppermute(local, "blocks", shard, axes, [(i, last - i) for i in range(last + 1)])
    (shard,) = local.bind(shard)
    for request in _rev_requests(local):
        shard = take(local, request, shard)
    return [shard]


def slice_(node: Node) -> str:
    """ "k0 x1+ w2~ -> k0 1 w2~": dims that are taken whole are kept, of a single position one shard is the
    owner.
    """
    dims = [_slice_dim(node, d) for d in range(len(node.in_shapes[0]))]
    return f"{' '.join(a for a, _ in dims)} -> {' '.join(b for _, b in dims)}"


def _slice_dim(node: Node, d: int) -> tuple[str, str]:
    old, new = node.in_shapes[0][d], node.out_shapes[0][d]
    if old == new:
        return f"k{d}", f"k{d}"
    if new == 1:
        return f"x{d}{owner_mark(node.inputs[0].aval.dtype)}", "1"
    return window_of(f"w{d}", node), window_of(f"w{d}", node)


def _slice_requests(local: Local) -> Iterator[HaloRequest]:
    starts, strides = local.params["start_indices"], local.params["strides"] or itertools.repeat(1)
    for d, (start, step) in enumerate(zip(starts, strides, strict=False)):
        if local.results[0].dims[d] and _slice_dim(local.node, d)[0][0] == "w":
            span = lambda r, e, start=start, step=step: (start + r * step, start + (e - 1) * step + 1)  # noqa: E731
            yield request_of(local, 0, d, (0, d), span, (local.out_shape()[d] - 1) * step + 1)


def _slice_local(local: Local, shard):
    """Each shard takes the position that the owner of the requested one takes; then all but the owner give
    zeros.
    """
    first, last = list(local.params["start_indices"]), list(local.params["limit_indices"])
    layout, inside = local.operands[0], True
    for request in _slice_requests(local):
        shard = take(local, request, shard)
        first[request.dim], last[request.dim] = 0, request.rows
    for d, (old, new) in enumerate(zip(local.node.in_shapes[0], local.node.out_shapes[0], strict=True)):
        if old == new:
            last[d] = shard.shape[d]
        elif layout.dims[d] and new == 1:
            owner, first[d] = divmod(first[d], local.in_shape()[d])
            last[d] = first[d] + 1
            inside &= local.index(layout.dims[d]) == owner
    (part,) = local.bind(shard, start_indices=tuple(first), limit_indices=tuple(last))
    return [part if inside is True else lax.select(inside, part, lax.full_like(part, 0))]


def split(node: Node) -> str:
    """ "k0 c~ -> k0 c~, k0 c~"."""
    dim, window = node.params["axis"], window_of("c", node)
    results = [" ".join(_kept(shape, {dim: window})) for shape in node.out_shapes]
    return f"{' '.join(_kept(node.in_shapes[0], {dim: window}))} -> {', '.join(results)}"


def _split_requests(local: Local) -> Iterator[HaloRequest]:
    dim = local.params["axis"]
    starts = [0, *itertools.accumulate(local.params["sizes"])]
    for i, start in enumerate(starts[:-1] if local.results[0].dims[dim] else ()):
        yield request_of(
            local, 0, dim, (i, dim), lambda r, e, by=start: (r + by, e + by), local.out_shape(i)[dim]
        )


def _split_local(local: Local, shard):
    requests = list(_split_requests(local))
    return [take(local, request, shard) for request in requests] if requests else local.bind(shard)


def squeeze(node: Node) -> str:
    """ "k0 1 -> k0"."""
    dims = _kept(node.in_shapes[0], {d: "1" for d in node.params["dimensions"]})
    return f"{' '.join(dims)} -> {' '.join(d for d in dims if d != '1')}"


def stack(node: Node) -> str:
    """ "k0 k1, k0 k1 -> k0 s! k1": the new dim is unsplit."""
    dims = [f"k{d}" for d in range(len(node.in_shapes[0]))]
    return (
        f"{', '.join([' '.join(dims)] * len(node.inputs))} -> "
        f"{' '.join(_inserted(dims, node.params['axis']))}"
    )


def _inserted(dims: list[str], at: int) -> list[str]:
    return [*dims[:at], "s!", *dims[at:]]


def _shard_alike_local(local: Local, x, y):
    """That both lie alike, which the rule says, is all that it is for."""
    return [x, y]


def tile(node: Node) -> str:
    """ "k0 k1 -> k0 (n1 k1)": repetitions may be split freely."""
    reps = node.params["reps"]
    result = [f"k{d}" if n == 1 else f"(n{d} k{d})" for d, n in enumerate(reps)]
    return (
        replicated_rule(node)
        if 0 in node.out_shapes[0]
        else f"{' '.join(_kept(reps, {}))} -> {' '.join(result)}"
    )


def _tile_local(local: Local, shard):
    return local.bind(
        shard, reps=tuple(new // old for new, old in zip(local.out_shape(), shard.shape, strict=True))
    )


def transpose(node: Node) -> str:
    """ "k0 k1 -> k1 k0"."""
    dims = _kept(node.in_shapes[0], {})
    return f"{' '.join(dims)} -> {' '.join(dims[d] for d in node.params['permutation'])}"


def unstack(node: Node) -> str:
    """ "k0 s! k1 -> k0 k1, k0 k1": the dim that goes is unsplit."""
    dims = [f"k{d}" for d in range(len(node.out_shapes[0]))]
    return (
        f"{' '.join(_inserted(dims, node.params['axis']))} -> "
        f"{', '.join([' '.join(dims)] * len(node.outputs))}"
    )


def _moves_all(node: Node) -> tuple[Passes, ...]:
    return (MOVES(*range(len(node.inputs))),)


register_rule("bitcast_convert_type", bitcast_convert_type, fuses="all")
register_rule(
    "broadcast_in_dim",
    broadcast_in_dim,
    _broadcast_in_dim_local,
    passes=(MOVES(0),),
    made_anywhere=True,
    fuses="all",
    reads="view",
)
register_rule(
    "concatenate",
    concatenate,
    _concatenate_local,
    passes=_moves_all,
    sends=halo_sends(_concatenate_requests),
    of_parts=True,
)
register_rule("empty", empty, _empty_local)
register_rule("empty2", " -> ")
register_rule("iota", iota, _iota_local, made_anywhere=True, fuses="all")
register_rule("optimization_barrier", optimization_barrier, reads="none", anew=True)
register_rule("pad", pad, _pad_local, passes=_pad_passes, sends=halo_sends(_pad_requests), of_parts=True)
register_rule("rev", rev, _rev_local, passes=(MOVES(0),), sends=_rev_sends)
register_rule("shard_alike", "..., ... -> ..., ...", _shard_alike_local, reads="none")
register_rule(
    "slice",
    slice_,
    _slice_local,
    passes=(MOVES(0),),
    sends=halo_sends(_slice_requests),
    reads="part",
    of_parts=True,
)
register_rule(
    "split", split, _split_local, passes=(MOVES(0),), sends=halo_sends(_split_requests), of_parts=True
)
register_rule("squeeze", squeeze, passes=(MOVES(0),), fuses="all", reads="view")
register_rule("stack", stack, passes=_moves_all, of_parts=True)
register_rule("tile", tile, _tile_local, passes=(MOVES(0),))
register_rule("transpose", transpose, passes=(MOVES(0),), fuses="all")
register_rule("unstack", unstack, passes=(MOVES(0),), of_parts=True)
