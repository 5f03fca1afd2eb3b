"""Takes values apart to shards and puts them together, on the host, and compares values. Shares no code with
what it checks.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.reshard.run import identity
from shardax.sharding import Axes, AxisSizes, Layout

SLACK = 256  # ulps of the greatest number of a value that another order of sums may cost
_COARSE = 1 / 16
_REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def scatter(value: np.ndarray, layout: Layout, sizes: AxisSizes) -> np.ndarray:
    """What each device holds, stacked in mesh order. Padding holds garbage; of what is pending, the first
    device along its axes holds all.

    >>> from shardax.sharding import Sharding
    >>> scatter(np.arange(3), Layout(Sharding((("x",),)), (4,)), {"x": 2})[0]
    array([0, 1])
    """
    padded = with_garbage(value, layout.padded)
    return np.stack([_shard(padded, layout, at, sizes) for at in _positions(sizes)])


def gather(
    shards: np.ndarray, layout: Layout, shape: tuple[int, ...], sizes: AxisSizes
) -> tuple[np.ndarray, str]:
    """The value that stacked shards make; and where devices that should hold the same part of it disagree, or
    "".
    """
    value, seen, problem = np.zeros(shape + shards.shape[layout.sharding.rank + 1 :], shards.dtype), set(), ""
    for part, at in _settled(shards, layout, sizes):
        where = _block(layout, at, sizes)
        start = tuple(s.start for s in where)
        part = part[tuple(slice(max(0, n - s)) for n, s in zip(shape, start, strict=True))]
        if start in seen and not problem and not alike(part, value[where]):
            problem = f"devices that hold the same part disagree, at {at}"
        seen.add(start)
        value[where] = part
    return value, problem


def with_garbage(value: np.ndarray, padded: tuple[int, ...]) -> np.ndarray:
    """A value padded at the end of each dim with NaN, the greatest integer, or the negation of its last
    boolean.
    """
    shape = padded + value.shape[len(padded) :]
    widths = [(0, p - n) for p, n in zip(shape, value.shape, strict=True)]
    if value.dtype == bool and widths:
        filler = ~np.pad(value, widths, mode="edge")
    else:
        exact = jnp.issubdtype(value.dtype, jnp.integer)
        filler = np.full(
            shape, jnp.iinfo(value.dtype).max if exact else np.nan, value.dtype
        )  # a lone boolean is overwritten
    filler[tuple(map(slice, value.shape))] = value
    return filler


def words(value: Any) -> Any:
    """Keys as the integers that they are made of; anything else as it is."""
    return jax.random.key_data(value) if is_key(value) else value


def is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def difference(got: np.ndarray, expected: np.ndarray, slack: float = SLACK) -> str:
    """Where two values differ, or "". Floats may differ by `slack` ulps of the greatest number of `expected`
    (see `tolerance`).

    >>> difference(np.asarray([1, 2, 3]), np.asarray([1, 2, 4]))
    '1 of 3 differ, by at most 1, first at (2,): 3, not 4'
    """
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return f"{got.dtype}{list(got.shape)}, not {expected.dtype}{list(expected.shape)}"
    (got, expected), close = _comparable(got, expected, slack)
    if np.all(close):
        return ""
    at = tuple(int(i) for i in np.argwhere(~close)[0])
    most = np.nanmax(np.abs(got[~close] - expected[~close]), initial=0) if expected.dtype != bool else 1
    return (
        f"{np.sum(~close)} of {close.size} differ, by at most {most:g}, first at {at}: {got[at]}, not "
        f"{expected[at]}"
    )


def tolerance(dtype, slack: float = SLACK) -> float:
    """How far floats may be apart, in relation to the greatest: `slack` ulps, but a sixteenth at most, or one
    ulp where that is more. 256 ulps of bfloat16 are twice the number itself.

    >>> [tolerance(dtype) for dtype in ("bfloat16", "float8_e5m2")]
    [0.0625, 0.25]
    """
    eps = float(jnp.finfo(dtype).eps)
    return min(eps * slack, max(_COARSE, eps))


def alike(got: np.ndarray, expected: np.ndarray, slack: float = SLACK) -> bool:
    return not difference(got, expected, slack)


def greatest_error(got: np.ndarray, expected: np.ndarray) -> float:
    """The greatest difference, in relation to the greatest number of `expected`; 0 for what is no float."""
    if not jnp.issubdtype(expected.dtype, jnp.inexact) or not expected.size:
        return 0.0
    got, expected = (x.astype(_wide(expected.dtype)) for x in (got, expected))
    finite = np.isfinite(expected) & np.isfinite(got)
    most = np.max(np.abs(expected), where=finite, initial=0)
    return float(np.max(np.abs(got - expected), where=finite, initial=0) / most) if most else 0.0


def _comparable(
    got: np.ndarray, expected: np.ndarray, slack: float
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        exact = expected.dtype if expected.dtype == bool else np.int64
        return (got.astype(exact), expected.astype(exact)), np.asarray(got == expected)
    apart = tolerance(expected.dtype, slack)
    got, expected = (x.astype(_wide(expected.dtype)) for x in (got, expected))
    greatest = np.max(np.abs(expected), where=np.isfinite(expected), initial=0)
    return (got, expected), np.isclose(got, expected, rtol=apart, atol=apart * greatest, equal_nan=True)


def _wide(dtype) -> type:
    return np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64


def _positions(sizes: AxisSizes) -> Iterator[dict[str, int]]:
    """Where each device stands, in mesh order."""
    return (dict(zip(sizes, at, strict=True)) for at in itertools.product(*map(range, sizes.values())))


def _block(layout: Layout, at: dict[str, int], sizes: AxisSizes) -> tuple[slice, ...]:
    """The part of the padded value that is the device's at this position."""
    local = layout.local_shape(sizes)
    starts = (_position(axes, at, sizes) * n for axes, n in zip(layout.dims, local, strict=True))
    return tuple(slice(start, start + n) for start, n in zip(starts, local, strict=True))


def _position(axes: Axes, at: dict[str, int], sizes: AxisSizes) -> int:
    position = 0
    for axis in axes:
        position = position * sizes[axis] + at[axis]
    return position


def _shard(padded: np.ndarray, layout: Layout, at: dict[str, int], sizes: AxisSizes) -> np.ndarray:
    shard = padded[_block(layout, at, sizes)]
    owed = next((reduction for axis, reduction in layout.pending if at[axis]), None)
    return np.full_like(shard, identity(owed, shard.dtype)) if owed else shard


def _settled(
    shards: np.ndarray, layout: Layout, sizes: AxisSizes
) -> Iterator[tuple[np.ndarray, dict[str, int]]]:
    """The shards with what is pending reduced, each with the first of the positions that it belongs to."""
    parts = shards.reshape(*sizes.values(), *shards.shape[1:])
    parts = (
        parts.astype(_wide(parts.dtype))
        if layout.pending and jnp.issubdtype(parts.dtype, jnp.inexact)
        else parts
    )
    for axis, reduction in layout.pending:
        parts = _REDUCE[reduction].reduce(
            parts, axis=list(sizes).index(axis), keepdims=True, dtype=parts.dtype
        )
    left = {axis: 1 if axis in layout.pending_axes else n for axis, n in sizes.items()}
    parts = parts.reshape(math.prod(left.values()), *shards.shape[1:]).astype(shards.dtype)
    yield from zip(parts, _positions(left), strict=True)
