"""100 steps of training on stages, by both forms, on other models, meshes and schedules: the losses of one device."""

from functools import cache, partial

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import gpt2, gpt2_sharding
from models.devices import make_mesh
from models.steps import State, make_init, make_step
from tests.test_pipeline import V, encoder_decoder, unlike
from tests.test_zero_training import losses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.once,
    pytest.mark.mixed_dtypes,
    pytest.mark.promotes_ranks,
]

BATCH, SEQ = 24, 6
PIPELINES = {  # a mesh, the schedule, chunks on each stage, microbatches: of which 7 do not divide the batch
    "1f1b": ({"stage": 2, "data": 2, "model": 2}, "1f1b", 1, 6),
    "zb-h1": ({"stage": 3, "data": 2}, "zb-h1", 1, 7),
    "interleaved": ({"stage": 2, "data": 2}, "interleaved", 2, 6),
    "gpipe": ({"stage": 4, "data": 2}, "gpipe", 1, 3),
    "zb-h2": ({"stage": 8}, "zb-h2", 1, 8),
}


def of_tokens(make):
    """A loss of two arrays of tokens, as a model."""
    of_two, params = make()
    loss = lambda params, batch, step: of_two(params, *batch)  # noqa: E731

    def batch(number: int):
        return tuple(np.random.default_rng(number).integers(0, V, (2, BATCH, SEQ)).astype("int32"))

    return lambda key: params, loss, batch, lambda params, axes: jax.tree.map(lambda _: P(), params)


def of_gpt2(scan: bool):
    """Of five layers, which few of the numbers of stages divide."""
    config = gpt2.Config(vocab=67, layers=5, heads=2, model=16, seq=SEQ, scan=scan)
    loss = lambda params, batch, step: gpt2.loss(config, params, batch)  # noqa: E731

    def batch(number: int):
        return np.random.default_rng(number).integers(0, 67, (BATCH, SEQ + 1)).astype("int32")

    return partial(gpt2.init_params, config), loss, batch, gpt2_sharding.param_specs


MODELS = {
    "scanned": partial(of_gpt2, True),
    "unrolled": partial(of_gpt2, False),
    "encoder and decoder": partial(of_tokens, encoder_decoder),
    "unlike": partial(of_tokens, unlike),
}


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3, eps=1e-5))


@cache
def on_one_device(name: str):
    init_params, loss, batch, _ = MODELS[name]()
    tx = optimizer()
    return losses(jax.jit(make_step(loss, tx)), jax.jit(make_init(init_params, tx))(jax.random.key(0)), batch)


def pipelined(form: str, name: str, pipeline: str):
    """The step, and its state and batches."""
    axes, schedule, chunks, microbatches = PIPELINES[pipeline]
    init_params, loss, batch, param_specs = MODELS[name]()
    init = make_init(init_params, tx := optimizer())
    how = {"microbatches": microbatches, "schedule": schedule, "chunks": chunks}
    if form == "Pipeline":
        step, transforms = make_step(loss, tx), [sx.pipeline.Pipeline("stage", **how)]
    else:
        by_microbatches = partial(sx.pipeline.value_and_grad, axis="stage", batch_argnames="batch", **how)
        step, transforms = make_step(loss, tx, by_microbatches), []
    state = jax.jit(init)(jax.random.key(0))
    specs = State(param_specs(state.params, [axis for axis in axes if axis == "model"]), None, None)
    shardings = specs, P("data" if "data" in axes else None)
    sharded = sx.shard_jit(
        step, mesh=make_mesh(axes), in_shardings=shardings, donate_argnums=0, transforms=transforms
    )
    return sharded, state, batch


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", ["Pipeline", "value_and_grad"])
def test_hundred_steps(form, name, pipeline):
    found, wanted = losses(*pipelined(form, name, pipeline)), on_one_device(name)
    assert wanted[-1] < wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
