"""sort and top_k. The sorted dim of `sort` is whole; `top_k` picks on each device, then among what the devices picked."""

from jax import lax

from shardax.graph import Node
from shardax.spmd_rules.localize import identity
from shardax.spmd_rules.registry import Local, register_rule


def _kept(node: Node) -> list[str]:
    return [f"k{d}" for d in range(len(node.inputs[0].shape))]


def approx_top_k(node: Node) -> str:
    """ "k n! -> k t!, k t!"."""
    dims = _kept(node)
    return _picked(dims, node.params["reduction_dimension"] % len(dims), "!")


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


def _top_k_local(local: Local, shard):
    """Gathers k candidates from each device. In their order equal values stay in global order, so ties are decided alike."""
    axis, k, layout = local.params["axis"], local.params["k"], local.operands[0]
    axes = layout.dims[axis]
    if not axes:
        return local.bind(shard)
    shard = local.mask(0, shard, identity("max", shard.dtype), [axis])
    values, places = local.bind(shard, k=min(k, shard.shape[axis]))
    places = places + lax.convert_element_type(local.start(layout, axis), places.dtype)
    values, places = (lax.all_gather(x, axes, axis=axis, tiled=True) for x in (values, places))
    values, among = local.bind(values)
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


register_rule("approx_top_k", approx_top_k)
register_rule("sort", sort)
register_rule("top_k", top_k, _top_k_local)
