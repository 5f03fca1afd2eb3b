"""Programs on which shard_jit and plain `jax.jit` once differed, or might: one line each."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import program


def mesh_of(*sizes: int):
    return jax.make_mesh(
        sizes,
        tuple("xyz"[: len(sizes)]),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: math.prod(sizes)],
    )


def assert_same(f, args, specs=None, mesh=(4, 2), **how):
    """Calls f under shard_jit and under jax.jit; floats differ by rounding only, all else not at all."""
    wanted = jax.jit(f)(*args)
    got = sx.shard_jit(f, mesh=mesh_of(*mesh), in_shardings=specs, **how)(*args)
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
        rtol = {"float32": 1e-5, "bfloat16": 2e-2}.get(want.dtype.name, 0)
        np.testing.assert_allclose(_numbers(have), _numbers(want), rtol=rtol, atol=rtol)


def _numbers(x):
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x, "float32") if x.dtype == jnp.bfloat16 else np.asarray(x)


def ones(*shape, dtype="float32"):
    """Whole numbers, none of them zero."""
    return np.random.default_rng(0).choice([-3, -2, -1, 1, 2, 3], shape).astype(dtype)


def test_gradient_of_a_scan_with_unused_cotangents():
    f = lambda x: lax.cond(x.sum() > 99, lambda x: jnp.sin(x), lambda x: jnp.tanh(x).sum() + 0 * x, x)  # noqa: E731
    assert_same(jax.grad(lambda x: f(x).sum()), [ones(5)], P("x"))


def test_booleans_that_are_pending_beside_others_that_are_not():
    assert_same(
        lambda x, i: jnp.where((x > 0)[i], (x > 1)[i], False),
        [ones(9, 4), np.array([1, 8, 3])],
        (P("x"), P("y")),
    )


def test_arguments_without_elements():
    assert_same(jax.grad(lambda x: (x * jnp.arange(6.0)[:0]).sum()), [ones(0)], P("x"))


def test_while_under_vmap_each_until_its_own_end():
    halve = lambda x: lax.while_loop(lambda c: c.max() > 1, lambda c: c / 2, x)  # noqa: E731
    assert_same(jax.vmap(halve), [ones(8, 4)], P("x"))


def test_results_without_elements_need_no_lowering():
    assert_same(
        lambda x: (jnp.cumsum(x, 1), jnp.tile(x, 2), jnp.sort(x, 0), x[:, ::-1], x.sum(1)),
        [ones(4, 0)],
        P(None, "x"),
    )


def test_mutable_arrays_inside():
    def f(x):
        ref = jax.new_ref(x)
        ref[0] = ref[1] * 2
        ref[...] += 1
        return ref[...]

    assert_same(f, [ones(5, 4)], P("x"))


def test_branches_for_platforms():
    never = lambda x: jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)  # noqa: E731
    allow = sx.Options(allow=("ffi_call",))
    assert_same(
        lambda x: lax.platform_dependent(x, cpu=lambda x: x * 2, tpu=never),
        [ones(5, 4)],
        P("x"),
        options=allow,
    )


def test_high_words_of_products():
    assert_same(lambda i: lax.mulhi(i << 20, i << 28), [ones(5, 4, dtype="int32")], P("x"))


def test_positions_of_sorted_values():
    assert_same(lambda x, y: jnp.searchsorted(jnp.sort(x), y), [ones(5), ones(9)], (P("x"), P("y")))


def test_roots():
    """One equation with a tree of operands in 0.12."""
    newton = lambda f, x: lax.fori_loop(0, 20, lambda i, x: x - f(x) / (3 * x * x), x)  # noqa: E731

    def cubic(a):
        return lax.custom_root(
            lambda x: x**3 - a, jnp.ones_like(a), newton, lambda g, y: y / g(jnp.ones_like(y))
        )

    assert_same(cubic, [1 + ones(5)], P("x"))
    assert_same(jax.grad(lambda a: cubic(a).sum()), [1 + ones(5)], P("x"))


def test_scatter_of_one_place_into_a_slice():
    f = lambda x: x.at[:, jnp.array([2])].multiply(7, unique_indices=True)  # noqa: E731
    assert_same(f, [np.arange(125, dtype="uint16")[None]], P(None, "x"))


def test_shardings_of_a_jit_inside_are_annotations():
    mesh = mesh_of(4, 2)
    inner = jax.jit(
        jnp.sin, in_shardings=NamedSharding(mesh, P("x", "y")), out_shardings=NamedSharding(mesh, P("y", "x"))
    )
    plan = sx.shard_jit(lambda x: inner(x + 1), mesh=mesh).plan(ones(16, 8))
    assert (plan.in_shardings[0].spec, plan.out_shardings.spec) == (P("x", "y"), P("y", "x"))
    assert_same(lambda x: inner(x + 1), [ones(16, 8)])


def test_constants_that_rest_otherwise_than_annotated():
    assert_same(lambda: jnp.zeros(3), [], out_shardings=P("x"))


@pytest.mark.parametrize("stage", ["plan", "lower", "call"])
def test_a_program_of_an_unused_argument_is_built_once(stage, monkeypatch):
    built, build = [], program._build
    monkeypatch.setattr(program, "_build", lambda *args: built.append(args) or build(*args))
    f = sx.shard_jit(
        lambda unused, x, w: jnp.tanh(x @ w), mesh=mesh_of(4, 2), in_shardings=(P("x"), P("y"), None)
    )
    args = ones(8), ones(9, 6), ones(6, 4)
    if stage != "call":
        plan = getattr(f, stage)(*args)
    lowered = f.lower(*args)
    result = f(*args)
    assert len(built) == 1
    assert len(lowered.compile().input_shardings[0]) == 3 and "tensor<8xf32>" not in lowered.as_text()
    np.testing.assert_allclose(result, jnp.tanh(args[1] @ args[2]), rtol=1e-6)
    if stage == "plan":
        assert plan.phases["lower"] > 0
