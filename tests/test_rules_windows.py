"""Windows that slide along split dims: every claim of their rules, against the plain primitive. One line per
case.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import shardax as sx
from shardax import spmd_rules  # noqa: F401  (registers the built-in rules)
from shardax.check import check_rule, ramp
from shardax.graph.inline import from_jaxpr
from shardax.spmd_rules.registry import RULES
from tests.test_program import mesh_of


def conv(x, kernel, stride=1, padding="SAME", holes=1, spread=1):
    dims = ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(
        x, kernel, (stride,), padding, (holes,), (spread,), dimension_numbers=dims
    )


def gradients(f):
    return lambda *args: jax.grad(lambda *args: jnp.sum(f(*args) ** 2), tuple(range(len(args))))(*args)


def pool(x, combine=lax.max, size=3, stride=1, padding="SAME", holes=1, spread=1, start=None):
    neutral = {lax.max: -jnp.inf, lax.min: jnp.inf, lax.add: 0.0}[combine] if start is None else start
    return lax.reduce_window(x, neutral, combine, (size, 1), (stride, 1), padding, (holes, 1), (spread, 1))


def case(f, x, *others, **how):
    """Padding given as (low, high) is that of the one dim that slides."""
    if isinstance(how.get("padding"), tuple):
        how["padding"] = [how["padding"], (0, 0)] if f is pool else [how["padding"]]
    return partial(f, **how), x, *others


X, K = ramp(1, 9, 2), ramp(3, 2, 2)
KK = ramp(5, 2, 2)
P = ramp(9, 2)
CASES = {
    "conv same": case(conv, X, K),
    "conv valid": case(conv, X, K, padding="VALID"),
    "conv strided": case(conv, X, K, stride=2),
    "conv strided 3": case(conv, ramp(1, 13, 2), K, stride=3, padding=(2, 0)),
    "conv cropped": case(conv, X, K, padding=(-1, -2)),
    "conv far": case(conv, X, KK, spread=2, padding=(4, 4)),
    "conv holes": case(conv, X, K, holes=2, padding=(2, 1)),
    "conv holes and stride": case(conv, ramp(1, 12, 2), K, holes=2, stride=2, padding=(1, 1)),
    "conv holes and stride, uneven": case(conv, X, KK, holes=2, stride=3, padding=(2, 2)),
    "conv holes 3, stride 2, spread": case(conv, X, K, holes=3, stride=2, spread=2, padding=(0, 3)),
    "conv gradients": (gradients(conv), X, K),
    "conv gradients strided": (gradients(partial(conv, stride=2)), ramp(1, 12, 2), K),
    "conv gradients spread": (gradients(partial(conv, spread=2, stride=3)), ramp(1, 14, 2), K),
    "conv global": case(conv, ramp(1, 9, 2), ramp(9, 2, 2), padding="VALID"),
    "pool max strided": case(pool, P, size=2, stride=2, padding="VALID"),
    "pool max overlapping": case(pool, ramp(13, 2), size=3, stride=2),
    "pool min": case(pool, P, combine=lax.min, size=5),
    "pool sum": case(pool, P, combine=lax.add, padding=(3, 0)),
    "pool sum holes and stride": case(pool, P, combine=lax.add, holes=3, stride=2, padding=(1, 2)),
    "pool start": case(pool, P, combine=lax.add, start=1.5, padding="VALID"),
    "pool start, padded": case(pool, P, combine=lax.add, start=1.5),
    "pool product": case(pool, P / 4, combine=lax.mul, start=2.0),
    "pool product, holes": case(pool, P / 4, combine=lax.mul, start=2.0, holes=2, padding=(1, 2)),
    "pool product, holes and stride": case(
        pool, P / 4, combine=lax.mul, start=1.0, holes=3, stride=2, padding=(4, 1)
    ),
    "pool int": (lambda x: pool(x, start=jnp.int32(-1000)), ramp(9, 2, dtype="int32")),
    "pool gradient": (gradients(pool), P),
    "pool gradient strided": (gradients(partial(pool, size=2, stride=2, padding="VALID")), P),
    "pool gradient gaps": (gradients(partial(pool, size=2, stride=3, padding=[(1, 1), (0, 0)])), ramp(14, 2)),
    "pool gradient min": (gradients(partial(pool, combine=lax.min, size=5, stride=2)), ramp(12, 2)),
    "pool gradient sum": (gradients(partial(pool, combine=lax.add, stride=2)), P),
    "pool tangent": (lambda x, t: jax.jvp(partial(pool, stride=2), (x,), (t,)), P, P[::-1].copy()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.mixed_dtypes
def test_claims(name):
    f, *args = CASES[name]
    check_rule(f, *args)


@pytest.mark.parametrize(
    "name, primitive, texts",
    [
        ("conv same", "conv_general_dilated", ["n s0~ c+, w0! c+ o -> n s0~ o"]),
        ("conv global", "conv_general_dilated", ["n s0~+ c+, s0~+ c+ o -> n t0! o"]),
        (
            "conv gradients",
            "conv_general_dilated",
            ["n s0~ c+, w0! c+ o -> n s0~ o", "c+ s0~+ n, c+ s0~+ o -> t0! n o", ""],
        ),
        ("pool min", "reduce_window_min", ["s0~ k1 -> s0~ k1"]),
        ("pool gradient", "select_and_scatter_add", ["s0~ k1, s0~ k1 -> s0~ k1"]),
    ],
)
def test_rules_read(name, primitive, texts):
    f, *args = CASES[name]
    nodes = [n for n in from_jaxpr(jax.make_jaxpr(f)(*args)).nodes if n.name == primitive]
    assert [RULES[n.name].rule(n) for n, text in zip(nodes, texts, strict=True) if text] == [
        t for t in texts if t
    ]


@pytest.mark.parametrize("size, stride", [(29, 4), (31, 3), (32, 7)])
def test_rows_outside_of_all_windows_count_for_nothing(size, stride):
    """Their products with padding would be no zeros."""
    x, used = jnp.ones((1, size, 2)), (size - 3) // stride * stride + 3
    x = x.at[:, used:].set(jnp.inf)
    gradient = jax.grad(lambda kernel, x: conv(x, kernel, stride, "VALID").sum())
    step = sx.shard_jit(
        lambda kernel, x: gradient(kernel, sx.annotate(x, PartitionSpec(None, "x"))), mesh=mesh_of(4)
    )
    np.testing.assert_array_equal(step(K, x), gradient(K, x))
