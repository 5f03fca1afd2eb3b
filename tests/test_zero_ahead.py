"""Stage 3 that prefetches: a loop gathers the next layer's parameters, and its carry holds one layer's."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh
from shardax.zero import Zero
from shardax.zero.ahead import read_as
from tests.zero_steps import step_of

pytestmark = [
    pytest.mark.mixed_dtypes,
    pytest.mark.promotes_ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

MODEL, HIDDEN, BATCH = 64, 256, 4096


def train_step(tx, remat: bool, dtype=jnp.bfloat16):
    def layer(h_BM, w):
        w = jax.tree.map(lambda x: x.astype(dtype), w)
        h_BM = h_BM + (jnp.tanh(h_BM.astype(dtype) @ w["up"]) @ w["down"]).astype(jnp.float32)
        return h_BM * w["scale"].astype(jnp.float32), None

    def loss(params, x_BM):
        body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        return jnp.mean((jax.lax.scan(body, x_BM, params)[0] - 1) ** 2)

    return step_of(loss, tx)


def state_of(tx, layers: int):
    rng = np.random.default_rng(0)
    shapes = {"up": (layers, MODEL, HIDDEN), "down": (layers, HIDDEN, MODEL), "scale": (layers, MODEL)}
    params = {name: jnp.asarray(0.1 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    params["scale"] += 1
    return params, tx.init(params)


def losses(step, state, count=3):
    rng, found = np.random.default_rng(1), []
    for _ in range(count):
        state, loss = step(state, jnp.asarray(rng.normal(size=(BATCH, MODEL)), jnp.float32))
        found.append(float(loss))
    return found


@pytest.mark.parametrize(
    "layers, remat, dtype, mesh",
    [(4, True, "bfloat16", {"data": 8}), (5, False, "float32", {"data": 4, "model": 2})],
)
def test_losses_are_those_of_one_device(layers, remat, dtype, mesh):
    tx = optax.adamw(1e-2)
    step, devices = train_step(tx, remat, dtype), make_mesh(mesh)
    specs = ({"up": P(None, None, "model"), "down": P(), "scale": P()}, None) if "model" in mesh else None
    how = {
        "mesh": devices,
        "in_shardings": (specs, P("data")),
        "transforms": [Zero("data", 3, prefetch=True)],
    }
    found = losses(sx.shard_jit(step, **how), state_of(tx, layers))
    assert found == pytest.approx(
        losses(jax.jit(step), state_of(tx, layers)), rel=1e-4 if dtype == "bfloat16" else 1e-5
    )


def planned(zero: Zero, layers=6):
    tx = optax.adamw(1e-2)
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    state = jax.eval_shape(lambda: state_of(tx, layers))
    how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0, "transforms": [zero]}
    return sx.shard_jit(train_step(tx, True), **how).plan(
        state, jax.ShapeDtypeStruct((BATCH, MODEL), "float32")
    )


def gathers(plan):
    found = [c for c in plan.collectives if c.kind == "all_gather" and c.operands[0].size > MODEL]
    return Counter((c.trips, str(c.dtype)) for c in found)


@pytest.mark.quick
def test_a_layer_is_gathered_before_each_loop_and_carried_in_the_compute_dtype():
    plain, plan = planned(Zero("data", 3)), planned(Zero("data", 3, prefetch=True))
    assert gathers(plain) == {(6, "bfloat16"): 4}  # two matrices, in two passes
    assert gathers(plan) == {(1, "bfloat16"): 4, (6, "bfloat16"): 4}
    loops = [eqn for eqn in plan.local_jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    for loop in loops:
        carried = Counter(f"{v.aval.dtype}{v.aval.shape}" for v in loop.outvars)
        assert loop.params["unroll"] == 2
        assert carried[f"bfloat16({MODEL}, {HIDDEN})"] == carried[f"bfloat16({HIDDEN}, {MODEL})"] == 1
    layer = 2 * 2 * MODEL * HIDDEN  # bytes, gathered
    assert 0 < plan.memory().peak - plain.memory().peak <= 2 * layer


@pytest.mark.quick
def test_what_all_readers_cast_to():
    def body(w, once, twice, raw):
        inner = jax.jit(lambda x: x.astype(jnp.bfloat16) * 2)
        cast = twice.astype(jnp.bfloat16), twice.astype(jnp.float16)
        return inner(w), once.astype(jnp.bfloat16), cast, raw + 1, raw.astype(jnp.bfloat16)

    jaxpr = jax.make_jaxpr(body)(*[jax.ShapeDtypeStruct((4,), "float32")] * 4).jaxpr
    assert [str(jnp.dtype(read_as(jaxpr, v))) for v in jaxpr.invars] == ["bfloat16"] * 2 + ["float32"] * 2


@pytest.mark.quick
@pytest.mark.parametrize("how", [{"stage": 2}, {"stage": 3, "offload": "parameters"}])
def test_nothing_to_prefetch(how):
    with pytest.raises(
        ValueError, match=r"prefetch of Zero is True, stage \d and offload .*: it gathers ahead"
    ):
        Zero("data", prefetch=True, **how)
