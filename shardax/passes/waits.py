"""Waits: on CPUs collectives run in one order on all devices.

    y = while ... { psum ... }                   y = while ... { psum ... }
    z = all_gather x                     ->      z = all_gather (x, once y is there)

XLA's CPU runtime starts collectives in the order of its schedule, but starts the next one when a loop, a
branch or a call before it has begun, not when it has ended. Of a collective that does not depend on it, and
those inside, some devices then run one first and others another, and all wait for each other. So one that
stands after such a loop waits for it, and a loop for those before it, by a number that XLA does not see
through.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import DropVar

from shardax import _jax
from shardax.graph.equations import equations_like, map_equations
from shardax.ledger.collectives import array_bytes, is_collective
from shardax.passes.moves import is_at_host
from shardax.spmd_rules.equations import any_inside

LOOPS = lax.scan_p, lax.while_p, lax.cond_p


def waiting(jaxpr):
    """The same jaxpr, closed or open, and its bodies, in each of which such equations wait."""
    return map_equations(jaxpr, lambda eqns: list(_waiting(eqns)))


def _waiting(eqns: Sequence[Any]) -> Iterator[Any]:
    reached: dict[Any, int] = {}  # by variable, as bits, the equations with collectives that it depends on
    before: list[Any] = []  # those equations so far
    covers: list[int] = []  # what is there when one of them has ended
    block = 0  # the last one with bodies, as a bit
    for eqn in eqns:
        depends = 0
        for v in eqn.invars:
            depends |= 0 if _jax.is_literal(v) else reached.get(v, 0)
        if any_inside(is_collective, eqn):
            own, has_bodies = 1 << len(before), not is_collective(eqn)
            missing, after = (own - 1 if has_bodies else block) & ~depends, []
            while missing:
                last = missing.bit_length() - 1
                after.append(before[last])
                depends |= covers[last]
                missing &= ~depends
            if after:
                *new, eqn = _after(eqn, after)
                yield from new
            depends |= own
            block = own if has_bodies else block
            before.append(eqn)
            covers.append(depends)
        reached |= dict.fromkeys(eqn.outvars, depends)
        yield eqn


def _after(eqn, others: Sequence[Any]) -> list[Any]:
    """The equation, behind those by which its smallest operand waits for results of the others."""
    arrays = [n for n, v in enumerate(eqn.invars) if not _jax.is_literal(v) and not is_at_host(v)]
    results = [v for one in others for v in _results(one)]
    if not arrays or not results:
        return [eqn]
    chosen = min(arrays, key=lambda n: array_bytes(eqn.invars[n].aval))
    new, (late,) = equations_like(eqn, _once, [eqn.invars[chosen], *results])
    return [*new, eqn.replace(invars=[*eqn.invars[:chosen], late, *eqn.invars[chosen + 1 :]])]


def _results(eqn) -> list[Any]:
    """Results of an equation on the device that are there when it has ended: the smallest one that an
    operation, a loop or a branch makes, and all of a call, into which XLA looks.
    """
    kept = [(n, v) for n, v in enumerate(eqn.outvars) if not isinstance(v, DropVar) and not is_at_host(v)]
    made = [v for n, v in kept if not _passes(eqn, n)]
    made.sort(key=lambda v: array_bytes(v.aval))
    return made[:1] if is_collective(eqn) or eqn.primitive in LOOPS else made


def _passes(eqn, n: int) -> bool:
    """Whether a loop gives a result as it took it, so that XLA takes it from before the loop."""
    body = eqn.params.get("body_jaxpr" if eqn.primitive is lax.while_p else "jaxpr")
    if eqn.primitive not in (lax.scan_p, lax.while_p) or body is None:
        return False
    opened = _jax.closed(body).jaxpr
    return opened.outvars[n] in opened.invars


def _once(x, *others):
    """`x`, once the others are there: what is chosen instead never is."""
    never = jnp.bool_(False)
    for other in others:
        never |= _never(other)
    return lax.select(lax.broadcast(never, x.shape), jnp.zeros_like(x), x)


def _never(x):
    """A False that XLA does not see: not a number is not greater either."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        x = jax.random.key_data(x)
    first = lax.slice(x, [0] * x.ndim, [1] * x.ndim).reshape(()) if x.size else jnp.float32(0)
    number = lax.real(first) if jnp.iscomplexobj(first) else first
    return lax.convert_element_type(number, "float32") * 0 > 1
