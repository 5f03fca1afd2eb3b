"""Writes random programs, as text: compositions of primitives under random meshes and shardings."""

import contextlib
import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

_MESHES = [sizes for k in (1, 2, 3) for sizes in itertools.product((1, 2, 3, 4, 8), repeat=k) if math.prod(sizes) <= 8]
MESHES = _MESHES + [sizes for sizes in _MESHES if 1 not in sizes] * 6
EVEN = (4, 6, 8, 8, 12, 16, 24)
MOST = 2048  # the greatest magnitude of a float, the greatest number of elements


WAYS = {
    "call": lambda f: f,
    "grad": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda *args: jax.vmap(f)(*(jnp.stack([x, x]) for x in args)),
    "vmap_last": lambda f: lambda *args: jax.vmap(f, -1, -1)(*(jnp.stack([x, x], -1) for x in args)),
}


@dataclass(frozen=True)
class Program:
    """The text of a function: its statements and results. Its arguments: shapes, dtypes, specs. And how it is called."""

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

    def __str__(self):
        lines = [line for statement in self.statements for line in statement.splitlines()]
        called = ("in_shardings", "out_shardings", "grad", "way", "donated", "scale")
        notes = [f"mesh: {dict(zip('xyz', self.mesh, strict=False))}", *(f"{n}: {getattr(self, n)}" for n in called)]
        notes += [f"{name}: {dtype}{list(shape)}" for name, shape, dtype in self.args]
        body = "".join(f"    {line}\n" for line in [*lines, f"return ({', '.join(self.results)},)"])
        return f"def f({', '.join(name for name, _, _ in self.args)}):\n{body}\n" + "\n".join(f"# {note}" for note in notes)

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
    w = Writer(rng, sizes, "xyz"[: len(mesh)], [], smooth=rng.random() < 0.4)
    dtypes = ["float32", "float32", *(rng.choice(["float32", "int32", "bfloat16", "bool", "key"]) for _ in range(3))]
    for dtype in dtypes[: rng.randint(1, 5)]:
        shape = w.shape() if dtype != "key" else rng.choice([(), (2,), (5,)])
        w.values.append(Value(w.fresh("a"), shape if math.prod(shape) <= MOST else shape[:1], dtype, exact=dtype != "bfloat16"))
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
    return Program(args, tuple(w.statements), results, mesh, in_shardings, out_shardings, grad, way, donated, _tolerance(w))


def _results(w: "Writer") -> tuple[str, ...]:
    """What nothing reads, so that all counts; sometimes something else too."""
    read = "\n".join(w.statements).replace(" = ", "=")
    unread = [v.name for v in w.values if not re.search(rf"\b{v.name}\b(?!=|, v\d+=)", read)][-5:]
    return tuple(unread + w.rng.sample([v.name for v in w.values], int(w.rng.random() < 0.3)))


def _split(w: "Writer") -> None:
    """Splits some arguments as no argument can be between calls: unevenly."""
    for v in list(w.values):
        if w.rng.random() < 0.5:
            _same(w, v, f"constrain({v}, {w.spec(len(v.shape))!r})".replace("PartitionSpec", "P"))


def _tolerance(w: "Writer") -> float:
    if "bfloat16" in "".join((*w.statements, *(v.dtype for v in w.values))):
        return 5e-2
    return 1e-5 * max(1.0, *(v.bound for v in w.values if v.is_float), 1.0)


# Writing programs


@dataclass(frozen=True)
class Value:
    """A name of the program. `bound` limits its magnitude; `exact`: its value does not depend on the order of any sums."""

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
    statements: list[str] = field(default_factory=list)
    smooth: bool = False
    count: list[int] = field(default_factory=lambda: [0])
    depth: int = 0

    def fresh(self, letter: str = "v") -> str:
        self.count[0] += 1
        return f"{letter}{self.count[0]}"

    def pick(self, dtypes: Sequence[str] = ("float32",), least_rank: int = 0, exact: bool = False, where=None) -> Value:
        """A value of one of these dtypes, a late one more often. Raises _Impossible where there is none."""
        fit = [v for v in self.values if v.dtype in dtypes and len(v.shape) >= least_rank and (v.exact or not exact)]
        fit = [v for v in fit if where is None or where(v)]
        if not fit:
            raise _Impossible
        return self.rng.choice(fit + fit[-3:] * 3)

    def number(self, *dtypes: str, **how) -> Value:
        return self.pick(dtypes or ("float32", "float32", "bfloat16", "int32"), **how)

    def kinked(self, **how) -> Value:
        """A float where a function has a kink: its derivative there must not depend on rounding."""
        return self.pick(("float32", "int32"), exact=self.smooth, **how)

    def beside(self, x: Value) -> Value:
        """A value of the same dtype that broadcasts against x."""
        return self.pick((x.dtype,), where=lambda y: _broadcasts(x.shape, y.shape))

    def dim(self, x: Value) -> int:
        return self.rng.randrange(len(x.shape))

    def shape(self) -> tuple[int, ...]:
        return tuple(self.rng.choice(self.sizes) for _ in range(self.rng.choice([0, 1, 1, 2, 2, 2, 3])))

    def spec(self, rank: int) -> P:
        """Random axes on random dims, also several on one, in any order."""
        dims: list[list[str]] = [[] for _ in range(rank)]
        for axis in self.rng.sample(list(self.axes), min(self.rng.choice([0, 1, 1, 2, 3]), len(self.axes))) if rank else ():
            self.rng.choice(dims).append(axis)
        return P(*(None if not d else d[0] if len(d) == 1 else tuple(d) for d in dims))

    def put(self, text: str, bound: float = 3.0, exact: bool = True, count: int = 1) -> None:
        """Assigns an expression to `count` fresh names."""
        names = [self.fresh() for _ in range(count)]
        self.write(f"{', '.join(names)} = {text}", names, bound, exact)

    def write(self, statement: str, names: Sequence[str], bound: float, exact: bool) -> None:
        made = self.traced(statement, names)
        values = [_value(name, x, bound, exact) for name, x in zip(names, made, strict=True)]
        if any(math.prod(v.shape) > MOST or (v.is_float and v.bound > MOST) for v in values):
            raise _Impossible
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
            raise _Impossible from error

    def like(self, x: Value) -> str:
        """An expression of the shape and dtype of x."""
        alike = [v.name for v in self.values if (v.shape, v.dtype) == (x.shape, x.dtype)]
        if x.dtype not in ("float32", "int32") or (alike and self.rng.random() < 0.6):
            return self.rng.choice(alike[-4:])
        other = self.pick((x.dtype,))
        spread = f"jnp.broadcast_to({other}.sum(), {x.shape})"
        return spread if x.dtype == "int32" else f"jnp.tanh({spread})"

    def block(self, params: Sequence[Value], most: int) -> "Writer":
        """A writer for the body of a function that sees what is here already. What floats it makes are taken as inexact."""
        inner = [replace(v, exact=v.exact and not v.is_float) for v in self.values]
        return replace(self, values=[*inner, *params], statements=[], depth=self.depth + 1).fill(most)

    def fill(self, most: int) -> "Writer":
        wanted = self.rng.randint(1, most)
        for _ in range(4 * most):
            if len(self.statements) < wanted:
                with contextlib.suppress(_Impossible):
                    self.rng.choice(OPERATIONS)(self)
        return self

    def define(self, block: "Writer", params: Sequence[Value], results: Sequence[str]) -> tuple[str, str]:
        """The name and the text of a function."""
        name = self.fresh("f")
        lines = [line for statement in block.statements for line in statement.splitlines()]
        body = "".join(f"    {line}\n" for line in [*lines, f"return ({', '.join(results)},)"])
        return name, f"def {name}({', '.join(map(str, params))}):\n{body}"


class _Impossible(Exception):
    """The statement cannot be written here."""


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def _struct(v: Value):
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), v.shape)) if v.dtype == "key" else _plain_struct(v)


def _plain_struct(v: Value):
    return jax.ShapeDtypeStruct(v.shape, v.dtype)


def _value(name: str, x, bound: float, exact: bool) -> Value:
    dtype = "key" if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.name
    exact = exact and dtype != "bfloat16" if dtype in ("float32", "bfloat16") else True
    return Value(name, tuple(x.shape), dtype, bound, exact)


# Operations: each writes one statement


def smooth(w: Writer):
    x = w.number("float32", "bfloat16")
    text, bound = w.rng.choice(
        [("jnp.tanh({0})", 1), ("jnp.sin({0})", 1), ("jax.nn.gelu({0})", x.bound), ("jnp.exp(-{0} * {0})", 1)]
        + [("1 / (1 + {0} * {0})", 1), ("jnp.sqrt(1 + {0} * {0})", x.bound + 1), ("jax.nn.silu({0})", x.bound)]
        + [("{0} / 3", x.bound), ("jax.nn.softplus({0})", x.bound + 1), ("jnp.log1p({0} * {0})", x.bound + 1)]
    )
    w.put(text.format(x), bound, False)


def polynomial(w: Writer):
    x = w.number()
    text, bound = w.rng.choice(
        [("-{0}", x.bound), ("{0} * {0}", x.bound**2), ("{0} + 1", x.bound + 1), ("2 * {0}", 2 * x.bound)]
    )
    w.put(text.format(x), bound, x.exact)


def kink(w: Writer):
    x = w.kinked()
    text = w.rng.choice(["jax.nn.relu({0})", "jnp.abs({0})", "jnp.clip({0}, -1, 2)", "jnp.maximum({0}, 0)", "jnp.sign({0})"])
    w.put(text.format(x), x.bound, x.exact)


def integer(w: Writer):
    x = w.number("int32", "uint32")
    choices = ["{0} // 2", "{0} % 5", "lax.div({0}, jnp.asarray(2, {0}.dtype))", "{0} >> 1", "{0} & 3", "{0} ^ 1"]
    w.put(w.rng.choice(choices).format(x), x.bound)


def add(w: Writer):
    x = w.number()
    y = w.beside(x)
    w.put(f"{x} {w.rng.choice('+-')} {y}", x.bound + y.bound, x.exact and y.exact)


def multiply(w: Writer):
    x = w.number()
    y = w.beside(x)
    w.put(f"{x} * {y}", x.bound * y.bound, x.exact and y.exact)


def divide(w: Writer):
    x = w.number("float32")
    w.put(f"{x} / (1 + {w.beside(x)} ** 2)", x.bound, False)


def extremum(w: Writer):
    x = w.kinked()
    y = w.beside(x)
    if w.smooth and not y.exact:
        raise _Impossible
    w.put(f"jnp.{w.rng.choice(['maximum', 'minimum'])}({x}, {y})", max(x.bound, y.bound), x.exact and y.exact)


def compare(w: Writer):
    x = w.number("float32", "int32", exact=True)
    w.put(w.rng.choice([f"{x} > 0", f"{x} == 1", f"{x} <= {x}.sum()"]))


def logic(w: Writer):
    x = w.pick(("bool",))
    texts = [f"~{x}", f"{x} & {w.beside(x)}", f"{x} ^ {w.beside(x)}", f"jnp.any({x}, axis={_some_dims(w, x)})"]
    w.put(w.rng.choice([*texts, f"jnp.all({x}, axis={_some_dims(w, x)})", f"jnp.cumsum({x}.astype('int32'), axis=-1)"]))


def select(w: Writer):
    x = w.number()
    y, which = w.beside(x), w.pick(("bool",), where=lambda c: _broadcasts(c.shape, x.shape))
    w.put(f"jnp.where({which}, {x}, {w.rng.choice([str(y), '0'])})", max(x.bound, y.bound), x.exact and y.exact)


def einsum(w: Writer):
    x, y = w.number("float32", "bfloat16", least_rank=1), w.number("float32", "bfloat16")
    if x.dtype != y.dtype:
        raise _Impossible
    left = "abcdefghi"[: len(x.shape)]
    right = _letters(w, x, y, left)
    kept = [c for c in dict.fromkeys(left + right) if (c in left) != (c in right) or w.rng.random() < 0.4]
    w.rng.shuffle(kept)
    sizes = dict(zip(left + right, x.shape + y.shape, strict=True))
    summed = math.prod(n for c, n in sizes.items() if c not in kept)
    w.put(f"jnp.einsum('{left},{right}->{''.join(kept)}', {x}, {y})", x.bound * y.bound * summed, x.exact and y.exact)


def _letters(w: Writer, x: Value, y: Value, left: str) -> str:
    right = ""
    for d, n in enumerate(y.shape):
        shared = [c for c, m in zip(left, x.shape, strict=True) if m == n and c not in right]
        right += w.rng.choice(shared) if shared and w.rng.random() < 0.8 else "opqrstuvw"[d]
    return right


def _some_dims(w: Writer, x: Value) -> tuple[int, ...]:
    return tuple(sorted(w.rng.sample(range(len(x.shape)), w.rng.randint(0, len(x.shape)))))


def total(w: Writer):
    x = w.number(least_rank=1)
    dims = _some_dims(w, x)
    count = math.prod(x.shape[d] for d in dims)
    w.put(f"jnp.sum({x}, axis={dims}, keepdims={w.rng.random() < 0.3})", x.bound * count, x.exact)


def mean(w: Writer):
    x = w.number("float32", "bfloat16", least_rank=1)
    w.put(f"jnp.{w.rng.choice(['mean', 'var'])}({x}, axis={w.dim(x)}, keepdims={w.rng.random() < 0.5})", x.bound**2, False)


def normalize(w: Writer):
    x = w.number("float32", "bfloat16", least_rank=1, where=lambda x: 0 not in x.shape)
    w.put(f"jax.nn.{w.rng.choice(['softmax', 'log_softmax'])}({x}, axis={w.dim(x)})", 2 * x.bound + 8, False)


def greatest(w: Writer):
    x = w.kinked(least_rank=1)
    w.put(f"jnp.{w.rng.choice(['max', 'min'])}({x}, axis={_some_dims(w, x)})", x.bound, x.exact)


def place(w: Writer):
    x = w.number("float32", "int32", least_rank=1, exact=True)
    w.put(f"jnp.{w.rng.choice(['argmax', 'argmin', 'argsort'])}({x}, axis={w.dim(x)})", 1024)


def cumulate(w: Writer):
    x = w.number("float32", "int32", least_rank=1)
    d = w.dim(x)
    w.put(f"lax.cumsum({x}, {d}, reverse={w.rng.random() < 0.5})", x.bound * x.shape[d], x.exact)


def sort(w: Writer):
    x = w.kinked(least_rank=1)
    w.put(w.rng.choice(["jnp.sort({0}, axis={1})", "lax.cummax({0}, {1})"]).format(x, w.dim(x)), x.bound, x.exact)


def top_k(w: Writer):
    x = w.number("float32", "int32", least_rank=1, exact=True)
    w.put(f"lax.top_k({x}, {w.rng.randint(1, 3)})[{w.rng.choice([0, 0, 1])}]", max(x.bound, 1024))


ANY = ("float32", "float32", "bfloat16", "int32", "bool", "uint32")


def _same(w: Writer, x: Value, text: str):
    w.put(text, x.bound, x.exact)


def transpose(w: Writer):
    x = w.pick(ANY, 2)
    _same(w, x, f"jnp.transpose({x}, {tuple(w.rng.sample(range(len(x.shape)), len(x.shape)))})")


def reshape(w: Writer):
    """To other factors: dims are merged and taken apart."""
    x = w.pick(ANY, where=lambda x: math.prod(x.shape) > 1)
    primes = [p for n in x.shape for p in _primes(n)]
    shape: list[int] = []
    for p in primes:
        shape = [*shape[:-1], shape[-1] * p] if shape and w.rng.random() < 0.5 else [*shape, p]
    if w.rng.random() < 0.3:
        shape.insert(w.rng.randint(0, len(shape)), 1)
    if len(shape) > 4:
        raise _Impossible
    _same(w, x, f"jnp.reshape({x}, {tuple(shape)})")


def _primes(n: int) -> list[int]:
    p = next((p for p in range(2, n + 1) if n % p == 0), None)
    return [p, *_primes(n // p)] if p else []


def broadcast(w: Writer):
    x = w.pick(ANY)
    shape = (w.rng.choice(w.sizes), *(w.rng.choice(w.sizes) if n == 1 else n for n in x.shape))
    _same(w, x, f"jnp.broadcast_to({x}, {shape})")


def expand(w: Writer):
    x = w.pick(ANY)
    _same(w, x, f"jnp.expand_dims({x}, {w.rng.randint(0, len(x.shape))})")


def cut(w: Writer):
    x = w.pick(ANY, 1)
    parts = [w.rng.choice([":", "1:", ":-1", "::2", "0", "-1", ":1", "::-1", "1:3"]) for _ in x.shape]
    _same(w, x, f"{x}[{', '.join(parts)}]")


def pad(w: Writer):
    x = w.pick(("float32", "int32"), 1)
    config = [w.rng.choice([(0, 0, 0), (1, 0, 0), (0, 2, 0), (-1, 1, 0), (1, 1, 1), (3, 4, 0)]) for _ in x.shape]
    _same(w, x, f"lax.pad({x}, jnp.asarray({w.rng.choice([0, 1])}, {x}.dtype), {config})")


def concatenate(w: Writer):
    x = w.pick(ANY, 1)
    d = w.dim(x)
    fits = lambda y: (x.shape[:d], x.shape[d + 1 :]) == (y.shape[:d], y.shape[d + 1 :]) and len(x.shape) == len(y.shape)  # noqa: E731
    y = w.pick((x.dtype,), where=fits)
    w.put(f"jnp.concatenate([{x}, {y}], {d})", max(x.bound, y.bound), x.exact and y.exact)


def stack(w: Writer):
    x = w.pick(ANY)
    y = w.pick((x.dtype,), where=lambda y: x.shape == y.shape)
    w.put(f"jnp.stack([{x}, {y}], {w.rng.randint(0, len(x.shape))})", max(x.bound, y.bound), x.exact and y.exact)


def shift(w: Writer):
    x = w.pick(ANY, 1)
    _same(w, x, w.rng.choice(["jnp.roll({0}, 1, {1})", "jnp.flip({0}, {1})", "jnp.tile({0}, 2)"]).format(x, w.dim(x)))


def take(w: Writer):
    x, i = w.pick(ANY, 1, where=lambda x: 0 not in x.shape), w.pick(("int32",))
    d = w.dim(x)
    index, mode = w.rng.choice([(f"{i} % {x.shape[d]}", "clip"), (str(i), "clip"), (str(i), "wrap"), (str(i), "fill")])
    fill = ", fill_value=0" if mode == "fill" and x.dtype != "bool" else ""
    _same(w, x, f"jnp.take({x}, {index}, axis={d}, mode={mode!r}{fill})")


def label(w: Writer):
    x = w.pick(ANY, 1)
    i = w.pick(("int32",), where=lambda i: i.shape == x.shape[:-1])
    _same(w, x, f"jnp.take_along_axis({x}, jnp.expand_dims({i} % {x.shape[-1]}, -1), -1)")


def scatter(w: Writer):
    x, i = w.pick(("float32", "int32"), 1, where=lambda x: 0 not in x.shape), w.pick(("int32",))
    y = w.pick((x.dtype,), where=lambda y: y.shape == i.shape + x.shape[1:])
    bound = x.bound + y.bound * math.prod(i.shape)
    how = w.rng.choice(["add", "add", "max", "min"] if not w.smooth else ["add"])
    w.put(f"{x}.at[{i} % {x.shape[0]}].{how}({y})", bound, x.exact and y.exact)


def position(w: Writer):
    x, i = w.pick(ANY, 1), w.pick(("int32",), where=lambda i: not i.shape)
    d = w.dim(x)
    size = w.rng.choice([1, 1, max(1, x.shape[d] - 1), x.shape[d]])
    part = f"lax.dynamic_slice_in_dim({x}, {i}, {size}, {d})"
    new = f"lax.dynamic_update_slice_in_dim({x}, lax.slice_in_dim({x}, 0, {size}, axis={d}), {i}, {d})"
    _same(w, x, w.rng.choice([part, new]))


def one_hot(w: Writer):
    w.put(f"jax.nn.one_hot({w.pick(('int32',))}, {w.rng.choice(w.sizes)}, dtype='float32')", 1)


def iota(w: Writer):
    shape = w.shape()
    dtype = w.rng.choice(["float32", "int32"])
    if shape:
        w.put(f"lax.broadcasted_iota('{dtype}', {shape}, {w.rng.randrange(len(shape))})", max(shape))
    else:
        w.put(f"jnp.asarray({w.rng.randint(-2, 5)}, '{dtype}')", 5)


def convert(w: Writer):
    x = w.pick(ANY)
    to = w.rng.choice(["float32", "bfloat16", "int32", "float32"])
    if x.is_float and to == "int32" and not x.exact:
        raise _Impossible
    small = f"{x} % 7" if x.dtype in ("int32", "uint32") and to != "int32" else x
    w.put(f"({small}).astype('{to}')", max(x.bound, 7) if x.is_float else 7, x.exact)


def draw(w: Writer):
    key, shape = w.pick(("key",)), w.shape()
    kind = w.rng.choice(["bits", "normal", "uniform", "bernoulli", "split", "fold_in", "randint"])
    one = key if not key.shape else f"{key}[{', '.join('0' for _ in key.shape)}]"
    if kind == "split":
        return w.put(f"jax.random.split({one}, {w.rng.choice(w.sizes)})")
    if kind == "fold_in":
        return w.put(f"jax.random.fold_in({one}, 3)")
    more = f"shape={shape}" + (", minval=0, maxval=9" if kind == "randint" else "")
    w.put(f"jax.random.{kind}({one}, {more})", 9, kind not in ("normal", "uniform"))


def constrain(w: Writer):
    x = w.pick((*ANY, "key"))
    _same(w, x, f"constrain({x}, {w.spec(len(x.shape))!r})".replace("PartitionSpec", "P"))


def call(w: Writer):
    x, y = w.pick(ANY), w.pick(ANY)
    params = [replace(v, name=w.fresh("p"), exact=v.exact and not v.is_float) for v in (x, y)]
    block = _nested(w, params)
    how = w.rng.choice(["jax.jit", "jax.checkpoint", "jax.jit"])
    results = [str(v) for v in block.values[-2:]]
    name, text = w.define(block, params, results)
    _finish(w, text, f"{how}({name})({x}, {y})", len(results))


def branch(w: Writer):
    x, y = w.number("float32", "int32"), w.pick(("float32", "int32"))
    which = w.pick(("int32", "bool"))
    branches = []
    for _ in range(2):
        params = [replace(v, name=w.fresh("p"), exact=v.exact and not v.is_float) for v in (x, y)]
        block = _nested(w, params)
        branches.append(w.define(block, params, [block.like(x), block.like(y)]))
    text = "".join(text for _, text in branches)
    _finish(w, text, f"lax.cond({which}.sum() > 1, {branches[0][0]}, {branches[1][0]}, {x}, {y})", 2)


def scan(w: Writer):
    carry, xs = w.number("float32", "int32"), w.pick(ANY, 1, where=lambda x: 0 < x.shape[0] < 14)
    c = replace(carry, name=w.fresh("c"), exact=not carry.is_float)
    x = replace(xs, name=w.fresh("x"), shape=xs.shape[1:], exact=not xs.is_float)
    block = _nested(w, [x, c])
    new = w.rng.choice([block.like(c), f"{c} + {block.like(c)}"])
    name, text = w.define(block, [c, x], [_damped(new, c), str(block.values[-1])])
    text = text.replace("return (", "return (")
    more = w.rng.choice(["", ", reverse=True", ", unroll=2"])
    _finish(w, text, f"lax.scan({name}, {carry}, {xs}{more})", 2)


def loop(w: Writer):
    start = w.number("float32", "int32")
    c = replace(start, name=w.fresh("c"), exact=not start.is_float)
    block = _nested(w, [c])
    name, text = w.define(block, [c], [_damped(f"{c} + {block.like(c)}", c)])
    names = [w.fresh()]
    count = w.rng.choice(["2", "3"]) if w.smooth else w.rng.choice(["2", f"jnp.abs({w.pick(('int32',))}).sum() % 4"])
    w.write(f"{text}{names[0]} = lax.fori_loop(0, {count}, lambda i, c: {name}(c)[0], {start})", names, 64.0, False)


def search(w: Writer):
    """A while loop whose condition looks at the whole carry."""
    if w.smooth:
        raise _Impossible
    start = w.number("int32", where=lambda x: 0 not in x.shape)
    w.put(f"lax.while_loop(lambda c: jnp.abs(c).max() > 5, lambda c: lax.div(c, 2) - c % 2 * 0, {start})", 5)


def _nested(w: Writer, params: Sequence[Value]) -> Writer:
    if w.depth > 1:
        raise _Impossible
    return w.block(params, 4)


def _damped(text: str, like: Value) -> str:
    return text if not like.is_float else f"0.5 * ({text})"


def _finish(w: Writer, text: str, expression: str, count: int):
    names = [w.fresh() for _ in range(count)]
    w.write(f"{text}{', '.join(names)} = {expression}", names, 64.0, False)


OPERATIONS = [
    *[smooth, polynomial, kink, integer, add, add, multiply, divide, extremum, compare, logic, select],
    *[einsum] * 6,
    *[total, total, mean, normalize, greatest, place, cumulate, sort, top_k],
    *[transpose, reshape, reshape, broadcast, expand, cut, pad, concatenate, stack, shift],
    *[take, take, label, scatter, position, one_hot, iota, convert, draw, draw, constrain, constrain],
    *[call, branch, scan, scan, loop, search],
]
