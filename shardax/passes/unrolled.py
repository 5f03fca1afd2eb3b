"""What XLA's TPU compiler writes out row by row because it fits a core's vector memory, written so that it
does not: about 100,000 cycles more in both cases, by its own estimate, and up to 3 % each of what it writes
about a train step.

Lookups in a table of 16-bit floats, whose rows lie two in a word: up to about 8 MiB the compiler brings the
whole table, with code that grows with it (of 32,000 rows of 128: 68 MB of `--xla_jf_dump_llo_text`, on v3 and
on v5p). The same bits in words of 32 take a third of that, the casts included. It looks through casts
between floats, but not through integers.

Sums along the minor-most dim of few rows by few (of f32[256, 3, 2, 256]: 68 MB, of bf16 6): the array is one
window, all of which is unrolled. In a loop of a few rows at a time it takes an eighth. Arrays twice that size
have several windows, and a fifth of the code.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.graph.equations import equations_of

SUBLANES = 8
TABLE = 2 << 20, 9 << 20  # bytes of a table that is brought whole, and makes more code than casts of it do
WINDOW = 384 << 10, 2 << 20  # bytes of an array that is unrolled whole, and is not small
AT_ONCE = 64 << 10  # bytes of it in a trip of a loop

REDUCTIONS = lax.reduce_sum_p, lax.reduce_max_p, lax.reduce_min_p


def in_words(eqn) -> Iterator[Any]:
    """A lookup of rows in a table of 16-bit floats, as one of words; any other equation as it is."""
    if not _is_brought_whole(eqn):
        yield eqn
        return
    dtype, fill = eqn.invars[0].aval.dtype, eqn.params["fill_value"]
    bits = int(np.float32(np.nan if fill is None else fill).view(np.uint32))

    def look_up(table, indices):
        words = lax.bitcast_convert_type(lax.convert_element_type(table, np.float32), np.uint32)
        rows = lax.gather_p.bind(words, indices, **{**eqn.params, "fill_value": bits})
        return lax.convert_element_type(lax.bitcast_convert_type(rows, np.float32), dtype)

    yield from equations_of(look_up, eqn.invars, eqn.outvars, eqn)


def _is_brought_whole(eqn) -> bool:
    if eqn.primitive is not lax.gather_p:
        return False
    table, (least, most) = eqn.invars[0].aval, TABLE
    if table.ndim != 2 or table.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    rows = eqn.params["slice_sizes"] == (1, table.shape[1])
    return rows and least < table.size * table.dtype.itemsize <= most


def in_a_loop(eqn) -> Iterator[Any]:
    """A reduction along the minor-most dim that would be unrolled whole, some rows in each trip of a loop;
    any other equation as it is.
    """
    rows = _rows_at_once(eqn)
    if rows is None:
        yield eqn
        return

    def reduce(x):
        parts = lax.reshape(x, (x.shape[0] // rows, rows, *x.shape[1:]))
        made = lax.map(lambda part: eqn.primitive.bind(part, **eqn.params), parts)
        return lax.reshape(made, x.shape[:-1])

    yield from equations_of(reduce, eqn.invars, eqn.outvars, eqn)


def _rows_at_once(eqn) -> int | None:
    """How many rows of the leading dim to reduce at once, None for all."""
    if eqn.primitive not in REDUCTIONS:
        return None
    x = eqn.invars[0].aval
    if x.ndim < 3 or x.dtype != np.float32 or eqn.params["axes"] != (x.ndim - 1,) or x.shape[-2] >= SUBLANES:
        return None
    least, most = WINDOW
    if not least < x.size * x.dtype.itemsize <= most:
        return None
    row = math.prod(x.shape[1:]) * x.dtype.itemsize
    rows = max((n for n in range(1, AT_ONCE // row + 1) if x.shape[0] % n == 0), default=0)
    return rows if rows * row >= AT_ONCE // 8 else None
