"""Pipelines where Python's integers are int64 and floats may be float64: as the plain step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

B, L, M, V = 8, 8, 4, 11
AXES = (AxisType.Auto,) * 2
PARAMS = {"embed": (V, M), "layers": (L, M, M), "head": (M, V)}
HOW = {"in_shardings": (None, P("data"), P("data"))}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def loss(params, x_B, y_B):
    h_BM = sx.pipeline.outside(lambda params, x_B: params["embed"][x_B])(params, x_B)
    h_BM, _ = lax.scan(lambda h_BM, w_MM: (h_BM + jnp.tanh(h_BM @ w_MM), None), h_BM, params["layers"])
    logits_BV = jax.nn.log_softmax(h_BM @ params["head"])
    return -jnp.take_along_axis(logits_BV, y_B[:, None], -1).mean()


def plain(params, x_B, y_B):
    value, grads = jax.value_and_grad(loss)(params, x_B, y_B)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def pipelined(form: str, mesh, schedule: str):
    how = {"microbatches": 4, "schedule": schedule}
    if form == "Pipeline":
        return sx.shard_jit(plain, mesh=mesh, transforms=[sx.pipeline.Pipeline(**how)], **HOW)
    return sx.shard_jit(sx.pipeline.value_and_grad(loss, **how), mesh=mesh, **HOW)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", ["Pipeline", "value_and_grad"])
@pytest.mark.parametrize("schedule", ["gpipe", "eager-1f1b", "zb-h1", "dualpipev", "auto"])
def test_a_schedule_sends_what_it_sends_otherwise(form, dtype, schedule):
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in PARAMS.items()}
    x_B = jax.ShapeDtypeStruct((B,), "int64")
    mesh = AbstractMesh((4, 2), ("stage", "data"), axis_types=AXES)
    sent = pipelined(form, mesh, schedule).plan(params, x_B, x_B).collectives
    boundaries = {c.dtype for c in sent if c.kind == "ppermute"}
    assert {str(x) for x in boundaries} == {dtype}


@pytest.mark.parametrize("form, dtype", [("Pipeline", "float64"), ("value_and_grad", "float32")])
def test_as_on_one_device(form, dtype):
    random = np.random.RandomState(0)
    params = {name: jnp.asarray(random.randn(*shape) / 2, dtype) for name, shape in PARAMS.items()}
    x_B, y_B = random.randint(0, V, (2, B))
    mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=AXES)
    wanted = jax.jit(plain if form == "Pipeline" else jax.value_and_grad(loss))(params, x_B, y_B)
    got = pipelined(form, mesh, "1f1b")(params, x_B, y_B)
    within = 1e-12 if dtype == "float64" else 1e-5
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_allclose(a, b, rtol=within, atol=within)
