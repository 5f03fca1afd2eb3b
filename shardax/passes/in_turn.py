"""In turn: what is put together on the device only to be sent to the host is so one array after the other.

    a = all_gather(x);  a_host = send(a)         a = all_gather(x);               a_host = send(a)
    b = all_gather(y);  b_host = send(b)   ->    b = all_gather(barrier(y, a_host));  b_host = send(b)

New parameters that rest whole are gathered so (stages 1 and 2 of ZeRO). XLA would gather all of them before it
sends the first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from shardax import _jax
from shardax.graph.equations import equations_like
from shardax.passes.moves import is_at_host, moves, nbytes, variables


def in_turn(jaxpr):
    """The same jaxpr, closed or open, and its bodies, with such arrays in turn."""
    eqns = [_jax.with_bodies(eqn, in_turn) for eqn in _jax.closed(jaxpr).jaxpr.eqns]
    sends = {eqn.invars[0]: eqn.outvars[0] for eqn in eqns if moves(eqn) and is_at_host(eqn.outvars[0])}
    return _jax.replaced_eqns(jaxpr, _ordered(eqns, sends))


def _ordered(eqns: Sequence[Any], sends: Mapping[Any, Any]) -> list[Any]:
    """The equations, each that makes something larger, to be sent, after the array before is sent."""
    new, last = [], None
    for eqn in eqns:
        if len(eqn.outvars) == 1 and eqn.outvars[0] in sends and _enlarges(eqn):
            if last is not None:
                wait = lambda *operands: lax.optimization_barrier(operands)[0]  # noqa: E731  (traced anew)
                waits, made = equations_like(eqn, wait, [eqn.invars[0], last])
                new, eqn = [*new, *waits], eqn.replace(invars=[*made, *eqn.invars[1:]])
            last = sends[eqn.outvars[0]]
        new.append(eqn)
    return new


def _enlarges(eqn) -> bool:
    arrays = variables(eqn.invars)
    return bool(arrays) and nbytes(eqn.outvars[0]) > sum(map(nbytes, arrays))
