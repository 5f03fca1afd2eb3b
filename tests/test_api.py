"""Every form of shard_jit's signature, every way to a mesh, every kind of argument, against the plain
function.
"""

import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

AUTO = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("x", "y"))
A = np.arange(32, dtype=np.float32).reshape(8, 4)
B = np.arange(24, dtype=np.float32).reshape(4, 6)
EITHER = pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])


class Params(NamedTuple):
    w: jax.Array
    b: jax.Array


def matmul(a, b):
    return a @ b


def on(mesh: Mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def is_on(x, mesh: Mesh, *spec):
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), x.ndim), x.sharding
    assert x.sharding.mesh == mesh


class TestForms:
    def test_call(self):
        np.testing.assert_allclose(
            sx.shard_jit(matmul, mesh=AUTO, in_shardings=(P("x"), P(None, "y")))(A, B), A @ B
        )

    def test_decorator(self):
        @sx.shard_jit(mesh=AUTO, in_shardings=P("x"))
        def double(x):
            """Doubles."""
            return 2 * x

        is_on(double(A), AUTO, "x")
        assert (double.__name__, double.__doc__, double.__wrapped__(3)) == ("double", "Doubles.", 6)

    def test_bare_decorator_takes_the_mesh_in_context(self):
        @sx.shard_jit
        def double(x):
            return 2 * x

        with jax.set_mesh(AUTO):
            np.testing.assert_allclose(double(A), 2 * A)

    def test_partial(self):
        jitted = functools.partial(sx.shard_jit, mesh=AUTO, in_shardings=P("x"))(
            functools.partial(matmul, b=B)
        )
        np.testing.assert_allclose(jitted(A), A @ B)

    def test_method(self):
        class Model:
            def __init__(self, scale):
                self.scale = scale

            @sx.shard_jit(mesh=AUTO, static_argnums=0, in_shardings=P("x"))
            def __call__(self, x):
                return self.scale * x

            @sx.shard_jit(mesh=AUTO, static_argnums=0)
            def half(self, x):
                return x / 2

        is_on(Model(3.0)(A), AUTO, "x")
        np.testing.assert_allclose(Model(3.0).half(A), A / 2)

    def test_bound_method(self):
        class Model:
            def double(self, x):
                return 2 * x

        np.testing.assert_allclose(sx.shard_jit(Model().double, mesh=AUTO)(A), 2 * A)


class TestMeshes:
    @EITHER
    def test_given(self, mesh):
        is_on(sx.shard_jit(matmul, mesh=mesh, in_shardings=(P("x"), P(None, "y")))(A, B), mesh, "x", "y")

    @EITHER
    def test_set_mesh(self, mesh):
        with jax.set_mesh(mesh):
            is_on(sx.shard_jit(matmul, in_shardings=(P("x"), P(None, "y")))(A, B), mesh, "x", "y")

    @pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
    def test_legacy_context(self):
        with AUTO:
            is_on(sx.shard_jit(matmul, in_shardings=(P("x"), P(None, "y")))(A, B), AUTO, "x", "y")

    @EITHER
    def test_of_in_shardings(self, mesh):
        shardings = (NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "y")))
        is_on(sx.shard_jit(matmul, in_shardings=shardings)(A, B), mesh, "x", "y")

    @EITHER
    def test_of_the_arguments(self, mesh):
        jitted = sx.shard_jit(matmul)
        is_on(jitted(on(mesh, A, "x"), B), mesh, "x")
        is_on(jitted(on(mesh, A, "x"), B), mesh, "x")

    def test_of_the_arguments_changing(self):
        jitted = sx.shard_jit(lambda x: 2 * x)
        small = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        for mesh in (AUTO, small, AUTO):
            is_on(jitted(on(mesh, A, "x")), mesh, "x")

    def test_two_contexts(self):
        jitted = sx.shard_jit(lambda x: 2 * x, in_shardings=P("x"))
        other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
        for mesh in (AUTO, other, EXPLICIT):
            with jax.set_mesh(mesh):
                is_on(jitted(A), mesh, "x")

    @pytest.mark.parametrize("shape", [(2, 4), (4, 2), (8, 1)])
    def test_another_in_context(self, shape):
        """Axes of the same names and other sizes; and the program's own mesh is a refined one: 4 heads on 8
        devices.
        """
        x, lines = np.arange(24.0).reshape(8, 3), jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
        sums = sx.shard_jit(lambda x: (x.sum(0), x[::-1], jnp.cumsum(x, 0)), mesh=AUTO, in_shardings=P("x"))
        heads = sx.shard_jit(lambda x: x.reshape(4, 2, 3).sum(1), mesh=lines, in_shardings=P("x"))
        with jax.set_mesh(jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2)):
            for got, want in zip(
                (*sums(x), heads(x)),
                (x.sum(0), x[::-1], np.cumsum(x, 0), x.reshape(4, 2, 3).sum(1)),
                strict=True,
            ):
                np.testing.assert_allclose(got, want)

    def test_explicit_arguments_keep_their_shardings(self):
        with jax.set_mesh(EXPLICIT):
            x = jax.device_put(A, P("y", "x"))
            out = sx.shard_jit(lambda x: jax.lax.with_sharding_constraint(2 * x, P("y", "x")))(x)
            assert jax.typeof(out).sharding.spec == P("y", "x")
            is_on(out + x, EXPLICIT, "y", "x")

    def test_explicit_programs_that_reshard(self):
        def f(x):
            y = jax.sharding.reshard(jax.nn.relu(x - 3), P("x", "y"))
            y = jax.lax.scan(lambda c, _: (jax.sharding.reshard(c * 2, P("x", "y")), None), y, length=3)[0]
            return jnp.einsum("ab,bc->ac", y, jnp.ones((4, 4)), out_sharding=P("x")), jnp.zeros(
                (8, 4), out_sharding=P("y")
            )

        with jax.set_mesh(EXPLICIT):
            x = jax.device_put(A, P("y"))
            got, expected = sx.shard_jit(f)(x), jax.jit(f)(x)
            gradient = jax.grad(lambda x: sx.shard_jit(f)(x)[0].sum())(x)
            wanted = jax.grad(lambda x: f(x)[0].sum())(x)
        for x, y in zip((*got, gradient), (*expected, wanted), strict=True):
            np.testing.assert_allclose(x, y)
        assert [jax.typeof(x).sharding.spec for x in got] == [P("x", None), P("y", None)]

    @EITHER
    def test_islands_with_a_mesh_of_their_own(self, mesh):
        def f(x):
            row = lambda a: a * 2 + jax.lax.axis_index("x").astype(a.dtype)  # noqa: E731
            return jax.shard_map(row, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x) + 1

        x = on(mesh, A, "x")
        np.testing.assert_allclose(sx.shard_jit(f, mesh=mesh)(x), 2 * A + 1 + np.arange(8)[:, None] // 2)
        np.testing.assert_allclose(
            sx.shard_jit(f, mesh=mesh, in_shardings=P("x"))(A), 2 * A + 1 + np.arange(8)[:, None] // 2
        )

    @pytest.mark.parametrize("dims", [("x", "y"), ("y", "x"), (None, "y"), (("x", "y"),), ()], ids=str)
    def test_explicit_and_auto_axes_in_one(self, dims):
        """The types of results are their Explicit axes, and they rest split over the Auto ones too."""
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
        with jax.set_mesh(mesh):
            out = sx.shard_jit(lambda x: 2 * x, in_shardings=P(*dims))(A)
        is_on(out, mesh, *dims)
        types = [axis if axis == "x" else axis and "x" * ("x" in axis) or None for axis in dims]
        assert tuple(jax.typeof(out).sharding.spec) == (*types, *[None] * (2 - len(types)))
        np.testing.assert_array_equal(out, 2 * A)

    def test_explicit_results_on_another_mesh(self):
        other = on(jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2), A, "a").sharding
        with jax.set_mesh(EXPLICIT):
            out = sx.shard_jit(lambda x: jax.lax.with_sharding_constraint(2 * x, other))(A)
        np.testing.assert_array_equal(out, 2 * A)

    def test_explicit_closed_over(self):
        x = on(EXPLICIT, A, "x")
        with jax.set_mesh(EXPLICIT):
            np.testing.assert_allclose(sx.shard_jit(lambda y: x + y)(A), 2 * A)

    def test_abstract_plans_but_does_not_run(self):
        jitted = sx.shard_jit(
            matmul, mesh=AbstractMesh((64, 32), ("x", "y")), in_shardings=(P("x"), P(None, "y"))
        )
        plan = jitted.plan(
            jax.ShapeDtypeStruct((4096, 64), "float32"), jax.ShapeDtypeStruct((64, 8192), "float32")
        )
        assert plan.out_shardings.spec == P("x", "y")
        assert plan.comm_bytes == 0
        with pytest.raises(ValueError, match="AbstractMesh has no devices to run on"):
            jitted(A, B)

    @EITHER
    def test_annotations_inside(self, mesh):
        def f(x):
            x = jax.lax.with_sharding_constraint(x, P("x"))
            return sx.annotate({"a": jnp.sin(x), "b": x}, {"a": P(None, "y"), "b": None})

        out = sx.shard_jit(f, mesh=mesh)(A)
        is_on(out["a"], mesh, None, "y")
        is_on(out["b"], mesh, "x")

    def test_nested(self):
        inner = sx.shard_jit(jnp.sin, mesh=AUTO, in_shardings=P("x"))
        out = sx.shard_jit(lambda x: 2 * inner(x), mesh=AUTO)(A)
        is_on(out, AUTO, "x")
        np.testing.assert_allclose(out, 2 * np.sin(A), rtol=1e-6)


class TestArguments:
    def test_prefix_trees(self):
        params = {"layer": Params(B, np.ones(6, np.float32)), "none": None, "empty": ()}
        specs = ({"layer": P(None, "y"), "none": None, "empty": ()}, P("x"))
        with pytest.raises(ValueError, match=r"argument params\['layer'\]\.b"):
            sx.shard_jit(lambda params, x: x @ params["layer"].w, mesh=AUTO, in_shardings=specs)(params, A)
        specs = ({"layer": Params(P(None, "y"), P("y")), "none": None, "empty": None}, P("x"))
        is_on(
            sx.shard_jit(lambda p, x: x @ p["layer"].w, mesh=AUTO, in_shardings=specs)(params, A),
            AUTO,
            "x",
            "y",
        )

    def test_one_spec_for_all(self):
        is_on(sx.shard_jit(lambda a, b: a + b, mesh=AUTO, in_shardings=P("x"))(A, A), AUTO, "x")

    def test_unconstrained(self):
        spec = P(P.UNCONSTRAINED, "y")
        is_on(
            sx.shard_jit(lambda a, b: a + b, mesh=AUTO, in_shardings=(spec, P("x", "y")))(A, A),
            AUTO,
            "x",
            "y",
        )

    def test_out_shardings(self):
        jitted = sx.shard_jit(
            lambda x: {"a": x, "b": (x, x.sum())}, mesh=AUTO, out_shardings={"a": P("y"), "b": None}
        )
        is_on(jitted(A)["a"], AUTO, "y")

    def test_kwargs_beside_in_shardings(self):
        jitted = sx.shard_jit(lambda a, *, b: a @ b, mesh=AUTO, in_shardings=(P("x"),))
        is_on(jitted(A, b=B), AUTO, "x")
        assert set(jitted.plan(A, b=B).kw_shardings) == {"b"}

    def test_in_shardings_of_arguments_by_name(self):
        specs = (P("x"), {"w": P(None, "y")}, None)
        jitted = sx.shard_jit(
            lambda a, n, b, c=1, **scale: a @ b["w"] * n, mesh=AUTO, static_argnums=1, in_shardings=specs
        )
        is_on(jitted(A, 2, {"w": B}, 1), AUTO, "x", "y")
        is_on(jitted(A, n=2, c=1, b={"w": B}, scale=3), AUTO, "x", "y")
        is_on(jitted(n=2, c=1, b={"w": B}, a=A), AUTO, "x", "y")
        with pytest.raises(ValueError, match=r"argument b\['w'\] of shape"):
            sx.shard_jit(lambda a, b: a, mesh=AUTO, in_shardings=(None, P("z")))(A, b={"w": B})

    def test_static_by_number(self):
        jitted = sx.shard_jit(lambda n, a: n * a, mesh=AUTO, static_argnums=0, in_shardings=(P("x"),))
        is_on(jitted(3, A), AUTO, "x")
        np.testing.assert_allclose(jitted(2, A), 2 * A)

    def test_static_by_name(self):
        jitted = sx.shard_jit(
            lambda a, n: a * n if n > 2 else a, mesh=AUTO, static_argnames="n", in_shardings=(P("x"),)
        )
        np.testing.assert_allclose(jitted(A, 3), 3 * A)
        np.testing.assert_allclose(jitted(A, n=2), A)

    def test_static_defaults(self):
        jitted = sx.shard_jit(lambda a, n=2: a * n, mesh=AUTO, static_argnums=-1, in_shardings=(P("x"),))
        np.testing.assert_allclose(jitted(A, 3), 3 * A)

    @pytest.mark.mixed_dtypes
    def test_weak_types(self):
        jitted = sx.shard_jit(lambda x, s: x * s, mesh=AUTO)
        assert jitted(jnp.ones(8, jnp.bfloat16), 2.0).dtype == jnp.bfloat16
        assert jax.typeof(sx.shard_jit(lambda s: s * 2, mesh=AUTO)(2.0)).weak_type

    def test_scalars_and_keys(self):
        key = jax.random.key(0)
        out = sx.shard_jit(lambda key, n: (jax.random.split(key), n + 1), mesh=AUTO)(key, 3)
        assert jnp.array_equal(jax.random.key_data(out[0]), jax.random.key_data(jax.random.split(key)))
        assert out[1] == 4

    def test_unused(self):
        jitted = sx.shard_jit(lambda a, b: a, mesh=AUTO, in_shardings=(P("x"), P("y")))
        is_on(jitted(A, B), AUTO, "x")
        assert len(jax.tree.leaves(jitted.lower(A, B).compile().input_shardings)) == 1

    def test_empty(self):
        assert sx.shard_jit(lambda: None, mesh=AUTO)() is None
        assert sx.shard_jit(lambda x: {"a": (), "b": x}, mesh=AUTO)(None) == {"a": (), "b": None}

    def test_constants(self):
        table = jnp.asarray(B)
        np.testing.assert_allclose(
            sx.shard_jit(lambda a: a @ table, mesh=AUTO, in_shardings=P("x"))(A), A @ B
        )

    def test_uncommitted_arrays(self):
        is_on(sx.shard_jit(lambda x: 2 * x, mesh=AUTO, in_shardings=P("x"))(jnp.asarray(A)), AUTO, "x")

    @EITHER
    def test_committed_elsewhere_is_moved(self, mesh):
        jitted = sx.shard_jit(lambda x: 2 * x, mesh=mesh, in_shardings=P("x"))
        x = on(mesh, A, None, "y")
        is_on(jitted(x), mesh, "x")
        assert [(c.kind, c.axes, c.nbytes) for c in jitted.plan(x).collectives] == [
            ("all_gather", ("y",), 16)
        ]
        assert jitted.plan(A).comm_bytes == 0 and not jitted.plan(x).at_rest

    def test_committed_without_a_spec_stays(self):
        jitted = sx.shard_jit(lambda x: 2 * x, mesh=AUTO)
        for spec in (("x",), (None, "y"), ("y", "x"), ()):
            is_on(jitted(on(AUTO, A, *spec)), AUTO, *spec)

    def test_uneven(self):
        x = np.arange(9, dtype=np.float32)
        np.testing.assert_allclose(sx.shard_jit(jnp.cumsum, mesh=AUTO, in_shardings=P("x"))(x), np.cumsum(x))


class TestDonation:
    def step(self, state, grad):
        return {"w": state["w"] - grad["w"], "count": state["count"] + 1}, (grad["w"] ** 2).sum()

    @pytest.mark.parametrize("donate", [{"donate_argnums": 0}, {"donate_argnames": "state"}])
    @EITHER
    def test_aliases_and_keeps_its_sharding(self, mesh, donate):
        step = sx.shard_jit(self.step, mesh=mesh, **donate)
        state = {"w": on(mesh, A, "x"), "count": on(mesh, np.int32(0))}
        grad = {"w": on(mesh, A, "y")}
        memory = step.lower(state, grad).compile().memory_analysis()
        assert memory.alias_size_in_bytes == A.nbytes // 4 + 4
        new, _ = step(state, grad)
        is_on(new["w"], mesh, "x")
        assert state["w"].is_deleted()

    def test_told_otherwise(self):
        jitted = sx.shard_jit(
            lambda x: x + 1, mesh=AUTO, donate_argnums=0, in_shardings=P("x"), out_shardings=P("y")
        )
        is_on(jitted(on(AUTO, A, "x")), AUTO, "y")

    def test_index_moves_when_an_argument_is_unused(self):
        jitted = sx.shard_jit(lambda unused, x: x[:, ::-1] + 1, mesh=AUTO, donate_argnums=1)
        is_on(jitted(A, on(AUTO, A, "x")), AUTO, "x")


class TestReturned:
    def test_stages(self):
        jitted = sx.shard_jit(matmul, mesh=AUTO, in_shardings=(P("x"), P(None, "y")))
        shapes = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 6), "float32")
        compiled = jitted.lower(*shapes).compile()
        assert "HloModule" in compiled.as_text()
        assert compiled.output_shardings.spec == P("x", "y")
        assert jitted.eval_shape(*shapes).shape == (8, 6)
        assert jitted.trace(*shapes).out_info.shape == (8, 6)

    def test_shapes_with_shardings(self):
        x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=NamedSharding(AUTO, P("x")))
        plan = sx.shard_jit(lambda x: {"out": 2 * x}, mesh=AUTO).plan(x)
        assert plan.in_shardings == (NamedSharding(AUTO, P("x", None)),)
        assert plan.out_shardings == {"out": NamedSharding(AUTO, P("x", None))}

    def test_what_does_not_divide_rests_elsewhere(self):
        table = jax.ShapeDtypeStruct((257, 64), "float32")
        line = jax.make_mesh(
            (4,), ("x",), axis_types=(AxisType.Auto,)
        )  # y would split rows too, and take part

        def planned(function):
            shardings = {"in_shardings": P("x"), "out_shardings": {"new": P("x"), "sum": P()}}
            step = sx.shard_jit(lambda t: {"new": function(t), "sum": t.sum()}, mesh=line, **shardings)
            plan = step.plan(table)
            assert [(m.path, str(m.requested), str(m.stored)) for m in plan.at_rest] == [
                ("argument t", "P('x', None)", "P(None, 'x')"),
                ("result new", "P('x', None)", "P(None, 'x')"),
            ]
            return plan

        by_row = planned(lambda t: jnp.sort(t, axis=1))
        assert by_row.cost_at_rest(by_row.at_rest[0])
        anyhow = planned(lambda t: t + 1)  # is computed as it rests
        assert anyhow.cost_at_rest(anyhow.at_rest[0]) == 0

    def test_calls_after_the_first_compile_nothing(self):
        jitted = sx.shard_jit(matmul, mesh=AUTO, in_shardings=(P("x"), P(None, "y")))
        jitted(A, B)
        events = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, *args, **kwargs: events.append(name)
        )
        try:
            jitted(A, B)
        finally:
            jax.monitoring.clear_event_listeners()
        assert not events

    @pytest.mark.parametrize("given", [{"mesh": AUTO, "in_shardings": P("x")}, {"mesh": AUTO}, {}])
    def test_calls_after_the_first_run_no_python(self, given):
        jitted, x = sx.shard_jit(lambda x: 2 * x, **given), on(AUTO, A, "x")
        jitted(x)
        ran = []
        sys.setprofile(
            lambda frame, event, arg: ran.append(frame.f_code.co_name) if event == "call" else None
        )
        try:
            jitted(x)
        finally:
            sys.setprofile(None)
        assert not ran

    def test_another_sharding_compiles_once(self):
        traced = []
        jitted = sx.shard_jit(lambda x: traced.append(1) or 2 * x, mesh=AUTO)
        for spec, programs in (("x", 1), ("y", 2), ("x", 2), ("y", 2)):
            jitted(on(AUTO, A, spec))
            assert jitted.__call__._cache_size() == programs and len(traced) <= programs

    def test_clear_cache(self):
        jitted = sx.shard_jit(lambda x: 2 * x, mesh=AUTO)
        jitted(A)
        jitted.clear_cache()
        np.testing.assert_allclose(jitted(A), 2 * A)

    def test_disable_jit(self):
        with jax.disable_jit():
            assert sx.shard_jit(lambda x: float(x.sum()), mesh=AUTO)(A) == A.sum()

    def test_transforms(self):
        seen = []
        sx.shard_jit(jnp.sin, mesh=AUTO, transforms=(lambda jaxpr: seen.append(jaxpr) or jaxpr,))(A)
        assert "sin" in str(seen[0])


class TestAnnotateOutside:
    @EITHER
    def test_places(self, mesh):
        with jax.set_mesh(mesh):
            is_on(sx.annotate(A, P("x")), mesh, "x")
            is_on(sx.replicate({"a": A})["a"], mesh)
        is_on(sx.annotate((A, A), (NamedSharding(mesh, P("y")), None))[0], mesh, "y")
