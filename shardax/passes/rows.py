"""Reductions of arrays in a row, taken apart where one of the arrays is narrow.

    s = psum concatenate(x, y)[960]   a = s[:768]   b = s[768:]   ->   a = psum x[192, 4]   b = psum y[192]

So `passes/combine.py` writes them, and so users do. In a row all arrays have to lie row by row, and what
makes one is made in that order. XLA's TPU compiler fills the lanes with the minor-most dim: the gradient of a
kernel of four channels took 4.6 times as many cycles so, and as long to compile as all else. By itself it
makes one collective of reductions that stand together, in whatever order each array lies.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from jax import lax

from shardax import _jax
from shardax.graph.equations import equations_of
from shardax.passes.combine import REDUCTIONS

NARROW = 8  # of the 128 lanes; fewer elements of the minor-most dim than that leave most of them empty
TILE = 1024  # elements, which are laid out together: so few stay in a row

Readers = Mapping[Any, Sequence[Any]]
"""The equations that read each variable; None is the end of the program."""


def taken_apart(eqns: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The equations of a program with these results, each reduction of a row one for each part, where no more
    is read of it than parts, of which one is narrow.
    """
    readers: dict[Any, list[Any]] = {}
    for eqn, atoms in (*((eqn, eqn.invars) for eqn in eqns), (None, results)):
        for v in atoms:
            if not _jax.is_literal(v):
                readers.setdefault(v, []).append(eqn)
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    gone, new = set(), {}
    for eqn in eqns:
        row = _row(eqn, makers, readers)
        if row is not None and any(_is_narrow(_array(v, makers).aval.shape) for v in row.invars):
            gone |= {id(row), *(id(reader) for reader in readers[eqn.outvars[0]])}
            new[id(eqn)] = _of_parts(eqn, row, readers[eqn.outvars[0]], makers)
    return [made for eqn in eqns if id(eqn) not in gone for made in new.get(id(eqn), [eqn])]


def _row(eqn, makers: Mapping[Any, Any], readers: Readers):
    """The concatenation that a reduction is of, where neither is read but in its parts."""
    if eqn.primitive.name not in REDUCTIONS or len(eqn.invars) != 1 or _jax.is_literal(eqn.invars[0]):
        return None
    row = makers.get(eqn.invars[0])
    if row is None or row.primitive is not lax.concatenate_p or len(row.outvars[0].aval.shape) != 1:
        return None
    parts, reading = set(_ends(row)), readers.get(eqn.outvars[0], ())
    whole = len(readers[row.outvars[0]]) == 1 and all(not _jax.is_literal(v) for v in row.invars)
    return row if whole and reading and all(_part(reader) in parts for reader in reading) else None


def _is_narrow(shape: Sequence[int]) -> bool:
    return len(shape) > 1 and shape[-1] < NARROW and math.prod(shape) > TILE


def _part(eqn) -> tuple[int, int] | None:
    """From where to where a slice of a row takes it."""
    if eqn is None or eqn.primitive is not lax.slice_p or eqn.params["strides"] not in (None, (1,)):
        return None
    (start,), (end,) = eqn.params["start_indices"], eqn.params["limit_indices"]
    return start, end


def _ends(row) -> list[tuple[int, int]]:
    return list(pairwise(accumulate((v.aval.size for v in row.invars), initial=0)))


def _array(part: Any, makers: Mapping[Any, Any]) -> Any:
    """What a part of a row is, before it is laid in a row."""
    eqn = makers.get(part)
    return eqn.invars[0] if eqn is not None and eqn.primitive is lax.reshape_p else part


def _of_parts(eqn, row, slices: Sequence[Any], makers: Mapping[Any, Any]) -> list[Any]:
    """A reduction of each array that is read, which is laid in a row where a slice stood."""
    made: list[Any] = []
    for part, operand in zip(_ends(row), row.invars, strict=True):
        array = _array(operand, makers)
        reduced = _jax.new_variable(eqn.outvars[0].aval.update(shape=array.aval.shape))
        reading = [each for each in slices if _part(each) == part]
        made += [eqn.replace(invars=[array], outvars=[reduced])] if reading else []
        for each in reading:
            made += equations_of(lambda x: lax.reshape(x, (x.size,)), [reduced], each.outvars, each)
    return made
