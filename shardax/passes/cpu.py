"""What XLA's CPU compiler gets wrong, written so that it gets it right.

Updates of a part of an array: beside a reshape it fuses the new part into the loop that writes it into the
array, in place. Where the new part is read from that array, as in `y.at[1:].set(y[:-1])`, the loop then reads
what it has overwritten (openxla/xla#49176). Barriers do not help: they are gone before it fuses. So each
update is a call of its own, into which nothing is fused. A call is no copy: the array is still updated in
place. Arguments may be parts of each other outside, and a loop of one iteration is no loop to XLA, so no
update is left out because it seems to read something else.

all_to_alls: it refuses to compile one of a transposed operand by which some devices get nothing but padding.
So each operand is behind a barrier.

Done where the program is lowered for CPUs: the plan and other chips have neither.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from shardax import _jax
from shardax.graph.equations import instead_of, map_equations
from shardax.graph.indices import WRITES


def suited(jaxpr):
    """The same jaxpr, closed or open, each update of one part a call, each all_to_all behind a barrier, in
    bodies too.
    """
    return map_equations(jaxpr, lambda eqns: [new for eqn in eqns for new in _suited(eqn)])


def _suited(eqn) -> Iterator[Any]:
    writes = eqn.primitive.name in WRITES
    if writes and eqn.primitive.name != "dynamic_update_slice":
        places = eqn.invars[1].aval
        writes = places.size == places.shape[-1]  # a scatter to several places is never fused in place
    if writes:
        yield _call(eqn)
    elif eqn.primitive is lax.all_to_all_p:
        barrier = instead_of(eqn, lax.optimization_barrier, [_jax.new_variable(v.aval) for v in eqn.invars])
        yield barrier
        yield eqn.replace(invars=barrier.outvars)
    else:
        yield eqn


def _call(eqn):
    def update(*args):
        return eqn.primitive.bind(*args, **eqn.params)

    def call(*args):
        with set_xla_metadata(inlineable="false"):
            return jax.jit(update)(*args)

    return instead_of(eqn, call)
