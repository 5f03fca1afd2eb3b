"""State: which arguments of a program come back."""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


def state(
    arguments: Sequence[tuple[tuple[int, ...], Any]],
    results: Collection[tuple[tuple[int, ...], Any]],
    succeeded: Collection[int],
) -> set[int]:
    """The numbers of the arguments that come back, updated or as gradients: a result has their type, its
    shape and dtype.

    Where few come back, as activations do that pass through a layer, they are no state, unless they are
    donated and `succeeded` by a result. Scalars are none.

    Results may be like data: predictions like tokens, a reconstruction like what it is of. Where arrays are
    donated, others of no such shape are data if they are what has no gradient, signed integers and truth
    values, or if no array would be.

    >>> sorted(state([((8, 4), "float32"), ((2,), "int32")], {((8, 4), "float32")}, ()))
    [0]
    """
    arrays = [i for i, (shape, _) in enumerate(arguments) if shape]
    alike = {i for i in arrays if arguments[i] in results}
    if 2 * len(alike) < len(arrays):
        return set(succeeded)
    shapes = {shape for shape, _ in (arguments[i] for i in succeeded) if shape}
    if not shapes:
        return alike
    others = {i for i in alike if arguments[i][0] not in shapes}
    data = others if len(alike) == len(arrays) else {i for i in others if _is_discrete(arguments[i][1])}
    return alike - data


def _is_discrete(dtype) -> bool:
    """Keys of random numbers are not: they may be unsigned integers."""
    return any(jnp.issubdtype(dtype, kind) for kind in (np.signedinteger, np.bool_))
