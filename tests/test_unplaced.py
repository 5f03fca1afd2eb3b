"""Arguments that are not committed to devices: what is compiled for them is compiled once."""

import contextlib

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from tests.test_traffic import MESH, ROWS

MESHES = {
    "auto": jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2),
    "explicit": jax.make_mesh((4, 2), ("data", "model")),
    "three axes": jax.make_mesh((2, 2, 2), ("data", "model", "other"), axis_types=(AxisType.Auto,) * 3),
}
EITHER = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
OPTIMIZER = optax.adam(1e-2)

pytestmark = pytest.mark.mixed_dtypes


@contextlib.contextmanager
def counted():
    """The names of programs that are compiled meanwhile; those of device_put are none."""
    counts = []

    def note(event, duration, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration":
            counts.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def state(rows=12):
    """Uneven ones, one of bf16, and scalars."""
    keys = iter(jax.random.split(jax.random.key(0), 3))
    params = {
        "in": jax.random.normal(next(keys), (16, rows)),
        "out": jax.random.normal(next(keys), (rows, 10)).astype(jnp.bfloat16),
    }
    return params, OPTIMIZER.init(params), next(keys)


def step(state, batch, annotate=sx.annotate):
    params, moments, key = state
    batch = annotate(batch, P("data"))
    key, noise = jax.random.split(key)

    def loss(params):
        hidden = annotate(jnp.tanh(batch @ params["in"]), P("data", "model"))
        return jnp.mean((hidden @ params["out"].astype(jnp.float32)) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    gradients = jax.tree.map(lambda g: g * jax.random.uniform(noise, g.shape, g.dtype), gradients)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments, key), value


BATCH = np.linspace(-1, 1, 96, dtype="float32").reshape(6, 16)


def alone(state, batch):
    return step(state, batch, annotate=lambda x, _: x)


def test_the_losses_are_those_of_one_device():
    for mesh in MESHES.values():
        f, now, plain = sx.shard_jit(step, mesh=mesh, donate_argnums=0), state(), state()
        for _ in range(3):
            now, loss = f(now, BATCH)
            plain, expected = jax.jit(alone)(plain, BATCH)
            np.testing.assert_allclose(loss, expected, rtol=1e-2)
        assert jnp.array_equal(*(jax.random.key_data(x[2]) for x in (now, plain)))


@EITHER
@pytest.mark.parametrize("rows", [12, 7])
def test_a_state_that_comes_back_compiles_once(mesh, rows):
    traced = []

    def noted(state, batch):
        traced.append(batch)
        return step(state, batch)

    f, now = sx.shard_jit(noted, mesh=mesh, donate_argnums=0), state(rows)
    with counted() as compiled:
        for _ in range(3):
            now, _ = f(now, BATCH)
        f(state(rows), BATCH)  # and one that is not placed
        f(state(rows), batch=jnp.asarray(BATCH))
    assert len([name for name in compiled if "noted" in name]) == 2, compiled  # by position, by name
    assert len(traced) == 2 or mesh is MESHES["explicit"]  # where types are seen


@EITHER
def test_the_plan_is_that_of_the_call(mesh):
    f = sx.shard_jit(step, mesh=mesh, donate_argnums=0)
    planned = f.plan(state(), BATCH).results()
    results = jax.tree.leaves(f(state(), BATCH))
    for place, x in zip(planned, results, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, place.sharding.spec), x.ndim), place


def test_what_the_program_chose_serves_those_that_come_so():
    """And not those that come otherwise, which have a program of their own."""
    mesh = MESHES["auto"]
    f = sx.shard_jit(lambda x, w: sx.annotate(x, P("data")) @ w, mesh=mesh)
    x, w = np.ones((8, 16), "float32"), np.ones((16, 4), "float32")
    split = [jax.device_put(x, NamedSharding(mesh, spec)) for spec in (P("data"), P("model"))]
    with counted() as compiled:
        shardings = [f(x, w).sharding for x in (x, *split, x)]
    assert len([name for name in compiled if "lambda" in name]) == 2
    assert shardings[0] == shardings[1] == shardings[3]
    assert f.plan(x, w).source() == f.plan(split[0], w).source() != f.plan(split[1], w).source()


def test_arrays_of_the_user_stay():
    mesh = MESHES["auto"]
    f = sx.shard_jit(lambda x: sx.annotate(x + 1, P("data")), mesh=mesh, donate_argnums=0)
    x = jnp.ones(8)
    for _ in range(2):
        np.testing.assert_array_equal(f(x), np.full(8, 2.0))
    assert not x.is_deleted() and not x.committed


@pytest.mark.parametrize("leaf", [2.5, 3, True, np.float32(1.5), np.int8([1, 2, 3, 4]), 1j])
def test_python_values_keep_their_types(leaf):
    """Weak ones too, which decide what they are promoted to."""
    f = lambda x: (x, x * jnp.ones(4, jnp.bfloat16))  # noqa: E731
    for got, expected in zip(sx.shard_jit(f, mesh=MESHES["auto"])(leaf), jax.jit(f)(leaf), strict=True):
        assert got.aval.str_short() == expected.aval.str_short() and jnp.array_equal(got, expected)


def test_configurations_that_look_at_the_arrays():
    f, key = sx.shard_jit(jax.random.normal, mesh=MESHES["auto"]), jax.random.key(0)
    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        f(key), f(key)


@pytest.mark.once
@pytest.mark.parametrize("name", list(ROWS)[::5])
def test_a_program_of_its_own_would_be_the_same(name):
    """So which call comes first decides nothing."""
    f, args, _, outs, _ = ROWS[name]
    first, second = (sx.shard_jit(f, mesh=MESH, out_shardings=outs) for _ in range(2))
    plan = first.plan(*args)
    leaves, tree = jax.tree.flatten(args)
    shardings = [NamedSharding(MESH, place.sharding.spec) for place in plan.arguments()]
    placed = tree.unflatten(map(jax.device_put, leaves, shardings))
    assert second.plan(*placed).source() == plan.source()
