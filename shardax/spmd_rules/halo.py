"""Halos in lowerings: what a primitive wants of a split dim, said by its own coordinates;
`shardax.reshard.halo` brings it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.graph.graph import Node
from shardax.reshard.halo import Wanted, bring, exchange_of
from shardax.sharding import Layout
from shardax.spmd_rules.registry import Local
from shardax.spmd_rules.sends import ppermute

Span = Callable[[Any, Any], tuple[Any, Any]]
"""`span(r, e)` gives the first and the end of the rows that positions r to before e are made of; arrays in,
arrays out.
"""


def window_of(name: str, node: Node) -> str:
    """The factor of a windowed dim. Empty dims and those of random keys, which no filling is like, stay
    whole.
    """
    keys = any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in node.inputs)
    return f"{name}~{'!' * (keys or any(0 in shape for shape in (*node.in_shapes, *node.out_shapes)))}"


def wanted(local: Local, operand: int, dim: int, result: tuple[int, int], span: Span, rows: int) -> Wanted:
    """What the devices want of dim `dim` of an operand that make dim `result[1]` of result `result[0]`;
    `rows` are those that a whole block is made of.
    """
    number, to = result
    return _wanted(local, operand, dim, local.results[number], local.node.out_shapes[number], to, span, rows)


def wanted_with(
    local: Local, operand: int, dim: int, other: tuple[int, int], span: Span, rows: int
) -> Wanted:
    """What the devices want of an operand that hold blocks of dim `other[1]` of operand `other[0]`; else as
    `wanted`.
    """
    number, to = other
    return _wanted(local, operand, dim, local.operands[number], local.node.in_shapes[number], to, span, rows)


def _wanted(
    local: Local, operand: int, dim: int, layout: Layout, shape, to: int, span: Span, rows: int
) -> Wanted:
    axes, block = layout.dims[to], layout.local_shape(local.sizes)[to]
    starts = np.arange(local.count(axes)) * block
    firsts, ends = span(starts, np.minimum(starts + block, shape[to]))
    ends = np.where(starts < shape[to], ends, firsts)
    size, held = local.node.in_shapes[operand][dim], local.in_shape(operand)[dim]
    split = bool(local.operands[operand].dims[dim])
    return Wanted(dim, axes, tuple(firsts.tolist()), tuple(ends.tolist()), rows, size, held, split, operand)


def sent(local: Local, wants: Iterable[Wanted]) -> Iterator[int]:
    """The bytes that one device sends in each ppermute, when the dims are exchanged one after the other."""
    nbytes = [math.prod(local.in_shape(i)) * v.itemsize for i, v in enumerate(local.node.inputs)]
    held: dict[tuple[int, int], int] = {}
    for want in wants:
        row = nbytes[want.operand] // held.get((want.operand, want.dim), want.block)
        nbytes[want.operand], held[want.operand, want.dim] = row * want.rows, want.rows
        yield from (rows * row for rows in exchange_of(want).sent)


def halo_sends(wants: Callable[[Local], Iterable[Wanted]]) -> Callable[[Local], Iterator[int]]:
    """What a primitive sends whose lowering takes what `wants` says."""
    return lambda local: sent(local, wants(local))


def take(local: Local, want: Wanted, shard, fill=0):
    """The rows that this device wants, with `fill` for those outside of the value."""
    return bring(want, shard, local.index(want.axes), partial(ppermute, local, "halo"), fill)
