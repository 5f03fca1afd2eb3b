"""100 steps of training under ZeRO, every stage, optimizer, model and mesh: the losses of one device."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import gpt2, gpt2_sharding
from models.devices import make_mesh
from models.steps import State, make_init, make_step
from shardax.zero import Zero

pytestmark = [
    pytest.mark.slow,
    pytest.mark.once,
    pytest.mark.mixed_dtypes,
    pytest.mark.promotes_ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

STEPS, BATCH = 100, 20
SIZES = {
    "up": (13, 23),
    "bias": (23,),
    "down": (23, 3, 7),
    "scale": (3, 7),
    "gain": (),
}  # nothing divides them


def is_matrix(params):
    return jax.tree.map(lambda w: w.ndim > 1, params)


OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, eps=1e-5)),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3, eps=1e-5),
    "accumulating": lambda: optax.MultiSteps(optax.adam(1e-3, eps=1e-5), 4).gradient_transformation(),
    "masked": lambda: optax.chain(optax.masked(optax.trace(0.9), is_matrix), optax.sgd(1e-2)),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(1e-3, eps=1e-5),
}
MESHES = [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2}, {"data": 5}]


def mlp_params(key):
    keys = jax.random.split(key, len(SIZES))
    return {
        name: 0.3 * jax.random.normal(k, shape) + 0.2
        for k, (name, shape) in zip(keys, SIZES.items(), strict=True)
    }


def mlp_loss(params, batch, step):
    x_BI, y_BKO = batch
    h_BH = jnp.tanh(x_BI @ params["up"] + params["bias"])
    y = jnp.einsum("bh,hko->bko", h_BH, params["down"]) * params["scale"] * params["gain"]
    return jnp.mean((y - y_BKO) ** 2)


def mlp_batch(number: int):
    rng = np.random.default_rng(number)
    return np.float32(rng.normal(size=(BATCH, 13))), np.float32(rng.normal(size=(BATCH, 3, 7)))


def model(name: str):
    """How it is initialised, its loss, its batches, and specs of its parameters along axes of tensor parallelism."""
    if name == "mlp":
        specs = {**dict.fromkeys(SIZES), "up": P(None, "model"), "down": P("model")}
        return mlp_params, mlp_loss, mlp_batch, lambda params, axes: specs if axes else dict.fromkeys(SIZES)
    config = gpt2.Config(layers=2, heads=2, model=32, seq=16, scan=name == "scanned")
    loss = lambda params, text_BS, step: gpt2.loss(config, params, text_BS)  # noqa: E731
    batch = lambda n: np.random.default_rng(n).integers(0, 257, (BATCH, 17)).astype("int32")  # noqa: E731
    return partial(gpt2.init_params, config), loss, batch, gpt2_sharding.param_specs


def losses(step, state, batch):
    found = []
    for number in range(STEPS):
        state, loss = step(state, batch(number % 8))
        found.append(float(loss))
    return found


@cache
def on_one_device(name: str, optimizer: str):
    init_params, loss, batch, _ = model(name)
    tx = OPTIMIZERS[optimizer]()
    step = jax.jit(make_step(loss, tx))
    return losses(step, jax.jit(make_init(init_params, tx))(jax.random.key(0)), batch)


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(map(str, axes.values())))
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "name, optimizer",
    [("mlp", name) for name in OPTIMIZERS]
    + [(m, name) for m in ("scanned", "unrolled") for name in OPTIMIZERS if name != "lion"],
)
def test_hundred_steps(name, optimizer, stage, axes):
    init_params, loss, batch, param_specs = model(name)
    tx, mesh = OPTIMIZERS[optimizer](), make_mesh(axes)
    init, step = make_init(init_params, tx), make_step(loss, tx)
    shapes = jax.eval_shape(init, jax.random.key(0))
    specs = param_specs(shapes.params, [axis for axis in axes if axis == "model"])
    axis = ("data", "fsdp") if "fsdp" in axes else "data"
    how = {"mesh": mesh, "in_shardings": (State(specs, None, None), P(axis)), "donate_argnums": 0}
    how["options"] = sx.Options(chip="slow" if name == "mlp" else None)  # or so small a step is not split
    sharded = sx.shard_jit(step, transforms=[Zero(axis, stage)], **how)
    found = losses(sharded, jax.jit(init)(jax.random.key(0)), batch)
    wanted = on_one_device(name, optimizer)
    assert wanted[-1] < wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
