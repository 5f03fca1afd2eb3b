"""On host: what the host computes of one array is one call, of arrays that are in its memory.

    g_host = send(g)                         g_host = send(barrier(send(g)))
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
    computed = [eqn for eqn in eqns if is_computed_there(eqn)]
    if not computed:
        return _jax.replaced_eqns(jaxpr, eqns)
    roots = {v for eqn in computed for v in eqn.invars if is_at_host(v)} - {
        v for eqn in computed for v in eqn.outvars
    }
    found = [each for each in segments(eqns, roots, opened.outvars) if is_computed_there(each.eqns[-1])]
    makers = {eqn.outvars[0]: eqn for eqn in eqns if moves(eqn)}
    parts, new = in_order(eqns, found), []
    given = {v for part in parts for v in _reads(part)} | set(variables(opened.outvars))
    for part in parts:
        new += _call(part, makers, given) if isinstance(part, Segment) else [part]
    sent = {makers[v].invars[0] for each in found for v in each.reads() if v in makers and v.aval.shape}
    return _jax.with_eqns_and_results(jaxpr, *_stored(new, opened.outvars, sent))


def _stored(eqns: Sequence[Any], results: Sequence[Any], sent: Collection[Any]) -> tuple[list[Any], list[Any]]:
    """The equations and results, what is sent behind a barrier for all who read it. (XLA would make it anew for the norm of all
    gradients, in which it fuses its cast, and keep for that of what it is cast.)
    """
    stored: dict[Any, Any] = {}
    read = lambda atom: atom if _jax.is_literal(atom) else stored.get(atom, atom)  # noqa: E731
    new = []
    for eqn in eqns:
        new.append(eqn.replace(invars=list(map(read, eqn.invars))))
        for v in sent.intersection(eqn.outvars):
            barrier = lambda x: lax.optimization_barrier(x)  # noqa: E731  (traced anew)
            eqns, (stored[v],) = equations_like(eqn, barrier, [v])
            new += eqns
    return new, list(map(read, results))


def _reads(part) -> list[Any]:
    return part.reads() if isinstance(part, Segment) else variables(part.invars)


def is_computed_there(eqn) -> bool:
    """Whether the host computes what an equation makes of each element."""
    return is_elementwise(eqn) and is_at_host(eqn.outvars[0])


def _call(segment: Segment, makers: Mapping[Any, Any], given: Collection[Any]) -> list[Any]:
    """The equations of a segment, as one call, which gives what is read outside of it."""
    eqns, there, results = [], {}, [v for v in segment.made if v in given]
    for v in segment.reads():
        if v in makers and v.aval.shape:
            new, (there[v],) = equations_like(makers[v], lambda x: _there(x), [v])  # (traced anew)
            eqns += new
    operands = segment.reads()

    def run(*values):
        env = dict(zip(operands, values, strict=True))
        for eqn in segment.eqns:
            args = [v.val if _jax.is_literal(v) else env[v] for v in eqn.invars]
            (env[eqn.outvars[0]],) = bound(eqn, args)
        return [env[v] for v in results]

    atoms = [there.get(v, v) for v in operands]
    return [*eqns, *equations_of(jax.jit(run), atoms, results, segment.eqns[-1])]


def _there(x) -> Any:
    """A value that is at the host, in fact. XLA forgets behind a barrier where it is, and has to be told."""
    return jax.device_put(lax.optimization_barrier(x), HOST)
