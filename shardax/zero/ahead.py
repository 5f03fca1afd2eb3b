"""Ahead: a loop over layers that gathers the next layer's parameters while it computes with this one's.

    carry:  the gathered parameters of this layer

    trip i:                rows of layer i+1, behind what layer i reads
        gather them    |   compute layer i

Two layers' gathered parameters are alive. The loop is unrolled by two, so that each half gathers into what
the other no longer reads; otherwise XLA copies a whole layer in each trip. The last trip gathers once more
than is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params

from shardax import _jax
from shardax.graph.equations import equations_of
from shardax.spmd_rules.equations import casts

Gather = Callable[[Array, int], Array]
"""The parameter of one layer, whole, and which operand of the loop's body it is."""


def ahead(eqn, body, rows: Sequence[int], gather: Gather) -> list[Any]:
    """Equations in place of a scan: `body` instead of its own, whose operands `rows`, scanned over, are each
    gathered a trip before.
    """
    consts, carries = _jax.scan_counts(eqn.params)
    start, length, reverse = consts + carries, eqn.params["length"], eqn.params["reverse"]
    body = _jax.closed(body)
    dtypes = {k: read_as(body.jaxpr, body.jaxpr.invars[k]) for k in rows}

    def run(*operands):
        others = [k for k in range(start, len(operands)) if k not in dtypes]

        def shards(i):
            picked = (lax.dynamic_index_in_dim(operands[k], i, keepdims=False) for k in rows)
            return [x.astype(dtypes[k]) for k, x in zip(rows, picked, strict=True)]

        def trip(state, xs):
            carry, whole = state
            i, scanned = xs
            following = jnp.maximum(i - 1, 0) if reverse else jnp.minimum(i + 1, length - 1)
            carry, coming = lax.optimization_barrier((carry, shards(following)))
            known: Mapping[int, Array] = dict(zip((*others, *rows), (*scanned, *whole), strict=True))
            read = [known[k].astype(body.in_avals[k].dtype) for k in range(start, len(operands))]
            results = jaxpr_as_fun(body)(*operands[:consts], *carry, *read)
            return (results[:carries], list(map(gather, coming, rows))), results[carries:]

        first = list(map(gather, shards(length - 1 if reverse else 0), rows))
        xs = jnp.arange(length), [operands[k] for k in others]
        (carry, _), made = lax.scan(
            trip, (list(operands[consts:start]), first), xs, length, reverse=reverse, unroll=2
        )
        return *carry, *made

    return equations_of(run, eqn.invars, eqn.outvars, eqn)


def read_as(jaxpr, var) -> jax.typing.DTypeLike:
    """The dtype that all readers of a variable cast it to, else its own."""
    dtypes = _dtypes(jaxpr, var)
    return dtypes.pop() if len(dtypes) == 1 else var.aval.dtype


def _dtypes(jaxpr, var) -> set[Any]:
    found = {var.aval.dtype} if any(v is var for v in jaxpr.outvars) else set()
    for eqn in jaxpr.eqns:
        if any(v is var for v in eqn.invars):
            found |= _dtypes_of_reader(eqn, var)
    return found


def _dtypes_of_reader(eqn, var) -> set[Any]:
    if casts(eqn):
        return {eqn.outvars[0].aval.dtype}
    bodies = [_jax.closed(body).jaxpr for body in jaxprs_in_params(eqn.params)]
    if (
        len(bodies) != 1
        or len(bodies[0].invars) != len(eqn.invars)
        or eqn.primitive.name in ("scan", "while")
    ):
        return {var.aval.dtype}
    (body,) = bodies
    inner = (v for v, operand in zip(body.invars, eqn.invars, strict=True) if operand is var)
    return set().union(*(_dtypes(body, v) for v in inner))
