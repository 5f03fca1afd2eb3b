"""Every built-in rule, brute-forced by the checker: a line per primitive, sizes that devices divide and do
not.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.lax import linalg
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.check import check_rule, missing_claims, ramp
from shardax.spmd_rules import random
from shardax.spmd_rules.registry import LINEAR, MOVES, RULES, Entry

X, Y = ramp(5, 8), ramp(5, 8) + np.float32(0.125)
U = (np.abs(ramp(5, 8)) + 1) / 24  # in (0, 1)
INTS, ODD = ramp(5, 8, dtype="int32"), ramp(5, 8, dtype="int32") | 1
B = ramp(5, 8) > 0
T = ramp(3, 5, 8)
M = ramp(5, 4, 4) / 16 + 4 * np.eye(4, dtype="float32")  # five well-conditioned matrices
S = M @ M.swapaxes(1, 2)
SIZES = np.asarray([[1, 6], [3, 4], [7, 0]])  # of two groups of rows, in three batches
ODDS = np.where(
    np.arange(23) % 3, ramp(23), np.float32([np.nan, -0.0, np.inf, 0.0, -np.inf])[np.arange(23) % 5]
)
KEY, KEYS = jax.random.key(7), partial(jax.random.split, jax.random.key(3), 5)


def _bits(shape, dtype="uint32"):
    return lambda keys: jax.vmap(lambda key: jax.random.bits(key, shape, dtype))(keys)


def _conv(lhs, rhs, strides=(1, 1), padding="SAME", dims=("NHWC", "HWIO", "NHWC"), **params):
    return lax.conv_general_dilated(lhs, rhs, strides, padding, dimension_numbers=dims, **params)


def _gradients(f):
    """Both gradients of a function of two arguments, under a cotangent that is not constant."""
    return lambda a, b: jax.grad(lambda a, b: jnp.vdot(f(a, b), jnp.sin(f(a, b))), (0, 1))(a, b)


def _ragged_gradients(a, b, sizes):
    return _gradients(lambda a, b: lax.ragged_dot(a, b, sizes))(a, b)


def _pool(f, window=(1, 2, 2), strides=(1, 2, 1), **params):
    return partial(f, window_dimensions=window, window_strides=strides, padding="VALID", **params)


_max_pool = _pool(lambda x, **params: lax.reduce_window(x, -jnp.inf, lax.max, **params))
_min_pool = _pool(lambda x, **params: lax.reduce_window(x, jnp.inf, lax.min, **params))
_sum_pool = _pool(lambda x, **params: lax.reduce_window(x, 0.0, lax.add, **params))


def _pair_pool(x):
    return _pool(
        lambda x, **params: lax.reduce_window(
            (x, x), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), **params
        )
    )(x)


def _reduce_pairs(x, y):
    """Of each column the greatest x, and its y."""
    zeros = (np.float32(-np.inf), np.float32(0))
    return lax.reduce(
        (x, y),
        zeros,
        lambda a, b: tuple(lax.select(a[0] >= b[0], *pair) for pair in zip(a, b, strict=True)),
        (0,),
    )


WIDTHS = "int16 int32 uint16 uint32 int8".split()
ELEMENTWISE = {
    "unary, real": (
        lambda x: [
            getattr(lax, n)(x) for n in "abs neg sign floor ceil round cos sin tanh exp square".split()
        ],
        X,
    ),
    "unary, positive": (
        lambda x: [getattr(lax, n)(x) for n in "log sqrt rsqrt erf_inv lgamma log1p acos".split()],
        U,
    ),
    "unary, integers": (
        lambda i: [getattr(lax, n)(i) for n in "abs neg sign clz population_count".split()],
        INTS,
    ),
    "unary, booleans": (lax.bitwise_not, B),
    "binary": (
        lambda a, b: [
            getattr(lax, n)(a, b) for n in "add sub mul div max min atan2 rem nextafter eq lt".split()
        ],
        X,
        Y,
    ),
    "mulhi": (lambda a, b: [lax.mulhi(*(x.astype(t) * 40503 for x in (a, b))) for t in WIDTHS], INTS, ODD),
    "binary, integers": (
        lambda a, b: [getattr(lax, n)(a, b) for n in "add mul rem max bitwise_xor".split()],
        INTS,
        ODD,
    ),
    "complex": (lambda a, b: [f(lax.complex(a, b)) for f in (lax.conj, lax.real, lax.imag)], X, Y),
    "select_n": (lambda p, a, b: lax.select_n(p, a, b), B, X, Y),
    "clamp": (lambda a: lax.clamp(-1.0, a, 2.0), X),
    "clamp, all shaped": (lax.clamp, X - 1, Y, X + 1),
    "convert_element_type": (
        lambda a: [a.astype("int32"), a.astype("bfloat16"), a.astype("bfloat16").astype("float32")],
        X,
    ),
}

FAMILIES = {
    "approx_top_k": (lambda a: lax.approx_max_k(a, 2), X),
    "argmax": (lambda a: lax.argmax(a, 0, "int32"), X),
    "argmax, ties": (lambda i: lax.argmax(i, 0, "int32"), INTS // 8),
    "argmax, NaN": (lambda a: lax.argmax(jnp.where(a > 1, jnp.nan, a), 1, "int32"), X),
    "argmin": (lambda a: lax.argmin(a, 1, "int32"), X),
    "cholesky": (lambda a: linalg.cholesky(a, symmetrize_input=False), S),
    "conv_general_dilated": (_conv, ramp(5, 4, 3, 6), ramp(3, 3, 6, 4)),
    "conv_general_dilated, 1x1": (_conv, ramp(5, 4, 3, 6), ramp(1, 1, 6, 4)),
    "conv_general_dilated, strided": (
        partial(_conv, strides=(2, 1), padding="VALID"),
        ramp(4, 5, 4, 2),
        ramp(2, 2, 2, 5),
    ),
    "conv_general_dilated, NCHW": (
        partial(_conv, dims=("NCHW", "OIHW", "NCHW")),
        ramp(2, 6, 4, 3),
        ramp(5, 6, 3, 3),
    ),
    "conv_general_dilated, groups": (
        partial(_conv, feature_group_count=2),
        ramp(3, 4, 3, 8),
        ramp(2, 2, 4, 12),
    ),
    "conv_general_dilated, groups of 5": (
        partial(_conv, feature_group_count=5),
        ramp(3, 4, 3, 10),
        ramp(2, 2, 2, 15),
    ),
    "conv_general_dilated, depthwise": (
        partial(_conv, feature_group_count=6),
        ramp(3, 4, 3, 6),
        ramp(2, 2, 1, 6),
    ),
    "conv_general_dilated, batch groups": (
        partial(_conv, batch_group_count=4),
        ramp(8, 4, 3, 6),
        ramp(2, 2, 6, 8),
    ),
    "conv_general_dilated, gradients": (_gradients(_conv), ramp(5, 4, 3, 2), ramp(3, 3, 2, 4)),
    "conv_general_dilated, gradients, strided": (
        _gradients(partial(_conv, strides=(2, 2))),
        ramp(5, 4, 5, 2),
        ramp(3, 3, 2, 3),
    ),
    "conv_general_dilated, gradients, groups": (
        _gradients(partial(_conv, feature_group_count=2)),
        ramp(3, 4, 3, 4),
        ramp(2, 2, 2, 6),
    ),
    "conv_general_dilated, gradients, batch groups": (
        _gradients(partial(_conv, batch_group_count=2)),
        ramp(4, 4, 3, 3),
        ramp(2, 2, 3, 4),
    ),
    "cumlogsumexp": (lambda a: [lax.cumlogsumexp(a, 0), lax.cumlogsumexp(a, 1, reverse=True)], X),
    "cummax": (lambda a, i: [lax.cummax(a, 0), lax.cummax(i, 0, reverse=True), lax.cummax(a, 1)], X, INTS),
    "cummin": (lambda a, i: [lax.cummin(a, 0), lax.cummin(i, 0, reverse=True), lax.cummin(a, 1)], X, INTS),
    "cumprod": (
        lambda a, i: [lax.cumprod(a, 0), lax.cumprod(i, 0, reverse=True), lax.cumprod(a, 1)],
        U,
        INTS,
    ),
    "cumsum": (lambda a, i: [lax.cumsum(a, 0), lax.cumsum(i, 0, reverse=True), lax.cumsum(a, 1)], X, INTS),
    "dot_general": (lax.dot, ramp(5, 8), ramp(8, 6)),
    "dot_general, batched": (
        lambda a, b: lax.dot_general(a, b, (((2,), (1,)), ((0,), (2,)))),
        ramp(3, 4, 5),
        ramp(6, 5, 3),
    ),
    "dot_general, booleans": (lax.dot, ramp(5, 8) > 4, ramp(8, 6) > 5),
    "dot_general, two contracted": (
        lambda a, b: lax.dot_general(a, b, (((0, 2), (2, 0)), ((), ()))),
        ramp(3, 4, 5),
        ramp(5, 2, 3),
    ),
    "eig": (lambda a: linalg.eig(a), M),
    "eigh": (lambda a: linalg.eigh(a), S),
    "fft": (lambda a: [jnp.fft.rfft(a), jnp.fft.ifft(jnp.fft.fft2(a)), jnp.fft.irfft(jnp.fft.fft(a))], T),
    "hessenberg": (linalg.hessenberg, M),
    "householder_product": (lambda a: linalg.householder_product(a, a[:, 0] / 8), M),
    "lu": (linalg.lu, M),
    "lu_pivots_to_permutation": (lambda a: linalg.lu_pivots_to_permutation(linalg.lu(a)[1], 6), M),
    "qr": (lambda a: [linalg.qr(a, full_matrices=False), linalg.qr(a)], ramp(5, 4, 3)),
    "ragged_dot_general": (lax.ragged_dot, ramp(7, 4), ramp(3, 4, 5), np.asarray([1, 4, 2])),
    "ragged_dot_general, rows past": (lax.ragged_dot, ramp(9, 4), ramp(5, 4, 2), np.asarray([3, 0, 2, 1, 1])),
    "ragged_dot_general, gradients": (_ragged_gradients, ramp(7, 4), ramp(4, 4, 5), np.asarray([1, 3, 0, 3])),
    "ragged_dot_general, batches": (jax.vmap(lax.ragged_dot), ramp(3, 7, 4), ramp(3, 2, 4, 5), SIZES),
    "ragged_dot_general, batched gradients": (
        jax.vmap(_ragged_gradients),
        ramp(3, 7, 4),
        ramp(3, 2, 4, 5),
        SIZES,
    ),
    "random_bits": (_bits((3, 5)), KEYS),
    "random_bits, one key": (lambda key: jax.random.bits(key, (6, 5, 3)), KEY),
    "random_bits, 8": (_bits((7,), "uint8"), KEYS),
    "random_bits, 16": (_bits((2, 3), "uint16"), KEYS),
    "random_clone": (jax.random.clone, KEYS),
    "random_fold_in": (lambda keys: jax.vmap(jax.random.fold_in)(keys, jnp.arange(5)), KEYS),
    "random_fold_in, one message": (lambda keys: jax.vmap(jax.random.fold_in, (0, None))(keys, 3), KEYS),
    "random_gamma": (lambda keys: jax.vmap(lambda key: jax.random.gamma(key, jnp.ones(3)))(keys), KEYS),
    "random_seed": (jax.vmap(jax.random.key), np.arange(5)),
    "random_split": (lambda keys: jax.vmap(lambda key: jax.random.split(key, (3, 2)))(keys), KEYS),
    "random_split, one key": (lambda key: jax.random.split(key, 5), KEY),
    "random_unwrap": (jax.random.key_data, KEYS),
    "random_wrap": (jax.random.wrap_key_data, ramp(5, 2, dtype="uint32")),
    "reduce_max": (lambda a, i: [a.max(0), i.max((0, 1))], X, INTS),
    "reduce_min": (lambda a, i: [a.min(1), i.min(0)], X, INTS),
    "reduce_or": (lambda b: [b.any(0), b.any(1)], B),
    "reduce": (_reduce_pairs, X, Y),
    "reduce_max, complex": (lambda a, b: lax.complex(a, b).max(0), X, Y),
    "reduce_and": (lambda b: [b.all(0), b.all(1)], B),
    "reduce_and, bits": (lambda i: lax.reduce_and(i, (0, 1)), INTS),
    "reduce_or, bits": (lambda i: lax.reduce_or(i, (1,)), INTS),
    "reduce_prod": (lambda a: a.prod(1), U),
    "reduce_xor": (lambda i, b: [lax.reduce_xor(i, (0,)), lax.reduce_xor(b, (1,))], INTS, B),
    "reduce_sum": (lambda a, i: [a.sum(0), a.sum((0, 1)), i.sum(1)], X, INTS),
    "reduce_window": (_pair_pool, T),
    "reduce_window_max": (_max_pool, T),
    "reduce_window_min": (_min_pool, T),
    "reduce_window_sum": (_sum_pool, T),
    "reduce_window_sum, dilated": (partial(_sum_pool, window_strides=(1, 1, 1), base_dilation=(1, 2, 1)), T),
    "schur": (lambda a: linalg.schur(a), M),
    "select_and_gather_add": (lambda a, t: jax.jvp(_max_pool, (a,), (t,)), T, T[::-1].copy()),
    "select_and_scatter_add": (jax.grad(lambda a: jnp.sum(_max_pool(a) ** 3)), T),
    "sort, a lone dim": (
        lambda a, i: [lax.sort(a), lax.sort(i), jnp.argsort(a), lax.sort(i > 1)],
        ODDS,
        INTS.ravel()[:23] % 4,
    ),
    "sort, a lone dim, by keys": (
        lambda a, i: [lax.sort((i, a), num_keys=1), lax.sort((i.astype("bfloat16"), a, a[::-1]), num_keys=2)],
        ODDS,
        INTS.ravel()[:23] % 4,
    ),
    "sort, the last of all": (
        lambda a: [lax.sort(a[:, None], dimension=0), lax.sort(a * jnp.nan)],
        ODDS[:15],
    ),
    "sort": (lambda a, i: [lax.sort(a, dimension=0), lax.sort((a, i), dimension=1, num_keys=1)], X, INTS),
    "svd": (lambda a: linalg.svd(a, full_matrices=False), ramp(5, 4, 3)),
    "svd, values": (lambda a: linalg.svd(a, compute_uv=False), M),
    "symmetric_product": (lambda a: linalg.symmetric_product(a, a), M),
    "threefry2x32, one key": (
        lambda k, x: threefry2x32_p.bind(k, k, x, x),
        *(ramp(5, n, dtype="uint32") for n in (1, 6)),
    ),
    "threefry2x32": (threefry2x32_p.bind, *(ramp(5, 6, dtype="uint32"),) * 4),
    "top_k": (lambda a: lax.top_k(a, 3), X),
    "top_k, NaN": (
        lambda a: lax.top_k(a, 5, axis=0),
        np.where(X > 2, -np.float32(np.nan), np.where(X < -2, -np.inf, X)),
    ),
    "top_k, ties": (lambda i: lax.top_k(i, 4, axis=0), INTS // 8),
    "triangular_solve": (
        lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True),
        M,
        ramp(5, 4, 6),
    ),
    "triangular_solve, right": (lambda a, b: linalg.triangular_solve(a, b), M, ramp(5, 6, 4)),
    "tridiagonal": (linalg.tridiagonal, S),
    "tridiagonal_solve": (
        lambda d, b: linalg.tridiagonal_solve(d / 8, d + 4, d / 8, b),
        U[:, :4],
        ramp(5, 4, 6),
    ),
}


def _check(f, *args, only: str = "") -> dict[str, int]:
    return check_rule(f, *[a() if callable(a) else a for a in args], only=only)


@pytest.mark.parametrize("case", ELEMENTWISE)
def test_elementwise(case):
    assert sum(_check(*ELEMENTWISE[case]).values()) >= 5


@pytest.mark.parametrize("case", FAMILIES)
def test_rule(case):
    primitive = case.split(",")[0]
    assert _check(*FAMILIES[case], only=primitive)[primitive]


def _rbg(seed):
    return jax.random.split(jax.random.key(seed, impl="rbg"), 5)


def _in_sequence(f):
    """f under the stream that is drawn in sequence."""

    def with_flag(*args):
        with jax.threefry_partitionable(False):
            return f(*args)

    return with_flag


@pytest.mark.parametrize("f", [jax.random.bits, jax.random.split])
def test_keys_are_split_and_their_stream_is_not(f):
    assert check_rule(_in_sequence(jax.vmap(f)), KEYS())[f"random_{f.__name__.strip('_')}"]
    assert not check_rule(_in_sequence(lambda key: jax.random.bits(key, (6,))), KEY)


def test_other_generators_are_whole():
    assert not check_rule(_bits((6,)), _rbg(0))
    assert not check_rule(lambda keys: jax.vmap(jax.random.split)(keys), _rbg(0))


def test_positions_count_to_64_bits():
    """A block of four of a global shape of 3·2**46 elements, far inside it."""
    node = SimpleNamespace(outputs=[SimpleNamespace(shape=(3, 2**23 - 1, 2**23 + 1))])
    starts = (2, 2**22 + 77, 2**23 - 3)
    local: Any = SimpleNamespace(node=node, results=[None], start=lambda layout, d: jnp.int32(starts[d]))
    high, low = random._positions(local, (1, 1, 4), 0)
    first = np.ravel_multi_index(starts, node.outputs[0].shape)
    found = np.asarray(high, "uint64") * 2**32 + np.asarray(low, "uint64")
    assert found.ravel().tolist() == [first + i for i in range(4)]


def test_bits_of_64():
    with jax.enable_x64(True):
        assert check_rule(_bits((3, 5), "uint64"), KEYS(), only="random_bits")["random_bits"]


@pytest.mark.parametrize(
    "entry",
    [
        Entry("sort", "... -> ..."),
        Entry("reduce_max", "a b:min -> a"),
        Entry("cumsum", "... -> ...", lambda local, shard: local.bind(shard)),
        Entry("sin", "... -> ...", passes=(LINEAR(0),)),
        Entry("neg", "... -> ...", passes=(MOVES(0),)),
        Entry("cos", "... -> ...", lambda local, shard: [lax.cos(shard), shard]),
    ],
    ids=lambda entry: entry.name,
)
def test_the_checker_finds_wrong_claims(entry, monkeypatch):
    f = {"sort": jnp.sort, "reduce_max": lambda a: a.max(1), "cumsum": lambda a: lax.cumsum(a, 1)}.get(
        entry.name
    )
    monkeypatch.setitem(RULES, entry.name, entry)
    with pytest.raises(AssertionError, match=f"these claims are wrong:\n{entry.name} "):
        check_rule(f or getattr(lax, entry.name), X)


def test_the_checker_pads_what_divides(monkeypatch):
    """Where zeros count, as in a sum of exponentials."""
    zeros_count = Entry("reduce_sum", "a b+ -> a", lambda local, x: [x.sum(1) + (x == 0).sum(1)])
    monkeypatch.setitem(RULES, "reduce_sum", zeros_count)
    with pytest.raises(AssertionError, match=r"b \(8 in 12\) over x"):
        check_rule(lambda a: a.sum(1), ramp(5, 8) + 1 / 8)


MISSING = {
    "sin": ("a b! -> a b!", lax.sin, [X], ["dim 1 of operand 0 (factor b) is unsplit and could be kept"]),
    "reduce_sum": (
        "a! b! -> a!",
        lambda x: x.sum(1),
        [X],
        [
            "dim 0 of operand 0 (factor a) is unsplit and could be kept",
            "dim 1 of operand 0 (factor b) is unsplit and could be sum",
        ],
    ),
    "reduce_max": (
        "a b! -> a",
        lambda x: x.max(1),
        [X],
        ["dim 1 of operand 0 (factor b) is unsplit and could be max"],
    ),
    "dot_general": (
        "a k!, k! b -> a b",
        lax.dot,
        [X, Y.T],
        [f"dim {1 - i} of operand {i} (factor k) is unsplit and could be sum" for i in (0, 1)],
    ),
    "pad": (
        "a!, -> b!",
        lambda x: jnp.pad(x, (1, 2)),
        [X[0]],
        ["dim 0 of operand 0 (factor a) is unsplit and could be windowed"],
    ),
    "iota": (
        " -> a! b",
        lambda: lax.broadcasted_iota("int32", (5, 8), 1),
        [],
        ["dim 0 of result 0 (factor a) is unsplit and could be made"],
    ),
    "sort": ("a s! -> a s!", jnp.sort, [X], []),
    "cumsum": (
        "a s! -> a s!",
        lambda x: lax.cumsum(x, 1),
        [X],
        ["dim 1 of operand 0 (factor s) is unsplit and could be sum"],
    ),
    "cumprod": ("a s! -> a s!", lambda x: lax.cumprod(x, 1), [X], []),
}


@pytest.mark.parametrize("name", MISSING)
def test_the_checker_finds_missing_claims(name, monkeypatch):
    rule, f, args, claims = MISSING[name]
    monkeypatch.setitem(RULES, name, Entry(name, rule, RULES[name].local))
    assert [found.split(": ")[1] for found in missing_claims(f, *args, only=name)] == claims


def test_an_fft_whose_dims_lie_in_another_order():
    """XLA's CPU aborts on it, where the layout of an FFT's operand is that of what stands beside it."""
    mesh = jax.make_mesh(
        (3, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:6]
    )
    step = sx.shard_jit(lambda x: jnp.fft.ifft(sx.annotate(x, P("x"))).real, mesh=mesh)
    x = ramp(8, 2)
    np.testing.assert_allclose(jax.vmap(step, -1, -1)(x), np.fft.ifft(x, axis=0).real, atol=1e-5)


def test_an_initial_value_is_not_lost():
    """XLA loses it where what is reduced was concatenated, as an all_to_all does."""
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    specs: dict[str, Any] = {"in_shardings": P(None, ("x", "z", "y")), "out_shardings": P(("z", "y", "x"))}
    step = sx.shard_jit(lambda x: lax.reduce(x, np.float32(3), lambda a, b: a + b, (0,)), mesh=mesh, **specs)
    np.testing.assert_array_equal(step(np.ones((4, 6), "float32")), 7)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize(
    "combine, start", [(lax.add, 2), (lax.mul, 3), (lambda a, b: b, 4)], ids=["add", "mul", "last"]
)
def test_an_initial_value_counts_once(shape, combine, start):
    """XLA takes it for neutral where a dim of size one is reduced, as what one device found is."""
    mesh = jax.make_mesh(
        shape,
        ("x", "y", "z"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
        devices=jax.devices()[: np.prod(shape)],
    )

    def reduced(x):
        return lax.reduce(sx.annotate(x, P("x", ("z", "y"))), np.int32(start), combine, (1,))

    x = ramp(5, 6, 2, dtype="int32")
    step = sx.shard_jit(lambda x: jax.vmap(reduced, -1, -1)(x), mesh=mesh)
    np.testing.assert_array_equal(step(x), lax.reduce(x, np.int32(start), combine, (1,)))


FFTS = {
    "fftn": jnp.fft.fftn,
    "rfftn": jnp.fft.rfftn,
    "irfftn": lambda x: jnp.fft.irfftn(x, (9, 13, 21)),
    "fft2": lambda x: jnp.fft.ifft2(x, axes=(2, 0)),
    "loop": lambda x: lax.fori_loop(
        0, 2, lambda i, y: (jnp.fft.fftn(y) / 10).astype("complex64"), x.astype("complex64")
    ),
    "gradient": jax.grad(lambda x: jnp.abs(jnp.fft.rfftn(x)).sum()),
}


@pytest.mark.parametrize(
    "spec", [P(("x", "z")), P(None, ("z", "y")), P(None, "y", "x"), P("x", "y", "z")], ids=str
)
@pytest.mark.parametrize("name", FFTS)
def test_ffts_over_all_dims(name, spec):
    """Each goes dim by dim: no device has all of the array."""
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    x = np.random.default_rng(0).normal(size=(9, 13, 11)).astype("float32")
    options = sx.Options(chip="slow")  # on others so little is gathered
    step = sx.shard_jit(
        lambda x: jnp.abs(sx.annotate(FFTS[name](sx.annotate(2 * x, spec)), spec)).max(0),
        mesh=mesh,
        options=options,
    )
    wanted = np.abs(FFTS[name](2 * x)).max(0)
    np.testing.assert_allclose(step(x), wanted, atol=2e-6 * wanted.max())
    assert {c.kind for c in step.plan(x).collectives if c.reason.startswith("fft")} <= {
        "all_to_all",
        "ppermute",
    }
