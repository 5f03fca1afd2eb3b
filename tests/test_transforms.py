"""Transforms: what they are told, what they may give back, and how it is refused otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.transforms import Argument, Result

MESH = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
SCALE = np.arange(4, dtype="float32")


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def told(f, *args, **how) -> sx.Context:
    """The context that a transform of f gets."""
    seen = []

    def look(jaxpr, context):
        seen.append(context)
        return jaxpr

    sx.shard_jit(f, mesh=MESH, transforms=[look], **how).plan(*args)
    return seen[-1]


def step(state, batch, rate):
    grads = jax.grad(lambda w: ((batch["x"] @ w * SCALE) ** 2).sum())(state["w"])
    new = {"w": state["w"] - rate * grads, "m": state["m"] * 0.9}
    return new, {"loss": [batch["x"].sum()]}


ARGS = {"w": shape(8, 4), "m": shape(8, 4)}, {"x": shape(6, 8)}


def test_arguments():
    context = told(
        step, *ARGS, shape(), in_shardings=({"w": P("x"), "m": None}, P("y"), None), donate_argnums=0
    )
    assert context.mesh == MESH and context.options == sx.Options()
    assert context.arguments[:4] == (
        Argument("state/m", shape(8, 4), None, True, True),
        Argument("state/w", shape(8, 4), P("x", None), True, True),
        Argument("batch/x", shape(6, 8), P("y", None)),
        Argument("rate", shape()),
    )
    (closed_over,) = context.arguments[4:]
    assert closed_over == Argument("", shape(4))


def test_results():
    context = told(step, *ARGS, shape(), donate_argnums=0, out_shardings=(None, P()))
    assert context.results == (
        Result("0/m", shape(8, 4), None, 0),
        Result("0/w", shape(8, 4), None, 1),
        Result("1/loss/0", shape(), P()),
    )


def test_state_that_is_not_donated():
    """Gradients and updates are of the shape of the parameters; a batch that passes through is no state."""
    assert [a.is_state for a in told(step, *ARGS, shape()).arguments] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert not any(
        a.is_state for a in told(lambda w, v, x: x @ w @ v, shape(8, 4), shape(4, 8), shape(6, 8)).arguments
    )


def test_a_function_of_the_jaxpr_alone():
    seen = []
    twice = sx.shard_jit(lambda x: 2 * x, mesh=MESH, transforms=[lambda jaxpr: seen.append(jaxpr) or jaxpr])
    twice.plan(shape(8))
    assert len(seen) == 1


def test_in_order():
    def times(factor):
        def transform(jaxpr, context):
            return jax.make_jaxpr(lambda x: [factor * y + 1 for y in jaxpr_as_fun(jaxpr)(x)])(*jaxpr.in_avals)

        return transform

    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    f = sx.shard_jit(lambda x: x, mesh=mesh, in_shardings=P("x"), transforms=[times(2), times(3)])
    np.testing.assert_array_equal(f(jnp.arange(8)), 3 * (2 * np.arange(8) + 1) + 1)


class Rests:
    """State rests in another dtype than the step computes with."""

    def __init__(self, dtype):
        self.dtype = jnp.dtype(dtype)

    def traced_types(self, arguments):
        return [shape(*a.type.shape) if a.type.dtype == self.dtype else a.type for a in arguments]

    def __call__(self, jaxpr, context):
        rests = [self.dtype if a.is_state else a.type.dtype for a in context.arguments]

        def run(*args):
            wide = [x.astype(a.type.dtype) for x, a in zip(args, context.arguments, strict=True)]
            pairs = zip(jaxpr_as_fun(jaxpr)(*wide), context.results, strict=True)
            return [x if r.succeeds is None else x.astype(rests[r.succeeds]) for x, r in pairs]

        pairs = zip(context.arguments, rests, strict=True)
        return jax.make_jaxpr(run)(*(shape(*a.type.shape, dtype=dtype) for a, dtype in pairs))


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_state_that_rests_in_another_dtype(dtype):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    how = {"mesh": mesh, "in_shardings": ({"w": P("x"), "m": None}, P("y"), None)}
    rested = sx.shard_jit(step, donate_argnums=0, transforms=[Rests(dtype)], **how)
    rng = np.random.default_rng(0)
    state = {"w": rng.normal(size=(7, 4)).astype("float32"), "m": np.ones((7, 4), "float32")}
    narrow = jax.tree.map(lambda x: jnp.asarray(x, dtype), state)
    batch, rate = {"x": rng.normal(size=(6, 7)).astype("float32")}, np.float32(0.01)
    for _ in range(2):
        want, loss = jax.jit(step)(jax.tree.map(lambda x: x.astype("float32"), narrow), batch, rate)
        narrow, found = rested(narrow, batch, rate)
        assert jax.tree.map(lambda x: x.dtype, narrow) == {"w": dtype, "m": dtype}
        np.testing.assert_allclose(found["loss"][0], loss["loss"][0], rtol=1e-5)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(
                x.astype("float32"), y.astype(dtype).astype("float32"), rtol=1e-2
            ),
            narrow,
            want,
        )


def test_types_that_the_call_does_not_have():
    class Wide(Rests):
        def __call__(self, jaxpr, context):
            return jaxpr

    f = sx.shard_jit(lambda s: s * 2, mesh=MESH, transforms=[Wide("bfloat16")])
    with pytest.raises(
        ValueError, match=r"gave a jaxpr of f32\[8\], but the arguments of the call are bf16\[8\]: take"
    ):
        f.plan(shape(8, dtype="bfloat16"))


def test_as_many_types_as_arguments():
    class Short(Rests):
        def traced_types(self, arguments):
            return super().traced_types(arguments)[1:]

    f = sx.shard_jit(lambda a, b: a + b, mesh=MESH, transforms=[Short("bfloat16")])
    with pytest.raises(ValueError, match="gave 1 types for 2 arguments: give one for each"):
        f.plan(shape(8), shape(8))


def test_new_equations_hold_no_arrays():
    (sine,) = jax.make_jaxpr(jnp.sin)(shape(4)).eqns
    with pytest.raises(ValueError, match=r"closes over f32\[4\], which an equation cannot hold"):
        sx.equations_like(sine, lambda x: x * SCALE, sine.invars)


def test_annotations_of():
    def f(x):
        def body(c, _):
            return jax.lax.with_sharding_constraint(c * 2, jax.NamedSharding(MESH, P(None, "y"))), None

        return jax.lax.scan(body, sx.annotate(x, P("x")), None, length=3)[0]

    with jax.sharding.use_abstract_mesh(MESH):
        jaxpr = jax.make_jaxpr(f)(shape(8, 4))
    assert [(a.dims, a.role) for _, a in sx.annotations_of(jaxpr)] == [
        ((("x",), ()), "inside"),
        (((), ("y",)), "inside"),
    ]
    assert all(len(eqn.outvars) == 1 for eqn, _ in sx.annotations_of(jaxpr))


def test_new_equations():
    """They stand on the line of another, and may make what it made."""

    def f(x):
        return jnp.tanh(x) + 1

    jaxpr = jax.make_jaxpr(f)(shape(4))
    tanh = jaxpr.eqns[0]
    new, (made,) = sx.equations_like(tanh, lambda x: jnp.where(x > 0, x, 2 * x), tanh.invars)
    assert all(eqn.source_info is tanh.source_info for eqn in new) and made is new[-1].outvars[0]
    changed = sx.map_equations(
        jaxpr, lambda eqns: [*new[:-1], new[-1].replace(outvars=tanh.outvars), *eqns[1:]]
    )
    x = np.linspace(-1, 1, 4, dtype="float32")
    np.testing.assert_allclose(jaxpr_as_fun(changed)(x)[0], np.where(x > 0, x, 2 * x) + 1, rtol=1e-6)
    assert sx.equations_like(tanh, lambda x: x, tanh.invars) == ([], list(tanh.invars))


def test_map_equations_in_bodies():
    def f(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y), jnp.sin(x))

    def as_cos(eqns):
        return [e.replace(primitive=jax.lax.cos_p) if e.primitive is jax.lax.sin_p else e for e in eqns]

    jaxpr = jax.make_jaxpr(f)(shape(4))
    changed = sx.map_equations(jaxpr, as_cos)
    assert "sin" in str(jaxpr) and "sin" not in str(changed) and str(changed).count("cos") == 2
    assert sx.map_equations(jaxpr, lambda eqns: eqns) is jaxpr
