"""Equations in place of others."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import source_info_util

from shardax import _jax
from shardax.annotations.explicit import shape_of


def map_equations(jaxpr: Any, change: Callable[[list[Any]], list[Any]]) -> Any:
    """The same jaxpr, closed or open, the list of its equations as `change` returns it; so are the bodies in
    it, which come first. The jaxpr itself, where nothing is another.

    `change` may leave equations out, move them, and put others there, as `eqn.replace(...)` makes them. It
    must not change what the jaxpr takes and gives.

    >>> jaxpr = jax.make_jaxpr(jax.numpy.sin)(jax.numpy.ones(4))
    >>> def as_cos(eqns):
    ...     return [eqn.replace(primitive=jax.lax.cos_p) for eqn in eqns]
    >>> print(map_equations(jaxpr, as_cos))
    { lambda ; a:f32[4]. let b:f32[4] = cos a in (b,) }
    """
    eqns = _jax.closed(jaxpr).jaxpr.eqns
    inner = [_jax.with_bodies(eqn, lambda body: map_equations(body, change)) for eqn in eqns]
    return _jax.replaced_eqns(jaxpr, change(inner))


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
    new ones. What the function gives back as it took it, gives twice, or has as a number, is copied: an
    equation has to make each result. (A scan gives what it carries unchanged back without an equation.)
    """
    eqns, made = equations_like(like, fun, operands)
    if results is None:
        return eqns
    taken = {v for v in operands if not _jax.is_literal(v)}
    atoms: dict[Any, Any] = {}
    for atom, result in zip(made, results, strict=True):
        if _jax.is_literal(atom) or atom in taken or atom in atoms:
            (copy,), _ = equations_like(like, lax.copy_p.bind, [atom])
            eqns.append(copy.replace(outvars=[result]))
        else:
            atoms[atom] = result

    def read(atom):
        return atom if _jax.is_literal(atom) else atoms.get(atom, atom)

    return [
        eqn.replace(invars=list(map(read, eqn.invars)), outvars=list(map(read, eqn.outvars))) for eqn in eqns
    ]


def equations_like(eqn: Any, fun: Callable[..., Any], operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """New equations on the line of another one: those of a function of these operands, and the variables of
    its results.

    Args:
      eqn: whose source line, scope and context they get; of the local program also whose origin.
      fun: a function of arrays, which closes over none. Scopes in it stand within that of the equation.
      operands: variables and literals of the program.

    Raises ValueError where the function closes over an array.

    >>> import shardax as sx
    >>> jaxpr = jax.make_jaxpr(jax.numpy.sin)(jax.numpy.ones(4))
    >>> (sin,) = jaxpr.eqns
    >>> new, (double,) = sx.equations_like(sin, lambda x: 2 * x, sin.invars)
    >>> print(sx.map_equations(jaxpr, lambda eqns: [*new, sin.replace(invars=[double])]))
    { lambda ; a:f32[4]. let b:f32[4] = mul 2.0:f32[] a; c:f32[4] = sin b in (c,) }
    """
    with eqn.ctx.manager, source_info_util.user_context(eqn.source_info.traceback):
        made = jax.make_jaxpr(fun)(*(shape_of(v.aval) for v in operands)).jaxpr
    if made.constvars:
        shapes = ", ".join(v.aval.str_short(short_dtypes=True) for v in made.constvars)
        raise ValueError(
            f"equations_like: the function closes over {shapes}, which an equation cannot hold: make it "
            "inside of the function, or give it as an operand"
        )
    known = dict(zip(made.invars, operands, strict=True))

    def read(atom):
        return atom if _jax.is_literal(atom) else known.get(atom, atom)

    def placed(new):
        stack = eqn.source_info.name_stack + new.source_info.name_stack
        return new.replace(
            invars=list(map(read, new.invars)), source_info=eqn.source_info.replace(name_stack=stack)
        )

    return list(map(placed, made.eqns)), list(map(read, made.outvars))
