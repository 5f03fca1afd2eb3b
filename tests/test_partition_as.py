"""`partition_as`: whole functions run on shards; values, gradients and bytes as of the plain function."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.spmd_rules.registry import RULES

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
ATTENTION = "b s h d!, b t h d!, b t h d! -> b s h d!"


def _attention(q, k, v):
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1), v)


def _array(*shape, seed=0):
    return np.random.RandomState(seed).randn(*shape).astype("float32")


def _qkv(b, s, h):
    return _array(b, s, h, 8), _array(b, 6, h, 8, seed=1), _array(b, 6, h, 8, seed=2)


def _equal(f, args, specs):
    """The plan of f, whose results under these shardings are those of f unsharded."""
    with jax.set_mesh(MESH):
        wanted = jax.jit(f)(*args)
        step = sx.shard_jit(f, mesh=MESH, in_shardings=specs)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), step(*args), wanted)
        return step.plan(*args)


@pytest.mark.once
@pytest.mark.parametrize("sizes", [(8, 4, 2), (5, 3, 3), (3, 6, 1)])
@pytest.mark.parametrize("spec", [P("x", None, "y"), P(None, "x", "y"), P(("x", "y"))])
def test_attention(sizes, spec):
    f = sx.partition_as(ATTENTION)(_attention)
    _equal(lambda q, k, v: f(q + 1, k, v) * 2, _qkv(*sizes), (spec, None, None))
    _equal(jax.grad(lambda q, k, v: (f(q + 1, k, v) ** 2).sum(), (0, 1, 2)), _qkv(*sizes), (spec, None, None))


def test_batch_and_heads_send_nothing():
    assert not _equal(
        sx.partition_as(ATTENTION)(_attention), _qkv(8, 4, 2), (P("x", None, "y"),) * 3
    ).collectives


def test_a_factor_that_the_result_lacks_is_whole():
    f = sx.partition_as("b s h d, b t h d -> b s h d")(lambda q, k: _attention(q, k, k))
    plan = _equal(lambda q, k: f(q, k), _qkv(8, 4, 2)[:2], (P("x"), P(None, "y")))
    assert {c.kind for c in plan.collectives} <= {"all_gather", "all_to_all"}


@pytest.mark.parametrize("cut", [0, 3, 33])
@pytest.mark.parametrize("axes", ["x", ("x", "y")])
def test_reduced_factors(cut, axes):
    sums = sx.partition_as("n+ d -> d")(lambda x: jnp.exp(x).sum(0))
    most = sx.partition_as("n:max d -> d")(lambda x: (jnp.cos(x) - 2).max(0))
    args, specs = (_array(40, 6),), (P(axes),)
    for f in (sums, most):
        assert _equal(lambda x, f=f: f((x - 1)[cut:]), args, specs).collectives
        _equal(jax.grad(lambda x, f=f: f((x - 1)[cut:]).sum()), args, specs)


@pytest.mark.parametrize("n", [5, 13])
def test_uneven_sums_are_gathered_within(n, monkeypatch):
    """The planner gathers before, which costs less, unless it is told that to gather within is free."""
    monkeypatch.setitem(RULES, "partition_as", replace(RULES["partition_as"], sends=None))
    sums = sx.partition_as("n+ d, n+ -> d")(lambda x, y: (jnp.exp(x) * jnp.cos(y)[:, None]).sum(0))
    most = sx.partition_as("n:max d, n:max -> d")(lambda x, y: (jnp.cos(x) + jnp.cos(y)[:, None] - 3).max(0))
    split = functools.partial(sx.annotate, spec=P("x"))
    for f in (sums, most):
        g = lambda x, y, f=f: f(split(x - 1), split(y - 1))  # noqa: E731
        kinds = {c.kind for c in _equal(g, (_array(n, 60), _array(n)), None).collectives}
        assert {"all_gather", "all_reduce"} <= kinds, kinds


def test_a_product_over_an_even_sum_sends_what_dot_does():
    f = sx.partition_as("m k+, k+ n -> m n")(lambda a, b: a @ b)
    kinds = [
        [
            (c.kind, c.axes, c.nbytes)
            for c in _equal(g, (_array(8, 8), _array(8, 8)), (P(None, "x"), P("x"))).collectives
        ]
        for g in (f, lambda a, b: a @ b)
    ]
    assert kinds[0] == kinds[1]


def _scale_kernel(x, o):
    o[...] = jnp.tanh(x[...]) * 2


@functools.partial(jax.jit, static_argnames="interpret")
def _scale(x, interpret=True):
    return pl.pallas_call(
        _scale_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret
    )(x)


@pytest.mark.parametrize("n", [8, 5])
def test_pallas_with_rules_for_its_derivatives(n):
    rule = sx.partition_as("... -> ...")
    backward = sx.partition_as("..., ... -> ...")(lambda y, ct: ct * (2 - y * y / 2))

    @jax.custom_vjp
    def f(x):
        return rule(_scale)(x)

    f.defvjp(lambda x: (f(x), f(x)), lambda y, ct: (backward(y, ct),))
    args, specs = (_array(n, 6),), (P("x"),)
    assert all(c.nbytes <= 8 for c in _equal(lambda x: f(x).sum(), args, specs).collectives)
    plan = _equal(jax.grad(lambda x: f(x).sum()), args, specs)
    assert n == 5 or not plan.collectives
    x = jnp.asarray(args[0])
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), 2 / jnp.cosh(x) ** 2, rtol=1e-4)


def test_a_custom_vjp_below():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * 3,))
    g = sx.partition_as("... -> ...")(f)
    step = sx.shard_jit(lambda x: g(x).sum(), mesh=MESH, in_shardings=P("x"))
    np.testing.assert_array_equal(jax.grad(step)(jnp.ones((8, 2))), 3)


def _tree(x):
    return {"sum": x["a"] + x["b"], "most": (x["a"].argmax(-1), x["b"])}


def test_trees_integers_vmap_loops():
    f = sx.partition_as("b k!, b k! -> b, b k!, b k!")(_tree)
    args = ({"a": _array(8, 4), "b": _array(8, 4, seed=1)},)
    assert not _equal(f, args, (P("x"),)).collectives
    assert not _equal(jax.vmap(sx.partition_as("k!, k! -> , k!, k!")(_tree)), args, (P("x"),)).collectives
    _equal(jax.grad(lambda x: f(x)["sum"].sum()), args, (P("x"),))
    _equal(jax.vmap(f, ({"a": 1, "b": None},)), ({"a": _array(8, 3, 4), "b": _array(8, 4)},), (None,))
    double = sx.partition_as("... -> ...")(lambda x: jnp.sin(x) * 2)
    _equal(
        lambda x: jax.lax.scan(lambda c, _: (double(c), c.sum()), x, None, length=3),
        (_array(5, 4),),
        (P("x"),),
    )
    _equal(jax.grad(jax.checkpoint(lambda x: double(double(x)).sum())), (_array(5, 4),), (P("x"),))


def test_outside():
    f = sx.partition_as("... -> ...")(jnp.sin)
    x = _array(4)
    np.testing.assert_array_equal(f(x), jnp.sin(x))
    np.testing.assert_array_equal(jax.jit(f)(x), jax.jit(jnp.sin)(x))
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), np.cos(x), rtol=1e-6)
    linear = sx.partition_as("... -> ...")(lambda x: x * 2)
    np.testing.assert_array_equal(jax.linear_transpose(linear, x)(x)[0], x * 2)


@pytest.mark.parametrize("rule", ["b ? -> b", "b b", "h~ -> h~", "... k -> k", "(a b -> a b"])
def test_rules_that_are_refused(rule):
    with pytest.raises(ValueError, match=r"rule '.*': at '"):
        sx.partition_as(rule)


BAD = {
    "operands": ("b, b -> b", jnp.sin, "at '->': it has 2 operands, the equation has 1"),
    "results": ("b c -> b, c", jnp.sin, "it has 2 results"),
    "rank": ("b -> b", jnp.sin, "it names 1 dims, the shape is"),
    "size": ("b b -> b b", jnp.sin, "at 'b': this factor has size 4 in one place and 6 in another"),
    "effects": ("... -> ...", lambda x: (jax.debug.print("{}", x), x)[1], "has side effects"),
    "shards": (
        "b k -> b k",
        lambda x: x.reshape(-1, 6)[:4] if x.shape[0] == 4 else x[:1].repeat(3, 0),
        "on shards of shapes",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit(name):
    rule, fn, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        sx.shard_jit(sx.partition_as(rule)(fn), mesh=MESH, in_shardings=P("x"))(_array(4, 6))


def test_no_arrays_and_traced_values_from_around():
    with pytest.raises(
        ValueError,
        match=(
            "operand 1 of .* is 'a', of type str: give an array: bind what is none below with "
            "functools.partial"
        ),
    ):
        sx.partition_as("b, -> b")(lambda x, mode: x)(_array(4), "a")
    with pytest.raises(ValueError, match="closes over a traced value"):
        jax.jit(lambda x, y: sx.partition_as("b -> b")(lambda x: x + y)(x))(_array(4), _array(4))


def _products(in_shapes, out_shapes):
    (m, k), (_, n) = in_shapes
    return 2 * m * k * n


def _product_kernel(a, b, o):
    o[...] = a[...] @ b[...]


def _kernel(a, b):
    out = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
    return pl.pallas_call(_product_kernel, out_shape=out, interpret=True)(a, b)


@pytest.mark.parametrize("fn", [_kernel, lambda a, b: a @ b])
def test_flops(fn):
    """Those of shards; of what is given them they count instead of what can be seen."""
    f = sx.partition_as("m k!, k! n -> m n", flops=_products)(fn)
    args, specs = (_array(8, 8), _array(8, 4)), (P("x"), P(None, "y"))
    assert _equal(lambda a, b: f(a, b), args, specs).estimate("v5e").flops == 2 * 2 * 8 * 2
    mapped = jax.vmap(f, (0, None))
    assert (
        _equal(mapped, (_array(4, 8, 8), _array(8, 4)), (P("x"), None)).estimate("v5e").flops == 2 * 8 * 8 * 4
    )
    twice = lambda a, b: f(f(a, b) @ jnp.ones((4, 8)), b)  # noqa: E731
    assert _equal(twice, args, (P("x"), None)).estimate("v5e").flops == (2 + 1) * 2 * 2 * 8 * 4


def test_without_flops_what_can_be_seen_counts():
    args = (_array(8, 8), _array(8, 4))
    for fn, flops in ((_kernel, 0), (lambda a, b: a @ b, 2 * 2 * 8 * 4)):
        f = sx.partition_as("m k!, k! n -> m n")(fn)
        plan = _equal(lambda a, b, f=f: f(a, b), args, (P("x"), None))
        assert plan.estimate("v5e").flops == flops
        assert plan.estimate("v5e").nbytes == 4 * (
            2 * 8 + 8 * 4 + 2 * 4
        )  # a kernel's blocks are not in memory


def test_a_kernels_own_estimate_counts():
    cost = pl.CostEstimate(flops=4096, transcendentals=0, bytes_accessed=0)
    out = jax.ShapeDtypeStruct((8, 4), "float32")
    fn = lambda a, b: pl.pallas_call(_product_kernel, out_shape=out, interpret=True, cost_estimate=cost)(a, b)  # noqa: E731
    f = sx.partition_as("m! k!, k! n! -> m! n!")(fn)
    assert _equal(lambda a, b: f(a, b), (_array(8, 8), _array(8, 4)), None).estimate("v5e").flops == 4096


def test_bad_flops():
    f = sx.partition_as("... -> ...", flops=lambda ins, outs: "many")(jnp.sin)
    with pytest.raises(
        ValueError, match=r"what `flops` of partition_as at .*test_partition_as.py:\d+ gives is 'many'"
    ):
        sx.shard_jit(lambda x: f(x), mesh=MESH, in_shardings=P("x")).plan(_array(4, 6))
