"""Real train steps, several in a row: sharded on every kind of mesh, uneven wherever possible, against plain
`jax.jit`.

Losses and what optimizers accumulate are compared within reassociation. So are parameters, because each
optimizer's epsilon is far above what rounding leaves of a gradient that is zero: Adam would divide noise by
noise.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import convnet, gpt2, gpt2_sharding, mlp
from models.devices import make_mesh, mesh_text
from models.rules import on_axes
from models.steps import State, make_init, make_step

# flax and optax mix weakly typed floats with integer counts
pytestmark = [pytest.mark.promotes_ranks, pytest.mark.mixed_dtypes]

STEPS = 3


@pytest.fixture(autouse=True)
def quick_compilation():
    """XLA's optimizations are not under test here, and most of the time would go there."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


MESHES = ({"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2}, {"data": 5}, {"data": 3, "model": 2})


def adamw():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3, weight_decay=0.1))


def coarse_adamw():
    """For gradients of few digits."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=0.1, weight_decay=0.1))


def adafactor():
    return optax.adafactor(1e-2, min_dim_size_to_factor=8, eps=1e-6)


def lion():
    return optax.lion(1e-3)


def every_second():
    """Gradients of two steps make an update, under `lax.cond`."""
    return optax.MultiSteps(adamw(), 2)


@dataclass(frozen=True, eq=False)
class Job:
    """A model's train step for one device, its first state, a batch for each step, and its annotations."""

    init: Callable[[Any], State]
    step: Callable[[State, Any], tuple[State, Any]]
    batches: tuple[Any, ...]
    specs: Callable[[Any, Any], Any]
    batch_spec: Any


def make(model, config, batches, tx, loss=None) -> Job:
    sharding = gpt2_sharding if model is gpt2 else model
    loss = loss or (lambda params, batch, step: model.loss(config, params, batch))
    init = make_init(lambda key: model.init_params(config, key), tx)
    return Job(init, make_step(loss, tx), batches, sharding.param_specs, sharding.BATCH)


TINY = replace(gpt2.SIZES["tiny"], seq=12)
KEYS = {"typed": jax.random.key, "legacy": jax.random.PRNGKey}


@cache
def transformer(tx, batch: int, keys: str = "typed", **changes) -> Job:
    """A GPT-2 with 257 tokens; dropout where `changes` ask for it, its key folded from the step's number."""
    config = replace(TINY, **changes)
    rng = np.random.default_rng(0)
    texts = tuple(rng.integers(0, config.vocab, (batch, config.seq + 1), np.int32) for _ in range(STEPS))

    def loss(params, text_BS, step):
        key = jax.random.fold_in(KEYS[keys](1), step) if config.dropout else None
        return gpt2.loss(config, params, text_BS, key)

    return make(gpt2, config, texts, tx(), loss)


@cache
def perceptron(tx, batch: int = 10, hidden: int = 31) -> Job:
    config = mlp.Config(hidden=hidden, inputs=9, outputs=7)
    rng = np.random.default_rng(0)
    batches = tuple((rng.normal(size=(batch, 9)), rng.normal(size=(batch, 7))) for _ in range(STEPS))
    return make(mlp, config, jax.tree.map(np.float32, batches), tx())


@cache
def convolutional(tx, batch: int = 10, **changes) -> Job:
    config = convnet.Config(side=9, features=(7, 10), classes=5, **changes)
    rng = np.random.default_rng(0)
    images = [rng.normal(size=(batch, 9, 9, 3)).astype(np.float32) for _ in range(STEPS)]
    return make(convnet, config, tuple((x, rng.integers(0, 5, batch, np.int32)) for x in images), tx())


@cache
def on_one_device(job: Job) -> tuple[State, list[float]]:
    return run(job, jax.jit(job.step))


def run(job: Job, step) -> tuple[State, list[float]]:
    state, losses = jax.jit(job.init)(jax.random.key(0)), []
    for batch in job.batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return state, losses


def shapes(job: Job) -> State:
    return jax.eval_shape(job.init, jax.random.key(0))


def trains_alike(job: Job, mesh_shape, tolerance: float = 1e-4, specs=None) -> None:
    """`tolerance`: of the losses, relative; of each leaf of the state, relative to its largest element.

    `specs`: of parameters and batch, else the model's own.
    """
    mesh = make_mesh(mesh_shape)
    params, batch = specs or (
        job.specs(shapes(job).params, mesh.axis_names),
        on_axes(job.batch_spec, mesh.axis_names),
    )
    step = sx.shard_jit(
        job.step, mesh=mesh, in_shardings=(State(params, None, None), batch), donate_argnums=0
    )
    state, losses = run(job, step)
    expected, expected_losses = on_one_device(job)
    np.testing.assert_allclose(losses, expected_losses, rtol=tolerance / 10)
    jax.tree_util.tree_map_with_path(lambda path, x, y: leaf_equal(path, x, y, tolerance), state, expected)
    assert {
        leaf.sharding.mesh for leaf in jax.tree.leaves(state) if isinstance(leaf.sharding, NamedSharding)
    } == {mesh}


def leaf_equal(path, found, expected, tolerance: float) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), path
    if not np.issubdtype(expected.dtype, np.inexact):
        np.testing.assert_array_equal(found, expected, str(path))
    elif expected.size:
        scale = max(float(abs(expected).max()), 1e-6)
        np.testing.assert_allclose(
            found, expected, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path)
        )


def cases(*rows):
    return pytest.mark.parametrize(
        ("job", "mesh"),
        [pytest.param(job, m, id=f"{name}-{mesh_text(m)}", marks=marks) for name, job, m, *marks in rows],
    )


@cases(
    ("unrolled", lambda: transformer(adamw, 10), MESHES[0], pytest.mark.once),
    ("scanned-remat", lambda: transformer(adamw, 6, scan=True, remat=True), MESHES[1], pytest.mark.once),
    (
        "three-heads-legacy-keys",
        lambda: transformer(adafactor, 7, "legacy", heads=3, model=33, scan=True, dropout=0.2),
        MESHES[3],
        pytest.mark.slow,
    ),
    (
        "dropout",
        lambda: transformer(adafactor, 8, remat=True, dropout=0.2),
        MESHES[2],
        pytest.mark.once,
        pytest.mark.slow,
    ),
)
def test_transformer(job, mesh):
    trains_alike(job(), mesh)


@pytest.mark.once
@cases(
    ("adamw", lambda: perceptron(adamw), MESHES[0]),
    ("adafactor", lambda: perceptron(adafactor), MESHES[3]),
    ("lion", lambda: perceptron(lion), MESHES[3]),
    ("every-second", lambda: perceptron(every_second), MESHES[0]),
)
def test_perceptron(job, mesh):
    trains_alike(job(), mesh)


@pytest.mark.once
@cases(
    ("adamw", lambda: convolutional(adamw), MESHES[0]),
    ("adafactor-pool", lambda: convolutional(adafactor, pool=True), MESHES[3]),
)
def test_convolutional(job, mesh):
    trains_alike(job(), mesh)


@pytest.mark.once
def test_transformer_in_bfloat16():
    job = transformer(coarse_adamw, 10, dtype=jax.numpy.bfloat16, scan=True, remat=True, dropout=0.1)
    trains_alike(job, MESHES[0], 6e-2)


VARIANTS = (
    {"heads": 3, "model": 33},
    {"scan": True},
    {"scan": True, "remat": True, "dropout": 0.2},
    {"remat": True, "heads": 3, "model": 39, "vocab": 256},
)


@pytest.mark.slow
@pytest.mark.parametrize("tx", [adamw, adafactor, every_second])
@pytest.mark.parametrize("mesh", MESHES, ids=mesh_text)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_transformer(variant, mesh, tx):
    """Not lion, which takes the sign of a gradient that is zero, as that of the keys' bias is."""
    trains_alike(transformer(tx, 10, **variant), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("tx", [adamw, adafactor, lion, every_second])
@pytest.mark.parametrize("mesh", MESHES, ids=mesh_text)
@pytest.mark.parametrize(
    "make_job", [perceptron, convolutional, partial(convolutional, pool=True)], ids=["mlp", "conv", "pool"]
)
def test_every_small_model(make_job, mesh, tx):
    trains_alike(make_job(tx), mesh)


def any_spec(rng: random.Random, rank: int, axes) -> P | None:
    """Each axis on some dim or none, in any order; sometimes no annotation."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in rng.sample(axes, len(axes)):
        if dims and rng.random() < 0.6:
            rng.choice(dims).append(axis)
    return None if rng.random() < 0.3 else P(*(tuple(d) or None for d in dims))


def trains_alike_anyhow(job: Job, mesh, seed: int) -> None:
    """Under annotations that make no sense."""
    rng = random.Random(seed)
    specs = jax.tree.map(lambda x: any_spec(rng, x.ndim, list(mesh)), (shapes(job).params, job.batches[0]))
    trains_alike(job, mesh, specs=specs)


@pytest.mark.once
@pytest.mark.parametrize("seed", range(2))
def test_any_annotations(seed):
    trains_alike_anyhow(perceptron(adamw), MESHES[seed], seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(lambda: perceptron(adafactor), id="mlp"),
        pytest.param(lambda: convolutional(adamw, pool=True), id="pool"),
        pytest.param(lambda: transformer(adamw, 10), id="gpt"),
        pytest.param(lambda: transformer(adamw, 10, scan=True, remat=True, dropout=0.2), id="gpt-scanned"),
    ],
)
def test_any_annotations_of_any_model(job, seed):
    trains_alike_anyhow(job(), MESHES[seed], seed)
