"""Transforms: what they are told, what they may give back, and how it is refused otherwise."""

import functools
import itertools
import math
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.transforms import Argument, Result, staging_first

pytestmark = pytest.mark.promotes_ranks

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


def test_what_a_function_closes_over_is_no_state_and_does_not_count():
    """However many arrays it are, and though a result has their type."""
    tables = [np.array([2.0, 3.0, 5.0 + i], "float32") for i in range(9)]

    def step(w, x):
        return w - (x @ w).sum(), sum(table * x.sum() for table in tables)

    context = told(step, shape(8, 4), shape(6, 8))
    assert [a.path for a in context.arguments] == ["w", "x"] + [""] * len(tables)
    assert [a.is_state for a in context.arguments] == [True] + [False] * (1 + len(tables))


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


@pytest.mark.parametrize("values", [(True, True), (True, False), (False, True), (False, False)])
def test_those_that_lay_on_stages_come_before_what_rests_state(values):
    """Whatever stands between, as a Retyping; what has an attribute that is False counts as any other."""
    rests, lays = values
    resting = [SimpleNamespace(name=f"resting {i}", rests_state=rests) for i in range(2)]
    staging = [SimpleNamespace(name=f"staging {i}", lays_on_stages=lays) for i in range(2)]
    for given in itertools.permutations([*resting, *staging, Rests("bfloat16")]):
        got = staging_first(given)
        assert [t for t in got if t in staging] == [t for t in given if t in staging]
        assert [t for t in got if t not in staging] == [t for t in given if t not in staging]
        if rests and lays:
            assert max(map(got.index, staging)) < min(map(got.index, resting))
        else:
            assert got == given


class Rests:
    """State rests in another dtype than the step computes with."""

    def __init__(self, dtype):
        self.dtype = jnp.dtype(dtype)

    def traced_types(self, arguments):
        return [
            shape(*a.type.shape) if a.is_state and a.type.dtype == self.dtype else a.type for a in arguments
        ]

    def __call__(self, jaxpr, context):
        return resting(jaxpr, context, lambda x, type: x.astype(type.dtype))


class Padded:
    """State rests with zeros behind it: these are the shapes without them."""

    def __init__(self, **shapes):
        self.shapes = {path.replace("__", "/"): shape for path, shape in shapes.items()}

    def traced_types(self, arguments):
        return [shape(*self.shapes.get(a.path, a.type.shape), dtype=a.type.dtype) for a in arguments]

    def __call__(self, jaxpr, context):
        return resting(jaxpr, context, lambda x, type: padded(x, type.shape))


class Flat(Padded):
    """State rests as one dim, with zeros behind it."""

    def __call__(self, jaxpr, context):
        def to(x, type):
            return (
                x
                if x.shape == type.shape
                else padded(x.ravel(), (math.prod(type.shape),)).reshape(type.shape)
            )

        return resting(jaxpr, context, to)


def resting(jaxpr, context, to):
    """The program of arguments at rest; `to` brings a value to a type."""

    def run(*args):
        given = [to(x, a.type) for x, a in zip(args, context.arguments, strict=True)]
        outs = zip(jaxpr_as_fun(jaxpr)(*given), context.results, strict=True)
        return [x if r.succeeds is None else to(x, context.at_rest[r.succeeds]) for x, r in outs]

    return jax.make_jaxpr(run)(*context.at_rest)


def padded(x, to):
    """With zeros behind it, or without."""
    cut = x[tuple(map(slice, to))]
    return jnp.pad(cut, [(0, n - k) for n, k in zip(to, cut.shape, strict=True)])


def mesh_of(*sizes, type=AxisType.Auto):
    return jax.make_mesh(sizes, ("x", "y", "z")[: len(sizes)], axis_types=(type,) * len(sizes))


@contextmanager
def nothing_compiled():
    seen = []

    def note(event, seconds, **_):
        seen.append(event) if event == "/jax/core/compile/backend_compile_duration" else None

    jax.monitoring.register_event_duration_secs_listener(note)
    yield
    jax.monitoring.unregister_event_duration_listener(note)
    assert not seen


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_state_that_rests_in_another_dtype(dtype):
    how = {"mesh": mesh_of(4, 2), "in_shardings": ({"w": P("x"), "m": None}, P("y"), None)}
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


def momentum(state, x):
    """A step whose state has uneven shapes: 13 rows."""
    loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
    m = state["m"] * np.asarray(0.9, grad.dtype) + grad
    return {"w": state["w"] - np.asarray(0.1, m.dtype) * m, "m": m, "b": state["b"] + grad.sum(0)}, loss


def widened(state, x):
    return momentum(state, x.astype(state["w"].dtype))


def rounded(state, x):
    """The same of state that rests in bfloat16, by hand."""
    new, loss = momentum(*jax.tree.map(lambda v: v.astype("float32"), (state, x)))
    return jax.tree.map(lambda v: v.astype("bfloat16"), new), loss


TRUE = {"w": (13, 6), "m": (13, 6), "b": (6,)}
PADDED = {"w": (16, 6), "m": (16, 6), "b": (8,)}


def random_state(dtype):
    rng = np.random.default_rng(0)
    state = {name: jnp.asarray(rng.normal(size=dims), dtype) for name, dims in TRUE.items()}
    return state, jnp.asarray(rng.normal(size=(4, 13)), dtype)


def shape_and_dtype(x):
    return x.shape, x.dtype


def check_steps(train, to_rest, from_rest, dtype, tolerance, plain=momentum, count=3):
    """Steps of state at rest, out to the host and back between two of them, beside jax.jit's on true shapes."""
    true, x = random_state(dtype)
    rest = to_rest(true)
    places = sx.abstract_state(train, rest, x)
    shardings = jax.tree.map(lambda s: s.sharding, places)
    assert jax.tree.map(shape_and_dtype, places) == jax.tree.map(shape_and_dtype, rest)
    rest, x = jax.device_put(rest, shardings), jnp.asarray(x)
    for number in range(count):
        given = rest
        true, loss = jax.jit(plain)(true, x)
        with nothing_compiled() if number else nullcontext():
            rest, found = train(rest, x)
        assert all(x.is_deleted() for x in jax.tree.leaves(given))
        same = jax.tree.map(lambda x, to: x.sharding.is_equivalent_to(to, x.ndim), rest, shardings)
        assert all(same.values())
        np.testing.assert_allclose(np.float32(found), np.float32(loss), rtol=tolerance)
        at_host = jax.tree.map(np.asarray, rest)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), tolerance, tolerance),
            from_rest(at_host),
            jax.tree.map(np.asarray, true),
        )
        jax.tree.map(np.testing.assert_array_equal, to_rest(from_rest(at_host)), at_host)
        rest = jax.device_put(at_host, shardings)


def pad_all(state):
    return {name: padded(jnp.asarray(x), PADDED[name]) for name, x in state.items()}


def cut_all(state):
    return {name: padded(jnp.asarray(x), TRUE[name]) for name, x in state.items()}


CUT_PATHS = {f"state__{name}": dims for name, dims in TRUE.items()}
CUT, CUT_W = Padded(**CUT_PATHS), Padded(w=(13, 6))


@pytest.mark.parametrize(
    "spec, dtype, tolerance, type",
    [
        (P("x"), "float32", 1e-4, AxisType.Auto),
        (P("x"), "bfloat16", 3e-2, AxisType.Explicit),
        (P(None, "x"), "float32", 1e-4, AxisType.Explicit),
        (None, "bfloat16", 3e-2, AxisType.Auto),
    ],
)
def test_state_that_rests_padded(spec, dtype, tolerance, type):
    how = {"mesh": mesh_of(8, type=type), "in_shardings": ({"w": spec, "m": None, "b": None}, None)}
    train = sx.shard_jit(momentum, donate_argnums=0, transforms=[CUT], **how)
    check_steps(train, pad_all, cut_all, dtype, tolerance)


def test_nothing_is_sent_for_padding():
    """Sixteen rows and thirteen are in the same blocks of two."""
    how = {"mesh": mesh_of(8), "in_shardings": ({"w": P("x"), "m": None, "b": None}, P())}
    train = sx.shard_jit(momentum, donate_argnums=0, transforms=[CUT], **how)
    plan = train.plan({name: shape(*dims) for name, dims in PADDED.items()}, shape(4, 13))
    assert plan.in_shardings[0]["w"].spec == plan.out_shardings[0]["w"].spec == P("x", None)
    assert plan.in_shardings[0]["m"].spec == P("x", None) and not plan.at_rest
    assert [(c.kind, c.shape) for c in plan.collectives] == [("all_reduce", (4, 6))]


def test_state_that_rests_flat():
    """in_shardings are those of the flat array; what it is in the function is split as is annotated there."""
    train = sx.shard_jit(
        lambda state, x: momentum({**state, "w": sx.annotate(state["w"], P("x"))}, x),
        mesh=mesh_of(8),
        in_shardings=({"w": P("x"), "m": P("x"), "b": None}, None),
        donate_argnums=0,
        transforms=[Flat(state__w=(13, 6), state__m=(13, 6))],
    )

    def flat(state):
        return {n: x if n == "b" else padded(jnp.asarray(x).ravel(), (80,)) for n, x in state.items()}

    def full(state):
        return {n: x if n == "b" else x[:78].reshape(13, 6) for n, x in state.items()}

    check_steps(train, flat, full, "float32", 1e-4)
    plan = train.plan({"w": shape(80), "m": shape(80), "b": shape(6)}, shape(4, 13))
    assert plan.in_shardings[0]["w"].spec == plan.out_shardings[0]["w"].spec == P("x")


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
    assert all(eqn.source_info.traceback is tanh.source_info.traceback for eqn in new)
    assert made is new[-1].outvars[0]
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


@pytest.mark.parametrize(
    "transform, at_rest",
    [
        (Rests("bfloat16"), shape(16, 8, dtype="bfloat16")),
        (CUT_W, shape(16, 8)),
        (Flat(w=(13, 6)), shape(80)),
    ],
)
@pytest.mark.parametrize("spec", [P("x"), P()])
def test_what_is_requested_holds_at_rest(transform, at_rest, spec):
    """Also where all inside is split otherwise, and then what succeeds an argument rests as that."""

    def f(w, x):
        new = sx.annotate(w, P(None, "x")) - x.astype(w.dtype).sum()
        return sx.annotate(new, P(None, "x"))

    how = {"mesh": mesh_of(8), "in_shardings": (spec, None), "donate_argnums": 0}
    plan = sx.shard_jit(f, transforms=[transform], **how).plan(at_rest, shape(4))
    closed = P(*spec, *[None] * (len(at_rest.shape) - len(spec)))
    assert plan.in_shardings[0].spec == plan.out_shardings.spec == closed


@pytest.mark.parametrize("transform, at_rest", [(CUT_W, (16, 6)), (Flat(w=(13, 6)), (80,))])
def test_a_function_that_needs_explicit_types(transform, at_rest):
    """Thirteen rows have no type over eight devices, and none of the flat array is theirs."""
    mesh = mesh_of(8, type=AxisType.Explicit)

    def f(w, x):
        y = jnp.einsum("bd,de->be", x, w, out_sharding=P(None, None))
        return w - y.sum() * np.float32(0.1), y

    how = {"mesh": mesh, "in_shardings": (P("x"), P()), "donate_argnums": 0}
    true, x = np.arange(78, dtype="float32").reshape(13, 6), np.ones((4, 13), "float32")
    rest = np.pad(true.ravel(), (0, math.prod(at_rest) - 78)).reshape(at_rest)
    new, y = sx.shard_jit(f, transforms=[transform], **how)(
        jax.device_put(rest, jax.NamedSharding(mesh, P("x"))), x
    )
    assert jax.typeof(new).sharding.spec == P("x", *[None] * (len(at_rest) - 1))
    np.testing.assert_array_equal(y, x @ true)
    np.testing.assert_allclose(
        jax.device_get(new).ravel()[:78], (true - (x @ true).sum() * 0.1).ravel(), 1e-5
    )


def test_what_cannot_rest_as_requested_is_told():
    """As without a transform."""
    how = {"mesh": mesh_of(8), "in_shardings": (P("x"), None), "donate_argnums": 0}

    def at_rest(dtype, *transforms):
        f = sx.shard_jit(lambda w, x: w - x.sum() * w, transforms=transforms, **how)
        return [(a.path, a.requested, a.stored) for a in f.plan(shape(13, 8, dtype=dtype), shape(4)).at_rest]

    assert at_rest("bfloat16", Rests("bfloat16")) == at_rest("float32") != []


# What traced_types knows, and what it may give


class Wide(Rests):
    def __call__(self, jaxpr, context):
        return jaxpr


def refusal(transform, f=lambda a, b: a + b, *args, **how):
    with pytest.raises(ValueError) as error:
        args = args or (shape(8, dtype="bfloat16"),) * 2
        sx.shard_jit(f, mesh=MESH, transforms=[lambda jaxpr: jaxpr, transform], **how).plan(*args)
    return str(error.value).partition("\n---")[0]


def test_types_that_the_call_does_not_have():
    assert refusal(Wide("bfloat16")) == (
        "the result of transforms[1] of shard_jit takes f32[8] for argument a, which comes as bf16[8], and "
        "which traced_types had traced as f32[8]: take it as it comes, in context.at_rest, or leave "
        "traced_types out"
    )


@pytest.mark.parametrize(
    "types, text",
    [
        (
            lambda arguments: [a.type for a in arguments[1:]],
            "traced_types of transforms[1] of shard_jit gave 1 types for 2 arguments: give one for each, its own "
            "where it stays. Several arrays cannot rest as one: let the function take the one, and cut it",
        ),
        (
            lambda arguments: {a.path: a.type for a in arguments},
            "the result of traced_types of transforms[1] of shard_jit is {'a': ShapeDtypeStruct(shape=(8,), "
            "dtype=bfloat16), 'b': ShapeDtypeStruct(shape=(8,), dtype=bfloat16)}, of type dict: give a list "
            "of jax.ShapeDtypeStruct",
        ),
        (
            lambda arguments: [arguments[0].type, "float32"],
            "what traced_types of transforms[1] of shard_jit gave for argument b is 'float32', of type str: "
            "give a jax.ShapeDtypeStruct",
        ),
        (
            lambda arguments: [shape(8) if not a.is_state else a.type for a in arguments],
            "traced_types of the transforms of shard_jit contradict themselves: argument a, traced as "
            "f32[8], is state (is_state), and so they give bf16[8], and so on: decide by its path, its type, "
            "or whether it is donated",
        ),
    ],
)
def test_types_that_are_refused(types, text):
    """The last one is state exactly where it is traced as if it were none."""

    class Other(Rests):
        def traced_types(self, arguments):
            return types(arguments)

    assert refusal(Other("bfloat16"), lambda a, b: (a + b).astype("float32")) == text


def test_results_of_another_number():
    class Fewer(Rests):
        def __call__(self, jaxpr, context):
            return jax.make_jaxpr(lambda *args: jaxpr_as_fun(jaxpr)(*args)[:1])(*context.at_rest)

    assert refusal(Fewer("int8"), lambda a, b: (a, b)) == (
        "the result of transforms[1] of shard_jit has other results, bf16[8], than the jaxpr that it was "
        "given, bf16[8], bf16[8]: keep them"
    )


class Noted(Rests):
    """What is state, whenever traced_types is asked."""

    def __init__(self, dtype):
        super().__init__(dtype)
        self.told = []

    def traced_types(self, arguments):
        self.told.append([a.path for a in arguments if a.is_state])
        return super().traced_types(arguments)

    def __call__(self, jaxpr, context):
        self.last = [a.path for a in context.arguments if a.is_state]
        return super().__call__(jaxpr, context)


NARROW = {"w": shape(8, 4, dtype="bfloat16"), "m": shape(8, 4, dtype="bfloat16")}


def counted(f):
    @functools.wraps(f)
    def run(*args):
        run.count += 1
        return f(*args)

    run.count = 0
    return run


def descent(state, x):
    """`x` is no state, and computed with in its own dtype, whatever that is."""
    assert x.dtype == jnp.bfloat16
    loss, grads = jax.value_and_grad(lambda s: ((x.astype(s["w"].dtype) @ s["w"]) ** 2).sum())(state)
    return jax.tree.map(lambda s, g: s - g, state, grads), loss


@pytest.mark.parametrize("donated, traces", [((0,), 1), ((), 3)])
def test_state_is_known_where_types_are_asked(donated, traces):
    """Where nothing is donated, all arrays are tried as state, which the function refuses, then none, which
    shows what is state.
    """
    noted, f = Noted("bfloat16"), counted(descent)
    train = sx.shard_jit(f, mesh=MESH, donate_argnums=donated, transforms=[noted])
    plan = train.plan(NARROW, shape(6, 8, dtype="bfloat16"))
    assert noted.told[-1] == noted.last == ["state/m", "state/w"]
    assert f.count == traces
    assert [str(v.aval.dtype) for v in plan.arguments()] == ["bfloat16"] * 3
    grads = [v.aval.dtype for eqn in plan.global_jaxpr.eqns for v in eqn.outvars if v.aval.shape == (8, 4)]
    assert jnp.dtype("float32") in grads


def test_state_that_is_not_what_is_donated():
    """A donated batch that does not come back, and state that is not donated: two traces find out."""
    noted, f = Noted("bfloat16"), counted(lambda w, v, x: (w - x.sum().astype(w.dtype), v * 2))
    sx.shard_jit(f, mesh=MESH, donate_argnums=2, transforms=[noted]).plan(
        *(shape(*dims, dtype="bfloat16") for dims in ((8, 4), (3,), (6, 8)))
    )
    assert noted.told[-1] == noted.last == ["w", "v"] and f.count == 2


def test_types_that_do_not_ask_for_state_trace_once():
    f = counted(momentum)
    sx.shard_jit(f, mesh=mesh_of(8), donate_argnums=0, transforms=[CUT]).plan(
        {name: shape(*dims) for name, dims in PADDED.items()}, shape(4, 13)
    )
    assert f.count == 1


def test_an_error_of_the_function_comes_through():
    def broken(state, x):
        raise KeyError("of the function")

    with pytest.raises(KeyError, match="of the function"):
        sx.shard_jit(broken, mesh=MESH, donate_argnums=0, transforms=[Rests("bfloat16")]).plan(
            NARROW, shape(6, 8)
        )


# Several, and what else a call may have


def test_without_jit():
    """The function gets its own types there too."""
    how = {"mesh": mesh_of(8), "in_shardings": ({"w": P("x"), "m": None, "b": None}, None)}
    train = sx.shard_jit(momentum, transforms=[CUT], donate_argnums=0, **how)
    true, x = random_state("float32")
    with jax.disable_jit():
        new, loss = train(pad_all(true), x)
    want, want_loss = momentum(true, x)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for name, value in new.items():
        np.testing.assert_allclose(value, padded(want[name], PADDED[name]), rtol=1e-6)


def test_nans_are_found():
    def f(w, x):
        assert w.shape == (13, 6)
        return w * jnp.log(x)

    made = sx.shard_jit(f, mesh=mesh_of(8), in_shardings=P("x"), transforms=[CUT_W], donate_argnums=0)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="log"):
        made(jnp.ones((16, 6)), -jnp.ones((13, 6)))


class Told(Padded):
    """Says in which types it is given the arguments, and in which it has to take them."""

    def __call__(self, jaxpr, context):
        self.types = context.arguments[0].type, context.at_rest[0], context.results[0].type
        return super().__call__(jaxpr, context)


@pytest.mark.parametrize("narrow_first", [True, False])
def test_one_changes_the_dtype_and_one_the_shape(narrow_first):
    """The first one is next to the function, the last one to the call."""
    pads, narrows = Told(**CUT_PATHS), Rests("bfloat16")
    order = [narrows, pads] if narrow_first else [pads, narrows]
    how = {"mesh": mesh_of(8), "in_shardings": ({"w": P("x"), "m": None, "b": None}, None)}
    train = sx.shard_jit(widened, donate_argnums=0, transforms=order, **how)
    check_steps(train, pad_all, cut_all, "bfloat16", 3e-2, plain=rounded)
    dtype = "bfloat16" if narrow_first else "float32"
    of_b = shape(6, dtype=dtype), shape(8, dtype=dtype), shape(6, dtype=dtype)
    assert pads.types == of_b


def test_out_shardings_of_what_succeeds_an_argument():
    """It is known to succeed the argument, and so rests as it did; an argument has one successor."""
    how = {"mesh": mesh_of(8), "donate_argnums": 0, "out_shardings": (P(None, "x"), P())}
    f = sx.shard_jit(lambda w: (w * 2, w + 1), transforms=[Padded(w=(6, 13))], **how)
    w = np.arange(78, dtype="float32").reshape(6, 13)
    new, other = f(jnp.asarray(padded(jnp.asarray(w), (6, 16))))
    assert new.sharding.spec == P(None, "x") and other.shape == (6, 13)
    np.testing.assert_array_equal(new, padded(jnp.asarray(2 * w), (6, 16)))
    np.testing.assert_array_equal(other, w + 1)
    context = told(lambda w: (w * 2, w + 1), shape(6, 13), donate_argnums=0, out_shardings=(P("x"), None))
    assert [r.succeeds for r in context.results] == [None, 0]  # what is free rests as the argument


def test_a_ref_at_rest():
    def add(total, x):
        total[...] += x.sum(0)
        return x.mean()

    f = sx.shard_jit(add, mesh=mesh_of(8), in_shardings=(P("x"), None), transforms=[Padded(total=(13,))])
    total = jax.new_ref(jax.device_put(jnp.zeros(16), jax.NamedSharding(mesh_of(8), P("x"))))
    x = np.arange(52, dtype="float32").reshape(4, 13)
    f(total, x)
    with nothing_compiled():
        f(total, x)
    np.testing.assert_array_equal(total[...], np.pad(2 * x.sum(0), (0, 3)))


def test_keyword_and_static_arguments():
    def f(n, *, w):
        return {"w": w * n}

    made = sx.shard_jit(
        f, mesh=mesh_of(8), static_argnums=0, donate_argnames="w", transforms=[Padded(w=(13,))]
    )
    w = jnp.asarray(np.pad(np.arange(13.0, dtype="float32"), (0, 3)))
    np.testing.assert_array_equal(made(3, w=w)["w"], np.pad(3 * np.arange(13.0), (0, 3)))


# Three axes


THREE = (P("x", ("y", "z")), P(("z", "x")))  # the state, and the batch


def of_three_axes(transform, type, f=momentum, **how):
    """Thirteen rows over x, six columns over y and z: padded they can rest so, else they cannot."""
    how |= {"mesh": mesh_of(2, 2, 2, type=type), "transforms": [transform]}
    shardings = {"w": THREE[0], "m": None, "b": None}, THREE[1]
    return sx.shard_jit(f, in_shardings=shardings, **how)


@pytest.mark.parametrize("type, rows", [(AxisType.Auto, 14), (AxisType.Explicit, 16)])
def test_padded_on_three_axes(type, rows):
    train = of_three_axes(CUT, type, donate_argnums=0)
    check_steps(train, lambda state: wide_pad(state, rows), cut_all, "float32", 1e-4, count=2)


@pytest.mark.parametrize("type", [AxisType.Auto, AxisType.Explicit])
def test_bfloat16_on_three_axes(type):
    train = of_three_axes(Rests("bfloat16"), type, f=widened, donate_argnums=0)
    check_steps(train, lambda state: state, lambda state: state, "bfloat16", 3e-2, plain=rounded, count=2)


def wide_pad(state, rows=14):
    """Fourteen rows are in the same blocks of seven as thirteen, sixteen are not."""
    return {name: padded(jnp.asarray(x), (8,) if name == "b" else (rows, 8)) for name, x in state.items()}


@pytest.mark.parametrize("type", [AxisType.Auto, AxisType.Explicit])
def test_lowered_planned_and_told_on_three_axes(type):
    train = of_three_axes(CUT, type, donate_argnums=0)
    true, x = random_state("float32")
    rest = wide_pad(true)
    plan = train.plan(rest, x)
    assert plan.in_shardings[0]["w"].spec == plan.out_shardings[0]["w"].spec == P("x", ("y", "z"))
    assert "state/w" in plan.text() and plan.why("state/w") and plan.source() and not plan.at_rest
    assert not any(c.kind == "ppermute" for c in plan.collectives)
    placed = jax.device_put((rest, x), plan.in_shardings)
    new, loss = train.lower(*placed).compile()(*placed)
    want, want_loss = jax.jit(momentum)(true, x)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for name in TRUE:
        np.testing.assert_allclose(cut_all(jax.device_get(new))[name], want[name], rtol=1e-4)


class RestsByPath(Rests):
    """Parameters of a function that gives back none, so that they are no state."""

    def traced_types(self, arguments):
        return [shape(*a.type.shape) if a.path.startswith("state/") else a.type for a in arguments]


@pytest.mark.parametrize("type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("transform", [CUT, RestsByPath("bfloat16")])
def test_transformed_from_outside_on_three_axes(transform, type):
    """Gradients, and what is mapped over, are those of the state at rest: padded, in bfloat16."""

    def loss(state, x):
        return momentum(state, x.astype(state["w"].dtype))[1]

    def plain(state, x):
        brought = jax.tree.map(lambda v: v.astype("float32"), cut_all(state))
        return loss(brought, x)

    is_cut = transform is CUT
    true, x = random_state("float32" if is_cut else "bfloat16")
    rest = wide_pad(true) if is_cut else true
    xs, rests = jnp.stack([x, 2 * x]), jax.tree.map(lambda v: jnp.stack([v, 2 * v]), rest)
    sharded = of_three_axes(transform, type, f=loss)
    tolerance = 1e-5 if is_cut else 2e-2
    for transformed, args in (
        (jax.grad, (rest, x)),
        (lambda f: jax.jit(jax.vmap(jax.value_and_grad(f))), (rests, xs)),
        (lambda f: jax.vmap(f, (None, 0)), (rest, xs)),
    ):
        want = transformed(plain)(*args)
        with jax.set_mesh(mesh_of(2, 2, 2, type=type)):
            found = jax.device_get(transformed(sharded)(*args))
        assert jax.tree.map(shape_and_dtype, found) == jax.tree.map(shape_and_dtype, want)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.float32(a), np.float32(b), tolerance, tolerance)
