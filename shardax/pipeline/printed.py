"""Callbacks whose results nobody reads, as of `jax.debug.print`, taken out of a step: called behind its
microbatches.

What they get is made in the loop, as results are: of a step the values of the whole batch, of a loss that is
called with each microbatch a row for each, in their order. Those inside of loops and branches stay there.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from shardax import _jax
from shardax.annotations.explicit import shape_of
from shardax.graph.evaluate import bound, evaluate
from shardax.pipeline.cut import flat, variables
from shardax.spmd_rules.equations import is_once


def without_callbacks(closed) -> tuple[Any, list[Any]]:
    """The jaxpr without them, and they: their operands are its last results, in order."""
    if not closed.effects:
        return closed, []
    flattened = flat(closed)
    eqns = flattened.jaxpr.eqns
    read = {*variables(flattened.jaxpr.outvars), *(v for eqn in eqns for v in variables(eqn.invars))}
    is_called = [_is_callback(eqn) and read.isdisjoint(eqn.outvars) for eqn in eqns]
    if not any(is_called):
        return closed, []
    called = list(itertools.compress(eqns, is_called))
    left = [eqn for eqn, is_out in zip(eqns, is_called, strict=True) if not is_out]
    results = [*flattened.jaxpr.outvars, *_read(called)]
    quiet = _jax.with_eqns_and_results(flattened, left, results)
    # made anew, so that it has the effects that are left, and results of its own
    made = jax.make_jaxpr(lambda *args: evaluate(quiet, args))(*map(shape_of, closed.in_avals))
    return made, called


def called_back(called: Sequence[Any], results: Sequence[Any], each: bool = False) -> list[Any]:
    """Calls them with the last of these results, or with `each` row of them; the other results."""
    last = len(results) - len(_read(called))
    if each and called:
        lax.scan(lambda _, rows: (None, _call(called, rows)), None, list(results[last:]))
    else:
        _call(called, results[last:])
    return list(results[:last])


def _call(called: Sequence[Any], operands: Sequence[Any]) -> None:
    left = iter(operands)
    for eqn in called:
        bound(eqn, [v.val if _jax.is_literal(v) else next(left) for v in eqn.invars])


def _read(called: Sequence[Any]) -> list[Any]:
    return [v for eqn in called for v in variables(eqn.invars)]


def _is_callback(eqn) -> bool:
    return _jax.has_effects(eqn) and (is_once(eqn) or not eqn.outvars)
