"""Whether what a user gives is of the right kind: ValueErrors that name the argument, what it is, and what to
give.
"""

import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh


def require(ok: Any, argument: str, value: Any, expected: str) -> None:
    """Raises ValueError unless `ok`.

    >>> require(False, "threshold of Plan.memory", "1 MB", "a number of bytes")
    Traceback (most recent call last):
    ValueError: threshold of Plan.memory is '1 MB', of type str: give a number of bytes
    """
    if not ok:
        raise ValueError(
            f"{argument} is {_shown.repr(value)}, of type {type(value).__name__}: give {expected}"
        )


_shown = reprlib.Repr()
_shown.maxother = _shown.maxstring = 80


def is_integer(x: Any, least: float = -np.inf) -> TypeGuard[int]:
    """Whether it is a whole number, Python's or numpy's, and no bool."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool) and bool(x >= least)


def is_number(x: Any, least: float = -np.inf) -> TypeGuard[float]:
    """Whether it is a real number, and no bool."""
    return (
        isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool) and bool(x >= least)
    )


def require_mesh(mesh: Any, what: str) -> None:
    require(
        isinstance(mesh, Mesh | AbstractMesh),
        f"mesh of {what}",
        mesh,
        "a mesh, such as jax.make_mesh((4, 2), ('x', 'y'))",
    )


def require_function(f: Any, argument: str, expected: str = "a function", or_none: bool = False) -> None:
    require(
        callable(f) and not isinstance(f, Mesh) or or_none and f is None,
        argument,
        f,
        expected + " or None" * or_none,
    )


def require_array(x: Any, argument: str, expected: str = "an array or a number") -> None:
    try:
        jax.typeof(x)
    except TypeError:
        require(False, argument, x, expected)


def require_sizes(shape: tuple[Any, ...], what: str) -> None:
    """Those of a program have to be known where it is partitioned."""
    for n in shape:
        if not is_integer(n):
            raise ValueError(
                f"{what} of shape ({', '.join(map(str, shape))}) has the symbolic size {n} (jax.export), "
                "but which splits a program takes depends on its sizes: export it for each size that you "
                "need, or pad to the next of a few"
            )


def require_argument_numbers(numbers: Any, argument: str, or_none: bool = True) -> None:
    """Those of arguments: one, several, or None."""
    ok = or_none if numbers is None else _all(numbers, _is_index)
    require(ok, argument, numbers, "the number of an argument, such as 0, or a tuple of them")


def require_argument_names(argument_names: Any, argument: str) -> None:
    """Those of arguments: one, several, or None."""
    ok = argument_names is None or _all(argument_names, lambda x: isinstance(x, str))
    require(ok, argument, argument_names, "the name of an argument, or a tuple of them")


def _all(value: Any, is_one: Callable[[Any], bool]) -> bool:
    if is_one(value):
        return True
    return isinstance(value, Iterable) and not isinstance(value, str | Mapping) and all(map(is_one, value))


def _is_index(x: Any) -> bool:
    try:
        operator.index(x)
    except TypeError:
        return False
    return not isinstance(x, np.ndarray)
