"""Evaluates programs: each equation on its own line, in its own scopes, on the mesh in context."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from shardax import _jax
from shardax.annotations.explicit import SHARDING_PARAMS, as_at, shape_of
from shardax.graph import annotations

_INLINED = frozenset({"closed_call", "core_call", "eval_jaxpr", "jit", "pjit"})


def bound(eqn, operands: Sequence[Any], **changed) -> list[Any]:
    """What an equation makes of operands, on its own line. The shardings that JAX notes with some are those
    of a mesh whose axes are of other types."""
    with as_at(eqn):
        noted = () if eqn.primitive is _jax.sharding_constraint_p else SHARDING_PARAMS
        own = {name: None if name in noted else x for name, x in eqn.params.items()}
        params = eqn.primitive.get_bind_params({**own, **changed})
        made = eqn.primitive.bind(*operands, **params)
    return list(made) if eqn.primitive.multiple_results else [made]


def is_call(eqn) -> bool:
    """Whether it is a call, as of `jit`, without shardings."""
    return eqn.primitive.name in _INLINED and not any(annotations.shardings_of(eqn))


def without_calls(jaxpr) -> Any:
    """The same program, closed, with its calls inlined, and without what no result needs."""
    closed = _jax.closed(jaxpr)
    return _jax.dce(jax.make_jaxpr(lambda *args: evaluate(closed, args))(*map(shape_of, closed.in_avals)))


def evaluate(
    closed,
    args: Sequence[Any],
    callers: tuple[Any, ...] = (),
    inlines: Callable[[Any], bool] = is_call,
) -> list[Any]:
    """The results of a jaxpr, on the mesh in context; calls that it `inlines` inlined. What has no line of
    the user's own is on that of the innermost of its `callers` that has one.
    """
    env = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        eqn = _on_users_line(eqn, callers) if callers else eqn
        if inlines(eqn):
            with as_at(eqn):
                inner = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
                made = evaluate(_jax.closed(inner), operands, (eqn, *callers), inlines)
        else:
            made = bound(eqn, operands)
        env.update(zip(eqn.outvars, made, strict=True))
    return list(map(read, closed.jaxpr.outvars))


def _on_users_line(eqn, callers: Sequence[Any]) -> Any:
    traceback = _jax.with_user_frame(eqn, callers).traceback
    return eqn.replace(source_info=eqn.source_info.replace(traceback=traceback))
