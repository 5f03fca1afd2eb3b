"""Random programs under random meshes and shardings, against the same function under plain `jax.jit`.

A program is text, so that a failure prints what reproduces it. In CI a few dozen, always the same ones; by hand as many as wanted:

    python -m tests.test_random_programs 2000            as many programs, of seeds 0, 1, ...; failures are printed, reduced
    python -m tests.test_random_programs 1 --seed 17     that of one seed
"""

import argparse
import contextlib
import itertools
import math
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import reshard

_MESHES = [sizes for k in (1, 2, 3) for sizes in itertools.product((1, 2, 3, 4, 8), repeat=k) if math.prod(sizes) <= 8]
MESHES = _MESHES + [sizes for sizes in _MESHES if 1 not in sizes] * 6
EVEN = (4, 6, 8, 8, 12, 16, 24)
MOST = 2048  # the greatest magnitude of a float, the greatest number of elements


@hypothesis.settings(max_examples=60, derandomize=True, deadline=None, database=None, print_blob=False)
@hypothesis.given(st.randoms(use_true_random=False))
def test_random_programs(rng):
    with poisoned_padding():
        check(random_program(rng))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 2000, 50))
def test_more_random_programs(seed):
    with poisoned_padding():
        for one in range(seed, seed + 50):
            check(random_program(random.Random(one)))


@contextlib.contextmanager
def poisoned_padding():
    """Padding holds NaN or 77 here, so that whoever reads it is found out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard, "_garbage", lambda dtype: jnp.asarray(np.nan if _is_float(dtype) else 77).astype(dtype))
        yield


# A program, run and compared


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
        names = ", ".join(name for name, _, _ in self.args)
        lines = [line for statement in self.statements for line in statement.splitlines()]
        args = "".join(f"\n#   {name}: {dtype}{list(shape)}" for name, shape, dtype in self.args)
        return (
            f"def f({names}):\n" + "".join(f"    {line}\n" for line in lines) + f"    return ({', '.join(self.results)},)\n\n"
            f"# mesh {dict(zip('xyz', self.mesh, strict=False))}, in_shardings={self.in_shardings}, "
            f"out_shardings={self.out_shardings},\n# grad={self.grad}, way={self.way!r}, donated={self.donated}, scale={self.scale:g}{args}"
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


def _with_gradients(f: Callable[..., Any], args) -> Callable[..., Any]:
    """The gradients of a weighted sum of all float results, and the results."""
    moving = tuple(i for i, (_, _, dtype) in enumerate(args) if dtype in ("float32", "bfloat16"))

    def loss(*args):
        results = f(*args)
        return sum((_weights(x.shape) * x.astype("float32")).sum() for x in results if _is_float(x)) + jnp.float32(0), results

    return jax.grad(loss, moving, has_aux=True)


def _weights(shape: tuple[int, ...]):
    return np.cos(np.arange(math.prod(shape), dtype=np.float32)).reshape(shape)


def _is_float(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def check(program: Program) -> None:
    """Raises, with the program as a note, where shard_jit and jax.jit differ."""
    try:
        wanted = _called(program, jax.jit, lambda x, spec: x)(*program.arguments())
        got = _called(program, _shard_jit(program), lax.with_sharding_constraint)(*program.arguments())
        _compare(got, wanted, program.scale)
    except Exception as error:
        error.add_note(str(program))
        raise


def _called(program: Program, jit: Callable[..., Any], constrain: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a program, compiled by `jit`, differentiated inside or outside of it, and called in its way."""
    f = program.function(constrain)
    if not program.grad:
        return WAYS[program.way](jit(f))
    if program.way == "grad":
        return _with_gradients(jit(f), program.args)
    return WAYS[program.way](jit(_with_gradients(f, program.args)))


WAYS = {
    "call": lambda f: f,
    "grad": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda *args: jax.vmap(f)(*(jnp.stack([x, x]) for x in args)),
    "vmap_last": lambda f: lambda *args: jax.vmap(f, -1, -1)(*(jnp.stack([x, x], -1) for x in args)),
}


def _shard_jit(program: Program) -> Callable[..., Any]:
    axes = tuple("xyz"[: len(program.mesh)])
    devices = jax.devices()[: math.prod(program.mesh)]
    mesh = jax.make_mesh(program.mesh, axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices)
    outs = program.out_shardings if not program.grad or program.way == "grad" else None
    donated = program.donated if program.way == "call" else ()
    return sx.shard_jit(mesh=mesh, in_shardings=program.in_shardings, out_shardings=outs, donate_argnums=donated)


def _compare(got, wanted, scale: float) -> None:
    """Floats to within what the order of sums changes, in relation to the greatest numbers at hand; all else exactly."""
    got, wanted = ([_plain(x) for x in jax.tree.leaves(tree)] for tree in (got, wanted))
    floats = [np.abs(x[np.isfinite(x)]).max(initial=0.0) for x in wanted if x.dtype == np.float64]
    for have, want in zip(got, wanted, strict=True):
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
        if want.dtype == np.float64:
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=scale * max(1.0, *floats))
        else:
            np.testing.assert_array_equal(have, want)


def _plain(x) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x, np.float64) if _is_float(x) else np.asarray(x)


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


def _results(w: Writer) -> tuple[str, ...]:
    """What nothing reads, so that all counts; sometimes something else too."""
    read = "\n".join(w.statements).replace(" = ", "=")
    unread = [v.name for v in w.values if not re.search(rf"\b{v.name}\b(?!=|, v\d+=)", read)][-5:]
    return tuple(unread + w.rng.sample([v.name for v in w.values], int(w.rng.random() < 0.3)))


def _split(w: Writer) -> None:
    """Splits some arguments as no argument can be between calls: unevenly."""
    for v in list(w.values):
        if w.rng.random() < 0.5:
            _same(w, v, f"constrain({v}, {w.spec(len(v.shape))!r})".replace("PartitionSpec", "P"))


def _tolerance(w: Writer) -> float:
    if "bfloat16" in "".join((*w.statements, *(v.dtype for v in w.values))):
        return 5e-2
    return 1e-5 * max(1.0, *(v.bound for v in w.values if v.is_float), 1.0)


# By hand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print the programs, run none")
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("error")
    failed = [seed for seed in range(given.seed, given.seed + given.count) if not _passes(seed, given.show)]
    print(f"{given.count} programs, failed: {failed or 'none'}")


def _passes(seed: int, show: bool) -> bool:
    program = random_program(random.Random(seed))
    if show:
        print(program, "\n")
        return True
    error = _error(program)
    if error is None:
        return True
    program = _reduced(program, type(error))
    print(f"# seed {seed}: {type(error).__name__}: {str(_error(program))[:600]}\n{program}\n", flush=True)
    return False


def _error(program: Program) -> Exception | None:
    try:
        with warnings.catch_warnings(), poisoned_padding(), jax.numpy_dtype_promotion("strict"):
            warnings.filterwarnings("ignore", "Some donated buffers")
            check(program)
    except Exception as error:
        return error


def _reduced(program: Program, kind: type) -> Program:
    """The program without whatever it fails without, in the same way."""
    again = True
    while again:
        again = False
        for simpler in _simpler(program):
            error = _error(simpler)
            if type(error) is kind and not isinstance(error, NameError):
                program, again = simpler, True
                break
    return program


def _simpler(program: Program):
    for i in range(len(program.results) if len(program.results) > 1 else 0):
        yield replace(program, results=_less(program.results, i), out_shardings=_less(program.out_shardings, i))
    for i in reversed(range(len(program.statements))):
        yield replace(program, statements=_less(program.statements, i))
    for i, (name, _, _) in enumerate(program.args):
        if all(name not in text for text in (*program.statements, *program.results)) and not program.donated:
            yield replace(program, args=_less(program.args, i), in_shardings=_less(program.in_shardings, i))
    for name in ("grad", "donated"):
        if getattr(program, name):
            yield replace(program, **{name: type(getattr(program, name))()})
    for name in ("in_shardings", "out_shardings"):
        specs = getattr(program, name)
        for i in [i for i, spec in enumerate(specs) if spec is not None]:
            yield replace(program, **{name: (*specs[:i], None, *specs[i + 1 :])})


def _less(items: tuple, i: int) -> tuple:
    return items[:i] + items[i + 1 :]


if __name__ == "__main__":
    main()
