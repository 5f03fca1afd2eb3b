"""Moves: which equations copy an array from one memory to the other, and how large it is."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from shardax import _jax
from shardax.annotations.explicit import memory_of

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
WHOLE = 200  # of all that moves: so much of it, the smallest arrays, is brought whole, at any time


def variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not _jax.is_literal(v)]


def nbytes(v) -> int:
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize


def is_at_host(atom) -> bool:
    return not _jax.is_literal(atom) and memory_of(atom.aval) is HOST


def moves(eqn) -> bool:
    """Whether an equation copies one array to another memory."""
    if eqn.primitive.name != "device_put" or len(eqn.invars) != 1 or _jax.is_literal(eqn.invars[0]):
        return False
    return memory_of(eqn.invars[0].aval) is not memory_of(eqn.outvars[0].aval)


def large(arrays: Iterable[Any]) -> set[Any]:
    """Those of some arrays but for the smallest ones, half a percent of all."""
    ordered = sorted(dict.fromkeys(arrays), key=nbytes)
    left, found = sum(map(nbytes, ordered)) / WHOLE, set()
    for v in ordered:
        left -= nbytes(v)
        found |= {v} if left < 0 else set()
    return found


def brings(eqn) -> bool:
    """Whether an equation brings an array from the host to the device."""
    return moves(eqn) and is_at_host(eqn.invars[0])
