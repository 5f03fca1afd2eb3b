"""Matrices: which equations of an update compute with whole ones."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

from shardax import _jax
from shardax.differentiated import is_differentiated
from shardax.spmd_rules.registry import RULES

MATRICES = 2  # FLOPs for each number that is read or made: products of matrices have more, of vectors fewer


def of_update(eqns: Sequence[Any]) -> Iterator[Any]:
    return (eqn for eqn in eqns if not is_differentiated(eqn.source_info.name_stack))


def has_matrices(eqn) -> bool:
    """Whether an equation or one in its bodies that is of an update multiplies or factors matrices."""
    entry = RULES.get(eqn.primitive.name)
    if entry is not None and (flops := entry.flops_at(eqn)) is not None:
        return flops > MATRICES * sum(v.aval.size for v in (*eqn.invars, *eqn.outvars))
    bodies = jaxprs_in_params(eqn.params)
    return any(has_matrices(inner) for body in bodies for inner in of_update(_jax.closed(body).jaxpr.eqns))
