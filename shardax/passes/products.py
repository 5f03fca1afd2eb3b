"""Products over several dims of rows, as products of matrices.

    bsm,vm->bsv of b=512, s=16   ->   tm,vm->tv of t=8192

XLA's TPU compiler makes a convolution of a product whose rows have two dims, a window along the shorter one,
and lays that one outermost. Where the shorter one is the inner one, all that is read and written is laid out
so: s, then b by features, so that what an all_to_all or a gather of rows brings is copied row by row into
another order, with code for each (3.6 % of `--xla_jf_dump_llo_text` for the step of GSPMD's 128B model).
As a matrix the rows stay in the order in which they are. It is undone by the compiler, which looks through
reshapes, unless a barrier keeps it. Only where that is no copy: of rows that fill the tiles.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax import lax

from shardax import _jax
from shardax.graph.equations import equations_of

TILE = 32  # bytes of a column of a tile: eight rows of 32 bits, sixteen of 16

Dims = tuple[int, ...]


def of_matrices(eqns: Sequence[Any]) -> Iterator[Any]:
    """The same equations, such products as products of matrices. A value that several read is one matrix."""
    matrices: dict[tuple[Any, Dims], Any] = {}
    for eqn in eqns:
        groups = _rows(eqn)
        if groups is None:
            yield eqn
            continue
        operands = []
        for v, dims in zip(eqn.invars, groups, strict=True):
            if dims and (v, dims) not in matrices:
                made = equations_of(lambda x, dims=dims: _as_matrix(x, dims), [v], None, eqn)
                yield from made
                matrices[v, dims] = made[-1].outvars[0]
            operands.append(matrices[v, dims] if dims else v)
        yield from equations_of(
            lambda x, y, eqn=eqn, groups=groups: _product(x, y, eqn, groups), operands, eqn.outvars, eqn
        )


def _rows(eqn) -> tuple[Dims, Dims] | None:
    """The dims of each operand that are rows, () where it stays as it is; None where both do."""
    if eqn.primitive is not lax.dot_general_p or any(map(_jax.is_literal, eqn.invars)):
        return None
    contracting, batch = eqn.params["dimension_numbers"]
    if batch[0] or not all(contracting):
        return None
    shapes = [v.aval for v in eqn.invars]
    several = []
    for x, dims in zip(shapes, contracting, strict=True):
        free = tuple([d for d in range(x.ndim) if d not in dims])
        several.append([group for group in (tuple(dims), free) if len(group) > 1])
    if not any(several) or not all(len(some) <= 1 for some in several):
        return None
    if not all(_is_inner_short(x, group) for x, some in zip(shapes, several, strict=True) for group in some):
        return None
    left, right = (some[0] if some else () for some in several)
    return left, right


def _is_inner_short(x, dims: Dims) -> bool:
    """Whether such dims lie beside each other, the last the shorter one, and can be one without a copy."""
    beside = dims == (*range(dims[0], dims[0] + len(dims)),) and dims[-1] < x.ndim - 1
    short = x.shape[dims[-1]] < math.prod(x.shape[d] for d in dims[:-1])
    return beside and short and x.shape[dims[-1]] * x.dtype.itemsize % TILE == 0


def _as_matrix(x, dims: Dims):
    shape = (*x.shape[: dims[0]], math.prod(x.shape[d] for d in dims), *x.shape[dims[-1] + 1 :])
    return lax.optimization_barrier(lax.reshape(x, shape))


def _product(x, y, eqn, groups: tuple[Dims, Dims]):
    contracting, _ = eqn.params["dimension_numbers"]
    dims = tuple(map(_in_matrix, contracting, groups))
    params = {**eqn.params, "dimension_numbers": (dims, ((), ()))}
    return lax.reshape(lax.dot_general_p.bind(x, y, **params), eqn.outvars[0].aval.shape)


def _in_matrix(contracting: Dims, rows: Dims) -> Dims:
    """Where the dims that are summed over are, when the rows, these or others, are one dim."""
    if not rows or contracting[0] < rows[0]:
        return contracting
    return rows[:1] if contracting == rows else tuple([d - len(rows) + 1 for d in contracting])
