"""What writes programs as text: names with bounds on what they hold, and statements that trace."""

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

MOST = 2048  # the greatest magnitude of a float, the greatest number of elements


@dataclass(frozen=True)
class Value:
    """A name of the program. `bound` limits its magnitude; `exact`: its value does not depend on the order of
    any sums.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bound: float = 3.0
    exact: bool = True

    def __str__(self):
        return self.name

    @property
    def is_float(self) -> bool:
        return self.dtype in ("float32", "bfloat16")


@dataclass
class Writer:
    """Writes statements. A statement that does not trace, or whose values grow too large, is not written."""

    rng: random.Random
    sizes: Sequence[int]
    axes: Sequence[str]
    values: list[Value]
    operations: Sequence[Callable[["Writer"], None]]
    statements: list[str] = field(default_factory=list)
    smooth: bool = False
    count: list[int] = field(default_factory=lambda: [0])
    depth: int = 0

    def fresh(self, letter: str = "v") -> str:
        self.count[0] += 1
        return f"{letter}{self.count[0]}"

    def pick(
        self, dtypes: Sequence[str] = ("float32",), least_rank: int = 0, exact: bool = False, where=None
    ) -> Value:
        """A value of one of these dtypes, a late one more often. Raises Impossible where there is none."""
        fit = [
            v
            for v in self.values
            if v.dtype in dtypes and len(v.shape) >= least_rank and (v.exact or not exact)
        ]
        fit = [v for v in fit if where is None or where(v)]
        if not fit:
            raise Impossible
        return self.rng.choice(fit + fit[-3:] * 3)

    def number(self, *dtypes: str, **how) -> Value:
        return self.pick(dtypes or ("float32", "float32", "bfloat16", "int32"), **how)

    def kinked(self, **how) -> Value:
        """A float where a function has a kink: its derivative there must not depend on rounding."""
        return self.pick(("float32", "int32"), exact=self.smooth, **how)

    def places(self, shape: tuple[int, ...] | None = None) -> Value:
        """Integers, of this shape if one is given: a value, or an expression that makes some."""
        fit = [v for v in self.values if v.dtype == "int32" and shape in (None, v.shape)]
        if fit and self.rng.random() < 0.7:
            return self.rng.choice(fit)
        made = self.rng.choice([(), (2,), (5,), (2, 3)]) if shape is None else shape
        return Value(f"(jnp.arange({math.prod(made)}, dtype='int32') * 5 - 3).reshape({made})", made, "int32")

    def beside(self, x: Value) -> Value:
        """A value of the same dtype that broadcasts against x."""
        return self.pick((x.dtype,), where=lambda y: broadcasts(x.shape, y.shape))

    def dim(self, x: Value) -> int:
        return self.rng.randrange(len(x.shape))

    def shape(self) -> tuple[int, ...]:
        return tuple(self.rng.choice(self.sizes) for _ in range(self.rng.choice([0, 1, 1, 2, 2, 2, 3])))

    def spec(self, rank: int) -> P:
        """Random axes on random dims, also several on one, in any order."""
        dims: list[list[str]] = [[] for _ in range(rank)]
        for axis in (
            self.rng.sample(list(self.axes), min(self.rng.choice([0, 1, 1, 2, 3]), len(self.axes)))
            if rank
            else ()
        ):
            self.rng.choice(dims).append(axis)
        return P(*(None if not d else d[0] if len(d) == 1 else tuple(d) for d in dims))

    def put(self, text: str, bound: float = 3.0, exact: bool = True, count: int = 1) -> None:
        """Assigns an expression to `count` fresh names."""
        names = [self.fresh() for _ in range(count)]
        self.write(f"{', '.join(names)} = {text}", names, bound, exact)

    def same(self, x: Value, text: str) -> None:
        """Assigns an expression that has elements of x in it and no others."""
        self.put(text, x.bound, x.exact)

    def write(self, statement: str, names: Sequence[str], bound: float, exact: bool) -> None:
        made = self.traced(statement, names)
        values = [_value(name, x, bound, exact) for name, x in zip(names, made, strict=True)]
        if any(math.prod(v.shape) > MOST or (v.is_float and v.bound > MOST) for v in values):
            raise Impossible
        self.statements.append(statement)
        self.values += values

    def traced(self, statement: str, names: Sequence[str]) -> list[Any]:
        def run(env):
            scope = {"jax": jax, "jnp": jnp, "lax": lax, "P": P, "constrain": lambda x, spec: x, **env}
            exec(statement, scope)
            return [scope[name] for name in names]

        try:
            return jax.eval_shape(run, {v.name: _struct(v) for v in self.values})
        except (IndexError, TypeError, ValueError, ZeroDivisionError) as error:
            raise Impossible from error

    def like(self, x: Value) -> str:
        """An expression of the shape and dtype of x."""
        alike = [v.name for v in self.values if (v.shape, v.dtype) == (x.shape, x.dtype)]
        if x.dtype not in ("float32", "int32") or (alike and self.rng.random() < 0.6):
            return self.rng.choice(alike[-4:])
        other = self.pick((x.dtype,))
        spread = f"jnp.broadcast_to({other}.sum(), {x.shape})"
        return spread if x.dtype == "int32" else f"jnp.tanh({spread})"

    def block(self, params: Sequence[Value], most: int) -> "Writer":
        """A writer for the body of a function that sees what is here already. What floats it makes are taken
        as inexact.
        """
        inner = [replace(v, exact=v.exact and not v.is_float) for v in self.values]
        return replace(self, values=[*inner, *params], statements=[], depth=self.depth + 1).fill(most)

    def fill(self, most: int) -> "Writer":
        wanted = self.rng.randint(1, most)
        for _ in range(4 * most):
            if len(self.statements) < wanted:
                with contextlib.suppress(Impossible):
                    self.rng.choice(self.operations)(self)
        return self

    def define(self, block: "Writer", params: Sequence[Value], results: Sequence[str]) -> tuple[str, str]:
        """The name and the text of a function."""
        name = self.fresh("f")
        lines = [line for statement in block.statements for line in statement.splitlines()]
        body = "".join(f"    {line}\n" for line in [*lines, f"return ({', '.join(results)},)"])
        return name, f"def {name}({', '.join(map(str, params))}):\n{body}"


class Impossible(Exception):
    """The statement cannot be written here."""


def broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def _struct(v: Value):
    return (
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), v.shape))
        if v.dtype == "key"
        else _plain_struct(v)
    )


def _plain_struct(v: Value):
    return jax.ShapeDtypeStruct(v.shape, v.dtype)


def _value(name: str, x, bound: float, exact: bool) -> Value:
    dtype = "key" if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.name
    exact = exact and dtype != "bfloat16" if dtype in ("float32", "bfloat16") else True
    return Value(name, tuple(x.shape), dtype, bound, exact)
