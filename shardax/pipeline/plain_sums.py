"""Losses that are plain sums over the rows of their microbatch, where the mean of microbatches is promised.

A mean over rows divides, or multiplies by weights; a plain sum does neither between the rows and the sum:

    loss <- reduce_sum <- what is linear, as add or a cast <- what is not, a product, a lookup, the batch

Where something linear scales, as mul and div do, it may be by the weights of a mean, and nothing is said. No
mean scales within what is not linear, as dropout does.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax import lax

from shardax import _jax
from shardax.pipeline.cut import variables
from shardax.spmd_rules.equations import is_elementwise, is_lookup, keeps_order, linear_in, multiplies


def plain_sum(jaxpr, is_batch: Sequence[bool]) -> Any:
    """The equation that sums the first result over rows of the batch, where nothing scales them before or
    behind; else None. `is_batch`: of the inputs.
    """
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    eqn = _made_by(jaxpr.outvars[0], makers)
    if eqn is None or eqn.primitive is not lax.reduce_sum_p:
        return None
    if eqn.invars[0] not in _of_batch(jaxpr, is_batch):
        return None
    return None if any(map(_scales, _linear(eqn, makers))) else eqn


def _made_by(v, makers: Mapping[Any, Any]) -> Any:
    """The equation that makes a variable, but for casts, signs and shapes."""
    eqn = None if _jax.is_literal(v) else makers.get(v)
    if eqn is None or len(eqn.invars) != 1 or not (keeps_order(eqn) or is_elementwise(eqn)):
        return eqn
    return _made_by(eqn.invars[0], makers) if linear_in(eqn) else eqn


def _of_batch(jaxpr, is_batch: Sequence[bool]) -> set[Any]:
    """The variables that depend on the batch."""
    found = {v for v, own in zip(jaxpr.invars, is_batch, strict=True) if own}
    for eqn in jaxpr.eqns:
        if not found.isdisjoint(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _linear(eqn, makers: Mapping[Any, Any]) -> Iterator[Any]:
    """It and the equations before it, as far as all are linear; those before which they are no more among
    them."""
    seen, left = set[int](), [eqn]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            if not multiplies(one) and not is_lookup(one):
                summed = [one.invars[i] for operands in linear_in(one) for i in operands]
                left += [makers[v] for v in variables(summed) if v in makers]


def _scales(eqn) -> bool:
    """Whether it multiplies one operand by another, or divides it."""
    if not is_elementwise(eqn) or len(eqn.invars) == 1 or eqn.invars[0] is eqn.invars[1]:
        return False
    return any(len(operands) == 1 for operands in linear_in(eqn))
