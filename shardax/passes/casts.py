"""Casts of weights that a loop over layers gathers, kept in the loop.

Of float32 weights that a loop's body casts to bfloat16 alone, XLA's TPU compiler casts all layers before the
loop, and keeps that second copy of them while the loop runs: it stores in bfloat16 what is read in no other
type, and looks through slices, loops and barriers for that, but not through integers. A barrier between
integers keeps the cast in the loop, where it is of one layer. That frees two bytes for each parameter that
a device has. It moves ten bytes more for each of them in each pass, which is little beside the gather of
them, if that is over several devices.

    layers f32 -> slice, cast, gather            XLA: layers f32 -> cast -> layers bf16 -> slice, gather
                  slice, bits, barrier, cast, gather   stays as it is

Only of matrices: of weights of more dims XLA wants these in another order, and would copy all layers in
float32 for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax import _jax
from shardax.graph.equations import equations_of
from shardax.passes.moves import variables

SEVERAL = 8  # devices


def in_loop(eqn) -> Any:
    """A scan that keeps such casts of its rows in its body; any other equation as it is."""
    if eqn.primitive.name != "scan":
        return eqn
    start = sum(_jax.scan_counts(eqn.params))

    def held(body):
        jaxpr = _jax.closed(body).jaxpr
        casts = _casts(jaxpr, jaxpr.invars[start:])
        return _jax.replaced_eqns(body, [new for eqn in jaxpr.eqns for new in _held(eqn, casts)])

    return _jax.with_bodies(eqn, held)


def _casts(jaxpr, rows: Sequence[Any]) -> set[Any]:
    """What is cast of matrices among the rows that are read by casts alone, and gathered."""
    row_of = {v: v for v in rows if v.aval.ndim == 2 and v.aval.dtype == np.float32}
    readers = {v: [] for v in row_of}
    gathered = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.all_gather_p and eqn.params["axis_size"] >= SEVERAL:
            gathered.update(variables(eqn.invars))
        if eqn.primitive is lax.optimization_barrier_p:  # of what is computed again
            row_of |= {
                v: row_of[x] for v, x in zip(eqn.outvars, eqn.invars, strict=True) if _is_in(x, row_of)
            }
            continue
        for v in eqn.invars:
            if _is_in(v, row_of):
                readers[row_of[v]].append(eqn)
    alone = (some for some in readers.values() if some and all(map(_casts_to_bfloat16, some)))
    return {eqn.outvars[0] for some in alone for eqn in some} & gathered


def _is_in(atom, variables: Mapping[Any, Any]) -> bool:
    return not _jax.is_literal(atom) and atom in variables


def _casts_to_bfloat16(eqn) -> bool:
    return eqn.primitive is lax.convert_element_type_p and eqn.outvars[0].aval.dtype == jnp.bfloat16


def _held(eqn, casts: set[Any]) -> Iterator[Any]:
    if casts.isdisjoint(eqn.outvars):
        yield eqn
        return
    held = _jax.new_variable(eqn.invars[0].aval)
    yield from equations_of(_kept, eqn.invars, [held], eqn)
    yield eqn.replace(invars=[held])


def _kept(x):
    bits = lax.optimization_barrier(lax.bitcast_convert_type(x, "uint32"))
    return lax.bitcast_convert_type(bits, "float32")
