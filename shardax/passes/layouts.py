"""Layouts: what is copied between the memories of a TPU and its host lies on the device as arrays at rest do.

XLA chooses a layout by what reads an array, such as what gathers it, and then refuses the copy: it compiles
none that changes the layout too, and none of blocks in some layouts. So it is with what is brought, and with
what is put together to be sent.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from shardax import _jax
from shardax.graph.equations import equations_like, equations_of
from shardax.graph.evaluate import is_call
from shardax.passes.blocks import tiled_dims
from shardax.passes.in_turn import put_together, sends
from shardax.passes.moves import brings

_LOOPS = (lax.scan_p, lax.while_p)


def laid_out(jaxpr):
    """The same jaxpr, closed or open, and its bodies but those of loops, which bring parts of arrays."""
    eqns = _jax.closed(jaxpr).jaxpr.eqns
    eqns = [eqn if eqn.primitive in _LOOPS else _jax.with_bodies(eqn, laid_out) for eqn in eqns]
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    pairs = [(eqn, put_together(eqn, makers)) for eqn in eqns if sends(eqn)]
    before = {id(eqn) for pair in pairs if pair[1] is not None for eqn in pair}
    computed = {
        v for eqn in eqns if is_call(eqn) for v in eqn.outvars
    }  # by the host, which lays it out itself
    behind = {id(eqn) for eqn in eqns if brings(eqn) and eqn.invars[0] not in computed}
    return _jax.replaced_eqns(jaxpr, [new for eqn in eqns for new in _laid_out(eqn, before, behind)])


def _laid_out(eqn, before: set[int], behind: set[int]) -> Sequence[Any]:
    """An equation, its operand laid out before, or its result behind it."""
    if id(eqn) in before:
        new, operand = equations_like(eqn, lambda x: _as_at_rest(x), [eqn.invars[0]])  # (traced anew)
        return [*new, eqn.replace(invars=[*operand, *eqn.invars[1:]])]
    if id(eqn) in behind and len(eqn.outvars[0].aval.shape) > 1:
        copy = _jax.new_variable(eqn.outvars[0].aval)
        return [eqn.replace(outvars=[copy]), *equations_of(_as_at_rest, [copy], eqn.outvars, eqn)]
    return [eqn]


def _as_at_rest(x) -> Any:
    if x.ndim < 2:
        return x
    minor = tiled_dims(x.shape)
    return with_layout_constraint(x, Layout((*(dim for dim in range(x.ndim) if dim not in minor), *minor)))
