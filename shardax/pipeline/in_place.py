"""A backward scan over layers that adds what it makes to sums, in place.

    rows = scan(layers)                  of each layer the gradient of its weights
    sums + rows
    becomes
    sums = scan(layers, carrying sums)   each layer adds its own row

so that no array of all rows is made, filled, and read again: where few rows of the batch pass many weights,
that is a good part of a backward pass.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardax import _jax
from shardax.annotations.explicit import as_at
from shardax.cost import noted
from shardax.graph.evaluate import evaluate


def adding(eqn, operands: Sequence[Any], length: int, totals: Mapping[int, Any]) -> list[Any]:
    """What `length` trips of a scan make.

    Args:
      eqn: the scan.
      totals: by the number of a result that is stacked: the sums, [rows, ...], `length` rows at least, to the
        first of which its rows are added. They are the result then.
    """
    body, (consts, carries) = eqn.params["jaxpr"], _jax.scan_counts(eqn.params)
    fixed, start, rows = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]

    def trip(state, x):
        (carry, sums), (row, *own) = state, x
        made = evaluate(body, [*fixed, *carry, *own])
        sums = {n: _added(total, row, made[n]) for n, total in sums.items()}
        return (made[:carries], sums), [y for n, y in enumerate(made) if n >= carries and n not in totals]

    how = {name: eqn.params[name] for name in ("reverse", "unroll")}
    with as_at(eqn):
        numbers = jnp.arange(length, dtype="int32")
        state = list(start), dict(totals)
        with noted.in_place():
            (carry, sums), stacked = lax.scan(trip, state, [numbers, *rows], length=length, **how)
    others = iter([*carry, *stacked])
    return [sums[n] if n in sums else next(others) for n in range(len(eqn.outvars))]


def _added(total, row, x):
    """The sums, with x added to a row."""
    own = lax.dynamic_index_in_dim(total, row, keepdims=False) + x.astype(total.dtype)
    return lax.dynamic_update_index_in_dim(total, own, row, 0)
