"""The pass by which the host looks up rows of a table that rests there: only these come to the device."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh
from shardax.passes.lookups import is_looked_up
from shardax.passes.moves import brings
from shardax.zero import Zero
from tests import on_tpu
from tests.test_on_host import programs
from tests.test_zero import quick_compilation
from tests.test_zero_offload import AS_WRITTEN
from tests.zero_steps import step_of

pytestmark = [pytest.mark.mixed_dtypes, pytest.mark.promotes_ranks]

__all__ = ["quick_compilation"]
BOTH = ("optimizer", "parameters")
ROWS, MODEL, LAYERS = 509, 24, 2  # a prime: nothing divides the rows


def layers(params, h_BM):
    layer = lambda h, w: (h + jnp.tanh(h @ w.astype(h.dtype)), None)  # noqa: E731
    return lax.scan(layer, h_BM, params["layers"])[0]


def squared(params, h_BM):
    return jnp.mean((layers(params, h_BM).astype("float32") - 1) ** 2)


def looked_up(params, t_B):
    return squared(params, params["table"][t_B])


def cast_before(params, t_B):
    """The table is cast, then looked up."""
    return squared(params, params["table"].astype("bfloat16")[t_B])


def clipped(params, t_B):
    return squared(params, params["table"].at[2 * t_B - ROWS // 2].get(mode="clip"))


def filled(params, t_B):
    """What is out of bounds is no number."""
    h_BM = jnp.take(params["table"], 2 * t_B - ROWS // 2, axis=0)
    return squared(params, jnp.where(jnp.isnan(h_BM), 0.5, h_BM))


def tied(params, t_B):
    """The table makes logits too."""
    logits_BV = layers(params, params["table"][t_B]) @ params["table"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits_BV), t_B[:, None], 1))


def make_params(make):
    return {"table": make((ROWS, MODEL)), "layers": make((LAYERS, MODEL, MODEL))}


def stepping(loss, mesh, zero, tx):
    specs = {"table": P("model"), "layers": P(None, None, "model")} if "model" in mesh.shape else None
    how = {"mesh": mesh, "in_shardings": ((specs, None), P(zero.axis)), "donate_argnums": 0}
    how |= {
        "compiler_options": AS_WRITTEN,
        "options": sx.Options(chip="slow", idle_axes=False),
    }  # all is split as suggested, and so alike, with or without offload
    return sx.shard_jit(step_of(loss, tx), transforms=[zero], **how)


def lookups(jaxpr) -> list[Any]:
    return [eqn for program in programs(jaxpr) for eqn in program.eqns if is_looked_up(eqn)]


def brought(jaxpr) -> list[tuple[int, ...]]:
    """The shapes of what is brought in the program itself, not in loops."""
    return [v.aval.shape for eqn in list(programs(jaxpr))[1].eqns if brings(eqn) for v in eqn.outvars]


@pytest.mark.quick
@pytest.mark.parametrize("loss, whole", [(looked_up, 0), (cast_before, 0), (tied, 1)])
def test_rows_come_to_the_device(loss, whole):
    """The table comes where it makes logits, once for both passes."""
    mesh, tx = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)), optax.adam(1e-2)
    params = make_params(lambda shape: jax.ShapeDtypeStruct(shape, "float32"))
    step = stepping(loss, mesh, Zero("data", 1, offload=BOTH), tx)
    plan = step.plan((params, jax.eval_shape(tx.init, params)), jax.ShapeDtypeStruct((64,), "int32"))
    (eqn,) = lookups(plan.local_jaxpr)
    assert eqn.outvars[0].aval.shape == (8, MODEL) and eqn.invars[0].aval.shape == (ROWS, MODEL)
    assert brought(plan.local_jaxpr).count((8, MODEL)) == 1
    assert brought(plan.local_jaxpr).count((ROWS, MODEL)) == whole


@pytest.mark.quick
def test_a_table_of_fewer_rows_than_are_looked_up_is_brought():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = make_params(lambda shape: jax.ShapeDtypeStruct(shape, "float32"))
    step = sx.shard_jit(
        looked_up, mesh=mesh, transforms=[sx.zero.AtHost("params")], in_shardings=(None, P("data"))
    )
    plan = step.plan(params, jax.ShapeDtypeStruct((8 * 512,), "int32"))
    assert not lookups(plan.local_jaxpr) and brought(plan.local_jaxpr) == [(ROWS, MODEL)]


@pytest.mark.parametrize(
    "loss", [looked_up, cast_before, clipped, filled, tied], ids=lambda loss: loss.__name__
)
@pytest.mark.parametrize(
    "stage, axes", [(1, {"data": 8}), (3, {"data": 4}), (2, {"data": 2, "fsdp": 2, "model": 2})]
)
def test_results_are_equal(loss, stage, axes, quick_compilation):
    mesh, rng, tx = make_mesh(axes), np.random.default_rng(0), optax.adamw(1e-2)
    axis = ("data", "fsdp") if "fsdp" in axes else "data"
    params = make_params(lambda shape: rng.normal(size=shape).astype("float32") * 0.3)
    batches, found = rng.integers(0, ROWS, (3, 32)).astype("int32"), []
    for offload in (), BOTH:
        step = stepping(loss, mesh, Zero(axis, stage, offload=offload), tx)
        state, values = (params, jax.jit(tx.init)(params)), []
        for t_B in batches:
            state, value = step(state, t_B)
            values.append(float(value))
        found.append((values, state))
    np.testing.assert_array_equal(found[1][0], found[0][0])
    for x, y in zip(*(jax.tree.leaves(state) for _, state in found), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("loss", [looked_up, cast_before, clipped, filled], ids=lambda loss: loss.__name__)
def test_inference(loss):
    mesh, rng = make_mesh({"data": 4}), np.random.default_rng(0)
    params = make_params(lambda shape: rng.normal(size=shape).astype("float32"))
    t_B = rng.integers(0, ROWS, 32).astype("int32")
    how = {"mesh": mesh, "in_shardings": (None, P("data"))}
    step = sx.shard_jit(loss, transforms=[sx.zero.AtHost("params")], **how)
    assert lookups(step.plan(params, t_B).local_jaxpr)
    np.testing.assert_allclose(step(params, t_B), sx.shard_jit(loss, **how)(params, t_B), rtol=1e-6)


VOCABULARY, EMBEDDING, HEADS, DEPTH = 50304, 768, 12, 12  # as GPT-2's


@pytest.fixture(scope="module")
def compiled_for_tpu():
    """What `python -m tests.test_lookups` finds."""
    return on_tpu.found("tests.test_lookups")


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["inference", "inference, tied", "stage 1", "stage 1, tied", "stage 3, tied"]
)
def test_bytes_in_the_program_for_tpu(compiled_for_tpu, name):
    """The device holds less by what moved; but for the table, where that is brought for logits of inference.
    (Of stage 3 by what is in use at once: what is allocated has 9 MiB more of gaps then, of 160 that moved.)
    """
    before, after = compiled_for_tpu[name]
    brought = 4 * VOCABULARY * EMBEDDING if name == "inference, tied" else 0
    kind = "in use" if name == "stage 3, tied" else "device"
    assert before[kind] - after[kind] >= 0.98 * (after["host"] - brought) > 0
    assert after["temporaries at the host"] == 0


def transformed(params, t_B):
    """Layers with heads, as those of attention, but for the softmax."""

    def layer(h_BM, w):
        q_BNH = jnp.einsum("bm,mnh->bnh", h_BM, w["q"].astype(h_BM.dtype))
        h_BM = h_BM + jnp.einsum("bnh,nhm->bm", jnp.tanh(q_BNH), w["o"].astype(h_BM.dtype))
        return h_BM + jnp.tanh(h_BM @ w["up"].astype(h_BM.dtype)) @ w["down"].astype(h_BM.dtype), None

    return lax.scan(jax.checkpoint(layer), params["table"][t_B].astype("bfloat16"), params["layers"])[0]


def made_alike(params, t_B):
    return jnp.mean((transformed(params, t_B).astype("float32") - 1) ** 2)


def predicting(params, t_B):
    h_BM = transformed(params, t_B)
    logits_BV = jnp.einsum("bm,vm->bv", h_BM, params["table"].astype(h_BM.dtype)).astype("float32")
    picked_B = jnp.sum(h_BM.astype("float32") * params["table"][t_B], 1)
    return jnp.mean(jax.nn.logsumexp(logits_BV, axis=1) - picked_B)


def main() -> None:
    """Prints the bytes of programs for a TPU v5e-8, 1024 tokens on each device, without offload and with it."""
    mesh, tx, found = on_tpu.mesh(data=8), optax.adamw(1e-2), {}
    shapes = {"up": (EMBEDDING, 4 * EMBEDDING), "down": (4 * EMBEDDING, EMBEDDING)}
    shapes |= {"q": (EMBEDDING, HEADS, 64), "o": (HEADS, 64, EMBEDDING)}
    layers = {name: jax.ShapeDtypeStruct((DEPTH, *shape), "float32") for name, shape in shapes.items()}
    params = {"table": jax.ShapeDtypeStruct((VOCABULARY, EMBEDDING), "float32"), "layers": layers}
    t_B = jax.ShapeDtypeStruct((8 * 1024,), "int32")
    how = {"mesh": mesh, "in_shardings": (None, P("data"))}
    for form, loss in {"": made_alike, ", tied": predicting}.items():
        ways = [[], [sx.zero.AtHost("params")]]
        steps = [sx.shard_jit(loss, transforms=way, **how) for way in ways]
        found[f"inference{form}"] = [on_tpu.bytes_of(step, params, t_B) for step in steps]
        state = params, jax.eval_shape(tx.init, params)
        for stage in 1, 3:
            zeros = [Zero("data", stage, offload=offload) for offload in ((), BOTH)]
            steps = [
                sx.shard_jit(step_of(loss, tx), transforms=[zero], donate_argnums=0, **how) for zero in zeros
            ]
            found[f"stage {stage}{form}"] = [on_tpu.bytes_of(step, state, t_B) for step in steps]
    for name, each in found.items():
        columns = (f"{kind} {' to '.join(f'{x[kind] / 2**20:.1f}' for x in each)} MiB" for kind in each[0])
        print(f"{name:<18}", *columns, sep="   ")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
