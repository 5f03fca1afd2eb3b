"""Halos in lowerings: what a primitive needs of a split dim, in its own coordinates;
`shardax.reshard.halo` brings it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.cost.network import Message
from shardax.graph.graph import Node
from shardax.reshard.halo import HaloRequest, bring, exchange_of
from shardax.sharding import Layout
from shardax.spmd_rules.registry import Local
from shardax.spmd_rules.sends import ppermute

Span = Callable[[Any, Any], tuple[Any, Any]]
"""`span(r, e)` gives the first and the end of the rows that positions r to before e are made of; arrays in,
arrays out.
"""


def window_of(name: str, node: Node) -> str:
    """The factor of a windowed dim. Empty dims and those of random keys, which no filling is like, stay
    unsplit.
    """
    keys = any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in node.inputs)
    return f"{name}~{'!' * (keys or any(0 in shape for shape in (*node.in_shapes, *node.out_shapes)))}"


def request_of(
    local: Local, operand: int, dim: int, result: tuple[int, int], span: Span, rows: int
) -> HaloRequest:
    """What the devices need of dim `dim` of an operand that make dim `result[1]` of result `result[0]`;
    `rows` are those that a whole block is made of.
    """
    number, to = result
    return _request_of(
        local, operand, dim, local.results[number], local.node.out_shapes[number], to, span, rows
    )


def request_beside(
    local: Local, operand: int, dim: int, other: tuple[int, int], span: Span, rows: int
) -> HaloRequest:
    """What the devices need of an operand that hold blocks of dim `other[1]` of operand `other[0]`; else as
    `request_of`.
    """
    number, to = other
    return _request_of(
        local, operand, dim, local.operands[number], local.node.in_shapes[number], to, span, rows
    )


def _request_of(
    local: Local, operand: int, dim: int, layout: Layout, shape, to: int, span: Span, rows: int
) -> HaloRequest:
    axes, block = layout.dims[to], layout.local_shape(local.sizes)[to]
    starts = np.arange(local.count(axes)) * block
    firsts, ends = span(starts, np.minimum(starts + block, shape[to]))
    ends = np.where(starts < shape[to], ends, firsts)
    size, held = local.node.in_shapes[operand][dim], local.in_shape(operand)[dim]
    split = bool(local.operands[operand].dims[dim])
    return HaloRequest(
        dim, axes, tuple(firsts.tolist()), tuple(ends.tolist()), rows, size, held, split, operand
    )


def sent(local: Local, requests: Iterable[HaloRequest]) -> Iterator[Message]:
    """What one device sends in each ppermute, when the dims are exchanged one after the other."""
    nbytes = [math.prod(local.in_shape(i)) * v.itemsize for i, v in enumerate(local.node.inputs)]
    held: dict[tuple[int, int], int] = {}
    for request in requests:
        row = nbytes[request.operand] // held.get((request.operand, request.dim), request.block)
        nbytes[request.operand], held[request.operand, request.dim] = row * request.rows, request.rows
        exchange = exchange_of(request)
        far_of = exchange.reaches_far(tuple(local.sizes[a] for a in request.axes))
        for rows, far in zip(exchange.sent, far_of, strict=True):
            yield Message("ppermute", request.axes, rows * row, far=far)


def halo_sends(requests: Callable[[Local], Iterable[HaloRequest]]) -> Callable[[Local], Iterator[Message]]:
    """What a primitive sends whose lowering takes `requests`."""
    return lambda local: sent(local, requests(local))


def take(local: Local, request: HaloRequest, shard, fill=0):
    """The rows that this device needs, with `fill` for those outside of the value."""
    return bring(request, shard, local.index(request.axes), partial(ppermute, local, "halo"), fill)
