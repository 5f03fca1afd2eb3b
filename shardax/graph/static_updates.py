"""Rewrites updates at a place that is known when the program is traced, such as `x.at[3:21].add(y)`, as
padding and adding.

Written so, they are split like any window: the rows of y come from the neighbours. Where y is small beside x,
the update stays as it is: y is cheap to have on every device, and x is then updated in place.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax import _jax
from shardax.annotations.explicit import shape_of

_SMALL = 8  # an update of less than this part of the array stays one


def as_padding(eqn, starts: Sequence[int]) -> Any:
    """The jaxpr, of the same arguments, that does what the update `eqn` does from the positions `starts` on;
    None where it should stay as it is."""
    operand, updates = (eqn.invars[i].aval for i in (0, _UPDATES[eqn.primitive.name]))
    inside = all(0 <= s and s + u <= n for s, u, n in zip(starts, updates.shape, operand.shape, strict=True))
    plain = not jnp.issubdtype(operand.dtype, jax.dtypes.extended) and operand.dtype == updates.dtype
    if not (plain and inside and 0 < operand.size <= _SMALL * updates.size):
        return None
    adds = eqn.primitive.name == "scatter-add"

    def update(*args):
        return put(args[0], args[_UPDATES[eqn.primitive.name]], starts, adds)

    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), ())
    ):  # of an island values name another
        return _jax.on_line_of(eqn, jax.make_jaxpr(update)(*(shape_of(v.aval) for v in eqn.invars)))


def put(x, y, starts: Sequence[int], adds: bool = False):
    """x with y in it, or added to it, from the positions `starts` on."""
    config = [(s, n - s - u, 0) for s, n, u in zip(starts, x.shape, y.shape, strict=True)]
    padded = lax.pad(y, np.zeros((), y.dtype), config)
    return x + padded if adds else lax.select(_inside(x.shape, config), padded, x)


def _inside(shape: Sequence[int], config: Sequence[tuple[int, int, int]]):
    inside = np.True_
    for d, (low, high, _) in enumerate(config):
        if low or high:
            place = lax.broadcasted_iota("int32", shape, d)
            inside &= (place >= low) & (place < shape[d] - high)
    return jnp.broadcast_to(inside, shape)


def scatter_starts(eqn, indices: np.ndarray) -> list[int] | None:
    """Where the one window of a scatter begins; None where there are several windows, or dims that it has
    not.
    """
    numbers = eqn.params["dimension_numbers"]
    if indices.ndim != 1 or numbers.inserted_window_dims or numbers.operand_batching_dims:
        return None
    if eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None:
        return None
    starts = [0] * len(eqn.invars[0].aval.shape)
    for d, index in zip(numbers.scatter_dims_to_operand_dims, indices.tolist(), strict=True):
        starts[d] = index
    return starts


_UPDATES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
