"""abstract_state: how a state will rest, before it exists; and the functions that make it so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh

pytestmark = pytest.mark.mixed_dtypes

SPECS = {"up": P("data", "model"), "down": P("model", "data")}
BATCH = jax.ShapeDtypeStruct((6, 64), jnp.float32)
tx = optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9)


def init(key):
    """`down` has 250 rows, which no axis divides but by 2."""
    up, down = jax.random.split(key)
    params = {"up": jax.random.normal(up, (64, 250)), "down": jax.random.normal(down, (250, 64))}
    return params, tx.init(params)


def train_step(state, x, scale=1.0):
    params, opt_state = state
    grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2) * scale)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def step_on(mesh, **options):
    return sx.shard_jit(
        train_step, mesh=mesh, in_shardings=((SPECS, None), P("data")), donate_argnums=0, **options
    )


def abstract(mesh):
    return sx.abstract_state(step_on(mesh), jax.eval_shape(init, jax.random.key(0)), BATCH)


def alike(a, b) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_is_how_the_state_rests():
    mesh = make_mesh({"data": 2, "model": 4})
    state = abstract(mesh)
    found = step_on(mesh)(init(jax.random.key(0)), np.ones(BATCH.shape, np.float32))
    assert all(jax.tree.leaves(jax.tree.map(alike, state, found)))
    assert not found[0]["down"].sharding.is_fully_replicated


def test_sharded_init_never_holds_a_whole_state():
    mesh = make_mesh({"data": 2, "model": 4})
    state = abstract(mesh)
    sharded = sx.shard_jit(init, out_shardings=state)
    memory, on_one = (
        f.lower(jax.random.key(0)).compile().memory_analysis() for f in (sharded, jax.jit(init))
    )
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    one = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert memory.output_size_in_bytes <= one + 8 * len(jax.tree.leaves(state))
    held = memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert held < 0.6 * whole  # threefry's own arrays are some shards' worth
    assert held < 0.3 * (on_one.output_size_in_bytes + on_one.temp_size_in_bytes)
    made = sharded(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, made, jax.jit(init)(jax.random.key(0)))
    assert all(jax.tree.leaves(jax.tree.map(alike, state, made)))


def test_needs_no_devices():
    state = abstract(AbstractMesh((64, 32), ("data", "model"), axis_types=(AxisType.Auto,) * 2))
    assert state[0]["up"].sharding.spec == P("data", None)
    assert state[1][0].v_row["up"].sharding.spec == P("data")


def test_chosen_arguments():
    step = step_on(make_mesh({"data": 2, "model": 4}))
    shapes = jax.eval_shape(init, jax.random.key(0))
    state, batch = sx.abstract_state(step, shapes, BATCH, argnums=(0, 1), scale=2.0)
    assert state == sx.abstract_state(step, shapes, BATCH, scale=2.0)
    assert batch == sx.abstract_state(step, shapes, BATCH, argnums=-1, scale=2.0)
    assert (batch.shape, batch.sharding.spec) == ((6, 64), P("data", None))


def test_static_arguments_do_not_count():
    step = sx.shard_jit(
        lambda n, x: x * n, mesh=make_mesh({"data": 2}), in_shardings=P("data"), static_argnums=0
    )
    assert sx.abstract_state(step, 3, BATCH).sharding.spec == P("data", None)


def test_a_sharding_that_an_abstract_argument_names_and_no_array_can_have():
    mesh = make_mesh({"data": 2, "model": 4})
    x = jax.ShapeDtypeStruct(
        (10, 30), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, P("data", "model"))
    )
    assert sx.abstract_state(sx.shard_jit(lambda x: 2 * x), x).sharding.spec == P("data", None)


def test_errors():
    step = sx.shard_jit(lambda x: 2 * x, mesh=make_mesh({"data": 2}))
    with pytest.raises(
        ValueError, match=r"step is <function.*which shard_jit did not make: give it shard_jit\(fun"
    ):
        sx.abstract_state(train_step, BATCH)
    with pytest.raises(
        ValueError, match="argnums names argument 1, and this call has 1 positional arguments"
    ):
        sx.abstract_state(step, BATCH, argnums=1)
    other = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    with pytest.raises(
        ValueError,
        match=r"argument x of shape \(6, 64\) is given the sharding of an abstract array of shape \(3, 3\)",
    ):
        sx.shard_jit(lambda x: 2 * x, mesh=make_mesh({"data": 2}), in_shardings=(other,)).plan(BATCH)
