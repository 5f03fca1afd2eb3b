"""In turn: what is put together on the device only to be sent to the host is so one array after the other.

    a = all_gather(x);  a_host = send(a)         a = all_gather(x);               a_host = send(a)
    b = all_gather(y);  b_host = send(b)   ->    b = all_gather(barrier(y, a_host));  b_host = send(b)

New parameters that rest whole are gathered so (stages 1 and 2 of ZeRO). XLA would gather all of them before
it sends the first.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from shardax import _jax
from shardax.graph.equations import equations_like
from shardax.passes.moves import is_at_host, moves, variables


def in_turn(jaxpr):
    """The same jaxpr, closed or open, and its bodies, with such arrays in turn."""
    eqns = [_jax.with_bodies(eqn, in_turn) for eqn in _jax.closed(jaxpr).jaxpr.eqns]
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    place = {id(eqn): n for n, eqn in enumerate(eqns)}
    after: dict[int, list[Any]] = {}
    sent, last = -1, []
    for eqn in filter(sends, eqns):
        large = put_together(eqn, makers)
        if large is not None and place[id(large)] > sent:
            after[id(large)] = last
            sent, last = place[id(eqn)], eqn.outvars
    return _jax.replaced_eqns(jaxpr, _ordered(eqns, after))


def sends(eqn) -> bool:
    return moves(eqn) and is_at_host(eqn.outvars[0])


def put_together(send, makers: Mapping[Any, Any]) -> Any:
    """What makes the array that is sent of fewer elements than it has; other equations may cut it then."""
    eqn = makers.get(send.invars[0])
    while eqn is not None:
        read = variables(eqn.invars)
        if read and _size(eqn.outvars[0]) > sum(map(_size, read)):
            return eqn
        eqn = makers.get(read[0]) if len(read) == 1 else None
    return None


def _size(v) -> int:
    return math.prod(v.aval.shape)


def _ordered(eqns: Sequence[Any], after: Mapping[int, Sequence[Any]]) -> list[Any]:
    """The equations, those in `after`, by their numbers, behind copies."""
    new = []
    for eqn in eqns:
        if copies := after.get(id(eqn), ()):
            wait = lambda *operands: lax.optimization_barrier(operands)[0]  # noqa: E731  (traced anew)
            waits, operand = equations_like(eqn, wait, [eqn.invars[0], *copies])
            new, eqn = [*new, *waits], eqn.replace(invars=[*operand, *eqn.invars[1:]])
        new.append(eqn)
    return new
