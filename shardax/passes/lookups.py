"""Lookups: of a table at the host the rows that are looked up come to the device, not the table.

    w = bring(w_host)                        x_host = gather(w_host, send(i))       on the host
    x = gather(cast(w), i)           ->      x = cast(bring(x_host))

What else reads the table, such as logits that it makes too, has it brought whole. So is a small one, and one
of which more is looked up than there is. Its gradient is added up on the device, as that of any parameter.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax import _jax
from shardax.graph.equations import equations_of
from shardax.graph.evaluate import bound
from shardax.passes.blocks import DEVICE
from shardax.passes.moves import HOST, brings, is_at_host, large, nbytes
from shardax.spmd_rules import equations


def looked_up(jaxpr):
    """The same jaxpr, closed or open, and its bodies, with such lookups at the host."""
    eqns = [_jax.with_bodies(eqn, looked_up) for eqn in _jax.closed(jaxpr).jaxpr.eqns]
    tables = large(eqn.invars[0] for eqn in filter(brings, eqns))
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    return _jax.replaced_eqns(jaxpr, [new for eqn in eqns for new in _at_host(eqn, makers, tables)])


def is_looked_up(eqn) -> bool:
    """Whether the host looks something up."""
    return eqn.primitive is lax.gather_p and is_at_host(eqn.outvars[0])


def _at_host(eqn, makers: Mapping[Any, Any], tables: Collection[Any]) -> list[Any]:
    """The equation, or those by which the host does what it does."""
    if eqn.primitive is not lax.gather_p:
        return [eqn]
    table, casts = eqn.invars[0], []
    while (maker := makers.get(table)) is not None and equations.casts(maker):
        table, casts = maker.invars[0], [maker, *casts]
    if maker is None or not brings(maker):
        return [eqn]
    source, indices = maker.invars[0], eqn.invars[1]
    if source not in tables or nbytes(source) <= nbytes(eqn.outvars[0]):
        return [eqn]

    def run(table, indices):
        rows = jax.device_put(_looked_up(eqn, table, indices), DEVICE)
        for cast in casts:
            (rows,) = bound(cast, [rows])
        return _filled(eqn, rows, indices)

    return equations_of(run, [source, indices], eqn.outvars, eqn)


def _looked_up(eqn, table, indices) -> Any:
    """What the host looks up. It is told no bounds: numbers to compare with would not be in its memory."""
    if eqn.params["mode"] != lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        indices = lax.clamp(jnp.zeros_like(indices), indices, _last(eqn, indices))
    in_bounds = {"mode": lax.GatherScatterMode.PROMISE_IN_BOUNDS, "fill_value": None}
    (rows,) = bound(_jax.on_host(eqn), [table, jax.device_put(indices, HOST)], **in_bounds)
    return rows


def _filled(eqn, rows, indices) -> Any:
    """What is looked up, with the value that stands for what is out of bounds."""
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return rows
    are_inside = (indices >= 0) & (indices <= _last(eqn, indices))
    inside = lax.reduce(are_inside, np.bool_(True), lax.bitwise_and, [indices.ndim - 1])
    others = [dim for dim in range(rows.ndim) if dim not in eqn.params["dimension_numbers"].offset_dims]
    is_filled = lax.broadcast_in_dim(~inside, rows.shape, others)
    return lax.select(is_filled, lax.full_like(rows, eqn.params["fill_value"]), rows)


def _last(eqn, indices) -> Any:
    """The last index of each dim that is in bounds, as an array like these."""
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    most = jnp.iinfo(indices.dtype).max
    last = [min(shape[d] - sizes[d], most) for d in eqn.params["dimension_numbers"].start_index_map]
    numbers = [lax.full((*indices.shape[:-1], 1), each, indices.dtype) for each in last]
    return lax.concatenate(numbers, indices.ndim - 1)
