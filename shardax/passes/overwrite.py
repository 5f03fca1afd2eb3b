"""Overwrite: an update row by row, of arrays at the host among others, takes the place of what it reads.

XLA gives what a scan stacks a buffer of its own, and keeps what the scan goes over beside it until all rows
are done: the new parameters beside the old ones. Here the scan carries such an array, and writes each row of
the result in the place of the one that it read:

    x, y = scan(f, xs)      xs: rows of x, and others    ->    x = scan(f), row i of x becomes row i of y

Arrays at the host stay as they are: XLA brings their rows ahead, and sends them back behind. An array that is
read later is not overwritten.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from shardax import _jax
from shardax.annotations.explicit import memory_of
from shardax.graph.equations import equations_of

HOST = jax.memory.Space.Host


def overwriting(eqns: Sequence[Any], arguments: Sequence[Any], results: Sequence[Any]) -> Iterator[Any]:
    """The equations, scans over rows at the host in this form. Arguments, which a caller may donate, are
    overwritten first.
    """
    last = {v: n for n, eqn in enumerate(eqns) for v in eqn.invars if not _jax.is_literal(v)}
    last |= {v: len(eqns) for v in results if not _jax.is_literal(v)}
    first = set(arguments)
    for n, eqn in enumerate(eqns):
        if eqn.primitive is lax.optimization_barrier_p:
            first |= {new for v, new in zip(eqn.invars, eqn.outvars, strict=True) if v in first}
        places = _places(eqn, {v for v in eqn.invars if not _jax.is_literal(v) and last[v] == n}, first)
        yield from _overwriting(eqn, places) if places else [eqn]


def _places(eqn, free: set[Any], first: set[Any]) -> dict[int, int]:
    """By the number of an operand that a scan goes over that of the result which takes its place."""
    if eqn.primitive.name != "scan":
        return {}
    consts, carries = _jax.scan_counts(eqn.params)
    start = consts + carries
    if not any(_at_host(v) for v in eqn.invars[start:]) or not _is_plain(eqn.params["jaxpr"]):
        return {}
    candidates = [
        k
        for k, v in enumerate(eqn.invars)
        if k >= start and v in free and not _at_host(v) and eqn.invars.count(v) == 1
    ]
    candidates.sort(key=lambda k: eqn.invars[k] not in first)
    places: dict[int, int] = {}
    for r, y in list(enumerate(eqn.outvars))[carries:]:
        alike = (k for k in candidates if k not in places and _alike(eqn.invars[k].aval, y.aval))
        if not _at_host(y) and (k := next(alike, None)) is not None:
            places[k] = r
    return places


def _at_host(v) -> bool:
    return not _jax.is_literal(v) and memory_of(v.aval) is HOST


def _alike(x, y) -> bool:
    return (x.shape, x.dtype) == (y.shape, y.dtype)


def _is_plain(body) -> bool:
    """Whether no equation has a body, or names axes."""
    eqns = _jax.closed(body).jaxpr.eqns
    return not any(_jax.has_bodies(eqn) or "axis_name" in eqn.params or _sums(eqn) for eqn in eqns)


def _sums(eqn) -> bool:
    return any(isinstance(axis, str) for axis in eqn.params.get("axes") or ())


def _overwriting(eqn, places: Mapping[int, int]) -> list[Any]:
    params, body = eqn.params, _jax.closed(eqn.params["jaxpr"])
    consts, carries = _jax.scan_counts(params)
    start, length, reverse = consts + carries, params["length"], params["reverse"]

    def run(*operands):
        scanned = [k for k in range(start, len(operands)) if k not in places]

        def trip(state, rows):
            i, carry, over = state
            known = dict(zip(scanned, rows, strict=True))
            known |= {
                k: lax.dynamic_index_in_dim(x, i, keepdims=False) for k, x in zip(places, over, strict=True)
            }
            read = (known[k] for k in range(start, len(operands)))
            made = jaxpr_as_fun(body)(*operands[:consts], *carry, *read)
            over = [
                lax.dynamic_update_index_in_dim(x, made[r], i, 0)
                for x, r in zip(over, places.values(), strict=True)
            ]
            kept = [y for r, y in enumerate(made) if r >= carries and r not in places.values()]
            return (i + (-1 if reverse else 1), made[:carries], over), kept

        begin = jnp.int32(length - 1 if reverse else 0)
        state = begin, list(operands[consts:start]), [operands[k] for k in places]
        rows = [operands[k] for k in scanned]
        (_, carry, over), kept = lax.scan(trip, state, rows, length, reverse=reverse, unroll=params["unroll"])
        left, at = iter(kept), dict(zip(places.values(), over, strict=True))
        stacked = [at[r] if r in at else next(left) for r in range(carries, len(eqn.outvars))]
        return *carry, *stacked

    return equations_of(run, eqn.invars, eqn.outvars, eqn)
