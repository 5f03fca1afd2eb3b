"""Cumulative operations: along a split dim each device scans its block, and adds what the blocks before it
come to.

block 0   block 1   block 2       scan each block        what is before        combined
1 2 3     4 5 6     7 8 9    ->   1 3 6 | 4 9 15 | ...   0 | 6 | 21       ->   1 3 6 | 10 15 21 | ...
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.cost.network import Message
from shardax.reshard.run import identity
from shardax.spmd_rules.registry import LINEAR, Local, Passes, register_rule
from shardax.spmd_rules.sends import all_gather


def _cumulative_local(combine: Callable, neutral_of: Callable[[Any], Any], local: Local, shard):
    """One all_gather of one total for each block; the totals before this device's are summed up by the
    primitive itself.
    """
    axis, reverse = local.params["axis"], local.params["reverse"]
    axes = local.operands[0].dims[axis]
    if not axes:
        return local.bind(shard)
    neutral = neutral_of(shard.dtype)
    (scanned,) = local.bind(local.mask(0, shard, neutral, [axis]))
    totals = all_gather(local, "totals", _total(local, scanned), axes, axis)
    place = lax.broadcasted_iota("int32", totals.shape, axis)
    before = place > local.index(axes) if reverse else place < local.index(axes)
    (sums,) = local.bind(lax.select(before, totals, lax.full_like(totals, neutral)))
    return [combine(lax.broadcast_in_dim(_total(local, sums), scanned.shape, range(scanned.ndim)), scanned)]


def _total(local: Local, scanned):
    """What the scan reaches last, as a block of size one."""
    axis = local.params["axis"]
    last = 0 if local.params["reverse"] else scanned.shape[axis] - 1
    return lax.slice_in_dim(scanned, last, last + 1, axis=axis)


def _sends(local: Local) -> Iterator[Message]:
    axes, block = local.operands[0].dims[local.params["axis"]], local.in_shape()[local.params["axis"]]
    if axes:
        total = math.prod(local.in_shape()) // max(1, block) * local.node.inputs[0].itemsize
        yield Message("all_gather", axes, total * (local.count(axes) - 1))


_SCANS = {
    "cumlogsumexp": (jnp.logaddexp, partial(np.full, (), -np.inf), ()),
    "cummax": (lax.max, partial(identity, "max"), (Passes(("max",), (0,)),)),
    "cummin": (lax.min, partial(identity, "min"), (Passes(("min",), (0,)),)),
    "cumprod": (lax.mul, partial(np.ones, ()), ()),
    "cumsum": (lax.add, partial(identity, "sum"), (LINEAR(0),)),
}

for _name, (_combine, _neutral_of, _passes) in _SCANS.items():
    _lowering = partial(_cumulative_local, _combine, _neutral_of)
    register_rule(_name, "... -> ...", _lowering, passes=_passes, sends=_sends)
