"""Shampoo and SOAP under ZeRO: the losses of one device, of a GPT-2 whose sizes nothing divides; what is sent."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import gpt2
from models.devices import make_mesh
from models.steps import State, make_init, make_step
from shardax.zero import Zero, dealt
from tests import test_zero
from tests.kronecker import root_by_newton, shampoo, soap
from tests.test_zero import abstract
from tests.test_zero_dealt import HIDDEN, LAYERS, MODEL, listed
from tests.zero_steps import step_of

pytestmark = [pytest.mark.mixed_dtypes, pytest.mark.promotes_ranks]

quick_compilation = test_zero.quick_compilation

STEPS = 5
OPTIMIZERS = {
    "shampoo": lambda: shampoo(0.002),
    "by newton": lambda: shampoo(0.002, root_by_newton),
    "soap": lambda: soap(0.01),
}


def run(step, state):
    losses = []
    for number in range(STEPS):
        text_BS = np.random.default_rng(number % 3).integers(0, 31, (20, 12)).astype("int32")
        state, loss = step(state, text_BS)
        losses.append(float(loss))
    return losses


@pytest.mark.once
@pytest.mark.parametrize(
    "name, form, stage, count",
    [
        ("soap", "as it is", 1, 8),
        pytest.param("shampoo", "padded", 3, 5, marks=pytest.mark.slow),
        pytest.param("by newton", "as it is", 2, 5, marks=pytest.mark.slow),
        pytest.param("by newton", "dealt", 3, 8, marks=pytest.mark.slow),
        pytest.param("shampoo", "as it is", 1, 8, marks=pytest.mark.slow),
        pytest.param("shampoo", "padded", 2, 8, marks=pytest.mark.slow),
        pytest.param("soap", "as it is", 3, 5, marks=pytest.mark.slow),
        pytest.param("soap", "dealt", 1, 2, marks=pytest.mark.slow),
        ("soap", "padded", 1, 5),
    ],
)
def test_losses(name, form, stage, count, quick_compilation):
    """Unlike matrices, of two to four dims, and vectors, each dim with a matrix of its own."""
    tx, mesh = OPTIMIZERS[name](), make_mesh({"data": count})
    tx = dealt(tx) if form == "dealt" else tx
    config = gpt2.Config(layers=1 + (form == "dealt"), heads=2, model=18, seq=11, vocab=31)
    init = make_init(partial(gpt2.init_params, config), tx)
    step = make_step(lambda params, text_BS, _: gpt2.loss(config, params, text_BS), tx)
    how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0}
    sharded = sx.shard_jit(step, transforms=[Zero("data", stage)], **how)
    wanted = run(jax.jit(step), jax.jit(init)(jax.random.key(0)))
    state = jax.jit(init)(jax.random.key(0))
    if form == "padded":
        state = State(*sx.zero.init(tx, state.params, mesh, "data", stage), state.step)
    np.testing.assert_allclose(run(sharded, state), wanted, rtol=1e-5)
    assert wanted[-1] < wanted[0]


@pytest.mark.once
@pytest.mark.parametrize("dealt", [False, True])
def test_bases_of_singular_statistics(dealt, quick_compilation):
    """Without a ridge the last pivots of QR are rounding errors, and with these go directions and signs of the
    last columns of a basis: in float32 other columns come of another order of summation, on one device too. In
    float64 all pivots are far above it, and so is equal, to what it amplifies, the whole state of stage 3.
    """
    tx = soap(0.01, ridge=0.0)
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 4)
        params = [jax.random.normal(k, (24, 24), "float64") / 5 for k in keys]
        how = {"mesh": make_mesh({"data": 4}), "in_shardings": (None, P("data")), "donate_argnums": 0}
        step = sx.shard_jit(step_of(square, tx), transforms=[Zero("data", 3, dealt=dealt)], **how)
        state, expected = (params, jax.jit(tx.init)(params)), (params, jax.jit(tx.init)(params))
        for n in range(3):
            x_BM = np.random.default_rng(n).normal(size=(40, 24))
            state, expected = step(state, x_BM)[0], jax.jit(step_of(square, tx))(expected, x_BM)[0]
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6 * max(1, np.abs(y).max()), rtol=0)


def square(params, x_BM):
    for w in params:
        x_BM = x_BM + jax.numpy.tanh(x_BM @ w)
    return (x_BM**2).mean()


def planned(tx, params, stage, **options):
    """By whole matrices: the activations are as many as make gathered gradients dearer than scattered ones."""
    x_BM = jax.ShapeDtypeStruct((16384, MODEL), "float32")
    how = {"mesh": abstract(data=8), "in_shardings": (None, P("data")), "donate_argnums": 0}
    how |= {"transforms": [Zero("data", stage, dealt=False)], "options": sx.Options(**options)}
    step = sx.shard_jit(step_of(listed, tx), **how)
    return step.plan((params, jax.eval_shape(tx.init, params)), x_BM)


@pytest.mark.quick
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("make", [shampoo, soap])
def test_dealt_state_rests_where_it_is_computed_with(make, stage):
    """Statistics, bases and moments are whole matrices on their devices, and never sent: gradients come, and
    updates go, as with SGD. In stage 3 parameters rest otherwise. Not dealt, and split as annotations say alone, each
    device computes three times as much.
    """
    params = [jax.ShapeDtypeStruct((MODEL, HIDDEN), "float32")] * LAYERS
    plain = planned(optax.sgd(0.1, momentum=0.9), params, stage)
    tx = make(0.1, largest=HIDDEN)
    alone, shared = planned(tx, params, stage, idle_axes=False), planned(dealt(tx), params, stage)
    specs = [x.spec for x in jax.tree.leaves(shared.in_shardings[0][1])]
    assert set(specs) <= {P("data"), P("data", None), P("data", None, None)}
    one = LAYERS * MODEL * HIDDEN * 4 // 8
    assert shared.comm_bytes - plain.comm_bytes < (1.1 if stage == 1 else 2.1) * one
    assert alone.comm_bytes - plain.comm_bytes > 3 * LAYERS * one
    own, all_of_them = (p.estimate("v5p").flops - plain.estimate("v5p").flops for p in (shared, alone))
    assert own < all_of_them / 3


@pytest.mark.quick
@pytest.mark.parametrize("make", [shampoo, soap])
def test_dealt_conditions_stay(make):
    """A count of steps is one for all matrices: what is done every few steps is not done in each and dropped."""
    params = [jax.ShapeDtypeStruct((4, 6), "float32")] * 3
    tx = dealt(make(0.1))
    update = jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params)
    assert [eqn.primitive.name for eqn in update.eqns].count("cond") == 1
