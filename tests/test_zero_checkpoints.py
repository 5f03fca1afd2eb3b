"""Checkpoints of offloaded state: orbax saves it from the host's memory, and restores it in any stage, at the
host or not, on any number of devices, and without ZeRO; losses go on as they would.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh
from shardax.zero import Zero
from tests.test_zero import quick_compilation
from tests.zero_steps import step_of

__all__ = ["quick_compilation"]
pytestmark = [pytest.mark.mixed_dtypes, pytest.mark.promotes_ranks, pytest.mark.once]

BOTH = ("optimizer", "parameters")
EVEN, ODD = {"up": (4, 24, 40), "down": (4, 40, 24)}, {"up": (4, 23, 37), "down": (4, 37, 23)}
RESTORED = [
    ({"data": 8}, Zero("data", 3, offload=BOTH)),
    ({"data": 4}, Zero("data", 1, offload="optimizer")),
    ({"data": 2, "fsdp": 4}, Zero(("data", "fsdp"), 3)),
    ({"data": 5}, Zero("data", 2)),
    ({"data": 4}, None),
]


def make_params(shapes):
    rng = np.random.default_rng(0)
    return {name: np.float32(0.1 * rng.normal(size=shape)) for name, shape in shapes.items()}


def batches(model, count=4):
    rng = np.random.default_rng(1)
    return [np.float32(rng.normal(size=(40, model))) for _ in range(count)]


def stepping(mesh, zero):
    def loss(params, x_BM):
        layer = lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None)  # noqa: E731
        return ((jax.lax.scan(layer, x_BM, params)[0] - 1) ** 2).mean()

    how = {"mesh": mesh, "in_shardings": (None, P(tuple(mesh.shape))), "donate_argnums": 0}
    return sx.shard_jit(step_of(loss, optax.adamw(1e-2)), transforms=[zero] if zero else [], **how)


def trained(step, state, xs):
    losses = []
    for x_BM in xs:
        state, loss = step(state, x_BM)
        losses.append(float(loss))
    return state, losses


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def saved(folder, state):
    with ocp.StandardCheckpointer() as orbax:
        orbax.save(folder / "state", state)


def restored(folder, like):
    with ocp.StandardCheckpointer() as orbax:
        return orbax.restore(folder / "state", like)


@pytest.fixture(scope="module", params=["even", "padded", "in buckets"])
def checkpoint(request, tmp_path_factory):
    """A folder with a state saved after two steps at the host, its shapes, and the losses of four steps."""
    shapes = EVEN if request.param == "even" else ODD
    tx, params, mesh = optax.adamw(1e-2), make_params(shapes), make_mesh({"data": 8})
    xs, zero = batches(shapes["up"][1]), Zero("data", 3, offload=BOTH)
    _, wanted = trained(stepping(mesh, None), (params, jax.jit(tx.init)(params)), xs)
    state = params, jax.jit(tx.init)(params)
    if request.param != "even":
        bucket = 0 if request.param == "padded" else 2**20
        state = sx.zero.init(tx, params, mesh, "data", 3, bucket=bucket, offload=BOTH)
    state, losses = trained(stepping(mesh, zero), state, xs[:2])
    assert kinds(state) == {"pinned_host"}
    np.testing.assert_allclose(losses, wanted[:2], rtol=1e-5)
    true = sx.zero.unpad(state)  # of an even one itself
    assert [x.shape for x in jax.tree.leaves(true[0])] == [shapes[name] for name in sorted(shapes)]
    folder = tmp_path_factory.mktemp("checkpoint")
    saved(folder, true)
    return folder, jax.device_get(true), xs, wanted


@pytest.mark.parametrize("mesh, zero", RESTORED, ids=str)
def test_restored(checkpoint, mesh, zero):
    """Into what `abstract_state` says, each array where it is to rest: no device holds more of it."""
    folder, true, xs, wanted = checkpoint
    step = stepping(make_mesh(mesh), zero)
    like = sx.abstract_state(step, jax.eval_shape(lambda: true), xs[0])
    state = restored(folder, like)
    for x, y, rests in zip(*map(jax.tree.leaves, (state, true, like)), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.sharding == rests.sharding
    offloaded = zero is not None and bool(zero.offload)
    assert ("pinned_host" in kinds(state)) == offloaded
    _, losses = trained(step, state, xs[2:])
    np.testing.assert_allclose(losses, wanted[2:], rtol=1e-5)


@pytest.mark.parametrize("count", [5, 8])
def test_restored_and_padded_at_the_host(checkpoint, count):
    """By `pad` under `jax.jit`, in which the host's memory is named: the step is compiled once."""
    folder, true, xs, wanted = checkpoint
    mesh = make_mesh({"data": count})
    step = stepping(mesh, Zero("data", 3, offload=BOTH))
    padded = lambda state: sx.zero.pad(state, mesh, params=true[0])  # noqa: E731
    rests = sx.abstract_state(step, jax.eval_shape(padded, true), xs[0])
    state = restored(folder, jax.tree.map(np.zeros_like, true))
    state = jax.jit(padded, out_shardings=jax.tree.map(lambda x: x.sharding, rests))(state)
    assert kinds(state) == {"pinned_host"}
    state, losses = trained(step, state, xs[2:])
    np.testing.assert_allclose(losses, wanted[2:], rtol=1e-5)
    assert kinds(state) == {"pinned_host"}
