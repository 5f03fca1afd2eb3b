"""Tests on numbers whether a function, and its gradient, are associative: only then may a scan be split into
blocks.

A scan with another function is meaningful too, but its result depends on the order in which JAX takes steps.
So does the gradient of a maximum of two equal numbers. The numbers have both signs, and many of them are
equal; a function has to be associative on all. It computes in 32 bits at least: in 16, what rounding may do
hides what the order does.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.spmd_rules.associative import Combine, Constant

_ROWS = 64
_FEW = np.array([-1.0, -0.5, 0.0, 0.5, 1.0, 2.0])


@lru_cache(maxsize=256)
def is_associative(combine: Combine, types: tuple[tuple[Any, Any], ...], dim: int) -> bool:
    """Whether f(f(a, b), c) = f(a, f(b, c)), for elements of the shapes and dtypes `types`, as far as their
    floats tell.
    """
    return _agree(_both, combine, types, dim)


@lru_cache(maxsize=256)
def has_associative_gradient(combine: Combine, types: tuple[tuple[Any, Any], ...], dim: int) -> bool:
    """Whether the gradients of both with respect to a, b and c are the same."""
    return _agree(_both_gradients, combine, types, dim)


def _agree(both, combine: Combine, types, dim: int) -> bool:
    random = np.random.default_rng(0)
    *abc, cts = ([_in_32_bits(_sample(random, *t)) for t in _small(combine, types, dim)] for _ in range(4))
    combine = _widened(combine)
    no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with no_mesh, jax.default_matmul_precision("highest"), jax.ensure_compile_time_eval():
        one, two = jax.tree.map(np.asarray, jax.jit(partial(both, combine))(abc, cts))
    floats = [x for x in jax.tree.leaves((abc, one, two)) if jnp.issubdtype(x.dtype, jnp.inexact)]
    largest = [_by_row(np.abs(x.astype("complex128")), dim).max(1, initial=1) for x in floats]
    scale = np.maximum.reduce(largest) if largest else np.ones(_ROWS)
    return all(_close(x, y, scale, dim) for x, y in zip(one, two, strict=True))


def _both(combine: Combine, abc, cts):
    a, b, c = abc
    return combine(combine(a, b), c), combine(a, combine(b, c))


def _both_gradients(combine: Combine, abc, cts):
    def inexact(xs: Sequence[Any]) -> list[Any]:
        return [x for x in xs if jnp.issubdtype(x.dtype, jnp.inexact)]

    def gradient(i: int):
        _, back = jax.vjp(lambda *abc: inexact(_both(combine, abc, None)[i]), *abc)
        return [x for x in jax.tree.leaves(back(inexact(cts))) if x.dtype != jax.dtypes.float0]

    return gradient(0), gradient(1)


def _widened(combine: Combine) -> Combine:
    """The function with floats of 32 bits in the place of smaller ones."""

    def param(x):
        return _wide(x) if isinstance(x, np.dtype) else x

    def operand(x):
        return x if isinstance(x, int) else Constant(_wide(x.dtype), _in_32_bits(x.value).tobytes())

    steps = (
        (p, tuple((name, param(x)) for name, x in ps), tuple(map(operand, xs))) for p, ps, xs in combine.steps
    )
    return replace(combine, steps=tuple(steps))


def _wide(dtype) -> np.dtype:
    small = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype("float32") if small else np.dtype(dtype)


def _in_32_bits(x):
    return x.astype(_wide(x.dtype))


def _small(combine: Combine, types, dim: int) -> list[tuple[tuple[int, ...], Any]]:
    """The types with a few rows, two of what else is treated alike; what is mixed has its size."""
    rows = combine.words[0].split()[dim]

    def size(word: str, n: int) -> int:
        return _ROWS if word == rows else n if word.endswith("!") else 2

    return [
        (tuple(map(size, words.split(), shape)), dtype)
        for words, (shape, dtype) in zip(combine.words, types, strict=True)
    ]


def _sample(random: np.random.Generator, shape: tuple[int, ...], dtype) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.inexact):
        parts = [
            np.where(random.random(shape) < 0.5, random.choice(_FEW, shape), random.normal(size=shape))
            for _ in range(2)
        ]
        return (parts[0] + (1j * parts[1] if jnp.issubdtype(dtype, jnp.complexfloating) else 0)).astype(dtype)
    if dtype == np.bool_:
        return random.random(shape) < 0.5
    info = jnp.iinfo(dtype)
    return np.where(
        random.random(shape) < 0.5,
        random.integers(0, 4, shape),
        random.integers(info.min // 2, info.max // 2, shape),
    ).astype(dtype)


def _by_row(x: np.ndarray, dim: int) -> np.ndarray:
    return np.moveaxis(x, dim, 0).reshape(x.shape[dim], -1)


def _close(one: np.ndarray, two: np.ndarray, scale: np.ndarray, dim: int) -> bool:
    if not jnp.issubdtype(one.dtype, jnp.inexact):
        return bool((one == two).all())
    tolerance = 32 * float(jnp.finfo(one.dtype).eps) * scale[:, None]
    one, two = (_by_row(x.astype("complex128"), dim) for x in (one, two))
    with np.errstate(invalid="ignore"):
        return bool(((one == two) | (np.isnan(one) & np.isnan(two)) | (np.abs(one - two) <= tolerance)).all())
