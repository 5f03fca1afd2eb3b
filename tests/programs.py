"""Writes random programs, as text: compositions of primitives under random meshes and shardings."""

import itertools
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.operations import OPERATIONS
from tests.rarer_operations import RARER_OPERATIONS
from tests.writer import MOST, Value, Writer

_MESHES = [
    sizes
    for k in (1, 2, 3)
    for sizes in itertools.product((1, 2, 3, 4, 8), repeat=k)
    if math.prod(sizes) <= 8
]
MESHES = _MESHES + [sizes for sizes in _MESHES if 1 not in sizes] * 6
EVEN = (4, 6, 8, 8, 12, 16, 24)


WAYS = {
    "call": lambda f: f,
    "grad": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda *args: jax.vmap(f)(*(jnp.stack([x, x]) for x in args)),
    "vmap_last": lambda f: lambda *args: jax.vmap(f, -1, -1)(*(jnp.stack([x, x], -1) for x in args)),
}


@dataclass(frozen=True)
class Program:
    """The text of a function: its statements and results. Its arguments: shapes, dtypes, specs. And how it is
    called.
    """

    args: tuple[tuple[str, tuple[int, ...], str], ...]
    statements: tuple[str, ...]
    results: tuple[str, ...]
    mesh: tuple[int, ...]
    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    grad: bool = False
    way: str = "call"
    donated: tuple[int, ...] = ()
    scale: float = 1.0
    chip: str | None = None  # "slow": whatever can be split is

    def __str__(self):
        lines = [line for statement in self.statements for line in statement.splitlines()]
        called = ("in_shardings", "out_shardings", "grad", "way", "donated", "scale", "chip")
        notes = [
            f"mesh: {dict(zip('xyz', self.mesh, strict=False))}",
            *(f"{n}: {getattr(self, n)}" for n in called),
        ]
        notes += [f"{name}: {dtype}{list(shape)}" for name, shape, dtype in self.args]
        body = "".join(f"    {line}\n" for line in [*lines, f"return ({', '.join(self.results)},)"])
        return f"def f({', '.join(name for name, _, _ in self.args)}):\n{body}\n" + "\n".join(
            f"# {note}" for note in notes
        )

    def function(self, constrain: Callable[..., Any]) -> Callable[..., Any]:
        names = {"jax": jax, "jnp": jnp, "lax": lax, "P": P, "constrain": constrain}
        exec(str(self), names)
        return names["f"]

    def arguments(self) -> list[Any]:
        rng = np.random.default_rng(0)
        return [_argument(rng, shape, dtype) for _, shape, dtype in self.args]


def _argument(rng, shape: tuple[int, ...], dtype: str):
    """Whole numbers, so that sums are exact in any order; none of them zero, so that none goes unnoticed."""
    if dtype == "key":
        return jax.random.split(jax.random.key(7), shape)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return jnp.asarray(rng.choice([-3, -2, -1, 1, 2, 3], shape), dtype)


def random_program(rng: random.Random) -> Program:
    mesh = rng.choice(MESHES)
    sizes = [rng.choice([*range(1, 14), *EVEN, *EVEN, 257, 0]) for _ in range(rng.randint(2, 3))]
    w = Writer(
        rng, sizes, "xyz"[: len(mesh)], [], [*OPERATIONS, *RARER_OPERATIONS], smooth=rng.random() < 0.4
    )
    dtypes = [
        "float32",
        rng.choice(["int32", "float32"]),
        "float32",
        *(rng.choice(["float32", "int32", "bfloat16", "bool", "key", "int8"]) for _ in range(2)),
    ]
    for dtype in dtypes[: rng.randint(1, 5)]:
        shape = w.shape() if dtype != "key" else rng.choice([(), (2,), (5,)])
        w.values.append(
            Value(
                w.fresh("a"),
                shape if math.prod(shape) <= MOST else shape[:1],
                dtype,
                exact=dtype != "bfloat16",
            )
        )
    args = tuple((v.name, v.shape, v.dtype) for v in w.values)
    _split(w)
    w.fill(12)
    results = _results(w)
    in_shardings = tuple(rng.choice([None, w.spec(len(shape)), w.spec(len(shape))]) for _, shape, _ in args)
    shapes = {v.name: v.shape for v in w.values}
    out_shardings = tuple(rng.choice([None, None, w.spec(len(shapes[r]))]) for r in results)
    grad = w.smooth and any(dtype in ("float32", "bfloat16") for _, _, dtype in args)
    way = rng.choice(["call", "call", "call", *WAYS])
    donated = tuple(i for i in range(len(args)) if rng.random() < 0.1)
    called = in_shardings, out_shardings, grad, way, donated, _tolerance(w), rng.choice([None, "slow"])
    return Program(args, tuple(w.statements), results, mesh, *called)


def _results(w: Writer) -> tuple[str, ...]:
    """What nothing reads, so that all counts; sometimes something else too."""
    read = "\n".join(w.statements).replace(" = ", "=")
    unread = [v.name for v in w.values if not re.search(rf"\b{v.name}\b(?!=|, v\d+=)", read)][-5:]
    return tuple(unread + w.rng.sample([v.name for v in w.values], int(w.rng.random() < 0.3)))


def _split(w: Writer) -> None:
    """Splits some arguments as no argument can be between calls: unevenly."""
    for v in list(w.values):
        if w.rng.random() < 0.5:
            w.same(v, f"constrain({v}, {w.spec(len(v.shape))!r})".replace("PartitionSpec", "P"))


def _tolerance(w: Writer) -> float:
    if "bfloat16" in "".join((*w.statements, *(v.dtype for v in w.values))):
        return 5e-2
    return 1e-5 * max(1.0, *(v.bound for v in w.values if v.is_float), 1.0)
