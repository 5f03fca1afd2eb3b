"""What XLA's TPU compiler does badly, written so that it does it well.

all_to_alls: it takes one that cuts or joins another dim than the leading one apart by itself, and copies what
is sent up to fifty-eight times for that, the more the more devices there are (cycles that it estimates, for
v3 and v5p). Here the pieces are put in front, the all_to_all is of whole pieces, and these are put where they
belong. That takes seven copies at most in most cases measured. Where a value of one row is joined along the
minor-most dim it takes 7 to 21, and the compiler by itself takes 2 to 16.

Done where the program is lowered for TPUs: the plan and other chips have one all_to_all.
"""

from collections.abc import Iterator
from typing import Any

from jax import lax

from shardax import _jax
from shardax.graph.equations import equations_of


def suited(jaxpr):
    """The same jaxpr, closed or open, each all_to_all one of leading pieces, in bodies too."""
    eqns = [_jax.with_bodies(eqn, suited) for eqn in _jax.closed(jaxpr).jaxpr.eqns]
    return _jax.replaced_eqns(jaxpr, [new for eqn in eqns for new in _suited(eqn)])


def _suited(eqn) -> Iterator[Any]:
    if eqn.primitive is not lax.all_to_all_p or not eqn.params["tiled"]:
        yield eqn
        return
    cut, join = eqn.params["split_axis"], eqn.params["concat_axis"]
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if cut == join or 0 in before.shape:
        yield eqn
        return
    count = before.shape[cut] // after.shape[cut]
    front = equations_of(lambda x: _pieces_in_front(x, cut, count), eqn.invars, None, eqn)
    sent = _jax.new_variable(front[-1].outvars[0].aval)
    yield from front
    yield eqn.replace(
        invars=front[-1].outvars, outvars=[sent], params={**eqn.params, "split_axis": 0, "concat_axis": 0}
    )
    yield from equations_of(lambda x: _pieces_joined(x, join, after.shape), [sent], eqn.outvars, eqn)


def _pieces_in_front(x, dim: int, count: int):
    """[.., n, ..] -> [count, .., n / count, ..]"""
    shape = (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    return lax.transpose(lax.reshape(x, shape), (dim, *(d for d in range(len(shape)) if d != dim)))


def _pieces_joined(x, dim: int, shape: tuple[int, ...]):
    """[count, .., n, ..] -> [.., count n, ..]"""
    order = [*range(1, dim + 1), 0, *range(dim + 1, x.ndim)]
    return lax.reshape(lax.transpose(x, order), shape)
