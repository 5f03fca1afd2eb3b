"""Makes every update of a part of an array a call of its own, into which XLA's CPU compiler fuses nothing.

Beside a reshape it fuses the new part into the loop that writes it into the array, in place. Where the new part is read from
that array, as in `y.at[1:].set(y[:-1])`, the loop then reads what it has overwritten (openxla/xla#49176). Barriers do not help:
they are gone before it fuses. A call is no copy: the array is still updated in place. Arguments may be parts of each other
outside, and a loop of one trip is no loop to XLA, so no update is left out because it seems to read something else.

Done where the program is lowered for CPUs: the plan and other chips have the update itself.
"""

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import source_info_util

from shardax import _jax
from shardax.indices import WRITES
from shardax.untyped import shape_of


def called(jaxpr):
    """The same ClosedJaxpr, each update of one part, in bodies too, a call."""
    return _jax.map_eqns(jaxpr, lambda eqn: _call(eqn) if _is_of_one_part(eqn) else eqn)


def _is_of_one_part(eqn) -> bool:
    """A scatter to several places is never fused in place."""
    if eqn.primitive.name == "dynamic_update_slice" or eqn.primitive.name not in WRITES:
        return eqn.primitive.name in WRITES
    places = eqn.invars[1].aval
    return places.size == places.shape[-1]


def _call(eqn):
    def update(*args):
        return eqn.primitive.bind(*args, **eqn.params)

    with eqn.ctx.manager, source_info_util.user_context(eqn.source_info.traceback), set_xla_metadata(inlineable="false"):
        (call,) = jax.make_jaxpr(jax.jit(update))(*(shape_of(v.aval) for v in eqn.invars)).eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
