"""100 steps of matrix optimizers under ZeRO, of parameters in bfloat16 and moments in float32: as near to one
device as that is to itself with batches summed in another order.

A bound in digits has no reason here: a rounding of a parameter changes all that comes after. What ZeRO changes is
the order of sums alone, so other orders on one device say how far apart runs may be.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh
from shardax.zero import Zero
from tests.kronecker import soap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.once,
    pytest.mark.mixed_dtypes,
    pytest.mark.promotes_ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

STEPS, BATCH, LAYERS, MODEL, HIDDEN = 100, 40, 2, 18, 37  # sizes that nothing divides
OPTIMIZERS = {"soap": lambda: soap(0.003), "muon": lambda: optax.contrib.muon(0.003, eps=1e-5)}


def first_state(tx):
    """Parameters in bfloat16; the optimizer's state is that of float32 ones."""
    rng = np.random.default_rng(0)
    shapes = [{"up": (MODEL, HIDDEN), "down": (HIDDEN, MODEL)}] * LAYERS
    make: Callable[[Any], Any] = lambda shape: jnp.asarray(0.2 * rng.normal(size=shape), "bfloat16")  # noqa: E731
    params = jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return params, jax.jit(tx.init)(jax.tree.map(lambda w: w.astype("float32"), params))


def loss_of(params, x_BM, y_BM):
    h_BM = x_BM.astype("bfloat16")
    for w in params:
        h_BM = h_BM + jnp.tanh(h_BM @ w["up"]) @ w["down"]
    return jnp.mean((h_BM.astype("float32") - y_BM) ** 2)


def stepping(tx, parts: int = 1):
    """A step whose gradients are the mean of those of so many parts of the batch."""

    def step(state, batch):
        params, opt_state = state
        by_part = [x.reshape(parts, -1, MODEL) for x in batch]
        found = [jax.value_and_grad(loss_of)(params, *(x[n] for x in by_part)) for n in range(parts)]
        value, grads = jax.tree.map(lambda *xs: sum(xs) / parts, *found)
        wide = jax.tree.map(lambda x: x.astype("float32"), (grads, params))
        updates, opt_state = tx.update(wide[0], opt_state, wide[1])
        new = jax.tree.map(lambda w, u: (w + u).astype("bfloat16"), wide[1], updates)
        return (new, opt_state), value

    return step


def losses(step, state, order=slice(None)) -> np.ndarray:
    """Those of all steps, each of a batch in some order."""
    found = []
    for number in range(STEPS):
        rng = np.random.default_rng(number % 8)
        x_BM = rng.normal(size=(BATCH, MODEL)).astype("float32")
        state, value = step(state, (x_BM[order], np.sin(2 * x_BM[order])))
        found.append(float(value))
    return np.array(found)


@cache
def on_one_device(name: str) -> tuple[np.ndarray, float]:
    """The losses, and how far those of other orders are from them at most."""
    tx = OPTIMIZERS[name]()
    first = losses(jax.jit(stepping(tx)), first_state(tx))
    others = [losses(jax.jit(stepping(tx, parts)), first_state(tx)) for parts in (2, 4, 5, 8)]
    others += [losses(jax.jit(stepping(tx)), first_state(tx), slice(None, None, -1))]
    return first, max(np.abs(each - first).max() for each in others)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "stage, axes, padded",
    [
        (1, {"data": 8}, False),
        (2, {"data": 5}, True),
        (3, {"data": 4, "model": 2}, False),
        (3, {"data": 2, "fsdp": 2, "model": 2}, True),
    ],
    ids=str,
)
def test_hundred_steps(name, stage, axes, padded):
    tx, mesh = OPTIMIZERS[name](), make_mesh(axes)
    axis = ("data", "fsdp") if "fsdp" in axes else "data"
    state = first_state(tx)
    if padded:
        of_params = sx.zero.pad(state[0], mesh, axis) if stage == 3 else state[0]
        state = of_params, sx.zero.pad(state[1], mesh, axis)
    specs = (
        [{"up": P(None, "model"), "down": P("model")}] * LAYERS if "model" in axes and not padded else None
    )
    how = {"mesh": mesh, "in_shardings": ((specs, None), P(axis)), "donate_argnums": 0}
    how["options"] = sx.Options(chip="slow")  # or so small a step is not split
    found = losses(sx.shard_jit(stepping(tx), transforms=[Zero(axis, stage)], **how), state)
    wanted, apart = on_one_device(name)
    print(f"{name}: {np.abs(found - wanted).max():.2g} from one device, which is {apart:.2g} from itself")
    assert wanted[-8:].mean() < 0.7 * wanted[:8].mean() and apart < 0.02 * wanted[:8].mean()
    assert np.abs(found - wanted).max() <= 2 * apart
