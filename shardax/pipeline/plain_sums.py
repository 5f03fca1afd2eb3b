"""Losses that are plain sums over the rows of their microbatch, where the mean of microbatches is promised.

A mean over rows divides, or multiplies by weights; a plain sum does neither between the rows and the sum:

    loss <- reduce_sum <- elementwise, without mul and div <- a product, a lookup, the batch itself

Where there is a mul or a div, it may be the weights of a mean, and nothing is said.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax import lax

from shardax import _jax
from shardax.pipeline.cut import variables

_SAME = frozenset({"convert_element_type", "copy", "neg", "reshape", "squeeze", "stop_gradient"})
_UNSCALED = _SAME | frozenset(
    "abs add add_any broadcast_in_dim concatenate exp integer_pow log log1p logistic max min reduce_max "
    "reduce_sum select_n slice sqrt square sub tanh transpose".split()
)


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
    return None if any(_scales(before) for before in _elementwise(eqn, makers)) else eqn


def _made_by(v, makers: Mapping[Any, Any]) -> Any:
    """The equation that makes a variable, but for casts and signs."""
    eqn = None if _jax.is_literal(v) else makers.get(v)
    return _made_by(eqn.invars[0], makers) if eqn is not None and eqn.primitive.name in _SAME else eqn


def _of_batch(jaxpr, is_batch: Sequence[bool]) -> set[Any]:
    """The variables that depend on the batch."""
    found = {v for v, own in zip(jaxpr.invars, is_batch, strict=True) if own}
    for eqn in jaxpr.eqns:
        if not found.isdisjoint(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _elementwise(eqn, makers: Mapping[Any, Any]) -> Iterator[Any]:
    """The equations before one, as far as those go that scale nothing; what scales among them."""
    seen, left = set[int](), [eqn]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            if one.primitive.name in _UNSCALED:
                left += [makers[v] for v in variables(one.invars) if v in makers]


def _scales(eqn) -> bool:
    return eqn.primitive.name in ("div", "mul") and eqn.invars[0] is not eqn.invars[1]
