"""Scans over layers that add their rows to sums by themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax.pipeline.in_place import adding
from shardax.pipeline.schedules import make_schedule
from shardax.pipeline.slots import BACKWARD
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
    for adds in False, True:
        for own in at.passes(adds=adds):
            back = own.of[BACKWARD]
            assert [at.sums.types[place].shape[1:] for place in back.totals] == [(256, 256)] * adds
            assert not set(back.totals) & set(back.sums)
