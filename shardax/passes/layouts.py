"""Layouts: what is copied between the memories of a TPU and its host lies on the device as arrays at rest do.

XLA chooses a layout by what reads an array, such as what gathers it, and then refuses the copy: it compiles
none that changes the layout too, and none of blocks in some layouts.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from shardax import _jax
from shardax.graph.equations import equations_like, equations_of
from shardax.passes.blocks import tiled_dims
from shardax.passes.in_turn import put_together, sends
from shardax.passes.moves import brings

_LOOPS = (lax.scan_p, lax.while_p)


def laid_out(jaxpr):
    """The same jaxpr, closed or open, and its bodies but those of loops, which bring parts of arrays."""
    eqns = _jax.closed(jaxpr).jaxpr.eqns
    eqns = [eqn if eqn.primitive in _LOOPS else _jax.with_bodies(eqn, laid_out) for eqn in eqns]
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    before = {id(made) for eqn in filter(sends, eqns) for made in (eqn, put_together(eqn, makers))}
    return _jax.replaced_eqns(jaxpr, [new for eqn in eqns for new in _laid_out(eqn, before)])


def _laid_out(eqn, before: set[int]) -> Sequence[Any]:
    """An equation, its operand laid out before, or what it brings behind."""
    if id(eqn) in before:
        new, operand = equations_like(eqn, lambda x: _as_at_rest(x), [eqn.invars[0]])  # (traced anew)
        return [*new, eqn.replace(invars=[*operand, *eqn.invars[1:]])]
    if brings(eqn) and len(eqn.outvars[0].aval.shape) > 1:
        copy = _jax.new_variable(eqn.outvars[0].aval)
        return [eqn.replace(outvars=[copy]), *equations_of(_as_at_rest, [copy], eqn.outvars, eqn)]
    return [eqn]


def _as_at_rest(x) -> Any:
    if x.ndim < 2:
        return x
    minor = tiled_dims(x.shape)
    return with_layout_constraint(x, Layout((*(dim for dim in range(x.ndim) if dim not in minor), *minor)))
