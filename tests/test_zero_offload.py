"""ZeRO's offload: state rests at the host, the device holds less by just that, and results are the same."""

import json
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh
from shardax.passes.blocks import tiled_dims
from shardax.zero import Zero
from shardax.zero.offload import require_memory
from tests import on_tpu
from tests.test_zero import OPTIMIZERS, SIZES, losses, quick_compilation, train_step
from tests.zero_steps import step_of

pytestmark = [
    pytest.mark.mixed_dtypes,
    pytest.mark.promotes_ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

__all__ = ["quick_compilation"]
LAYERS, MODEL, HIDDEN = 24, 64, 256
STACKED = {"up": (LAYERS, MODEL, HIDDEN), "down": (LAYERS, HIDDEN, MODEL)}
BOTH = ("optimizer", "parameters")


def stacked_step(tx, dtype=jnp.float32):
    def loss(params, x_BM):
        def layer(h_BM, w):
            up, down = w["up"].astype(dtype), w["down"].astype(dtype)
            return h_BM + jnp.tanh(h_BM @ up) @ down, None

        h_BM = jax.lax.scan(jax.checkpoint(layer), x_BM.astype(dtype), params)[0]
        return jnp.mean((h_BM.astype(jnp.float32) - 1) ** 2)

    return step_of(loss, tx)


def adamw():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def planned(zero, devices=8):
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    tx = adamw()
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in STACKED.items()}
    args = (params, jax.eval_shape(tx.init, params)), jax.ShapeDtypeStruct((512, MODEL), "float32")
    how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0}
    step = sx.shard_jit(stacked_step(tx), transforms=[zero], **how)
    return step.plan(*args), sx.abstract_state(step, *args)


@pytest.mark.quick
@pytest.mark.parametrize("stage", [1, 3])
def test_peak_falls_by_what_moved(stage):
    without, _ = planned(Zero("data", stage))
    before = without.memory()
    assert before.host == 0
    for offload in ("optimizer", BOTH):
        zero = Zero("data", stage, offload=offload)
        plan, resting = planned(zero)
        memory, moved = plan.memory(), sum(zero.resident(plan).hosted.values())
        assert moved == sum(
            place.aval.size * 4 // place.shards
            for place in plan.arguments()
            if place.at_host and place.aval.shape
        )
        assert -0.02 * moved <= moved - (before.peak - memory.peak) <= 0.02 * moved
        assert sum(memory.hosted.values()) == moved <= memory.host
        assert plan.comm_bytes == without.comm_bytes
        parameters = sum(x.size * 4 for x in jax.tree.leaves(resting[0])) // (1 if stage == 1 else 8)
        again = 2 * parameters if offload is BOTH else 0  # both passes and the update read them
        assert 2 * moved <= 16e9 * plan.estimate("v5p").host <= 1.001 * (2 * moved + again)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(resting[0])}
        assert kinds == ({"pinned_host"} if offload is BOTH else {None, "device"} & kinds)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(resting[1]) if x.shape} == {"pinned_host"}
        text = str(plan)
        assert "in the host's memory" in text and "at the host" in text


def run(zero, mesh, dtype=jnp.float32, placed=False):
    tx, rng = optax.adamw(1e-2), np.random.default_rng(0)
    shapes = {"up": (4, 24, 36), "down": (4, 36, 24)}
    params = {name: np.float32(0.1 * rng.normal(size=shape)) for name, shape in shapes.items()}
    axes = ("data", "fsdp") if "fsdp" in mesh.shape else "data"
    specs = {"up": P(None, None, "model"), "down": P(None, "model")} if "model" in mesh.shape else None
    how = {"mesh": mesh, "in_shardings": ((specs, None), P(axes)), "donate_argnums": 0}
    step = sx.shard_jit(stacked_step(tx, dtype), transforms=[zero], **how)
    state = params, jax.jit(tx.init)(params)
    xs = [np.float32(rng.normal(size=(400, 24))) for _ in range(3)]
    if placed:
        state = jax.device_put(
            state, jax.tree.map(lambda x: x.sharding, sx.abstract_state(step, state, xs[0]))
        )
    found = []
    for x in xs:
        state, loss = step(state, x)
        found.append(float(loss))
    return state, found


@pytest.mark.once
@pytest.mark.parametrize(
    "stage, offload, update_on, axes, dtype, placed",
    [
        pytest.param(1, "optimizer", "host", {"data": 4}, jnp.float32, True, marks=pytest.mark.slow),
        (2, BOTH, "device", {"data": 2, "fsdp": 2, "model": 2}, jnp.float32, False),
        pytest.param(3, BOTH, "device", {"data": 4, "model": 2}, jnp.bfloat16, True, marks=pytest.mark.slow),
        (3, BOTH, "host", {"data": 8}, jnp.bfloat16, True),
    ],
)
def test_results_are_equal(stage, offload, update_on, axes, dtype, placed, quick_compilation):
    mesh, axis = make_mesh(axes), ("data", "fsdp") if "fsdp" in axes else "data"
    plain, wanted = run(Zero(axis, stage), mesh, dtype)
    state, found = run(Zero(axis, stage, offload=offload, update_on=update_on), mesh, dtype, placed)
    assert found == wanted
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.sharding.shard_shape(x.shape) == y.sharding.shard_shape(y.shape)
    at_host = jax.tree.map(lambda x: x.sharding.memory_kind == "pinned_host", state)
    assert all(jax.tree.leaves(at_host[0])) == (offload is BOTH)
    assert all(
        h for h, x in zip(jax.tree.leaves(at_host[1]), jax.tree.leaves(state[1]), strict=True) if x.ndim
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_that_offloads(stage):
    """`sx.zero.shard` with offload: state is made at the host, comes and goes, and the step is compiled once."""
    mesh, rng = make_mesh({"data": 8}), np.random.default_rng(0)
    params = {
        name: np.float32(0.1 * rng.normal(size=s))
        for name, s in {"up": (4, 24, 40), "down": (4, 40, 24)}.items()
    }
    xs = [np.float32(rng.normal(size=(40, 24))) for _ in range(3)]

    def trained(offload):
        tx = sx.zero.shard(adamw(), "data", stage, offload=offload)
        with jax.set_mesh(mesh):
            state: Any = params, tx.init(params)
        step = sx.shard_jit(stacked_step(tx), mesh=mesh, in_shardings=(None, P("data")), donate_argnums=0)
        kinds, found = [], []
        for x in xs:
            kinds.append([x.sharding.memory_kind for x in jax.tree.leaves(state[1])])
            state, loss = step(state, x)
            found.append(float(loss))
        return state, found, kinds, step.plan(state, xs[0]).memory()

    (plain, wanted, _, before), (state, found, kinds, after) = trained(()), trained("optimizer")
    assert found == wanted
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(x, y)
    moments = [x.ndim > 0 for x in jax.tree.leaves(state[1])]
    assert [[kind == "pinned_host" for kind in each] for each in kinds] == [moments] * 3
    moved = sum(x.nbytes // 8 for x in jax.tree.leaves(state[1]) if x.ndim)
    assert before.peak - after.peak >= 0.98 * moved


def test_under_an_outer_jit():
    """With donation, which the outer one sees to, as often as it is called; results are in the host's memory."""
    mesh, tx, x_BM = make_mesh({"data": 4}), optax.adam(1e-2), np.ones((16, 8), "float32")
    params = {name: np.full(s, 0.1, "float32") for name, s in {"up": (2, 8, 16), "down": (2, 16, 8)}.items()}

    def trained(jit, offload):
        how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0}
        step = jit(sx.shard_jit(stacked_step(tx), transforms=[Zero("data", offload=offload)], **how))
        state, found = (params, jax.jit(tx.init)(params)), []
        for _ in range(3):
            state, loss = step(state, x_BM)
            found.append(float(loss))
        return state, found

    outer = lambda step: jax.jit(step, donate_argnums=0)  # noqa: E731
    (_, wanted), (state, found) = trained(lambda step: step, ()), trained(outer, "optimizer")
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(state[1]) if x.ndim]
    assert kinds == ["pinned_host"] * 4


def test_the_host_computes_the_update():
    """In the program for XLA, all but what the device needs of it: products, not the roots that Adam takes."""
    mesh, tx = make_mesh({"data": 4}), optax.adamw(1e-2)
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in STACKED.items()}
    args = (params, jax.eval_shape(tx.init, params)), jax.ShapeDtypeStruct((512, MODEL), "float32")
    how = {"mesh": mesh, "in_shardings": (None, P("data"))}
    step = sx.shard_jit(stacked_step(tx), transforms=[Zero(offload="optimizer", update_on="host")], **how)
    lines = step.lower(*args).as_text().splitlines()
    on_host = [line for line in lines if "_xla_compute_type" in line]
    assert sum("sqrt" in line for line in on_host) == sum("sqrt" in line for line in lines) > 0
    assert not any("dot_general" in line for line in on_host)


AS_WRITTEN = {"xla_disable_hlo_passes": "algsimp", "xla_cpu_max_isa": "SSE4_2"}
"""XLA folds a gradient's constant factors into its update, and adds its product without rounding it (FMA), where
no barrier stands between. With both off, an update gives the same bits wherever it comes from.
"""


@pytest.mark.once
@pytest.mark.parametrize(
    "name",
    [
        "masked",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("adafactor", "muon", "accumulating", "injected")),
    ],
)
def test_any_optimizer(name, quick_compilation):
    """Norms of layers, branches, factored moments, matrices; sizes that nothing divides. (On a chip on which all
    is split one program is found for both: on others much of so small a step costs the same either way.)
    """
    tx, mesh = OPTIMIZERS[name](), make_mesh({"data": 4})
    how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0}
    how |= {"compiler_options": AS_WRITTEN, "options": sx.Options(chip="slow")}
    (state, found), (plain, wanted) = (
        losses(sx.shard_jit(train_step(tx), transforms=[zero], **how), tx, 3)
        for zero in (Zero("data", 3, offload=BOTH), Zero("data", 3))
    )
    assert found == wanted
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(x, y)
    assert {name for name, x in state[0].items() if x.sharding.memory_kind == "pinned_host"} == {
        name for name, shape in SIZES.items() if shape
    }


def odd_step(zero, layers=20):
    """A step of sizes that nothing divides but its number of layers, and a state of it."""
    mesh, tx = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)), adamw()
    shapes = {"up": (layers, 63, 251), "down": (layers, 251, 63)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    state = sx.zero.init(tx, params, mesh, "data", zero.stage)
    how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0, "transforms": [zero]}
    step = sx.shard_jit(stacked_step(tx), **how)
    return step, state, (params, jax.eval_shape(tx.init, params)), jax.ShapeDtypeStruct((512, 63), "float32")


@pytest.mark.quick
@pytest.mark.parametrize("layers, offload", [(20, "optimizer"), (20, BOTH), (24, "optimizer"), (24, BOTH)])
def test_padded(layers, offload):
    """What rests padded comes and goes so: the peak falls by all that moved, also where the layers alone could be
    split.
    """
    plans = []
    for zero in Zero("data", 3), Zero("data", 3, offload=offload):
        step, state, _, x_BM = odd_step(zero, layers)
        plans.append(step.plan(state, x_BM))
    before, after = plans
    moved = sum(zero.resident(after).hosted.values())
    assert before.memory().peak - after.memory().peak >= 0.98 * moved > 0
    assert before.comm_bytes >= after.comm_bytes
    assert len(state[0]["up"].value.shape) == 3 and state[0]["up"].value.shape[0] == layers


def unrolled(zero, mesh, layers, model, hidden, make):
    """A step of unrolled layers, with what it takes: `make` an array of each shape."""
    tx, one = adamw(), {"up": (model, hidden), "down": (hidden, model)}
    params = [{name: make(shape) for name, shape in one.items()} for _ in range(layers)]
    how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0, "transforms": [zero]}
    step = sx.shard_jit(unrolled_step(tx), **how)
    init = (
        tx.init if isinstance(params[0]["up"], np.ndarray) else lambda params: jax.eval_shape(tx.init, params)
    )
    return step, (params, init(params))


@pytest.mark.quick
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_of_unrolled_layers_come_one_layer_ahead(stage):
    """The peak falls by what moved, but for the layer ahead, in bfloat16."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x_BM, plans = jax.ShapeDtypeStruct((4096, 64), "float32"), []
    for zero in Zero("data", stage), Zero("data", stage, offload=BOTH):
        make = lambda shape: jax.ShapeDtypeStruct(shape, "float32")  # noqa: E731
        step, state = unrolled(zero, mesh, 24, 64, 256, make)
        plans.append(step.plan(state, x_BM))
    before, after = plans
    moved = sum(zero.resident(after).hosted.values())
    assert before.memory().peak - after.memory().peak >= 0.98 * moved > 0
    assert after.comm_bytes == before.comm_bytes
    parameters, moments = after.memory().hosted.values()
    assert after.estimate("v5p").host <= 1.01 * (4 * parameters + 2 * moments) / 16e9


@pytest.mark.parametrize("stage", [1, 3])
def test_unrolled_layers_give_the_same(stage):
    mesh, rng = make_mesh({"data": 8}), np.random.default_rng(0)
    x_BM, found = np.float32(rng.normal(size=(64, 24))), []
    for zero in Zero("data", stage), Zero("data", stage, offload=BOTH):
        rng = np.random.default_rng(1)
        make = lambda shape, rng=rng: np.float32(0.1 * rng.normal(size=shape))  # noqa: E731
        step, state = unrolled(zero, mesh, 3, 24, 40, make)
        losses = []
        for _ in range(3):
            state, loss = step(state, x_BM)
            losses.append(float(loss))
        found.append((losses, state))
    assert found[0][0] == found[1][0]
    for x, y in zip(*(jax.tree.leaves(state) for _, state in found), strict=True):
        np.testing.assert_array_equal(x, y)


def microbatched_step(tx):
    """A loop that adds up gradients of microbatches; each looks a table up, and goes over layers."""

    def loss(params, t_B):
        def layer(h_BM, w):
            return h_BM + jnp.tanh(h_BM @ w["up"]) @ w["down"], None

        h_BM = params["table"].astype("bfloat16")[t_B].astype("float32")
        layers = {name: params[name] for name in ("up", "down")}
        return jnp.mean((jax.lax.scan(jax.checkpoint(layer), h_BM, layers)[0] - 1) ** 2)

    def step(state, t_KB):
        params, opt_state = state

        def add(total, t_B):
            value, grads = jax.value_and_grad(loss)(params, t_B)
            return jax.tree.map(jnp.add, total, (grads, value)), None

        zeros = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
        grads, value = jax.lax.scan(add, zeros, t_KB)[0]
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


MICROBATCHED = {"even": (24, 512, 2048), "padded": (20, 509, 2039), "by rows": (24, 509, 2039)}


@pytest.mark.quick
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("sizes", ["even", "padded"])
def test_each_microbatch_brings_its_layers(stage, sizes):
    layers, model, hidden = MICROBATCHED[sizes]
    mesh, tx, plans = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)), adamw(), []
    shapes = {"up": (layers, model, hidden), "down": (layers, hidden, model), "table": (4099, model)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    state = params, jax.eval_shape(tx.init, params)
    if sizes == "padded":
        state = sx.zero.init(tx, params, mesh, "data", stage, bucket=0)
    for zero in Zero("data", stage), Zero("data", stage, offload=BOTH):
        how = {"mesh": mesh, "in_shardings": (None, P(None, "data")), "donate_argnums": 0}
        step = sx.shard_jit(microbatched_step(tx), transforms=[zero], **how)
        plans.append(step.plan(state, jax.ShapeDtypeStruct((4, 512), "int32")))
    before, after = plans
    moved = sum(zero.resident(after).hosted.values())
    assert before.memory().peak - after.memory().peak >= 0.98 * moved > 0


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("sizes", MICROBATCHED)
def test_microbatches_give_the_same(stage, sizes, quick_compilation):
    """To the bit, where what comes from the host is split as what rests on the device is: not over idle axes, over which only
    that is which has no host in it."""
    layers, model, hidden = MICROBATCHED[sizes][0] // 3, *(n // 32 for n in MICROBATCHED[sizes][1:])
    mesh, tx = make_mesh({"data": 4, "model": 2}), optax.adamw(1e-2)
    shapes = {"up": (layers, model, hidden), "down": (layers, hidden, model), "table": (251, model)}
    rng = np.random.default_rng(0)
    params = {name: 0.1 * rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    t_NKB, found = rng.integers(0, 251, (2, 3, 32)).astype("int32"), []
    for offload in (), BOTH:
        state: Any = (params, jax.jit(tx.init)(params))
        if sizes == "padded":
            state = sx.zero.init(tx, params, mesh, "data", stage, bucket=0, offload=offload)
        how = {"mesh": mesh, "in_shardings": (None, P(None, "data")), "donate_argnums": 0}
        how |= {"compiler_options": AS_WRITTEN, "options": sx.Options(chip="slow", idle_axes=False)}
        step = sx.shard_jit(microbatched_step(tx), transforms=[Zero("data", stage, offload=offload)], **how)
        for t_KB in t_NKB:
            state, value = step(state, t_KB)
        found.append((value, sx.zero.unpad(jax.device_get(state))))
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.quick
@pytest.mark.parametrize("stage, offload", [(1, "optimizer"), (3, BOTH)])
def test_buckets_cost_nothing_at_the_peak(stage, offload):
    """Biases and scales in a bucket come whole while it is updated, when less is in use than before."""
    mesh, tx = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)), adamw()
    shapes = {"up": (12, 101, 509), "down": (12, 509, 101), "bias": (12, 509), "scale": (12, 101)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}

    def loss(params, x_BM):
        def layer(h, w):
            return h + jnp.tanh((h * w["scale"]) @ w["up"] + w["bias"]) @ w["down"], None

        return ((jax.lax.scan(jax.checkpoint(layer), x_BM, params)[0] - 1) ** 2).mean()

    state, peaks = sx.zero.init(tx, params, mesh, "data", stage), []
    assert state[1][1][0].mu.buckets
    for zero in Zero("data", stage), Zero("data", stage, offload=offload):
        how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0, "transforms": [zero]}
        step = sx.shard_jit(step_of(loss, tx), **how)
        plan = step.plan(state, jax.ShapeDtypeStruct((4096, 101), "float32"))
        peaks.append(plan.memory().peak)
    moved = sum(zero.resident(plan).hosted.values())
    assert peaks[0] - peaks[1] >= 0.98 * moved > 0


@pytest.mark.quick
def test_nothing_is_sent_in_the_memory_of_the_host():
    """Parameters that the axis divides along the layers alone: each device brings its own."""
    zero = Zero("data", 3, offload=BOTH)
    step, _, state, x_BM = odd_step(zero, layers=24)
    plan = step.plan(state, x_BM)
    assert plan.in_shardings[0][0]["up"].spec == P("data", None, None)
    assert plan.memory().host == pytest.approx(sum(zero.resident(plan).hosted.values()), rel=0.05)


@pytest.mark.parametrize("update_on", ["device", "host"])
@pytest.mark.parametrize("stage, offload", [(1, "optimizer"), (2, BOTH), (3, BOTH)])
def test_made_at_host(stage, offload, update_on):
    """A state of `init` is where the step takes it, and the step is compiled once."""
    mesh, tx = make_mesh({"data": 4}), optax.adam(1e-2)
    params = {name: jnp.full(shape, 0.1, "float32") for name, shape in {"w": (2, 7, 9), "b": (2, 9)}.items()}
    state = sx.zero.init(tx, params, mesh, "data", stage, bucket=0, offload=offload)

    def loss(params, x_BM):
        layer = lambda h, w: (jnp.tanh(h @ w["w"] + w["b"])[:, :7], None)  # noqa: E731
        return (jax.lax.scan(layer, x_BM, params)[0] ** 2).mean()

    how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0}
    step = sx.shard_jit(
        step_of(loss, tx), transforms=[Zero("data", stage, offload=offload, update_on=update_on)], **how
    )
    x_BM = np.ones((8, 7), "float32")
    rests = sx.abstract_state(step, jax.eval_shape(lambda: state), x_BM)
    for x, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(rests), strict=True):
        assert x.sharding == wanted.sharding, (x.shape, x.sharding, wanted.sharding)
    assert "pinned_host" in {x.sharding.memory_kind for x in jax.tree.leaves(state)}
    plain, plain_loss = jax.jit(step_of(loss, tx))((params, tx.init(params)), x_BM)
    state, value = step(state, x_BM)
    np.testing.assert_allclose(value, plain_loss, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(sx.zero.unpad(state)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("update_on", ["device", "host"])
@pytest.mark.parametrize("model, hidden, rows", [(22, 18, 22), (21, 42, 42)])
def test_nothing_is_resharded_at_the_host(model, hidden, rows, update_on, quick_compilation):
    """Another axis splits a dim of a parameter whose size the program pads further where the batch has it: the
    parameter is brought first.
    """
    mesh, tx, rng = make_mesh({"data": 4, "model": 2}), optax.adamw(1e-2), np.random.default_rng(0)
    shapes = {"up": (4, model, hidden), "down": (4, hidden, model), "out": (model, hidden)}
    params = {name: np.float32(0.1 * rng.normal(size=shape)) for name, shape in shapes.items()}
    specs = {"up": P(None, "model"), "down": P(None, None, "model"), "out": P("model")}
    x_BM, found = np.float32(rng.normal(size=(rows, model))), []

    def loss(params, x_BM):
        layer = lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None)  # noqa: E731
        stack = {name: params[name] for name in ("up", "down")}
        return ((jax.lax.scan(layer, x_BM, stack)[0] @ params["out"] - 1) ** 2).mean()

    for offload in (), BOTH:
        how = {"mesh": mesh, "in_shardings": ((specs, None), P(("model", "data"))), "donate_argnums": 0}
        zero = Zero("data", 3, offload=offload, update_on=update_on if offload else "device")
        step = sx.shard_jit(step_of(loss, tx), transforms=[zero], **how)
        state = sx.zero.init(tx, params, mesh, "data", 3, requested=specs, bucket=0, offload=offload)
        for _ in range(2):
            state, value = step(state, x_BM)
            found.append(float(value))
    np.testing.assert_allclose(found[2:], found[:2], rtol=1e-6)
    assert "pinned_host" in {x.sharding.memory_kind for x in jax.tree.leaves(state)}


@pytest.mark.quick
def test_bad_input():
    with pytest.raises(ValueError, match="offload of Zero is 'moments', .*: give 'optimizer', 'parameters'"):
        Zero(offload="moments")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"offload of Zero is \['optimizer'\], of type list: give"):
        Zero(offload=["optimizer"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="update_on of Zero is 'tpu'"):
        Zero(offload="optimizer", update_on="tpu")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="the host updates what rests in its memory, so give offload='optimizer'"
    ):
        Zero(offload="parameters", update_on="host")
    with pytest.raises(
        ValueError, match="cannot bring parameters to where the loss reads them: give 'optimizer', or"
    ):
        sx.zero.shard(optax.adam(1e-3), offload=BOTH)  # type: ignore[arg-type]
    device = SimpleNamespace(addressable_memories=lambda: [SimpleNamespace(kind="device")], device_kind="toy")

    class Toy(Mesh):
        local_devices = [device]

    mesh = object.__new__(Toy)
    with pytest.raises(
        ValueError, match=r"offload of Zero.*\(toy\) have no memory of kind 'pinned_host', only 'device'"
    ):
        require_memory(mesh, "offload of Zero is 'optimizer'")


TPU_MODELS = {  # layers, model, hidden; arrays of a shard do not fit into VMEM, but for the small one
    "large": (24, 2048, 8192),
    "small": (24, 512, 2048),
    "padded": (20, 2043, 8181),
    "unrolled": (8, 2048, 8192),
    "deep": (16, 2048, 8192),  # unrolled too
    "in tiles, padded": (24, 2043, 8181),  # of layers with others
    "microbatched": (24, 2048, 8192),  # and a table
    "on the host": (24, 2048, 8192),
    "unrolled on the host": (8, 2048, 8192),
    "padded on the host": (20, 2043, 8181),
}
WAYS = [(1, ()), (1, "optimizer"), (1, BOTH), (3, ()), (3, "optimizer"), (3, BOTH)]
WAYS_OF = {
    "deep": WAYS[3:],
    "in tiles, padded": [(1, ()), (1, BOTH), (3, ()), (3, BOTH)],
    "microbatched": [(1, ()), (1, BOTH), (3, ()), (3, BOTH)],
    "on the host": [(1, "optimizer"), (3, "optimizer"), (3, BOTH)],
    "unrolled on the host": [(3, "optimizer")],
    "padded on the host": [(3, "optimizer"), (3, BOTH)],
}
TILED = [
    (2048, 8192),
    (2043, 8181),
    (50257, 96),
    (24, 3, 1000),
    (12, 1019, 512),
    (64, 4096, 64),
    (251, 8),
    (3, 5, 7),
]


@pytest.fixture(scope="module")
def compiled_for_tpu():
    """What `python -m tests.test_zero_offload` finds."""
    return on_tpu.found("tests.test_zero_offload", timeout=1800)


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "model, stage, offload",
    [
        *((m, stage, "optimizer") for m in ("large", "small", "padded", "unrolled") for stage in (1, 3)),
        *((m, stage, "both") for m in ("large", "small", "padded", "unrolled") for stage in (1, 3)),
        *((m, stage, "both") for m in ("in tiles, padded", "microbatched") for stage in (1, 3)),
        *(("deep", 3, offload) for offload in ("optimizer", "both")),
        *((m, 3, "both") for m in ("on the host", "padded on the host")),
        *((m, 3, "optimizer") for m in ("on the host", "padded on the host", "unrolled on the host")),
        ("on the host", 1, "optimizer"),
    ],
)
def test_bytes_in_the_program_for_tpu(compiled_for_tpu, model, stage, offload):
    """As XLA allocates them: the device holds less by what moved, and the host holds it once, unless it
    computes the update.
    """
    name = "large" if model == "on the host" else model.removesuffix(" on the host")
    before, after = compiled_for_tpu[name][f"{stage}"], compiled_for_tpu[model][f"{stage} {offload}"]
    assert before["device"] - after["device"] >= 0.98 * after["host"] > 0
    assert after["temporaries at the host"] == 0 or "on the host" in model


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize("model, offload", [("large", "both"), ("deep", "optimizer"), ("deep", "both")])
def test_bytes_in_use_at_once(compiled_for_tpu, model, offload):
    """Without the gaps that XLA leaves between buffers."""
    before, after = compiled_for_tpu[model]["3"], compiled_for_tpu[model][f"3 {offload}"]
    assert before["in use"] - after["in use"] >= 0.98 * after["host"] > 0
    assert after["temporaries at the host"] == 0


@pytest.mark.tpu
@pytest.mark.slow
def test_tiles_of_tpus(compiled_for_tpu):
    """An array lies in the program for TPU as `tiled_dims` has it."""
    found = [(order[1] if len(order) > 1 else -1, order[0]) for order in compiled_for_tpu["layouts"]]
    assert found == [tiled_dims(shape) for shape in TILED]


def unrolled_step(tx):
    def loss(params, x_BM):
        h_BM = x_BM.astype(jnp.bfloat16)
        for w in params:
            layer = lambda h, w: h + jnp.tanh(h @ w["up"].astype(h.dtype)) @ w["down"].astype(h.dtype)  # noqa: E731
            h_BM = jax.checkpoint(layer)(h_BM, w)
        return jnp.mean((h_BM.astype(jnp.float32) - 1) ** 2)

    return step_of(loss, tx)


def compiled(mesh, name: str, stage: int, offload) -> dict[str, int]:
    """Bytes of a model's program."""
    layers, model, hidden = TPU_MODELS[name]
    tx, on = adamw(), "host" if "on the host" in name else "device"
    shapes = {"up": (layers, model, hidden), "down": (layers, hidden, model)}
    params = {key: jax.ShapeDtypeStruct(shape, "float32") for key, shape in shapes.items()}
    step, x_BM = stacked_step(tx), jax.ShapeDtypeStruct((1024, model), "float32")
    if "unrolled" in name or name == "deep":
        one = {key: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for key, x in params.items()}
        params, step, x_BM = (
            [one] * layers,
            unrolled_step(tx),
            jax.ShapeDtypeStruct((32768, model), "float32"),
        )
    batch = P("data")
    if name == "microbatched":
        params |= {"table": jax.ShapeDtypeStruct((50304, model), "float32")}
        step, x_BM, batch = microbatched_step(tx), jax.ShapeDtypeStruct((4, 8192), "int32"), P(None, "data")
    state = params, jax.eval_shape(tx.init, params)
    if "padded" in name:
        state = sx.zero.init(tx, params, mesh, "data", stage)
    how = {"mesh": mesh, "in_shardings": (None, batch), "donate_argnums": 0}
    step = sx.shard_jit(step, transforms=[Zero("data", stage, offload=offload, update_on=on)], **how)
    return on_tpu.bytes_of(step, state, x_BM)


def layouts(mesh) -> list[list[int]]:
    """The dims of arrays as they lie in a program, the minor-most first."""
    rests = jax.sharding.NamedSharding(mesh, P())
    args = [jax.ShapeDtypeStruct(shape, "float32", sharding=rests) for shape in TILED]
    text = jax.jit(lambda *xs: [x.sum() for x in xs]).lower(*args).compile().as_text() or ""
    entry = text.partition("entry_computation_layout={(")[2].partition(")->")[0]
    return [[int(dim) for dim in order.split(",")] for order in re.findall(r"\]\{([\d,]+):", entry)]


def main() -> None:
    """Prints bytes of programs for a TPU v5e-8, by model, ZeRO stage and what is offloaded."""
    mesh = on_tpu.mesh(data=8)
    found: dict[str, Any] = {"layouts": layouts(mesh)}
    for model in TPU_MODELS:
        for stage, offload in WAYS_OF.get(model, WAYS):
            name = f"{stage} {'both' if offload is BOTH else offload or ''}".strip()
            its = found.setdefault(model, {})[name] = compiled(mesh, model, stage, offload)
            print(
                f"{model:<22}{name:<12}",
                *(f"{kind} {n / 2**20:.1f} MiB " for kind, n in its.items()),
                flush=True,
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
