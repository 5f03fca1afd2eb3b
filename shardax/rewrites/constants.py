"""Constants that one equation makes: `np.arange(8)` counts, `np.arange(8) < 0` is the same everywhere.

What a function closes over is an argument of its program, of which nothing is known when that is partitioned.
Made by an equation it is: indices that count point nowhere, and each device makes its part.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax import _jax

_LARGE = 2**20  # bytes, of which what is on a device is not fetched


def with_made_constants(jaxpr) -> Any:
    """The closed jaxpr, where such constants are made."""
    pairs = zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
    return _jax.with_constants_made(
        jaxpr, {var: made for var, const in pairs if (made := _made(var.aval, const)) is not None}
    )


def _made(aval, const) -> Any:
    """The closed jaxpr of no arguments that makes a constant; None where it takes more than an equation, or
    is too large.
    """
    if not _is_plain(aval, const):
        return None
    with jax.transfer_guard_device_to_host("allow"):
        array = np.asarray(const)
    first, last = array.flat[0], array.flat[-1]
    if first == last and (array == first).all():
        return jax.make_jaxpr(lambda: lax.full(array.shape, first, array.dtype))()
    for dim, n in enumerate(array.shape):
        count = np.arange(n).reshape([-1 if d == dim else 1 for d in range(array.ndim)])
        if first == 0 and last == n - 1 > 1 and (array == count).all():
            return jax.make_jaxpr(lambda dim=dim: lax.broadcasted_iota(array.dtype, array.shape, dim))()
    return None


def _is_plain(aval, const) -> bool:
    """Whether a constant is an array of integers or booleans, strongly typed, that is at hand."""
    if (
        not aval.size
        or not aval.shape
        or aval.weak_type
        or not any(jnp.issubdtype(aval.dtype, dtype) for dtype in (jnp.integer, np.bool_))
    ):
        return False
    if isinstance(const, jax.Array) and not isinstance(const, np.ndarray):
        return const.nbytes <= _LARGE and len(const.sharding.device_set) == 1 and const.is_fully_addressable
    return True
