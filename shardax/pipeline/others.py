"""The arguments of a loss that are no parameters: arrays, and what the function takes as it is."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Others:
    """`tree`: of all of them. `names`: of the argument of each leaf that is an array; `fixed`: by number, the
    leaves that are none, such as a flag, a text or a function.
    """

    tree: Any
    names: tuple[str, ...]
    fixed: Mapping[int, Any]

    @staticmethod
    def of(named: Mapping[str, Any]) -> tuple["Others", list[jax.Array]]:
        """Those of some arguments, and the arrays.

        >>> others, arrays = Others.of({"x": np.ones(2), "train": True})
        >>> others.names, others.fixed, others.restored(arrays)[1]
        (('x',), {1: True}, True)
        """
        leaves, tree = jax.tree.flatten(list(named.values()))
        names = [name for name, x in named.items() for _ in jax.tree.leaves(x)]
        fixed = {i: x for i, x in enumerate(leaves) if not _is_array(x)}
        arrays = [jnp.asarray(x) for i, x in enumerate(leaves) if i not in fixed]
        return Others(tree, tuple(n for i, n in enumerate(names) if i not in fixed), fixed), arrays

    def restored(self, arrays: Sequence[Any]) -> list[Any]:
        """The arguments, in order."""
        left, count = iter(arrays), len(self.fixed) + len(self.names)
        leaves = [self.fixed[i] if i in self.fixed else next(left) for i in range(count)]
        return jax.tree.unflatten(self.tree, leaves)


def by_place(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, as many by place as the function takes so, the others by name; defaults stay its own."""
    if not kwargs:
        return tuple(args), {}
    bound = inspect.signature(function).bind(*args, **kwargs)
    return bound.args, bound.kwargs


def _is_array(x) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)
