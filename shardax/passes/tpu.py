"""What XLA's TPU compiler does badly, written so that it does it well.

all_to_alls: it takes one that cuts or joins another dim than the leading one apart by itself, and copies what
is sent up to fifty-eight times for that, the more the more devices there are (cycles that it estimates, for
v3 and v5p). Here the pieces are put in front, the all_to_all is of whole pieces, and these are put where they
belong. That takes seven copies at most in most cases measured. Where a value of one row is joined along the
minor-most dim it takes 7 to 21, and the compiler by itself takes 2 to 16. What a copy takes to compile is
another matter: large pieces that fill the lanes are put there one after the other, in a loop, which takes as
many cycles and a seventh of the compile time; and narrow ones, where their rows fill the lanes, are sent
transposed, so that one plain transpose puts them in place (a fifth of both). Where a tile is longer than the
second last dim, as where each device has few heads, that and the last are one dim meanwhile: ten copies
instead of thirty, of two heads of 128.

Products that are transposed: a transpose beside the product is no work, for the product is made in that
order; behind a reduce_scatter it stays there, and what a loop stacks of it (the gradients of all layers) is
copied from one order to the other. So where a product's sum is scattered and then transposed, the transpose
goes first; but where that would leave few elements of the minor-most dim, which makes an all_reduce of it.

A reduce_scatter of which slices are taken by device: it makes an all_reduce of it, and slices that. A barrier
between the two keeps it.

Collectives over a whole torus: `passes/torus.py`. Casts of weights that a loop gathers: `passes/casts.py`.
Reductions of narrow arrays in a row: `passes/rows.py`. Products over several dims of rows:
`passes/products.py`. What it unrolls whole: `passes/unrolled.py`.

Sums of many rows by index, as the gradient of an embedding is: the compiler sorts the indices, and makes two
megabytes of code for a thousandth of a step. It does not sort 2048: so a loop adds as many at a time, with a
fifteenth of the code, which takes a thirtieth of the time to compile.

Done where the program is lowered for TPUs: the plan and other chips have one all_to_all.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from jax import lax
from jax.sharding import AbstractMesh, Mesh

from shardax import _jax
from shardax.graph.equations import equations_of
from shardax.passes import casts, products, rows, torus, unrolled
from shardax.passes.unrolled import SUBLANES

LANES = 128
LARGE = 128 << 10  # bytes of a piece, next to which a trip of a loop is nothing
LONG = 4096  # indices, from which on they are sorted; 2048 are not
FEWEST = 256  # of them in a trip of a loop


def suited(jaxpr, mesh: Mesh | AbstractMesh | None = None):
    """The same jaxpr, closed or open, each all_to_all one of leading pieces, products transposed before their
    sums are scattered and these before slices are taken, long sums by index in parts, collectives over the
    whole torus of `mesh` in two, reductions of a row taken apart, in bodies too.
    """
    within = partial(suited, mesh=mesh)
    eqns = [_jax.with_bodies(casts.in_loop(eqn), within) for eqn in _jax.closed(jaxpr).jaxpr.eqns]
    opened = _jax.closed(jaxpr).jaxpr
    eqns = _transposed_first(rows.taken_apart(eqns, opened.outvars), opened.outvars)
    eqns = [new for eqn in eqns for new in _summed_in_parts(eqn)]
    eqns = list(_scattered_before_slices(products.of_matrices(eqns)))
    eqns = [new for eqn in eqns for new in unrolled.in_words(eqn)]
    eqns = [new for eqn in eqns for new in unrolled.in_a_loop(eqn)]
    eqns = [new for eqn in eqns for new in torus.in_two(eqn, mesh)]
    return _jax.replaced_eqns(jaxpr, [new for eqn in eqns for new in _suited(eqn)])


def _scattered_before_slices(eqns: Iterable[Any]) -> Iterator[Any]:
    """A barrier behind each reduce_scatter of which slices are taken by device."""
    eqns = list(eqns)
    slices = (eqn.invars[0] for eqn in eqns if eqn.primitive is lax.dynamic_slice_p)
    sliced = {v for v in slices if not _jax.is_literal(v)}
    for eqn in eqns:
        if eqn.primitive.name != "reduce_scatter" or eqn.outvars[0] not in sliced:
            yield eqn
            continue
        scattered = _jax.new_variable(eqn.outvars[0].aval)
        yield eqn.replace(outvars=[scattered])
        yield from equations_of(lax.optimization_barrier, [scattered], eqn.outvars, eqn)


def _transposed_first(eqns: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Of each product that is scattered and then transposed, the transpose first."""
    reads = Counter(v for v in (*results, *(v for eqn in eqns for v in eqn.invars)) if not _jax.is_literal(v))
    makers = {eqn.outvars[0]: eqn for eqn in eqns if eqn.outvars}
    transposes = {}
    for eqn in eqns:
        read = eqn.invars[0] if eqn.primitive is lax.transpose_p else None
        scatter = None if read is None or _jax.is_literal(read) else makers.get(read)
        if scatter and scatter.primitive.name == "reduce_scatter" and scatter.params["tiled"]:
            product = makers.get(scatter.invars[0])
            if product and product.primitive is lax.dot_general_p and not _would_be_short(scatter, eqn):
                if reads[product.outvars[0]] == reads[scatter.outvars[0]] == 1:
                    transposes[scatter.outvars[0]] = eqn
    hoisted = {eqn.outvars[0] for eqn in transposes.values()}
    kept = (eqn for eqn in eqns if not eqn.outvars or eqn.outvars[0] not in hoisted)
    return [new for eqn in kept for new in _scattered_last(eqn, transposes)]


def _would_be_short(scatter, transpose) -> bool:
    """Whether the scatter, after the transpose, would leave little of the minor-most dim."""
    order = transpose.params["permutation"]
    return order[-1] == scatter.params["scatter_dimension"] and transpose.outvars[0].aval.shape[-1] <= LANES


def _scattered_last(eqn, transposes: Mapping[Any, Any]) -> Iterator[Any]:
    """psum_scatter, then transpose  ->  transpose, then psum_scatter; any other equation as it is."""
    if not eqn.outvars or eqn.outvars[0] not in transposes:
        yield eqn
        return
    transpose = transposes[eqn.outvars[0]]
    order = transpose.params["permutation"]
    (first,) = equations_of(lambda x: lax.transpose(x, order), eqn.invars, None, transpose)
    dim = order.index(eqn.params["scatter_dimension"])
    yield first
    params = {**eqn.params, "scatter_dimension": dim}
    yield eqn.replace(invars=first.outvars, outvars=transpose.outvars, params=params)


def _suited(eqn) -> Iterator[Any]:
    if eqn.primitive is not lax.all_to_all_p or not eqn.params["tiled"]:
        yield eqn
        return
    cut, join = eqn.params["split_axis"], eqn.params["concat_axis"]
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if cut == join or 0 in before.shape:
        yield eqn
        return
    last = max(cut, join)
    if last < before.ndim - 1 and min(before.shape[-2], after.shape[-2]) < SUBLANES:
        yield from _as_one_dim(eqn, last)
        return
    count = before.shape[cut] // after.shape[cut]
    rows = _rows_side_by_side(before.shape, cut, join, count)
    front = equations_of(lambda x: _pieces_in_front(x, cut, count, rows), eqn.invars, None, eqn)
    sent = _jax.new_variable(front[-1].outvars[0].aval)
    yield from front
    yield eqn.replace(
        invars=front[-1].outvars, outvars=[sent], params={**eqn.params, "split_axis": 0, "concat_axis": 0}
    )
    yield from equations_of(lambda x: _pieces_joined(x, join, after.shape, rows), [sent], eqn.outvars, eqn)


def _as_one_dim(eqn, first: int) -> Iterator[Any]:
    """An all_to_all of the same values with this dim, which it cuts or joins, and all behind it as one."""

    def flat(aval):
        return (*aval.shape[:first], math.prod(aval.shape[first:]))

    (source,), (result,) = eqn.invars, eqn.outvars
    before = equations_of(lambda x: lax.reshape(x, flat(source.aval)), [source], None, eqn)
    made = _jax.new_variable(result.aval.update(shape=flat(result.aval)))
    yield from before
    yield from _suited(eqn.replace(invars=before[-1].outvars, outvars=[made]))
    yield from equations_of(lambda x: lax.reshape(x, result.aval.shape), [made], [result], eqn)


def _rows_side_by_side(shape: Sequence[int], cut: int, join: int, count: int) -> bool:
    """Whether pieces are sent transposed: leading ones that are joined along the minor-most dim, where they
    do not fill the lanes and their rows do.
    """
    width = shape[-1]
    rows = math.prod(shape) // count // width
    return cut == 0 and join == len(shape) - 1 and width % LANES > 0 and rows % LANES == 0


def _by_loop(shape: Sequence[int], count: int, dtype) -> bool:
    """Whether pieces of so many, of this shape, are copied one after the other: large ones, which fill the
    lanes.
    """
    return count > 1 and shape[-1] % LANES == 0 and math.prod(shape) * dtype.itemsize >= LARGE


def _pieces_in_front(x, dim: int, count: int, rows: bool = False):
    """[.., n, ..] -> [count, .., n / count, ..]; with `rows` [count, last, rows]"""
    shape = (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    if rows:
        return lax.transpose(lax.reshape(x, (count, x.size // count // x.shape[-1], x.shape[-1])), (0, 2, 1))
    size = x.shape[dim] // count
    if dim and _by_loop((*x.shape[:dim], size, *x.shape[dim + 1 :]), count, x.dtype):
        cut = lambda i: lax.dynamic_slice_in_dim(x, i * size, size, dim)  # noqa: E731
        return lax.map(cut, lax.iota("int32", count))
    return lax.transpose(lax.reshape(x, shape), (dim, *(d for d in range(len(shape)) if d != dim)))


def _pieces_joined(x, dim: int, shape: tuple[int, ...], rows: bool = False):
    """[count, .., n, ..] -> [.., count n, ..]; with `rows` from [count, last, rows]"""
    if rows:
        joined = lax.optimization_barrier(lax.reshape(x, (x.shape[0] * x.shape[1], x.shape[2])))
        return lax.reshape(lax.transpose(joined, (1, 0)), shape)
    if dim and _by_loop(x.shape[1:], x.shape[0], x.dtype):
        put = lambda i, whole: _put(whole, x, i, dim)  # noqa: E731
        return lax.fori_loop(0, x.shape[0], put, lax.full(shape, 0, x.dtype))
    order = [*range(1, dim + 1), 0, *range(dim + 1, x.ndim)]
    return lax.reshape(lax.transpose(x, order), shape)


def _put(whole, pieces, i, dim: int):
    piece = lax.dynamic_index_in_dim(pieces, i, keepdims=False)
    return lax.dynamic_update_slice_in_dim(whole, piece, i * piece.shape[dim], dim)


def _summed_in_parts(eqn) -> Iterator[Any]:
    """x.at[i].add(y)  ->  a loop that adds the same, some rows in each trip; any other equation as it is."""
    rows = _rows_at_once(eqn)
    if rows is None:
        yield eqn
    else:
        yield from equations_of(
            lambda *args: _sum_by_loop(eqn.params, rows, *args), eqn.invars, eqn.outvars, eqn
        )


def _sum_by_loop(params: Mapping[str, Any], rows: int, x, indices, updates):
    windows = updates.shape[indices.ndim - 1 :]
    parts = lax.reshape(indices, (indices.size // indices.shape[-1] // rows, rows, indices.shape[-1]))
    added = lax.reshape(updates, (parts.shape[0], rows, *windows))
    numbers = params["dimension_numbers"]._replace(update_window_dims=(*range(1, len(windows) + 1),))

    def add(i, total):
        which, what = (lax.dynamic_index_in_dim(a, i, keepdims=False) for a in (parts, added))
        return lax.scatter_add_p.bind(total, which, what, **{**params, "dimension_numbers": numbers})

    return lax.fori_loop(0, parts.shape[0], add, x)


def _rows_at_once(eqn) -> int | None:
    """How many rows to add at once, None for all: where there are many, in no order that is known, and they
    fill the lanes.
    """
    if (
        eqn.primitive is not lax.scatter_add_p
        or eqn.params["indices_are_sorted"]
        or eqn.params["unique_indices"]
    ):
        return None
    indices, updates = (v.aval for v in eqn.invars[1:])
    numbers, count = eqn.params["dimension_numbers"], math.prod(indices.shape[:-1])
    windows = (*range(len(indices.shape) - 1, len(updates.shape)),)
    by_row = numbers.update_window_dims == windows and windows and not numbers.operand_batching_dims
    if not by_row or updates.shape[-1] % LANES or count < LONG:
        return None
    rows = next(n for n in range(LONG // 2, 0, -1) if count % n == 0)
    return rows if rows >= FEWEST else None
