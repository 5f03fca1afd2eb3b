"""ZeRO: the state rests sharded, and what is sent and kept is as the formulas have it; losses stay what they are."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import gpt2
from models.devices import make_mesh
from models.steps import adamw, make_init, make_step
from shardax.zero import Zero

pytestmark = [pytest.mark.mixed_dtypes, pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")]

LAYERS, MODEL, HIDDEN = 4, 64, 128
STACKED = {"up": (LAYERS, MODEL, HIDDEN), "down": (LAYERS, HIDDEN, MODEL)}
PSI = sum(map(np.prod, STACKED.values()))  # parameters


def abstract(**axes):
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def shapes(tree, dtype="float32"):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in tree.items()}


def scanned_loss(params, batch):
    x_BM, y_BM = batch

    def layer(h_BM, w):
        return h_BM + jnp.tanh(h_BM @ w["up"]) @ w["down"], None

    return jnp.mean((jax.lax.scan(layer, x_BM, params)[0] - y_BM) ** 2).astype(jnp.float32)


def mixed_precision_step(state, batch):
    """Parameters in bfloat16; their float32 master and Adam's moments are the optimizer's state."""
    params, (master, moments) = state
    loss, grads = jax.value_and_grad(scanned_loss)(params, batch)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, moments = optax.scale_by_adam().update(grads, moments)
    master = jax.tree.map(lambda w, u: w - 0.1 * u, master, updates)
    return (jax.tree.map(lambda w: w.astype(jnp.bfloat16), master), (master, moments)), loss


def mixed_precision_plan(stage: int, devices: int):
    master = shapes(STACKED)
    state = shapes(STACKED, "bfloat16"), (master, jax.eval_shape(optax.scale_by_adam().init, master))
    batch = (jax.ShapeDtypeStruct((8192, MODEL), "bfloat16"),) * 2
    step = sx.shard_jit(
        mixed_precision_step,
        mesh=abstract(data=devices),
        in_shardings=(None, P("data")),
        donate_argnums=0,
        transforms=[Zero("data", stage)],
    )
    return step.plan(state, batch)


def resident(shardings, arrays) -> int:
    """Bytes on one device of what is no scalar."""
    pairs = zip(jax.tree.leaves(shardings), jax.tree.leaves(arrays), strict=True)
    return sum(int(np.prod(s.shard_shape(a.shape))) * a.dtype.itemsize for s, a in pairs if a.shape)


@pytest.mark.quick
@pytest.mark.parametrize("stage, params", [(1, 2 * PSI), (2, 2 * PSI), (3, 2 * PSI // 8)])
def test_bytes_that_rest(stage, params):
    plan = mixed_precision_plan(stage, 8)
    placed = list(plan.arguments())
    by_role = {"state/0": 0, "state/1": 0}
    for place in placed:
        if place.named[:7] in by_role and place.aval.shape:
            by_role[place.named[:7]] += place.aval.size * place.aval.dtype.itemsize // place.shards
    assert by_role == {"state/0": params, "state/1": 12 * PSI // 8}


@pytest.mark.quick
@pytest.mark.parametrize("stage, gathered, over", [(1, 1, 1), (2, 1, 1), (3, 2, LAYERS)])
def test_elements_that_are_sent(stage, gathered, over):
    """Two for each parameter, by the ring's n - 1 of n parts, and in stage 3 three: each layer's weights are gathered before
    they are used, forward and backward. All in the compute dtype.
    """
    sent, times = {}, {}
    for c in mixed_precision_plan(stage, 8).collectives:
        if c.shape:
            key = c.kind, str(c.dtype)
            sent[key] = sent.get(key, 0) + c.nbytes * c.trips
            times[c.kind] = c.trips
    part = 2 * PSI * 7 // 8
    assert sent == {("all_gather", "bfloat16"): gathered * part, ("reduce_scatter", "bfloat16"): part}
    assert times["all_gather"] == over


SIZES = {
    "up": (13, 24),
    "bias": (24,),
    "down": (24, 3, 7),
    "scale": (3, 7),
    "gain": (),
}  # no axis divides some of them
MATRICES = {"up": True, "bias": False, "down": False, "scale": True, "gain": False}


def mlp_loss(params, batch):
    x_BI, y_BKO = batch
    h_BH = jnp.tanh(x_BI @ params["up"] + params["bias"])
    return jnp.mean(
        (jnp.einsum("bh,hko->bko", h_BH, params["down"]) * params["scale"] * params["gain"] - y_BKO) ** 2
    )


def mlp_params():
    rng = np.random.default_rng(0)
    return {name: np.float32(rng.normal(size=shape) * 0.3 + 0.2) for name, shape in SIZES.items()}


def mlp_batch(number: int):
    rng = np.random.default_rng(number)
    return np.float32(rng.normal(size=(40, 13))), np.float32(rng.normal(size=(40, 3, 7)))


def train_step(tx):
    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(mlp_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05)),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(0.02),
    "muon": lambda: optax.contrib.muon(0.05),
    "accumulating": lambda: optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation(),
    "masked": lambda: optax.chain(optax.masked(optax.trace(0.9), MATRICES), optax.lamb(0.05)),
    "injected": lambda: optax.apply_if_finite(optax.inject_hyperparams(optax.adamw)(0.05), 3),
}


def losses(step, tx, count=5):
    params = mlp_params()
    state, found = (params, jax.jit(tx.init)(params)), []
    for number in range(count):
        state, loss = step(state, mlp_batch(number))
        found.append(float(loss))
    return state, found


@cache
def on_one_device(name: str):
    tx = OPTIMIZERS[name]()
    return losses(jax.jit(train_step(tx)), tx)


@pytest.mark.once
@pytest.mark.parametrize(
    "name, stage, axes",
    [
        ("adamw", 1, {"data": 8}),
        ("adamw", 2, {"data": 2, "fsdp": 2, "model": 2}),
        ("adamw", 3, {"data": 5}),
        ("adafactor", 3, {"data": 4, "model": 2}),
        ("lion", 1, {"data": 5}),
        ("muon", 3, {"data": 8}),
        ("accumulating", 2, {"data": 4, "model": 2}),
        ("masked", 1, {"data": 4, "model": 2}),
        ("injected", 3, {"data": 8}),
    ],
)
def test_losses(name, stage, axes):
    tx, mesh, axis = OPTIMIZERS[name](), make_mesh(axes), ("data", "fsdp") if "fsdp" in axes else "data"
    params = {**dict.fromkeys(SIZES), "up": P(None, "model"), "down": P("model")} if "model" in axes else None
    shardings = (params, None), P(axis)
    step = sx.shard_jit(
        train_step(tx), mesh=mesh, in_shardings=shardings, donate_argnums=0, transforms=[Zero(axis, stage)]
    )
    (state, found), (expected, wanted) = losses(step, tx), on_one_device(name)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6, err_msg=jax.tree_util.keystr(path))
    split = {
        name
        for name, x in state[0].items()
        if x.size > x.addressable_shards[0].data.size * mesh.shape.get("model", 1)
    }
    assert bool(split) == (stage == 3 and 24 % mesh.shape["data"] == 0)
