"""Equations in place of others."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import source_info_util

from shardax.untyped import shape_of


def instead_of(eqn, fun: Callable[..., Any], results: Sequence[Any] | None = None):
    """The one equation of a function of an equation's operands, on its line, which makes these results, or else its own."""
    with eqn.ctx.manager, source_info_util.user_context(eqn.source_info.traceback):
        (made,) = jax.make_jaxpr(fun)(*(shape_of(v.aval) for v in eqn.invars)).eqns
    return made.replace(invars=eqn.invars, outvars=list(results or eqn.outvars), source_info=eqn.source_info)
