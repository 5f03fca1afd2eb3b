"""On host: what the host computes of one array is one call, of arrays that are in its memory.

    g_host = send(g)                         g = barrier(g);  g_host = send(barrier(send(g)))
    m = b m + g_host       (on the host) ->  m, u = call(m, g_host)
    u = m / sqrt(v)        (on the host)

XLA forgets a copy to the host that only the host reads. It hands over what is on the device instead, in a
layout for which it makes copies there, of all that updates read, at once. Behind a barrier it is a copy to
the host's memory, and what it is of is free then. Numbers that are computed with XLA makes arrays of on the
device, where they are not in a call.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from shardax import _jax
from shardax.graph.equations import equations_like, equations_of
from shardax.graph.evaluate import bound
from shardax.passes.moves import HOST, is_at_host, moves, variables
from shardax.passes.segments import Segment, in_order, is_elementwise, segments


def called(jaxpr):
    """The same jaxpr, closed or open, and its bodies, with such calls."""
    opened = _jax.closed(jaxpr).jaxpr
    eqns = [_jax.with_bodies(eqn, called) for eqn in opened.eqns]
    found = _computed(eqns, opened.outvars)
    if not found:
        return _jax.replaced_eqns(jaxpr, eqns)
    sends = {eqn.outvars[0]: eqn for eqn in eqns if moves(eqn) and eqn.outvars[0].aval.shape}
    parts, new = in_order(eqns, found), []
    read = {v for part in parts for v in _reads(part)} | set(variables(opened.outvars))
    for part in parts:
        new += _call(part, sends, read) if isinstance(part, Segment) else [part]
    sent = {sends[v].invars[0] for each in found for v in each.reads() if v in sends}
    return _jax.with_eqns_and_results(jaxpr, *_made_once(new, opened.outvars, sent))


def is_on_host(eqn) -> bool:
    """Whether the host computes what an equation makes of each element."""
    return is_elementwise(eqn) and is_at_host(eqn.outvars[0])


def _computed(eqns: Sequence[Any], results: Sequence[Any]) -> list[Segment]:
    """What the host computes, by arrays."""
    computed = list(filter(is_on_host, eqns))
    made = {eqn.outvars[0] for eqn in computed}
    roots = {v for eqn in computed for v in eqn.invars if is_at_host(v)} - made
    return [each for each in segments(eqns, roots, results) if is_on_host(each.eqns[-1])]


def _reads(part) -> list[Any]:
    return part.reads() if isinstance(part, Segment) else variables(part.invars)


def _call(segment: Segment, sends: Mapping[Any, Any], read: Collection[Any]) -> list[Any]:
    """The equations of a segment, as one call, which gives what is `read` outside of it.

    sends: by copies at the host the equations that make them.
    """
    eqns, operands, results = [], segment.reads(), [v for v in segment.made if v in read]
    there = {}
    for v in filter(sends.__contains__, operands):
        new, (there[v],) = equations_like(sends[v], lambda x: _at_host(x), [v])  # (each time new variables)
        eqns += new

    def run(*values):
        env = dict(zip(operands, values, strict=True))
        for eqn in segment.eqns:
            args = [v.val if _jax.is_literal(v) else env[v] for v in eqn.invars]
            (env[eqn.outvars[0]],) = bound(eqn, args)
        return [env[v] for v in results]

    atoms = [there.get(v, v) for v in operands]
    return [*eqns, *equations_of(jax.jit(run), atoms, results, segment.eqns[-1])]


def _at_host(x) -> Any:
    """A copy that XLA makes. It forgets behind a barrier in which memory that is, and has to be told."""
    return jax.device_put(lax.optimization_barrier(x), HOST)


def _made_once(eqns: Sequence[Any], results: Sequence[Any], sent: set[Any]) -> tuple[list[Any], list[Any]]:
    """The equations and results, of which others read what is sent behind a barrier. (XLA would fuse casts of
    gradients into their norm, which comes late, and keep what they are cast from beside what is sent.)
    """
    behind: dict[Any, Any] = {}

    def now(atom):
        return atom if _jax.is_literal(atom) else behind.get(atom, atom)

    new = []
    for eqn in eqns:
        new.append(eqn.replace(invars=list(map(now, eqn.invars))))
        for v in sent.intersection(eqn.outvars):
            barrier, (behind[v],) = equations_like(eqn, lambda x: lax.optimization_barrier(x), [v])
            new += barrier
    return new, list(map(now, results))
