"""Zero within a limit of memory: of the ways that fit, the fastest, as the plans of each say by themselves."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.zero import Zero
from tests.zero_steps import layers

pytestmark = [pytest.mark.mixed_dtypes, pytest.mark.promotes_ranks]

MODEL, HIDDEN, LAYERS, MICROBATCHES = 128, 512, 2, 4


def step(state, x_KBM):
    """Microbatches, one after the other, before one update."""
    params, moments = state

    def loss(params, h_BM):
        for w in params:
            h_BM = h_BM + jnp.tanh(h_BM @ w["up"]) @ w["down"]
        return (h_BM**2).mean()

    def add(total, x_BM):
        value, grads = jax.value_and_grad(loss)(params, x_BM)
        return jax.tree.map(jnp.add, total, grads), value

    grads, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x_KBM)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return (jax.tree.map(lambda w, m: w - 0.1 * m, params, moments), moments), values.mean()


def planned(zero, run=step):
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    shapes = (MODEL, HIDDEN), (HIDDEN, MODEL), (MODEL, MODEL)
    up, down, square = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    params = [square] * 3 if run is layers else [{"up": up, "down": down}] * LAYERS
    batch, spec = ((8192,), P("data")) if run is layers else ((MICROBATCHES, 512), P(None, "data"))
    how = {"mesh": mesh, "in_shardings": (None, spec), "donate_argnums": 0}
    return sx.shard_jit(run, transforms=[zero], **how).plan(
        (params, params), jax.ShapeDtypeStruct((*batch, MODEL), "float32")
    )


def figures(plan) -> tuple[float, int]:
    return plan.estimate(plan.network.chip).seconds, plan.memory().peak


@pytest.mark.quick
@pytest.mark.parametrize(
    "run, stage, offload, ways",
    [
        (step, 1, "optimizer", [{"accumulate": "unreduced"}, {"accumulate": "scattered"}]),
        (layers, 3, (), [{"reshard_after_forward": True}, {"reshard_after_forward": False}]),
    ],
)
def test_the_fastest_that_fits(run, stage, offload, ways):
    said = [figures(planned(Zero("data", stage, offload=offload, **way), run)) for way in ways]
    peaks = sorted({peak for _, peak in said})
    assert len(peaks) > 1
    for limit in {peaks[0], peaks[-1] - 1, peaks[-1]}:
        plan = planned(Zero("data", stage, offload=offload, memory=limit), run)
        assert figures(plan)[0] == min(seconds for seconds, peak in said if peak <= limit)
        assert figures(plan)[1] <= limit
        assert "the fastest that fits into" in str(plan) and str(plan).count(": taken") == 1
        assert str(plan).count(": does not fit") == sum(peak > limit for _, peak in said)
    with pytest.raises(ValueError, match=rf"at least {peaks[0]:,} .* with accumulate='"):
        planned(Zero("data", stage, offload=offload, memory=peaks[0] - 1), run)


@pytest.mark.quick
def test_what_is_said_stays():
    """Or there is no loop over microbatches."""
    for zero, run, ways in (
        (Zero("data", 3, accumulate="scattered", memory=1e9), step, 2),
        (Zero("data", 1, memory=1e9), layers, 1),
    ):
        text = str(planned(zero, run))
        assert text.count("accumulate='") == text.count(": taken") + text.count(": not faster") == ways
        assert (zero.accumulate is None) or text.count(f"accumulate={zero.accumulate!r}") == ways


@pytest.mark.quick
def test_bad_input():
    with pytest.raises(ValueError, match="memory of Zero is '16GiB', of type str: give bytes, or None"):
        Zero(memory="16GiB")  # type: ignore[arg-type]
