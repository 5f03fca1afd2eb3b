"""Primitives of our own: what JAX shows only expanded, in one node of a graph. Their rules are in
`spmd_rules`.
"""

from jax import lax
from jax.extend.core import Primitive

rotate_p = Primitive("rotate")
"""rotate x: row r of the result, along dim `dim`, is row r + `first` of x, counted around its end."""


@rotate_p.def_impl
def rotated(x, *, dim: int, first: int):
    size = x.shape[dim]
    return lax.concatenate(
        [lax.slice_in_dim(x, first, size, axis=dim), lax.slice_in_dim(x, 0, first, axis=dim)], dim
    )


rotate_by_p = Primitive("rotate_by")
"""rotate_by x first: row r of the result, along dim `dim`, is row r + first of x, counted around its end;
with `back` row r - first. What is below 0 or above the size of the dim counts as that."""
