"""ZeRO in a pipeline: what it sends, by plans. `tests/test_pipeline_composition.py` runs both together."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

pytestmark = [pytest.mark.quick, pytest.mark.mixed_dtypes]

TX = optax.adam(1e-3)


def layer(h_BM, w):
    return h_BM + jnp.tanh(h_BM @ w["up"]) @ w["down"]


def scanned(params, x_BM):
    return jnp.mean(lax.scan(lambda h, w: (layer(h, w), None), x_BM, params)[0] ** 2)


def sized(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


SCANNED = {"up": sized(8, 128, 512), "down": sized(8, 512, 128)}
MESHES = {"data": {"stage": 4, "data": 2}, "and_model": {"stage": 2, "data": 2, "model": 2}}


def planned(loss, params, mesh, transforms, grad=jax.value_and_grad, donated=0):
    def step(state, x_BM):
        params, opt_state = state
        value, gradients = grad(loss)(params, x_BM)
        updates, opt_state = TX.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    sizes = MESHES[mesh]
    how = {
        "mesh": AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)),
        "in_shardings": (None, P("data")),
        "donate_argnums": donated,
    }
    if "model" in sizes:
        last = {"up": P("stage", None, "model"), "down": P("stage", "model")}
        how["in_shardings"] = ((last, None), P("data"))
    state = params, jax.eval_shape(TX.init, params)
    return sx.shard_jit(step, transforms=transforms, **how).plan(state, sized(4096, 128))


def over_data(plan):
    """Of weights and their gradients: the collectives of more than scalars."""
    each = [c for c in plan.collectives if c.axes == ("data",) and not c.other_branch]
    return [c for c in each if c.nbytes > 1000]


def sent(plan):
    return sum(c.nbytes * c.trips for c in over_data(plan))


def scatters(plan):
    return [c.trips for c in over_data(plan) if c.kind == "reduce_scatter"]


PIPELINE = sx.pipeline.Pipeline(microbatches=8)


@pytest.mark.parametrize(("mesh", "stage"), [("data", 1), ("data", 2), ("and_model", 3)])
def test_it_sends_no_more(mesh, stage):
    """Gradients are scattered once, behind all ticks, and weights gathered once: as much as to reduce the
    gradients, in either order."""
    without = planned(scanned, SCANNED, mesh, [PIPELINE])
    zero = sx.zero.Zero("data", stage=stage)
    for transforms in [PIPELINE, zero], [zero, PIPELINE]:
        plan = planned(scanned, SCANNED, mesh, transforms)
        # over all axes: `model` may share the rows, so that weights come over both
        assert 0 < plan.comm_bytes <= without.comm_bytes
        assert scatters(plan) == [1, 1]


def test_the_explicit_form_sends_no_more():
    def grad(loss):
        return sx.pipeline.value_and_grad(loss, microbatches=8)

    without, plan = (
        planned(scanned, SCANNED, "data", transforms, grad)
        for transforms in ([], [sx.zero.Zero("data", stage=3)])
    )
    assert 0 < sent(plan) <= sent(without)


def test_the_explicit_form_finds_state_that_is_not_donated():
    """It closes over the tables of its schedule, more of them than the step has arguments."""

    def grad(loss):
        return sx.pipeline.value_and_grad(loss, microbatches=8)

    zero = [sx.zero.Zero("data", 2)]
    plans = [planned(scanned, SCANNED, "data", zero, grad, donated) for donated in (0, ())]
    assert sent(plans[0]) == sent(plans[1])


def test_gradients_are_scattered_in_each_tick_where_one_says_so():
    """That takes less memory."""
    plans = [
        planned(scanned, SCANNED, "data", [PIPELINE, sx.zero.Zero("data", stage=3, accumulate=how)])
        for how in ("unreduced", "scattered")
    ]
    assert list(map(scatters, plans)) == [[1, 1], [16, 16]]  # two layers, of eight microbatches
    assert plans[1].memory().peak < plans[0].memory().peak


def test_a_limit_of_memory_decides():
    """What is faster needs more memory, and is taken where there is that."""

    def plan(**how):
        return planned(scanned, SCANNED, "data", [PIPELINE, sx.zero.Zero("data", stage=3, **how)])

    fast, small = (plan(accumulate=how).memory().peak for how in ("unreduced", "scattered"))
    plans = [plan(memory=memory) for memory in (9e9, (fast + small) / 2)]
    assert list(map(scatters, plans)) == [[1, 1], [16, 16]]


def test_what_a_loop_adds_up_elsewhere_stays_split():
    """Sums of gradients whole on each device are what a pipeline has alone: FSDP means to save memory. The stages, which
    nothing else uses, share the microbatches: each has two of the eight, and eight layers of either.
    """

    def accumulated(loss):
        def grad(params, x_BM):
            def add(total, x_BM):
                return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x_BM)), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            return 0.0, lax.scan(add, zeros, x_BM.reshape(8, -1, 128))[0]

        return grad

    plan = planned(scanned, SCANNED, "data", [sx.zero.Zero("data", stage=3)], accumulated)
    assert scatters(plan) == [16, 16]
