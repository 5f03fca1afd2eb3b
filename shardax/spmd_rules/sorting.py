"""sort and top_k. The sorted dim of `sort` is whole; `top_k` picks on each device, then among what the devices picked."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.graph import Node
from shardax.reshard import identity
from shardax.spmd_rules.registry import Local, register_rule


def _kept(node: Node) -> list[str]:
    return [f"k{d}" for d in range(len(node.inputs[0].shape))]


def approx_top_k(node: Node) -> str:
    """As top_k, where that many are to be picked; "k n! -> k t!, k t!" where candidates are."""
    dims = _kept(node)
    return _picked(dims, node.params["reduction_dimension"] % len(dims), "" if node.params["aggregate_to_topk"] else "!")


def sort(node: Node) -> str:
    """Any number of operands, sorted alike."""
    dims = _kept(node)
    dims[node.params["dimension"]] = "s!"
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


def _approx_top_k_local(local: Local, shard):
    """The recall is that of the whole dim; what is lost, the devices lose."""
    axis, fill = (
        local.params["reduction_dimension"] % shard.ndim,
        identity("max" if local.params["is_max_k"] else "min", shard.dtype),
    )
    size = local.params["reduction_input_size_override"]
    whole = size if size >= 0 else local.node.inputs[0].shape[axis]
    first = partial(local.bind, reduction_input_size_override=whole)
    return _pick(local, shard, axis, fill, first, partial(local.bind, recall_target=1.0))


def _top_k_local(local: Local, shard):
    return _pick(local, shard, local.params["axis"], _least(shard.dtype), local.bind, local.bind)


def _least(dtype):
    """What top_k puts last: it takes floats in total order, in which -NaN comes before -inf."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return identity("max", dtype)
    return np.full((), 0xFF, np.uint8).repeat(np.dtype(dtype).itemsize).view(dtype)[0]


def _pick(local: Local, shard, axis: int, fill, first: Callable, last: Callable):
    """Gathers k candidates from each device. In their order equal values stay in global order, so ties are decided alike."""
    layout = local.operands[0]
    axes = layout.dims[axis]
    if not axes:
        return local.bind(shard)
    shard = local.mask(0, shard, fill, [axis])
    values, places = first(shard, k=min(local.params["k"], shard.shape[axis]))
    places = places + lax.convert_element_type(local.start(layout, axis), places.dtype)
    values, places = (lax.all_gather(x, axes, axis=axis, tiled=True) for x in (values, places))
    values, among = last(values)
    return [values, _take_along(places, among, axis)]


def _take_along(places, among, axis: int):
    batch = tuple(d for d in range(places.ndim) if d != axis)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        operand_batching_dims=batch,
        start_indices_batching_dims=batch,
    )
    return lax.gather(places, lax.expand_dims(among, [among.ndim]), numbers, (1,) * places.ndim, mode="promise_in_bounds")


register_rule("approx_top_k", approx_top_k, _approx_top_k_local)
register_rule("sort", sort)
register_rule("top_k", top_k, _top_k_local)
