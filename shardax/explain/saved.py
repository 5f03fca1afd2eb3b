"""What the forward pass saves for the backward pass, read off the local jaxpr, with the names of
`checkpoint_name`.

JAX writes `transpose(...)` into the name stack of what differentiation adds. What is stored before and read
there was saved.
"""

from collections.abc import Iterator
from typing import Any

from shardax import _jax
from shardax.differentiated import is_transposed
from shardax.explain.live import Life, nbytes
from shardax.ledger.collectives import reason_of
from shardax.spmd_rules.equations import moves


def saved(jaxpr) -> Iterator[tuple[Any, str, str]]:
    """(variable, name, line) of each array that is saved, arguments left out; "" where it has no name or
    line.
    """
    life = Life(jaxpr)
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    seen: set[Any] = set()
    for eqn in filter(_is_backward, jaxpr.eqns):
        for v in sorted(life.reads(eqn) - seen, key=lambda v: life.birth.get(v, 0)):
            seen.add(v)
            maker = makers.get(v)
            if maker is not None and not _is_backward(maker) and nbytes(v):
                yield v, _name(v, makers), _line(v, maker)


def _is_backward(eqn) -> bool:
    return is_transposed(eqn.source_info.name_stack)


def _name(v, makers) -> str:
    """The name of a variable: of the `name` equation that it comes from, moved and cast at most; of a loop's
    stack, inside.
    """
    while not _jax.is_literal(v) and v in makers:
        eqn = makers[v]
        if eqn.primitive.name == "name":
            return eqn.params["name"]
        if eqn.primitive.name == "scan":
            body = _jax.closed(eqn.params["jaxpr"]).jaxpr
            inside = body.outvars[eqn.outvars.index(v)]
            return _name(inside, {v: e for e in body.eqns for v in e.outvars})
        if not moves(eqn):
            return ""
        v = eqn.invars[0]
    return ""


def _line(v, maker) -> str:
    """Of what a loop stacks, the line in its body; of an argument that was moved, why."""
    if maker.primitive.name == "scan":
        body = _jax.closed(maker.params["jaxpr"]).jaxpr
        inside = body.outvars[maker.outvars.index(v)]
        makers = {v: e for e in body.eqns for v in e.outvars}
        maker = makers.get(inside, maker) if not _jax.is_literal(inside) else maker
    return _jax.user_line(maker.source_info) or reason_of(r"\w+", maker.source_info.name_stack)
