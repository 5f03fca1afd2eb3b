"""States of Flax, saved by orbax as they lie and restored as they rest on another mesh, through
`abstract_state`.
"""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardax as sx
import shardax.flax
from models.devices import make_mesh
from tests import test_flax, test_nnx

pytestmark = pytest.mark.mixed_dtypes

FIRST = {"data": 2, "model": 4}
OTHER = {"data": 2, "fsdp": 2, "model": 2}


def there_and_back(folder, saved, wanted):
    with ocp.StandardCheckpointer() as orbax:
        orbax.save(folder / "state", saved)
        orbax.wait_until_finished()
        return orbax.restore(folder / "state", wanted)


def bits(x):
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def check(found, saved, wanted):
    """What was saved, to the bit, where it was wanted; some of it split over axes of the other mesh."""
    for x, y, w in zip(*map(jax.tree.leaves, (found, saved, wanted)), strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))
        assert x.sharding.is_equivalent_to(w.sharding, x.ndim) and x.sharding.mesh == w.sharding.mesh
    assert any(not w.sharding.is_fully_replicated for w in jax.tree.leaves(wanted))


def nnx_step(mesh):
    return sx.flax.shard_jit(
        test_nnx.train_step,
        mesh=make_mesh(mesh),
        in_shardings=(None, None, None, P("data")),
        donate_argnums=(0, 1, 2),
    )


@pytest.fixture(scope="module")
def trained():
    """Objects of nnx after two steps: parameters, statistics, a generator's key and count, factored moments,
    a metric.
    """
    with nnx.use_eager_sharding(False):
        objects, step = sx.flax.shard_jit(test_nnx.create, mesh=make_mesh(FIRST))(), nnx_step(FIRST)
        for _ in range(2):
            step(*objects, test_nnx.X)
        states = jax.tree.map(lambda x: x.copy(), tuple(map(nnx.state, objects)))
        return states, [float(step(*objects, test_nnx.X)) for _ in range(2)]


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(OTHER, id="2x2x2"),
        pytest.param({"data": 1, "model": 2}, id="two devices", marks=pytest.mark.once),
    ],
)
def test_nnx_objects_go_on_on_another_mesh(trained, mesh, tmp_path):
    states, losses = trained
    with nnx.use_eager_sharding(False):
        objects, step = nnx.eval_shape(test_nnx.create), nnx_step(mesh)
        wanted = sx.flax.abstract_state(step, *objects, test_nnx.X, argnums=(0, 1, 2))
        found = there_and_back(tmp_path, states, wanted)
        check(found, states, wanted)
        for target, state in zip(objects, found, strict=True):
            nnx.update(target, state)
        np.testing.assert_allclose([float(step(*objects, test_nnx.X)) for _ in range(2)], losses, rtol=1e-5)


@pytest.mark.once
def test_a_boxed_train_state_goes_on_on_another_mesh(tmp_path):
    model = test_flax.MODELS["logical"]
    shapes = jax.eval_shape(lambda key: test_flax.init(model, key), jax.random.key(0))

    def step_on(mesh):
        specs = sx.flax.specs(shapes, test_flax.RULES)
        return sx.shard_jit(test_flax.train_step, mesh=make_mesh(mesh), in_shardings=(specs, P("data")))

    step, other = step_on(FIRST), step_on(OTHER)
    state, _ = step(test_flax.init(model, jax.random.key(0)), test_flax.X)
    wanted = sx.abstract_state(other, shapes, test_flax.X)
    found = there_and_back(tmp_path, state, wanted)
    check(found, state, wanted)
    (_, loss), (_, again) = step(state, test_flax.X), other(found, test_flax.X)
    np.testing.assert_allclose(again, loss, rtol=1e-5)
