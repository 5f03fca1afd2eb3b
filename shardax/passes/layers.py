"""Layers: of a stack at the host whose layers share tiles, the host cuts out each layer.

    for each row w of w_host: ...            ->      for each i:  w = w_host[i] (on the host); ...

TPUs tile an array along those two dims of which it takes the least memory. Where these are its layers and
another one, as of 24 layers of 2043 by 1023, no copy between the memories is of one layer, and XLA does not
compile it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardax import _jax
from shardax.graph.equations import equations_of
from shardax.graph.evaluate import evaluate
from shardax.passes.blocks import tiled_dims
from shardax.passes.moves import HOST, is_at_host


def cut_out(jaxpr):
    """The same jaxpr, closed or open, and its bodies, in whose loops the host cuts out such layers."""
    eqns = [_jax.with_bodies(eqn, cut_out) for eqn in _jax.closed(jaxpr).jaxpr.eqns]
    return _jax.replaced_eqns(jaxpr, [new for eqn in eqns for new in _cut_out(eqn)])


def _cut_out(eqn) -> list[Any]:
    """A loop, as one that goes over numbers instead of such stacks."""
    first = sum(_jax.scan_counts(eqn.params)) if eqn.primitive is lax.scan_p else len(eqn.invars)
    stacks = {k for k in range(first, len(eqn.invars)) if _shares_tiles(eqn.invars[k])}
    if not stacks:
        return [eqn]
    return equations_of(lambda *operands: _loop(eqn, stacks, operands), eqn.invars, eqn.outvars, eqn)


def _shares_tiles(v) -> bool:
    """Whether layers of more than one dim are in the same tiles. (XLA copies rows of matrices.)"""
    return is_at_host(v) and len(v.aval.shape) > 2 and 0 in tiled_dims(v.aval.shape)


def _loop(eqn, stacks: set[int], operands: Sequence[Any]) -> list[Any]:
    consts, carries = _jax.scan_counts(eqn.params)
    first, body = consts + carries, _jax.closed(eqn.params["jaxpr"])
    scanned = {k: x for k, x in enumerate(operands) if k >= first and k not in stacks}

    def layer(carry, number_and_rows):
        number, rows = number_and_rows
        own = rows | {k: _layer(operands[k], number) for k in stacks}
        made = evaluate(body, [*operands[:consts], *carry, *(own[k] for k in sorted(own))])
        return made[:carries], made[carries:]

    numbers = jnp.arange(eqn.params["length"], dtype="int32")
    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, made = lax.scan(layer, list(operands[consts:first]), (numbers, scanned), **how)
    return [*carry, *made]


def _layer(stack, number) -> Any:
    """A layer that the host cuts out, in its memory."""
    args = stack, jax.device_put(number, HOST)
    cut = jax.make_jaxpr(_cut)(*args)
    return evaluate(_jax.replaced_eqns(cut, list(map(_jax.on_host, cut.eqns))), args)[0]


def _cut(stack, number) -> Any:
    starts, sizes = [number, *[0] * (stack.ndim - 1)], (1, *stack.shape[1:])
    return lax.squeeze(lax.dynamic_slice(stack, starts, sizes, allow_negative_indices=False), (0,))
