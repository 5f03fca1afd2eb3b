"""Layouts: what is copied between the memories of a TPU and its host lies on the device as arrays at rest do.

XLA chooses a layout by what reads an array, such as what gathers it, and then refuses the copy: it compiles
none that changes the layout too, and none of blocks in some layouts. So it is with what is brought, and with
what is put together to be sent.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from shardax import _jax
from shardax.graph.equations import equations_like, equations_of
from shardax.graph.evaluate import is_call
from shardax.passes.blocks import Shape, tiled_dims
from shardax.passes.in_turn import put_together, sends
from shardax.passes.moves import brings, is_at_host


def laid_out(jaxpr, in_loop: bool = False):
    """The same jaxpr, closed or open, and its bodies, laid out so; but parts of arrays, which loops bring."""
    eqns = [
        _jax.with_bodies(eqn, partial(laid_out, in_loop=in_loop or _is_loop(eqn))) for eqn in _eqns(jaxpr)
    ]
    computed = {
        v for eqn in eqns if is_call(eqn) for v in eqn.outvars
    }  # by the host, which lays it out itself
    brought = (eqn for eqn in eqns if brings(eqn) and not in_loop and eqn.invars[0] not in computed)
    before, behind = _before(eqns), {id(eqn) for eqn in (*brought, *filter(_writes, eqns))}
    return _jax.replaced_eqns(jaxpr, [new for eqn in eqns for new in _laid_out(eqn, before, behind)])


def _eqns(jaxpr) -> Sequence[Any]:
    return _jax.closed(jaxpr).jaxpr.eqns


def _is_loop(eqn) -> bool:
    return eqn.primitive in (lax.scan_p, lax.while_p)


def _before(eqns: Sequence[Any]) -> dict[int, Shape]:
    """The equations that send what was put together, or put it together, by their `id`; with the shape of
    the array as which their operands are to lie: that of which they are a piece, or else their own.
    """
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    wholes = {eqn.invars[1]: eqn.invars[0] for eqn in eqns if eqn.primitive is lax.dynamic_update_slice_p}
    pairs = [(eqn, large) for eqn in filter(sends, eqns) if (large := put_together(eqn, makers)) is not None]
    return {
        id(eqn): wholes.get(send.outvars[0], eqn.invars[0]).aval.shape
        for send, large in pairs
        for eqn in (send, large)
    }


def _writes(eqn) -> bool:
    """Whether a loop writes at the host. What it makes on the device beside that may be cut as that is."""
    return _is_loop(eqn) and any(map(is_at_host, eqn.outvars))


def _laid_out(eqn, before: Mapping[int, Shape], behind: set[int]) -> Sequence[Any]:
    """An equation, its operand laid out before, or its results behind it."""
    if shape := before.get(id(eqn)):
        rests = lambda x: _as_at_rest(x, shape)  # noqa: E731  (traced anew)
        new, operand = equations_like(eqn, rests, [eqn.invars[0]])
        return [*new, eqn.replace(invars=[*operand, *eqn.invars[1:]])]
    if id(eqn) not in behind:
        return [eqn]
    made = {v: _jax.new_variable(v.aval) for v in filter(_has_layout, eqn.outvars)}
    new = [each for v, x in made.items() for each in _copied(x, v, eqn)]
    return [eqn.replace(outvars=[made.get(v, v) for v in eqn.outvars]), *new]


def _has_layout(v) -> bool:
    """Whether it is an array of numbers on the device that may lie in several ways."""
    is_number = not jax.numpy.issubdtype(v.aval.dtype, jax.dtypes.extended)
    return is_number and len(v.aval.shape) > 1 and not is_at_host(v)


def _copied(x, copy, like) -> list[Any]:
    return equations_of(lambda x: _as_at_rest(x, x.shape), [x], [copy], like)


def _as_at_rest(x, shape: Shape) -> Any:
    """A value, as an array of that shape lies at rest."""
    if x.ndim < 2:
        return x
    minor = tiled_dims(shape if len(shape) == x.ndim else x.shape)
    return with_layout_constraint(x, Layout((*(dim for dim in range(x.ndim) if dim not in minor), *minor)))
