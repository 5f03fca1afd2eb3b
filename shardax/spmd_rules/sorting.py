"""sort and top_k. `top_k` picks on each device, then among what the devices picked. `sort` wants the sorted
dim unsplit.

That is where another dim can be split. Where there is none, blocks are sorted, and a sorting network merges
them:

    blocks, each sorted    two exchange what they have: one keeps the lower half, one the upper
    3 7 | 1 9 | 0 4 | 2 8  ->  0 1 | 7 9 ...

Each of the network's log n (log n + 1) / 2 layers sends the shard once, and no device ever holds more than
two shards. By its price this pays from 8 devices on for integers, and from 32 on where places are sent along
to keep the sort stable. Else the dim is gathered.

After Knuth, The Art of Computer Programming 3: 5.2.2, algorithm M, and 5.3.4, exercise 38.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.cost.network import Message, reaches_far
from shardax.graph.graph import Node
from shardax.reshard.halo import slice_by_device
from shardax.reshard.run import identity
from shardax.spmd_rules.indexing import at_places
from shardax.spmd_rules.registry import Local, register_rule
from shardax.spmd_rules.sends import all_gather, ppermute


def _kept(node: Node) -> list[str]:
    return [f"k{d}" for d in range(len(node.inputs[0].shape))]


def approx_top_k(node: Node) -> str:
    """As top_k, where that many are to be picked; "k n! -> k t!, k t!" where candidates are."""
    dims = _kept(node)
    return _picked(
        dims, node.params["reduction_dimension"] % len(dims), "" if node.params["aggregate_to_topk"] else "!"
    )


def sort(node: Node) -> str:
    """ "k s!, k s! -> k s!, k s!": any number of operands, sorted alike. Without other dims "s, s -> s,
    s".
    """
    dims, shape, dim = _kept(node), node.in_shapes[0], node.params["dimension"]
    lone = shape[dim] > 0 and all(n == 1 for d, n in enumerate(shape) if d != dim)
    lone &= node.params["is_stable"] or node.params["num_keys"] == len(
        node.inputs
    )  # else only one device knows XLA's order
    dims[dim] = "s" if lone else "s!"
    side = ", ".join([" ".join(dims)] * len(node.inputs))
    return f"{side} -> {side}"


def top_k(node: Node) -> str:
    """ "k n -> k t!, k t!": n may be split, all devices along it get all that was picked."""
    dims = _kept(node)
    return _picked(dims, node.params["axis"], "")


def _picked(dims: list[str], axis: int, mark: str) -> str:
    before, after = dims[:axis], dims[axis + 1 :]
    operand, result = " ".join([*before, "n" + mark, *after]), " ".join([*before, "t!", *after])
    return f"{operand} -> {result}, {result}"


def _sort_local(local: Local, *shards):
    """By whether a row is padding, by the keys, and by its place in the operand, so that the sort is
    stable.
    """
    keys, dim, shape = local.params["num_keys"], local.params["dimension"], local.in_shape()
    if not local.operands[0].dims[dim]:
        return local.bind(*shards)
    place = lax.broadcasted_iota("int32", shape, dim) + local.start(local.operands[0], dim)
    padding = [place >= local.node.in_shapes[0][dim]] * _is_padded(local)
    places = [place] * _shows_places(local)
    rows = [*padding, *shards[:keys], *places, *shards[keys:]]
    by = partial(lax.sort, dimension=dim, is_stable=False, num_keys=len(padding) + keys + len(places))
    rows = by(rows)
    for layer in _network(local.count(local.operands[0].dims[dim])):
        rows = _merge_and_split(local, rows, layer, by)
    rows = rows[len(padding) :]
    return [*rows[:keys], *rows[keys + len(places) :]]


def _is_padded(local: Local) -> bool:
    dim = local.params["dimension"]
    return local.operands[0].padded[dim] != local.node.in_shapes[0][dim]


def _shows_places(local: Local) -> bool:
    """Whether the result shows which of two rows with equal keys comes first. For integers it does not;
    floats have two zeros.
    """
    return local.params["num_keys"] < len(local.node.inputs) or any(
        v.aval.dtype.kind not in "iub" for v in local.node.inputs
    )


def _merge_and_split(local: Local, rows, pairs: Sequence[tuple[int, int]], by: Callable):
    """The pairs exchange their blocks. Of what both have together, the first device keeps the lower half, the
    second the upper.
    """
    dim, block = local.params["dimension"], local.in_shape()[local.params["dimension"]]
    axes = local.operands[0].dims[dim]
    upper, paired = {hi for _, hi in pairs}, {i for pair in pairs for i in pair}
    both_ways = [way for lo, hi in pairs for way in ((lo, hi), (hi, lo))]
    others = [ppermute(local, "blocks", x, axes, both_ways) for x in rows]
    ordered = by([lax.concatenate(pair, dim) for pair in zip(rows, others, strict=True)])
    devices, index = range(local.count(axes)), local.index(axes)
    halves = [slice_by_device(x, [block * (i in upper) for i in devices], block, dim, index) for x in ordered]
    if len(paired) == len(devices):
        return halves
    takes_part = jnp.array([i in paired for i in devices])[index]
    return [lax.select(lax.full(x.shape, takes_part), half, x) for half, x in zip(halves, rows, strict=True)]


def _network(count: int) -> Iterator[list[tuple[int, int]]]:
    """The layers of Batcher's sorting network for `count` blocks: pairs that exchange at the same time.

    >>> list(_network(4))
    [[(0, 2), (1, 3)], [(0, 1), (2, 3)], [(1, 2)]]
    """
    top = 1 << max(count - 1, 0).bit_length() - 1 if count > 1 else 0
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            yield [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2


def _sort_sends(local: Local) -> Iterator[Message]:
    """One ppermute for each operand in each layer, the flag and the place being such too."""
    axes = local.operands[0].dims[local.params["dimension"]]
    extra = [1] * _is_padded(local) + [4] * _shows_places(local)
    sizes = [*extra, *(v.itemsize for v in local.node.inputs)] if axes else []
    for pairs, size in itertools.product(_network(local.count(axes)), sizes):
        far = reaches_far(pairs, [local.sizes[a] for a in axes])
        yield Message("ppermute", axes, math.prod(local.in_shape()) * size, far=far)


def _approx_top_k_local(local: Local, shard):
    """The recall is that of the whole dim. Elements are lost only where each device picks its candidates; the
    last pick is exact.
    """
    axis, size = (
        local.params["reduction_dimension"] % shard.ndim,
        local.params["reduction_input_size_override"],
    )
    fill = identity("max" if local.params["is_max_k"] else "min", shard.dtype)
    total = size if size >= 0 else local.node.inputs[0].shape[axis]
    first = partial(local.bind, reduction_input_size_override=total)
    return _pick(local, shard, axis, fill, first, partial(local.bind, recall_target=1.0))


def _top_k_local(local: Local, shard):
    return _pick(local, shard, local.params["axis"], _least(shard.dtype), local.bind, local.bind)


def _least(dtype):
    """What top_k puts last: it takes floats in total order, in which -NaN comes before -inf. Those of one
    byte it widens, and NaN loses its sign."""
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1:
        return identity("max", dtype)
    return np.full((), 0xFF, np.uint8).repeat(np.dtype(dtype).itemsize).view(dtype)[0]


def _pick(local: Local, shard, axis: int, fill, first: Callable, last: Callable):
    """Gathers k candidates from each device, or all that it has, where that is no more without their places.

    They come in the order of devices, so ties are decided as on one device.
    """
    layout = local.operands[0]
    axes, block, k = layout.dims[axis], shard.shape[axis], local.params["k"]
    if not axes:
        return local.bind(shard)
    shard = local.mask(0, shard, fill, [axis])
    if _sends_all(local, axis):
        return local.bind(all_gather(local, "candidates", shard, axes, axis))
    values, places = first(shard, k=min(k, block))
    places = places + lax.convert_element_type(local.start(layout, axis), places.dtype)
    values, places = (all_gather(local, "candidates", x, axes, axis) for x in (values, places))
    values, among = last(values)
    return [values, at_places(places, among, axis)]


def _sends_all(local: Local, axis: int) -> bool:
    values, places = local.node.outputs
    return local.in_shape()[axis] * values.itemsize <= local.params["k"] * (values.itemsize + places.itemsize)


def _pick_sends(axis: Callable[[Local], int], local: Local) -> Iterator[Message]:
    dim = axis(local)
    axes, block = local.operands[0].dims[dim], local.in_shape()[dim]
    row = math.prod(local.in_shape()) // max(1, block) * (local.count(axes) - 1)
    values, places = (v.itemsize for v in local.node.outputs)
    if axes:
        k = min(local.params["k"], block)
        sizes = [block * values] if _sends_all(local, dim) else [k * values, k * places]
        yield from (Message("all_gather", axes, row * nbytes) for nbytes in sizes)


register_rule(
    "approx_top_k",
    approx_top_k,
    _approx_top_k_local,
    sends=partial(_pick_sends, lambda local: local.params["reduction_dimension"] % len(local.in_shape())),
    heavy=True,
)
register_rule("sort", sort, _sort_local, sends=_sort_sends, heavy=True)
register_rule(
    "top_k", top_k, _top_k_local, sends=partial(_pick_sends, lambda local: local.params["axis"]), heavy=True
)
