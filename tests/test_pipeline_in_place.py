"""Scans over layers that add their rows to sums by themselves."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.pipeline.in_place import adding
from shardax.pipeline.schedules import make_schedule
from shardax.pipeline.slots import BACKWARD
from tests.test_pipeline import mesh_of, rand
from tests.test_pipeline_cut import region


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_are_added_to_the_first_of_a_sum(reverse):
    def layer(carry, x):
        w, n = x
        return 2 * carry + w.sum(), (w * carry, n + carry)

    def scanned(carry, w, n):
        return lax.scan(layer, carry, (w, n), reverse=reverse)

    args = np.float32(1), np.arange(12, dtype="float32").reshape(4, 3), np.arange(4, dtype="float32")
    (eqn,) = jax.make_jaxpr(scanned)(*args).jaxpr.eqns
    sums = np.full((6, 3), 10, "float32")
    found = jax.jit(lambda *args: adding(eqn, args, 4, {1: sums}))(*args)
    carry, (rows, others) = jax.jit(scanned)(*args)
    wanted = carry, sums + np.pad(rows, [(0, 2), (0, 0)]), others
    jax.tree.map(np.testing.assert_allclose, tuple(found), wanted)


def loss(params, x_BM):
    h_BM, _ = lax.scan(lambda h_BM, w: (jnp.tanh(h_BM @ w), None), x_BM @ params["in"], params["layers"])
    return ((h_BM @ params["in"].T - x_BM) ** 2).mean()


@pytest.mark.quick
def test_a_stage_adds_the_gradients_of_its_layers_by_itself():
    """And nothing else: those of tied ends are summands."""
    at = region(loss)._at(make_schedule("1f1b", 3, 4))
    for own in at.passes():
        back = own.of[BACKWARD]
        assert [at.sums.types[place].shape[1:] for place in back.totals] == [(256, 256)]
        assert not set(back.totals) & set(back.sums)


def test_no_branch_copies_the_sums():
    """First, middle and last stage add to the same sums by branches of their own."""
    params = {"in": jnp.ones((8, 64)), "layers": jnp.ones((6, 64, 64))}
    mesh = mesh_of(stage=3)
    grad = sx.pipeline.value_and_grad(loss, microbatches=4, schedule="1f1b")
    step = sx.shard_jit(grad, mesh=mesh, in_shardings=({"in": P(), "layers": P("stage")}, P()))
    text = step.lower(params, jnp.ones((12, 8))).compile().as_text()
    assert "f32[2,64,64]" in text
    assert not re.findall(r"= f32\[2,64,64\]\S* copy\(", text)


@pytest.mark.parametrize("schedule", ["eager-1f1b", "interleaved", "zb-h1"])
def test_gradients(schedule):
    """Of layers that stages and chunks do not divide, and of tied ends."""
    params = {"in": rand(0, 8, 16), "layers": rand(1, 7, 16, 16)}
    x_BM = rand(2, 12, 8)
    grad = sx.pipeline.value_and_grad(loss, microbatches=4, schedule=schedule)
    step = sx.shard_jit(grad, mesh=mesh_of(stage=3), in_shardings=(None, P()))
    found, wanted = step(params, x_BM), jax.jit(jax.value_and_grad(loss))(params, x_BM)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)
