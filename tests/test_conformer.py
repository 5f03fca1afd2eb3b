"""The Conformer on stages: losses, gradients and batch norm's statistics as those of the same microbatches
without a pipeline, and its data.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import conformer, speech
from models.steps import adamw

SMALL = {"model": 16, "heads": 2, "kernel": 5, "channels": 4, "bands": 20}
CONFIG = conformer.Config(layers=2, **SMALL)
DEEP = conformer.Config(layers=8, **SMALL)
FRAMES, MICROBATCHES = 24, 4


def batch(step: int, size: int = 16):
    return speech.batch(step, 0, size, FRAMES, CONFIG.bands, conformer.SUBSAMPLED)


def mesh_of(**sizes: int):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def check(config: conformer.Config, sizes: dict[str, int], schedule: str, tolerance=1e-5):
    params = conformer.init_params(config, jax.random.key(1))
    loss = partial(conformer.loss, config)
    grad = sx.pipeline.value_and_grad(loss, microbatches=MICROBATCHES, schedule=schedule, has_aux=True)
    split = P("data") if "data" in sizes else P()
    shardings = conformer.param_specs(), split, split
    step = sx.shard_jit(grad, mesh=mesh_of(**sizes), in_shardings=shardings)
    plain = jax.jit(conformer.accumulated(MICROBATCHES)(loss))
    for number in range(2):
        found, wanted = step(params, *batch(number)), plain(params, *batch(number))
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
            scale = max(1.0, float(np.abs(y).max()))
            where = jax.tree_util.keystr(path)
            np.testing.assert_allclose(x / scale, y / scale, atol=tolerance, rtol=tolerance, err_msg=where)


@pytest.mark.promotes_ranks
@pytest.mark.once
def test_stages_with_batch_norm():
    check(CONFIG, {"stage": 2, "data": 2}, "1f1b")


@pytest.mark.promotes_ranks
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "eager-1f1b", "interleaved", "zb-h1", "zbv"])
@pytest.mark.parametrize("stages", [2, 4])
def test_schedules(stages, schedule):
    check(DEEP, {"stage": stages, "data": 2}, schedule)


@pytest.mark.promotes_ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"stage": 3}, {"stage": 2, "data": 2, "model": 2}, {"stage": 8}], ids=lambda sizes: str(sizes)
)
def test_uneven_layers_and_three_axes(sizes):
    check(DEEP, sizes, "1f1b")


@pytest.mark.promotes_ranks
@pytest.mark.mixed_dtypes
@pytest.mark.slow
def test_bfloat16_with_remat():
    config = replace(DEEP, dtype=jnp.bfloat16, remat=True)
    check(config, {"stage": 2, "data": 2}, "1f1b", tolerance=5e-2)


@pytest.mark.promotes_ranks
@pytest.mark.mixed_dtypes
@pytest.mark.slow
def test_a_hundred_steps():
    losses = {}
    tx = adamw(2e-3, 10, 100)
    pipelined = partial(sx.pipeline.value_and_grad, microbatches=MICROBATCHES, has_aux=True)
    shardings = conformer.State(conformer.param_specs(), P("stage"), None), P("data"), P("data")
    mesh = mesh_of(stage=4, data=2)
    for name, grad in ("pipelined", pipelined), ("plain", conformer.accumulated(MICROBATCHES)):
        step = conformer.make_step(CONFIG, tx, grad)
        run = sx.shard_jit(step, mesh=mesh, in_shardings=shardings) if grad is pipelined else jax.jit(step)
        state, losses[name] = conformer.init_state(CONFIG, tx, jax.random.key(0)), []
        for number in range(100):
            state, value = run(state, *batch(number))
            losses[name].append(float(value))
    np.testing.assert_allclose(losses["pipelined"], losses["plain"], rtol=1e-4)
    assert losses["plain"][-1] < 0.9 * losses["plain"][0]


@pytest.mark.promotes_ranks
def test_running_statistics_take_the_place_of_a_batchs():
    loss = partial(
        conformer.loss, CONFIG, conformer.init_params(CONFIG, jax.random.key(0)), *batch(0, size=4)
    )
    value, statistics = loss()
    same, given = loss(statistics)
    np.testing.assert_allclose(same, value, rtol=1e-5)
    assert jax.tree.map(jnp.shape, given) == {"mean": (2, 16), "variance": (2, 16)}
    other, _ = loss(conformer.init_running(CONFIG))
    assert abs(other - value) > 1e-3


def test_params_have_the_papers_size():
    """Of Table 5's larger models in GSPMD: 6.47 and 12.95 units of 2^30."""
    for layers, size in (32, 6.47), (64, 12.95):
        shapes = conformer.abstract_params(conformer.Config(layers=layers, model=3072, heads=16))
        leaves = jax.tree.leaves(shapes["layers"])
        assert sum(leaf.size for leaf in leaves) / 2**30 == pytest.approx(size, rel=0.01)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="model=20 must be a multiple of 2 x heads=8"):
        conformer.Config(model=20, heads=4)


# Data


def test_batches_are_a_function_of_step_and_seed():
    for one, other in zip(batch(3), batch(3), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (batch(3)[0] != batch(4)[0]).any()
    features, labels = batch(0, size=64)
    assert features.shape == (64, FRAMES, CONFIG.bands) and labels.shape == (64, FRAMES // 4)
    assert np.isfinite(features).all() and set(np.unique(labels)) == set(range(speech.PHONES))


def test_phones_can_be_heard():
    """The nearest of the classes' mean spectra is right far more often than by chance."""
    train, test = (speech.batch(step, 0, 64, 64, 40, 4) for step in range(2))
    frames, labels = train[0][:, 2::4].reshape(-1, 40), train[1].reshape(-1)
    means = np.stack([frames[labels == phone].mean(0) for phone in range(speech.PHONES)])
    distances = ((test[0][:, 2::4].reshape(-1, 1, 40) - means) ** 2).sum(-1)
    assert (distances.argmin(1) == test[1].reshape(-1)).mean() > 4 / speech.PHONES
