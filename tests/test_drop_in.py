"""What runs under jax.jit runs with only the decorator changed: what is accepted, and the test that shows it.

factory form, partial, methods, bound methods               test_api.TestForms
a prefix tree of positional arguments, keyword arguments    test_api.TestArguments
numpy, Python scalars, weak types, unused arguments, None   test_api.TestArguments
NamedSharding with a memory kind                            TestMemory
PartitionSpec, None, UNCONSTRAINED, tuples of axes, boxes,
boxes of shardings, Format, GSPMDSharding, UNSPECIFIED      TestLeaves
keep_unused, inline, compiler_options; device, backend      TestArgumentsOfJit, test_errors
no mesh at all                                              TestOneDevice
mesh=, set_mesh, with mesh, of arguments; Auto, Explicit    test_api.TestMeshes
reshard, out_sharding=, islands on an Explicit mesh         test_api.TestMeshes
trace, lower, compile and what it gives, clear_cache        test_api.TestReturned, TestStages
jax.export, serialize_executable                            TestStages
typed and legacy keys, float0                               TestLeaves
with_sharding_constraint, device_put, control flow          TestInside, test_loops, test_transform
callbacks, prints; islands; kernels                         test_effects; test_islands; test_partition_as
Flax and optax                                              test_flax, test_optax
Refs (jax.new_ref) as arguments                             TestRefs
donation                                                    test_api.TestDonation
default_matmul_precision, x64, debug_nans, disable_jit,
log_compiles, debug_key_reuse, checking_leaks, no Shardy    TestConfiguration, test_api, test_transform
nothing leaks; the persistent cache is hit                  TestCaches
what jax.jit does, run with each of the two                 TestBehaviours (behaviours.py)
abstract meshes in context, arrays of other meshes          TestAbstractContexts, TestOtherMeshes
"""

import contextlib
import functools
import gc
import inspect
import logging
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import serialize_executable
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import _jax
from tests import behaviours

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("x", "y"))
OTHER = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
A = np.arange(32, dtype=np.float32).reshape(8, 4)
SPLIT = NamedSharding(MESH, P("x"))
HOST = NamedSharding(MESH, P("x"), memory_kind="pinned_host")


def double(x):
    return 2 * x


class TestMemory:
    def test_results_on_the_host(self):
        out = sx.shard_jit(
            lambda x: (2 * x, x), mesh=MESH, in_shardings=P("x"), out_shardings=(HOST, P("x"))
        )(A)
        assert [x.sharding.memory_kind for x in out] == [
            "pinned_host",
            jax.device_put(A, SPLIT).sharding.memory_kind,
        ]
        np.testing.assert_array_equal(out[0], 2 * A)

    @pytest.mark.parametrize("given", [{"in_shardings": HOST}, {}])
    def test_arguments_on_the_host(self, given):
        f = sx.shard_jit(lambda x: (2 * jax.device_put(x, jax.memory.Space.Device), x), mesh=MESH, **given)
        out = f(jax.device_put(A, HOST))
        assert out[1].sharding.memory_kind == "pinned_host" and out[0].sharding.memory_kind != "pinned_host"
        np.testing.assert_array_equal(out[0], 2 * A)

    def test_moved_inside(self):
        f = sx.shard_jit(lambda x: jax.device_put((2 * x, x), (SPLIT, HOST)), mesh=MESH)
        out = f(A)
        assert out[0].sharding.spec == out[1].sharding.spec == P("x")
        assert out[1].sharding.memory_kind == "pinned_host"

    def test_gradient_of_an_argument_on_the_host(self):
        f = lambda x: jnp.sin(jax.device_put(x, jax.memory.Space.Device)).sum()  # noqa: E731
        x = jax.device_put(A, HOST)
        for grad in (jax.grad(sx.shard_jit(f, mesh=MESH)), sx.shard_jit(jax.grad(f), mesh=MESH)):
            out = grad(x)
            assert out.sharding.memory_kind == "pinned_host"
            np.testing.assert_allclose(out, np.cos(A), rtol=1e-5)

    def test_residuals_that_a_policy_offloads(self):
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["h"],
            offload_src="device",
            offload_dst="pinned_host",
        )
        f = jax.checkpoint(lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "h")), policy=policy)
        out, pullback = jax.vjp(sx.shard_jit(f, mesh=MESH, in_shardings=P("x")), A)
        kept = [
            x
            for x in jax.tree.leaves(pullback)
            if isinstance(x, jax.Array) and x.sharding.memory_kind == "pinned_host"
        ]
        assert [x.sharding.shard_shape(x.shape) for x in kept] == [(2, 4)]
        np.testing.assert_allclose(kept[0], np.sin(A), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pullback(out)[0], jax.vjp(f, A)[1](np.array(out))[0], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        "space", [jax.memory.Space.Host, jax.memory.Space.Device, HOST], ids=["host", "device", "sharding"]
    )
    def test_gradient_through_a_move_is_as_jit_has_it(self, space):
        """JAX itself cannot transpose a move to the host: then the error is its own."""

        def f(x):
            return jnp.sin(jax.device_put(jax.device_put(jnp.sin(x), space), jax.memory.Space.Device)).sum()

        plain, ours = (
            _outcome(jax.grad(g), jax.device_put(A, SPLIT)) for g in (jax.jit(f), sx.shard_jit(f, mesh=MESH))
        )
        assert type(plain) is type(ours)
        assert plain == ours if isinstance(plain, str) else np.allclose(plain, ours, rtol=1e-5)


def _outcome(f, x):
    try:
        return np.array(f(x))
    except ValueError as error:
        return str(error)


class TestLeaves:
    @pytest.mark.parametrize(
        "spec", [P(("x", "y")), SPLIT, None, P.UNCONSTRAINED, P(P.UNCONSTRAINED, "y"), P(None, "x")]
    )
    def test_spec(self, spec):
        np.testing.assert_array_equal(sx.shard_jit(double, mesh=MESH, in_shardings=(spec,))(A), 2 * A)

    def test_boxes(self):
        nn = pytest.importorskip("flax.linen", reason="Flax is not installed")
        params = {"w": nn.Partitioned(jnp.asarray(A), names=("x", None)), "b": jnp.ones(4)}
        specs = nn.get_partition_spec(params)
        for given in (specs, nn.get_sharding(params, MESH), {"w": specs["w"], "b": None}):
            out = sx.shard_jit(lambda p: jax.tree.map(double, p), mesh=MESH, in_shardings=(given,))(params)
            assert out["w"].names == ("x", None) and out["w"].value.sharding.spec == P("x")

    @pytest.mark.parametrize("sides", ["in", "out", "both"])
    @pytest.mark.parametrize("kind", ["specs", "shardings", "none", "meshes", "logical", "subtrees", "optax"])
    def test_boxes_that_hold_shardings(self, kind, sides):
        """As `jax.tree.map` over boxed parameters makes them."""
        nn = pytest.importorskip("flax.linen", reason="Flax is not installed")
        box = functools.partial(nn.Partitioned, names=("y", None))  # the names do not count then
        w, leaf = jnp.asarray(A), P("x")
        params = {
            "meshes": {"w": box(w, mesh=MESH)},
            "logical": {"w": nn.LogicallyPartitioned(w, names=("in", "out"))},
            "subtrees": {"w": box({"u": w, "v": w})},
        }.get(kind, {"w": box(w), "b": jnp.ones(8)})
        if kind == "optax":
            params = pytest.importorskip("optax", reason="optax is not installed").adam(1e-3).init(params)
        given: Any = SPLIT if kind == "shardings" else None if kind == "none" else leaf
        specs = jax.tree.map(lambda x: given if x.ndim else P(), params)
        if kind == "subtrees":
            specs = {"w": box(leaf)}  # for both arrays in the box
        named = {"in_shardings": (specs,)} if sides != "out" else {}
        named |= {"out_shardings": specs} if sides != "in" else {}
        step = lambda params: jax.tree.map(double, params)  # noqa: E731
        with jax.set_mesh(MESH):
            found, wanted = sx.shard_jit(step, **named)(params), jax.jit(step, **named)(params)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert sides == "in" or kind == "none" or x.sharding.is_equivalent_to(y.sharding, x.ndim)
            np.testing.assert_array_equal(x, y)

    def test_keys(self):
        keys, legacy = jax.random.split(jax.random.key(1), 8), jax.random.PRNGKey(0)
        f = lambda keys, legacy: (jax.vmap(jax.random.normal)(keys), jax.random.bits(legacy, (8,)))  # noqa: E731
        for got, wanted in zip(
            sx.shard_jit(f, mesh=MESH, in_shardings=(P("x"), None))(keys, legacy),
            f(keys, legacy),
            strict=True,
        ):
            np.testing.assert_array_equal(got, wanted)

    def test_float0(self):
        zeros = np.zeros(3, jax.dtypes.float0)
        out = sx.shard_jit(lambda x, z: (x, z), mesh=MESH, in_shardings=(P("x"), None))(A, zeros)
        assert out[1].dtype == jax.dtypes.float0 and out[1].shape == (3,)

    @pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
    @pytest.mark.parametrize("spec", [P("x"), P("x", "y"), P(("x", "y")), P()], ids=str)
    def test_other_leaves_of_jit(self, mesh, spec):
        named = NamedSharding(mesh, spec)
        placed = jax.device_put(A, named)
        for leaf in (
            Format(None, named),
            Format(Layout.AUTO, named),
            placed.format,
            _jax.gspmd_sharding(jax.devices(), named, 2),
            _jax.UNSPECIFIED,
        ):
            f = sx.shard_jit(double, mesh=mesh, in_shardings=(leaf,), out_shardings=leaf)
            given = placed if leaf is _jax.UNSPECIFIED else A
            assert f(given).sharding.is_equivalent_to(named, 2)
            np.testing.assert_array_equal(f(given), 2 * A)

    def test_one_device_of_a_mesh_of_one(self):
        mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[2:3])
        one = SingleDeviceSharding(jax.devices()[2])
        out = sx.shard_jit(double, mesh=mesh, in_shardings=one, out_shardings=one)(A)
        assert out.sharding.device_set == {jax.devices()[2]}
        np.testing.assert_array_equal(out, 2 * A)


class TestArgumentsOfJit:
    def test_none_is_missing(self):
        """Those of a mesh are refused (test_errors)."""
        ours, jits = (inspect.signature(f).parameters for f in (sx.shard_jit, jax.jit))
        assert set(jits) <= set(ours)
        assert list(ours)[0] == list(jits)[0]

    def test_keep_unused(self):
        for keep in (False, True):
            f = sx.shard_jit(lambda x, unused: 2 * x, mesh=MESH, in_shardings=P("x"), keep_unused=keep)
            text = f.lower(A, A).as_text()
            assert ("%arg1" in text.split("@main(")[1].split("{\n")[0]) == keep
            np.testing.assert_array_equal(f(A, A), 2 * A)

    def test_inline(self):
        for inline in (False, True):
            f = sx.shard_jit(double, mesh=MESH, in_shardings=P("x"), inline=inline)
            ours, jits = (
                [eqn.primitive.name for eqn in jax.make_jaxpr(g)(A).eqns]
                for g in (f, jax.jit(double, inline=inline))
            )
            assert ("jit" in ours) == ("jit" in jits)  # JAX 0.12 inlines later
            np.testing.assert_array_equal(f(A), 2 * A)

    def test_compiler_options(self):
        f = functools.partial(sx.shard_jit, double, mesh=MESH, in_shardings=P("x"))
        on = f(compiler_options={"xla_embed_ir_in_executable": True})
        np.testing.assert_array_equal(on(A), 2 * A)
        for call in (f(compiler_options={"no_such": 1}), f(compiler_options={"no_such": 1}).lower(A).compile):
            with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'no_such'"):
                call(*(A,) * (call.__name__ == "double"))


class TestOneDevice:
    """Where there is no mesh, it runs as under jax.jit: a library decorates once."""

    def step(self, x, n=2, *, y=1.0):
        return {"a": jnp.tanh(x) * n, "b": (x + y).sum()}

    @pytest.mark.parametrize(
        "change",
        [
            lambda f: f,
            lambda f: jax.jit(f),
            lambda f: jax.grad(lambda x: f(x)["b"]),
            lambda f: jax.vmap(f),
            lambda f: jax.jit(jax.vmap(jax.grad(lambda x: f(x)["a"].sum()))),
            lambda f: jax.checkpoint(f),
            lambda f: lambda x: f(x, 3, y=x),
            lambda f: lambda x: jax.lax.scan(lambda c, row: (c, f(row)), 0, x)[1],
            lambda f: lambda x: f.lower(x).compile()(x),
            lambda f: lambda x: f.trace(x).lower().compile()(x),
            lambda f: lambda x: export.export(f)(x).call(x),
            lambda f: lambda x: jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), f.eval_shape(x)),
        ],
    )
    def test_as_jit(self, change):
        for x in (A, jax.device_put(A, jax.devices()[3])):
            found, wanted = (
                change(jit(self.step, static_argnames="n"))(x) for jit in (sx.shard_jit, jax.jit)
            )
            assert jax.tree.structure(found) == jax.tree.structure(wanted)
            for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                assert (got.sharding, got.committed) == (want.sharding, want.committed)
                np.testing.assert_array_equal(got, want)

    def test_is_traced_once_and_partitioned_when_there_is_a_mesh(self):
        traced = []
        f = sx.shard_jit(lambda x: (traced.append(1), 2 * x)[1], donate_argnums=0)
        for _ in range(3):
            assert isinstance(f(jnp.asarray(A)).sharding, SingleDeviceSharding)
        assert len(traced) == 1
        assert f(jax.device_put(A, SPLIT)).sharding.is_equivalent_to(SPLIT, 2)
        with jax.set_mesh(OTHER):
            assert f.plan(A).mesh == OTHER
        np.testing.assert_array_equal(f(A), 2 * A)
        x = jnp.asarray(A)
        f(x)
        assert x.is_deleted()

    def test_shardings_of_one_device(self):
        one = SingleDeviceSharding(jax.devices()[2])
        out = sx.shard_jit(lambda x, y: (x, y), in_shardings=(one, None), out_shardings=(one, None))(A, A)
        assert [x.sharding.device_set for x in out] == [{jax.devices()[2]}] * 2

    def test_refs_and_keys(self):
        def step(ref, key):
            ref[...] += 1
            return jax.random.normal(key, ref.shape)

        ref = jax.new_ref(jnp.zeros(4))
        out = sx.shard_jit(step)(ref, jax.random.key(0))
        np.testing.assert_array_equal(ref[...], np.ones(4))
        np.testing.assert_array_equal(out, jax.random.normal(jax.random.key(0), (4,)))

    @pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
    def test_inside_one_with_a_mesh(self, mesh):
        """Also where that is traced in an empty context, as what closes over an Explicit array is."""
        own = jax.device_put(A, NamedSharding(mesh, P("x")))
        inner = sx.shard_jit(lambda x: jnp.sin(x) + own)
        out = sx.shard_jit(lambda x: inner(x) * 2, mesh=mesh, in_shardings=P("x"))(A)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
        np.testing.assert_allclose(out, 2 * (np.sin(A) + A), rtol=1e-6)

    def test_debugging(self):
        f = sx.shard_jit(lambda x: jnp.log(x))
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log"):
            f(-A)
        with jax.disable_jit():
            np.testing.assert_allclose(sx.shard_jit(jnp.sin)(A), np.sin(A), rtol=1e-5)


def _put(mesh):
    return lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))


def _in(context):
    if context is None:
        return contextlib.nullcontext()
    abstract = isinstance(context, jax.sharding.AbstractMesh)
    return jax.sharding.use_abstract_mesh(context) if abstract else jax.set_mesh(context)


def _same(found, wanted, shardings: bool = True) -> None:
    """Values, types, whether committed, and where."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if not isinstance(want, jax.Array):
            assert got == want
            continue
        assert (str(jax.typeof(got)), got.committed) == (str(jax.typeof(want)), want.committed)
        assert got.weak_type == want.weak_type
        assert not shardings or got.sharding.is_equivalent_to(want.sharding, want.ndim)
        if not want.size:
            continue  # JAX cannot gather those
        exact = not jnp.issubdtype(want.dtype, jnp.inexact)
        tolerance = 0 if exact else 1e-2 if want.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(
            np.asarray(got, complex), np.asarray(want, complex), rtol=tolerance, atol=tolerance
        )


BOTH = pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])


@pytest.mark.promotes_ranks
class TestBehaviours:
    @BOTH
    @pytest.mark.parametrize("name", behaviours.BEHAVIOURS)
    def test_in_a_mesh(self, name, mesh):
        program = behaviours.BEHAVIOURS[name]
        with jax.set_mesh(mesh):
            found, wanted = (program(jit, _put(mesh)) for jit in (sx.shard_jit, jax.jit))
        _same(found, wanted, shardings=name != "callback")  # jax.jit leaves what that gives on one device

    @pytest.mark.parametrize("name", behaviours.EXPLICIT)
    def test_on_explicit_axes(self, name):
        program = behaviours.EXPLICIT[name]
        with jax.set_mesh(EXPLICIT):
            _same(*(program(jit, _put(EXPLICIT)) for jit in (sx.shard_jit, jax.jit)))

    @pytest.mark.parametrize(
        ("mesh", "context"),
        [(EXPLICIT, None), (EXPLICIT, EXPLICIT), (EXPLICIT, EXPLICIT.abstract_mesh), (MESH, None)],
        ids=["explicit, none", "explicit, set", "explicit, abstract", "auto, none"],
    )
    @pytest.mark.parametrize("closes", [False, True], ids=["", "closes over"])
    @pytest.mark.parametrize("name", behaviours.TRANSFORMED)
    def test_transformed(self, name, closes, mesh, context):
        put, transform = _put(mesh), behaviours.TRANSFORMED[name]
        held = put(behaviours.X[0]) if closes else 2.0
        with _in(context):
            found, wanted = (
                transform(jit(lambda x: jnp.sin(x) * held))(put(behaviours.X, "x"))
                for jit in (sx.shard_jit, jax.jit)
            )
        _same(found, wanted, shardings=mesh == EXPLICIT)  # a jit around knows of no shardings on Auto axes

    @BOTH
    @pytest.mark.parametrize("name", behaviours.REFUSED)
    def test_refused(self, name, mesh):
        program, words = behaviours.REFUSED[name]
        kinds = []
        for jit in (jax.jit, sx.shard_jit):
            with jax.set_mesh(mesh), pytest.raises(Exception, match=words) as caught:
                program(jit, _put(mesh))
            kinds.append(caught.type)
        assert kinds[0] is kinds[1]


class TestAbstractContexts:
    """What `use_abstract_mesh` puts in context says how it is traced; the devices are the arguments'."""

    @BOTH
    def test_on_the_devices_of_the_arguments(self, mesh):
        x = _put(mesh)(A, "x")
        with _in(mesh.abstract_mesh):
            wanted = jax.jit(lambda x: jnp.tanh(x) * 2)(x)
        bare = jax.sharding.AbstractMesh((4, 2), ("x", "y"), axis_types=mesh.axis_types)
        for context in (mesh.abstract_mesh, bare):
            with _in(context):
                _same(sx.shard_jit(lambda x: jnp.tanh(x) * 2)(x), wanted)

    @pytest.mark.parametrize("shape", [(4, 2), (2,)])
    def test_without_devices_it_runs_on_one(self, shape):
        names, kinds = ("x", "y")[: len(shape)], (AxisType.Auto,) * len(shape)
        context = jax.sharding.AbstractMesh(shape, names, axis_types=kinds)
        step = lambda x: jax.lax.with_sharding_constraint(jnp.tanh(x) * 2, P("x"))  # noqa: E731
        with _in(context):
            for around in (lambda f: f, lambda f: jax.jit(lambda x: f(x)), jax.checkpoint):
                found, wanted = (around(jit(step))(A) for jit in (sx.shard_jit, jax.jit))
                _same(found, wanted)
                assert isinstance(found.sharding, SingleDeviceSharding)

    def test_without_devices_nothing_can_be_split(self):
        abstract = MESH.abstract_mesh
        with _in(abstract), pytest.raises(ValueError, match=r"in_shardings\[0\] names axes .* no devices"):
            sx.shard_jit(double, in_shardings=P("x"))(A)
        with _in(EXPLICIT.abstract_mesh):
            for jit in (jax.jit, sx.shard_jit):
                with pytest.raises(ValueError, match="only AbstractMesh exists"):
                    jit(double)(A)

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    @BOTH
    def test_of_other_names(self, mesh, kind):
        """JAX refuses it. The axes in context, on the devices of the arguments."""
        context = jax.sharding.AbstractMesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
        with _in(context):
            out = sx.shard_jit(lambda x: jnp.tanh(x) * 2)(_put(mesh)(A, "x"))
        assert out.sharding.mesh.axis_names == ("a", "b") and set(out.sharding.mesh.axis_types) == {kind}
        np.testing.assert_allclose(out, np.tanh(A) * 2, rtol=1e-6)

    def test_types_of_results(self):
        shape = jax.ShapeDtypeStruct(
            (8, 4), "float32", sharding=NamedSharding(EXPLICIT.abstract_mesh, P("x"))
        )
        with _in(EXPLICIT.abstract_mesh):
            for stage in (lambda f: f.eval_shape(shape), lambda f: f.trace(shape).out_info):
                found, wanted = (stage(jit(double)) for jit in (sx.shard_jit, jax.jit))
                assert found.sharding == wanted.sharding


class TestOtherMeshes:
    """Arrays that lie on another Explicit mesh than the program's: JAX refuses them."""

    NAMES = {"same": ("x", "y"), "others": ("a", "b")}

    @pytest.mark.parametrize("names", NAMES)
    @pytest.mark.parametrize("way", ["argument", "in_shardings", "closed over"])
    def test_explicit(self, way, names):
        other = jax.make_mesh((2, 4), self.NAMES[names])
        held, x = _put(other)(A, other.axis_names[0]), _put(EXPLICIT)(A, "x")
        with jax.set_mesh(EXPLICIT):
            if way == "closed over":
                out = sx.shard_jit(lambda x: jnp.sin(x) + held)(x)
            else:
                specs = {"in_shardings": (P("x"), P("x"))} if way == "in_shardings" else {}
                out = sx.shard_jit(lambda x, y: jnp.sin(x) + y, **specs)(x, held)
        assert out.sharding.mesh == EXPLICIT
        np.testing.assert_allclose(out, np.sin(A) + A, rtol=1e-6)


class TestInside:
    def test_device_put_is_an_annotation(self):
        plan = sx.shard_jit(lambda x: jax.device_put(2 * x, SPLIT) + 1, mesh=MESH).plan(A)
        assert plan.out_shardings.spec == P("x", None)

    def test_constraint_under_vmap(self):
        f = sx.shard_jit(
            jax.vmap(lambda x: jax.lax.with_sharding_constraint(2 * x, P("y")), spmd_axis_name="x"), mesh=MESH
        )
        assert f(A).sharding.is_equivalent_to(NamedSharding(MESH, P("x", "y")), 2)

    def test_nested_jit_with_shardings(self):
        plan = sx.shard_jit(lambda x: jax.jit(double, out_shardings=SPLIT)(x), mesh=MESH).plan(A)
        assert plan.out_shardings.spec == P("x", None)

    @pytest.mark.parametrize("name", ["switch", "map", "associative_scan", "fori", "barrier"])
    def test_control_flow(self, name):
        f = {
            "switch": lambda x: jax.lax.switch(x.sum().astype("int32") % 3, [double, jnp.sin, jnp.cos], x),
            "map": lambda x: jax.lax.map(double, x),
            "associative_scan": lambda x: jax.lax.associative_scan(jnp.add, x),
            "fori": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x + 1, x),
            "barrier": lambda x: jax.lax.optimization_barrier((x, 2 * x))[1],
        }[name]
        np.testing.assert_allclose(
            sx.shard_jit(f, mesh=MESH, in_shardings=P("x"))(A), jax.jit(f)(A), rtol=1e-6
        )


def _written(refs, x):
    refs["w"][...] = refs["w"][...] + x @ x.T
    refs["w"][2] *= 2
    refs["n"][...] += 1
    return refs["w"][0].sum(), refs["read"][1]


class TestRefs:
    """Mutable arrays of the caller's are read and written where they lie."""

    def refs(self, rows: int, place):
        x = np.linspace(-1, 1, rows * 4, dtype=np.float32).reshape(rows, 4)
        made = {"w": jnp.ones((rows, rows)), "n": jnp.zeros((), "int32"), "read": jnp.asarray(x)}
        return jax.tree.map(lambda leaf: jax.new_ref(place(leaf)), made), x

    def results(self, f, refs, x):
        outs = [f(refs, x) for _ in range(3)]
        return jax.tree.map(np.asarray, (outs, jax.tree.map(lambda ref: ref[...], refs)))

    @pytest.mark.parametrize("rows", [8, 7])
    @pytest.mark.parametrize("kind", ["auto", "explicit", "inferred", "jit", "nested"])
    def test_are_written(self, kind, rows):
        mesh = EXPLICIT if kind == "explicit" else MESH
        wanted = self.results(jax.jit(_written), *self.refs(rows, lambda x: x))
        spec = P("x") if rows == 8 else P()
        place = lambda x: jax.device_put(x, NamedSharding(mesh, spec if x.ndim else P()))  # noqa: E731
        traced = []
        specs = None if kind == "inferred" else ({"w": P("x"), "n": None, "read": P("x", "y")}, P("x"))
        f = sx.shard_jit(lambda *args: (traced.append(1), _written(*args))[1], mesh=mesh, in_shardings=specs)
        call = {
            "jit": jax.jit(lambda *args: f(*args)),
            "nested": sx.shard_jit(lambda *args: f(*args), mesh=mesh),
        }.get(kind, f)
        with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
            refs, x = self.refs(rows, place)
            got = self.results(call, refs, x)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, wanted)
        assert refs["w"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        assert len(traced) == (2 if kind == "explicit" else 1)  # JAX refuses the type of one product first

    def test_plan_and_stages(self):
        refs, x = self.refs(8, lambda x: jax.device_put(x, SPLIT if x.ndim else NamedSharding(MESH, P())))
        f = sx.shard_jit(_written, mesh=MESH, in_shardings=(None, P("x")))
        plan = f.plan(refs, x)
        assert [(p.path, str(p.text)) for p in plan.results()][2:] == [
            (f"refs/{name}", "replicated" if name == "n" else "P('x')") for name in ("n", "read", "w")
        ]
        assert all(plan.because(c) for c in plan.collectives) and "refs/w" in str(plan)
        compiled = f.lower(refs, x).compile()
        assert compiled.memory_analysis().alias_size_in_bytes >= (8 * 8 * 4 + 8 * 4 * 4) // 4 + 4
        compiled(refs, x)
        assert refs["n"][...] == 1


class TestStages:
    f = staticmethod(sx.shard_jit(lambda x: 2 * jnp.tanh(x), mesh=MESH, in_shardings=P("x")))
    shape = jax.ShapeDtypeStruct((8, 4), "float32")

    def test_compiled(self):
        compiled = self.f.lower(self.shape).compile()
        ((given,), _), result = compiled.input_shardings, compiled.output_shardings
        assert given.is_equivalent_to(SPLIT, 2) and result.is_equivalent_to(SPLIT, 2)
        assert compiled.memory_analysis().argument_size_in_bytes == A.nbytes // 4
        assert "flops" in compiled.cost_analysis()
        np.testing.assert_allclose(compiled(jax.device_put(A, SPLIT)), 2 * np.tanh(A), rtol=1e-6)

    def test_serialized_executable(self):
        compiled = self.f.lower(self.shape).compile()
        loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
        np.testing.assert_allclose(loaded(jax.device_put(A, SPLIT)), 2 * np.tanh(A), rtol=1e-6)

    @pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "tpu")])
    def test_export_and_back(self, platforms):
        pytest.importorskip(
            "flatbuffers", reason="jax.export serializes with flatbuffers, which is not installed"
        )
        exported = export.export(self.f, platforms=platforms)(self.shape)
        back = export.deserialize(exported.serialize(vjp_order=1))
        (given,), (result,) = back.in_shardings_jax(MESH), back.out_shardings_jax(MESH)
        assert back.nr_devices == 8 and given.is_equivalent_to(SPLIT, 2) and result.is_equivalent_to(SPLIT, 2)
        x = jax.device_put(A / 32, given)
        np.testing.assert_allclose(back.call(x), 2 * np.tanh(A / 32), rtol=1e-5)
        np.testing.assert_allclose(
            jax.grad(lambda x: back.call(x).sum())(x), 2 * (1 - np.tanh(A / 32) ** 2), rtol=1e-5
        )

    @pytest.mark.parametrize(
        "name", ["uneven", "keywords", "keys", "unused", "host", "explicit", "committed", "other mesh"]
    )
    def test_what_is_exported_names_the_shardings_of_the_plan(self, name):
        call, args, kwargs, mesh = _exported(name)
        exported, plan = export.export(call)(*args, **kwargs), call.plan(*args, **kwargs)
        meshes = {s.mesh for s in jax.tree.leaves((plan.in_shardings, plan.out_shardings))}
        if len(meshes) > 1:  # JAX gives those on one mesh
            assert "sdy.sharding" in exported.mlir_module() and exported.nr_devices == 8
            return
        kept = [i in exported.module_kept_var_idx for i in range(len(exported.in_avals))]
        found = exported.in_shardings_jax(mesh), exported.out_shardings_jax(mesh)
        wanted = jax.tree.leaves((plan.in_shardings, plan.kw_shardings)), jax.tree.leaves(plan.out_shardings)
        assert [s and s.spec for s in found[0]] == [
            s.spec if k else None for s, k in zip(wanted[0], kept, strict=True)
        ]
        assert [s.spec for s in found[1]] == [s.spec for s in wanted[1]]
        placed = [
            jax.device_put(x, s) for x, s in zip(jax.tree.leaves((args, kwargs)), found[0], strict=True)
        ]
        args, kwargs = exported.in_tree.unflatten(placed)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5),
            exported.call(*args, **kwargs),
            call(*args, **kwargs),
        )

    def test_a_second_process_calls_what_was_exported(self, tmp_path):
        """It need not know shardax."""
        pytest.importorskip(
            "flatbuffers", reason="jax.export serializes with flatbuffers, which is not installed"
        )
        f = sx.shard_jit(
            lambda x, w: jnp.cumsum(jnp.tanh(x @ w), 0), mesh=MESH, in_shardings=(P("x"), P(None, "y"))
        )
        x, w = A[:7] / 32, A[:4] / 32
        (tmp_path / "f").write_bytes(export.export(f)(x, w).serialize(vjp_order=1))
        np.savez(tmp_path / "given", x=x, w=w)
        subprocess.run([sys.executable, "-c", _CALLER, str(tmp_path)], check=True)
        found = np.load(tmp_path / "found.npz")
        plain = f.__wrapped__
        np.testing.assert_allclose(found["y"], plain(x, w), rtol=1e-5)
        for name, wanted in zip(
            "xw", jax.grad(lambda x, w: (plain(x, w) ** 2).sum(), (0, 1))(x, w), strict=True
        ):
            np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-5)

    def test_wrapped(self):
        assert sx.shard_jit(double, mesh=MESH).__wrapped__ is double


_CALLER = """
import sys, jax, numpy as np
from jax import export
from jax.ad_checkpoint import checkpoint_name
folder = sys.argv[1]
f = export.deserialize(open(folder + "/f", "rb").read())
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
given = np.load(folder + "/given.npz")
x, w = (jax.device_put(given[name], s) for name, s in zip("xw", f.in_shardings_jax(mesh), strict=True))
grads = jax.grad(lambda x, w: (f.call(x, w) ** 2).sum(), (0, 1))(x, w)
assert "shardax" not in sys.modules and f.nr_devices == 8
np.savez(folder + "/found", y=f.call(x, w), x=grads[0], w=grads[1])
"""


def _exported(name: str):
    """A sharded function, its arguments, and the mesh that its shardings are asked for."""
    on = functools.partial(sx.shard_jit, mesh=MESH, in_shardings=P("x"))
    x, odd = A, A[:7]
    draw = jax.vmap(lambda key: jax.random.normal(key, (3,)))
    call, args, kwargs = {
        "uneven": (on(lambda x: jnp.cumsum(x, 0) @ x.T), (odd,), {}),
        "keywords": (on(lambda x, *, y: x + y), (odd,), {"y": odd}),
        "keys": (on(draw), (jax.random.split(jax.random.key(0), 8),), {}),
        "unused": (on(lambda unused, x: 2 * x), (odd, x), {}),
        "host": (
            on(lambda x: (jax.device_put(x, jax.memory.Space.Device), x), in_shardings=HOST),
            (jax.device_put(x, HOST),),
            {},
        ),
        "explicit": (on(lambda x: (x @ x.T).T, mesh=EXPLICIT), (x,), {}),
        "committed": (
            on(double, in_shardings=None),
            (jax.device_put(x, NamedSharding(MESH, P("y", "x"))),),
            {},
        ),
        "other mesh": (on(double, out_shardings=NamedSharding(OTHER, P("a"))), (x,), {}),
    }[name]
    return call, args, kwargs, EXPLICIT if name == "explicit" else MESH


class TestConfiguration:
    def test_matmul_precision(self):
        f = sx.shard_jit(lambda x: x @ x.T, mesh=MESH, in_shardings=P("x"))
        with jax.default_matmul_precision("highest"):
            assert "HIGHEST" in f.lower(A).as_text()
        assert "HIGHEST" not in f.lower(A).as_text()

    def test_x64(self):
        """Of arrays, as what `jax.jit` itself makes of NumPy's float64 is now and then that of the other mode: a thread of
        its own converts it, and the process dies of it.
        """
        f, x = sx.shard_jit(double, mesh=MESH, in_shardings=P("x")), A.astype(np.float64)
        assert f(jnp.asarray(x)).dtype == np.float32
        with jax.enable_x64(True):
            assert f(jnp.asarray(x)).dtype == np.float64
        assert f(jnp.asarray(x)).dtype == np.float32

    def test_x64_where_devices_count(self):
        """Places on devices are int32, whatever Python's integers become."""

        def f(x, i):
            x, i = jax.lax.with_sharding_constraint(x, P("x")), i % 5
            loop = jax.lax.scan(lambda c, row: (c + 1, row * c), 0, x)[1]
            moved = (
                jax.lax.with_sharding_constraint(x * 2, P(("x", "y"))),
                jnp.roll(x, 3, 0),
                x[i],
                x.at[i].add(1),
                jnp.roll(x, i[1], 0),
            )
            runs = (
                jax.lax.associative_scan(jnp.add, x, reverse=True),
                jnp.cumsum(x, 0),
                jnp.sort(x, 0),
                jax.lax.top_k(x.T, 3),
            )
            return moved, runs, loop, jnp.argmax(x, 0), jnp.diff(x, axis=0), jnp.concatenate([x[5:], x])

        with (
            jax.enable_x64(True),
            jax.set_mesh(jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Auto,) * 2)),
        ):
            args = np.arange(13 * 3).reshape(13, 3) * 7 % 16, np.arange(4)
            wanted = jax.jit(f)(*args)
        with jax.enable_x64(True), jax.set_mesh(MESH):
            for got, want in zip(
                jax.tree.leaves(sx.shard_jit(f)(*args)), jax.tree.leaves(wanted), strict=True
            ):
                np.testing.assert_array_equal(got, want, strict=True)

    def test_debug_nans(self):
        f = sx.shard_jit(lambda x: jnp.log(jnp.sin(x)), mesh=MESH, in_shardings=P("x"))
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log"):
            f(A)
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            jax.grad(lambda x: f(x).sum())(A)

    def test_debug_nans_in_the_backward_pass(self):
        """The operation is named, as with jax.jit."""
        f = lambda x: (jnp.sqrt(x) * 0).sum()  # noqa: E731
        for jitted in (jax.jit(f), sx.shard_jit(f, mesh=MESH, in_shardings=P("x"))):
            with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"encountered in mul"):
                jax.grad(jitted)(A)

    @pytest.mark.parametrize("spec", [P("x", "y"), P("y", "x"), P(("y", "x")), P(None, "y"), P()], ids=str)
    def test_without_shardy(self, spec):
        """GSPMD's attributes know of no axes: those of a committed argument are made of its tiles."""
        f, x = sx.shard_jit(double, mesh=MESH), jax.device_put(A, NamedSharding(MESH, spec))
        jax.config.update("jax_use_shardy_partitioner", False)
        try:
            out, text = f(x), f.lower(x).compile().as_text()
        finally:
            jax.config.update("jax_use_shardy_partitioner", True)
        assert out.sharding.is_equivalent_to(x.sharding, 2) and f.plan(x).in_shardings[0].is_equivalent_to(
            x.sharding, 2
        )
        assert not any(kind in text for kind in ("all-gather", "all-to-all", "collective-permute"))
        np.testing.assert_array_equal(out, 2 * A)

    def test_log_compiles(self, caplog):
        with jax.log_compiles(True), caplog.at_level(logging.WARNING):
            sx.shard_jit(double, mesh=MESH)(A)
        assert "jit(double)" in caplog.text

    def test_debug_key_reuse(self):
        draw = lambda key: jax.random.normal(key) + jax.random.uniform(key)  # noqa: E731
        with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
            sx.shard_jit(draw, mesh=MESH)(jax.random.key(0))

    def test_key_reuse_between_calls(self):
        draw, key = sx.shard_jit(jax.random.normal, mesh=MESH), jax.random.key(0)
        with jax.debug_key_reuse(True):
            draw(key)
            with pytest.raises(jax.errors.KeyReuseError):
                draw(key)

    def test_disable_jit_goes_through_transformations(self):
        with jax.disable_jit():
            np.testing.assert_allclose(
                jax.grad(lambda x: sx.shard_jit(jnp.sin, mesh=MESH)(x).sum())(A), np.cos(A), rtol=1e-5
            )


class TestCaches:
    def test_a_thousand_calls_leave_nothing(self):
        f = sx.shard_jit(lambda state, x: (state + x.sum(), 2 * x), mesh=MESH, in_shardings=(P(), P("x")))
        state, x = f(jnp.float32(0), A)
        state, x = f(state, x)
        gc.collect()
        arrays, programs = len(jax.live_arrays()), f.__call__._cache_size()
        for _ in range(1000):
            state, x = jax.block_until_ready(
                f(state, x)
            )  # too many collectives in flight starve XLA's CPU threads
        gc.collect()
        assert len(jax.live_arrays()) <= arrays  # fewer, where garbage of other tests has gone
        assert f.__call__._cache_size() == programs

    def test_programs_go_with_their_function(self):
        from shardax.program import _built

        def call(i):
            np.testing.assert_array_equal(sx.shard_jit(lambda x: x + i, mesh=MESH)(A), A + i)

        call(0.0)
        jax.clear_caches()
        gc.collect()
        before = len(_built)
        for i in range(3):
            call(float(i))
        jax.clear_caches()
        gc.collect()
        assert len(_built) <= before

    @pytest.mark.slow
    def test_a_second_process_hits_the_persistent_cache(self, tmp_path):
        first, second = (self.run(tmp_path) for _ in range(2))
        assert "miss" in first and "hit" not in first
        assert "hit" in second and "miss" not in second

    def run(self, folder) -> str:
        env = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(folder),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        return subprocess.run(
            [sys.executable, "-c", _STEP], env=env, capture_output=True, text=True, check=True
        ).stdout


_STEP = """
import jax, shardax as sx
from jax.sharding import AxisType, PartitionSpec as P
names = {"/jax/compilation_cache/cache_hits": "hit", "/jax/compilation_cache/cache_misses": "miss"}
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
x = jax.device_put(jax.numpy.ones((8, 4)), jax.NamedSharding(mesh, P()))
step = sx.shard_jit(jax.grad(lambda x: (jax.numpy.tanh(x) @ x.T).sum()), mesh=mesh, in_shardings=P("x"), donate_argnums=0)
jax.monitoring.register_event_listener(lambda name, **kwargs: print(names.get(name, "")))
step(x).block_until_ready()
"""
