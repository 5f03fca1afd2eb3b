"""Equations in place of others."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import source_info_util

from shardax import _jax
from shardax.annotations.explicit import shape_of


def instead_of(eqn, fun: Callable[..., Any], results: Sequence[Any] | None = None):
    """The one equation of a function of an equation's operands, on its line, which makes these results, or
    else its own.
    """
    (made,) = equations_of(fun, eqn.invars, results or eqn.outvars, eqn)
    return made


def equations_of(
    fun: Callable[..., Any], operands: Sequence[Any], results: Sequence[Any] | None, like
) -> list[Any]:
    """The equations of a function of these operands, on the line of `like`, which make these results, or else
    new ones.
    """
    with like.ctx.manager, source_info_util.user_context(like.source_info.traceback):
        made = jax.make_jaxpr(fun)(*(shape_of(v.aval) for v in operands)).jaxpr
    atoms = dict(zip(made.invars, operands, strict=True)) | dict(
        zip(made.outvars, results or made.outvars, strict=True)
    )

    def read(atom):
        return atom if _jax.is_literal(atom) else atoms.get(atom, atom)

    return [
        eqn.replace(
            invars=list(map(read, eqn.invars)),
            outvars=list(map(read, eqn.outvars)),
            source_info=like.source_info,
        )
        for eqn in made.eqns
    ]
