"""Representative equations of the primitives: what the checker tries, and what the page of primitives shows.

Our own, one or a few for each primitive, with sizes that devices divide and do not; then JAX's own test cases
of it.
"""

import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import experimental, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry2x32_p
from jax.lax import linalg

from shardax import _jax
from shardax.validation import is_integer, require

with suppress(ImportError):  # JAX 0.12 has it no more
    importlib.import_module("jax.experimental.shard_alike")

SMALL = 2000  # elements in all operands of a case of JAX's that is tried
_PRIMITIVE_OF_GROUP = {"reduce_window_add": "reduce_window_sum", "reduce_window_mul": "reduce_window"}


@dataclass(frozen=True, eq=False)
class Sample:
    """A function in which the primitive is, its arguments, and how to get at it again."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    snippet: str


def samples(
    name: str, module_samples: Mapping[str, Any] | None = None, count: int = 3, module: str = ""
) -> Iterator[Sample]:
    """Those of a primitive: those of a module, our own, and up to `count` of JAX's small ones."""
    for table, words in (
        (module_samples or {}, f"{module}.SAMPLES[{{!r}}]"),
        (SAMPLES, "shardax.check.samples.SAMPLES[{!r}]"),
    ):
        if name in table:
            f, *args = table[name]
            yield Sample(f, tuple(args), f"f, *args = {words.format(name)}")
    for case in [case for case in _cases().get(name, []) if _elements(case) <= SMALL][:count]:
        args = case.dyn_args_maker(np.random.RandomState(0))
        yield Sample(
            case.dyn_fun, tuple(args), f"f, args = shardax.check.samples.jax_case({case.fullname!r})"
        )


def jax_case(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A test case of JAX's own by its full name: the function and its arguments."""
    (case,) = (case for cases in _cases().values() for case in cases if case.fullname == name)
    return case.dyn_fun, tuple(case.dyn_args_maker(np.random.RandomState(0)))


@cache
def _cases() -> dict[str, list[Any]]:
    """JAX's own test cases by primitive, the greater ones first among the small."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for case in _jax.primitive_cases():
        if "isstable_False" in case.fullname:  # which of two rows with equal keys comes first is not defined
            continue
        name = str(_PRIMITIVE_OF_GROUP.get(case.group_name, case.group_name))
        groups[name.replace("scatter_", "scatter-") if name.startswith("scatter_") else name].append(case)
    return {name: sorted(cases, key=_elements, reverse=True) for name, cases in groups.items()}


def _elements(case: Any) -> int:
    return sum(math.prod(getattr(arg, "shape", ())) for arg in case.arg_descriptors)


@_jax.boundary
def ramp(*shape: int, dtype: Any = "float32") -> np.ndarray:
    """Different numbers of both signs around zero, in no order: an argument for cases.

    >>> ramp(5).tolist()
    [0.0, -0.5, -0.25, 0.25, 0.5]
    """
    require(all(is_integer(n, 0) for n in shape), "the shape of ramp", shape, "sizes of dims, such as 5, 6")
    require(_is_dtype(dtype), "dtype of ramp", dtype, "a dtype, such as 'float32'")
    n = math.prod(shape)
    shuffled = np.random.RandomState(0).permutation(n) - n // 2
    return (shuffled if np.issubdtype(dtype, np.integer) else shuffled / 4).astype(dtype).reshape(shape)


def _is_dtype(dtype: Any) -> bool:
    try:
        np.dtype(dtype)
    except TypeError:
        return False
    return True


_X, _Y, _T = ramp(5, 6), ramp(5, 6) + np.float32(0.125), ramp(3, 5, 8)
_U = (np.abs(_X) + 1) / 24  # in (0, 1)
_I, _WORDS = ramp(5, 6, dtype="int32"), ramp(5, 6, dtype="uint32")
_M = ramp(5, 4, 4) / 16 + 4 * np.eye(4, dtype="float32")  # five well-conditioned matrices
_S = _M @ _M.swapaxes(1, 2)


def _keyed(f: Callable[..., Any]) -> tuple[Any, ...]:
    """A function of five keys, made from words so that importing this file runs nothing."""
    return (lambda words: f(jax.random.wrap_key_data(words)), ramp(5, 2, dtype="uint32"))


def _each(f: Callable[..., Any]) -> tuple[Any, ...]:
    return _keyed(jax.vmap(f))


def _pool(f: Callable[..., Any], start: Any) -> Callable[..., Any]:
    return lambda x: lax.reduce_window(x, start, f, (1, 2, 2), (1, 2, 1), "VALID")


_max_pool = _pool(lax.max, -np.inf)


def _pair_pool(x):
    join = lambda a, b: (a[0] + b[0], a[1] * b[1])  # noqa: E731
    return lax.reduce_window((x, x), (np.float32(0), np.float32(1)), join, (1, 2, 2), (1, 2, 1), "VALID")


def _greatest_pair(x, y):
    """Of each column the greatest x, and its y."""
    pick = lambda a, b: tuple(lax.select(a[0] >= b[0], *pair) for pair in zip(a, b, strict=True))  # noqa: E731
    return lax.reduce((x, y), (np.float32(-np.inf), np.float32(0)), pick, (0,))


def _put(how: str) -> tuple[Any, ...]:
    return (
        lambda x, i, y: getattr(x.at[i], how)(y, mode="drop"),
        ramp(7, 6),
        np.asarray([5, 0, 6, 2, 2]),
        _Y,
    )


def _scatter_sub(x, i, y):
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return lax.scatter_sub(x, i, y, numbers, mode="drop")


def _unary(name: str, x: np.ndarray = _U, *more: Any) -> tuple[Any, ...]:
    return (lambda x: getattr(lax, name)(x, *more), x)


SAMPLES: dict[str, tuple[Any, ...]] = {
    "add_any": (lambda x, y: jax.vjp(lambda x: (x, x), x)[1]((x, y)), _X, _Y),
    "approx_top_k": (lambda x: lax.approx_max_k(x, 2), _X),
    "argmax": (lambda x: lax.argmax(x, 0, "int32"), _X),
    "argmin": (lambda x: lax.argmin(x, 1, "int32"), _X),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, "uint8"), _X),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (5, 4, 6), (0, 2)), ramp(5, 1)),
    "cholesky": (lambda x: linalg.cholesky(x, symmetrize_input=False), _S),
    "cholesky_update": (lambda x, w: linalg.cholesky_update(x, w), np.linalg.cholesky(_S[0]), ramp(4)),
    "clz": _unary("clz", _I),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), _X, ramp(3, 6)),
    "conv_general_dilated": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), ramp(5, 6, 8, 4), ramp(3, 6, 3, 3)),
    "copy": (lambda x: lax.copy_p.bind(x), _X),
    "convert_element_type": (lambda x: x.astype("bfloat16"), _X),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 0), _X),
    "cummax": (lambda x: lax.cummax(x, 0), _X),
    "cummin": (lambda x: lax.cummin(x, 0), _X),
    "cumprod": (lambda x: lax.cumprod(x, 0), _U),
    "cumsum": (lambda x: lax.cumsum(x, 0), _X),
    "dot_general": (lax.batch_matmul, ramp(3, 5, 6), ramp(3, 6, 4)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (3, 6)), ramp(8, 6), np.int32(2)),
    "dynamic_update_slice": (
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)),
        ramp(8, 6),
        ramp(3, 6),
        np.int32(2),
    ),
    "eig": (linalg.eig, _M),
    "eigh": (linalg.eigh, _S),
    "exp2": _unary("exp2"),
    "fft": (jnp.fft.fft, _X),
    "gather": (lambda x, i: jnp.take(x, i, 0, mode="clip"), ramp(7, 6), np.asarray([5, 0, 6])),
    "hessenberg": (linalg.hessenberg, _M),
    "householder_product": (lambda x: linalg.householder_product(x, x[:, 0] / 8), _M),
    "igamma_grad_a": (lambda x, y: lax.igamma_grad_a(x, y), _U, _U + 1),
    "iota": (lambda: lax.broadcasted_iota("int32", (5, 6), 0),),
    "log2": _unary("log2"),
    "lu": (linalg.lu, _M),
    "lu_pivots_to_permutation": (
        lambda i: linalg.lu_pivots_to_permutation(i, 6),
        np.tile([[1, 1, 3]], (5, 1)).astype("int32"),
    ),
    "mulhi": (lambda a, b: lax.mulhi(a * 40503, b * 40503), _I, _I | 1),
    "name": (lambda x: checkpoint_name(x, "x"), _X),
    "not": (lax.bitwise_not, _I),
    "one_minus_square": _unary("one_minus_square"),
    "optimization_barrier": (lambda x, y: lax.optimization_barrier((x, y)), _X, _I),
    "pad": (lambda x: lax.pad(x, np.float32(0), ((0, 3, 0), (0, 0, 1))), _X),
    "polygamma": (lambda m, x: lax.polygamma(m, x), np.ones((5, 6), "float32"), _U),
    "polynomial": _unary("polynomial", _X, (1.0, 2.0, 3.0)),
    "qr": (lambda x: linalg.qr(x, full_matrices=False), ramp(5, 4, 3)),
    "ragged_dot_general": (lax.ragged_dot, ramp(7, 4), ramp(3, 4, 5), np.asarray([1, 4, 2])),
    "random_bits": _each(lambda key: jax.random.bits(key, (3, 5))),
    "random_clone": _keyed(jax.random.clone),
    "random_fold_in": _each(lambda key: jax.random.fold_in(key, 3)),
    "random_gamma": _each(lambda key: jax.random.gamma(key, jnp.ones(3))),
    "random_seed": (jax.vmap(jax.random.key), np.arange(5)),
    "random_split": _each(lambda key: jax.random.split(key, (3, 2))),
    "random_unwrap": _keyed(jax.random.key_data),
    "random_wrap": (jax.random.wrap_key_data, ramp(5, 2, dtype="uint32")),
    "reduce": (_greatest_pair, _X, _Y),
    "reduce_and": (lambda x: (x > 0).all(0), _X),
    "reduce_max": (lambda x: x.max(0), _X),
    "reduce_min": (lambda x: x.min(0), _X),
    "reduce_or": (lambda x: (x > 0).any(0), _X),
    "reduce_prod": (lambda x: x.prod(1), _U),
    "reduce_sum": (lambda x: x.sum(1), _X),
    "reduce_window": (_pair_pool, _T),
    "reduce_window_max": (_max_pool, _T),
    "reduce_window_min": (_pool(lax.min, np.inf), _T),
    "reduce_window_sum": (_pool(lax.add, 0.0), _T),
    "reduce_xor": (lambda i: lax.reduce_xor(i, (0,)), _I),
    "reshape": (lambda x: x.reshape(6, 10), ramp(3, 4, 5)),
    "rev": (lambda x: lax.rev(x, (0,)), _X),
    "rng_bit_generator": (lambda key: lax.rng_bit_generator(key, (5, 6)), ramp(4, dtype="uint32")),
    "rng_uniform": (lambda: lax.rng_uniform(0.0, 1.0, (5, 6)),),
    "scatter": _put("set"),
    "scatter-add": _put("add"),
    "scatter-max": _put("max"),
    "scatter-min": _put("min"),
    "scatter-mul": _put("multiply"),
    "scatter-sub": (_scatter_sub, ramp(7, 6), np.asarray([[5], [0], [6], [2], [2]]), _Y),
    "schur": (linalg.schur, _M),
    "select_and_gather_add": (lambda x, t: jax.jvp(_max_pool, (x,), (t,)), _T, _T[::-1].copy()),
    "select_and_scatter_add": (jax.grad(lambda x: jnp.sum(_max_pool(x) ** 3)), _T),
    "slice": (lambda x: x[2:, ::2], _X),
    "shard_alike": (lambda x, y: experimental.shard_alike.shard_alike(x, y), _X, _Y),  # type: ignore
    "sort": (lambda x: lax.sort(x, dimension=1), _X),
    "split": (lambda x: lax.split(x, (2, 3)), _X),
    "square": _unary("square"),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), ramp(5, 1, 6)),
    "stack": (lambda x, y: jnp.stack([x, y]), _X, _Y),
    "svd": (lambda x: linalg.svd(x, full_matrices=False), ramp(5, 4, 3)),
    "symmetric_product": (lambda x: linalg.symmetric_product(x, x), _M),
    "threefry2x32": (lambda *words: threefry2x32_p.bind(*words), _WORDS, _WORDS, _WORDS, _WORDS),
    "tile": (lambda x: jnp.tile(x, (2, 1)), _X),
    "top_k": (lambda x: lax.top_k(x, 2), _X),
    "transpose": (jnp.transpose, _X),
    "triangular_solve": (
        lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True),
        _M,
        ramp(5, 4, 6),
    ),
    "tridiagonal": (linalg.tridiagonal, _S),
    "tridiagonal_solve": (
        lambda d, b: linalg.tridiagonal_solve(d / 8, d + 4, d / 8, b),
        _U[:, :4],
        ramp(5, 4, 6),
    ),
    "unstack": (lambda x: jnp.unstack(x), _X),
    "zeta": (lambda x, q: lax.zeta(x, q), _U + 1, _U + 2),
}
