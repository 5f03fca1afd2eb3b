"""The backward pass over layers as two scans: what the layer before waits for, and the gradients of weights.

    for each layer, last first        cotangent -> cotangent, gradient of its weights
    becomes
    for each layer, last first        cotangent -> cotangent, and what the gradient needs of it
    for each layer                    gradient of its weights

so that B of a zero-bubble schedule runs the one and W the other, and neither computes anything again.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from shardax import _jax
from shardax.annotations.explicit import as_at, shape_of
from shardax.differentiated import is_transposed
from shardax.graph.evaluate import bound
from shardax.pipeline.cut import variables
from shardax.spmd_rules.equations import multiplies


def apart(closed):
    """The program, in which scans of the backward pass whose rows of results take products that nothing
    carried depends on are two."""

    def run(*args):
        env = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, *args), strict=True))
        for eqn in closed.jaxpr.eqns:
            operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            late = _late(eqn)
            made = _two_scans(eqn, operands, late) if late else bound(eqn, operands)
            env.update(zip(eqn.outvars, made, strict=True))
        return [v.val if isinstance(v, Literal) else env[v] for v in closed.jaxpr.outvars]

    return jax.make_jaxpr(run)(*map(shape_of, closed.in_avals))


def _late(eqn) -> list[Any]:
    """The equations in the body of a backward scan that no carry depends on, if products are among them."""
    if eqn.primitive.name != "scan" or not is_transposed(eqn.source_info.name_stack):
        return []
    _, carries = _jax.scan_counts(eqn.params)
    body = eqn.params["jaxpr"].jaxpr
    needed, late = set(variables(body.outvars[:carries])), []
    for inner in reversed(body.eqns):
        if needed.isdisjoint(inner.outvars) and not _jax.has_effects(inner):
            late.append(inner)
        else:
            needed.update(variables(inner.invars))
    products = any(map(multiplies, late))
    return late[::-1] if carries and products else []


def _two_scans(eqn, operands: Sequence[Any], late: Sequence[Any]) -> list[Any]:
    body, (consts, carries) = eqn.params["jaxpr"], _jax.scan_counts(eqn.params)
    fixed, start, rows = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
    invars, outvars = body.jaxpr.invars, body.jaxpr.outvars[carries:]
    constants = dict(zip((*body.jaxpr.constvars, *invars[:consts]), (*body.consts, *fixed), strict=True))
    own = {v for inner in late for v in inner.outvars}
    early = [inner for inner in body.jaxpr.eqns if own.isdisjoint(inner.outvars)]
    scanned = invars[consts + carries :]
    read = dict.fromkeys(v for inner in late for v in variables(inner.invars))
    kept = [v for v in read if v not in own and v not in constants and v not in scanned]
    reread = [v for v in scanned if v in read]
    is_late = [not isinstance(v, Literal) and v in own for v in outvars]
    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}

    def first(carry, x):
        env = _run(early, {**constants, **dict(zip(invars[consts:], (*carry, *x), strict=True))})
        made = [_read(env, v) for v in body.jaxpr.outvars[:carries]]
        stacked = [_read(env, v) for v, later in zip(outvars, is_late, strict=True) if not later]
        return made, (stacked, [env[v] for v in kept])

    def second(_, x):
        env = _run(late, {**constants, **dict(zip((*reread, *kept), x, strict=True))})
        return None, [env[v] for v, later in zip(outvars, is_late, strict=True) if later]

    with as_at(eqn):
        carry, (stacked, values) = lax.scan(first, list(start), list(rows), **how)
        of_scanned = dict(zip(scanned, rows, strict=True))
        _, made = lax.scan(second, None, [*(of_scanned[v] for v in reread), *values], **how)
    now, later = iter(stacked), iter(made)
    return [*carry, *(next(later if is_later else now) for is_later in is_late)]


def _run(eqns: Iterable[Any], env: dict[Any, Any]) -> dict[Any, Any]:
    for eqn in eqns:
        env.update(zip(eqn.outvars, bound(eqn, [_read(env, v) for v in eqn.invars]), strict=True))
    return env


def _read(env: dict[Any, Any], atom) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]
