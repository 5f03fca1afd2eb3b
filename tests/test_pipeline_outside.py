"""What stands in front of the layers, outside of the pipeline: `sx.pipeline.outside`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.pipeline.call import Call
from tests.test_pipeline import mesh_of, rand

B, L, M, V = 24, 4, 16, 12
AXES = (AxisType.Auto,) * 2


def layer(x_BM, w):
    return x_BM + jnp.tanh(x_BM @ w), x_BM.mean(0)


def loss_with(outside, params, x_B, y_BM):
    """Tied ends, the front with weights of its own and a result; a value of the front that the end reads."""

    def front(params, x_B):
        h_BM = params["ends"].astype("float32")[x_B]
        return jnp.tanh(h_BM @ params["front"]), h_BM.sum()

    x_BM, total = outside(front)(params, x_B)
    x_BM, means = lax.scan(layer, x_BM, params["layers"])
    return ((x_BM @ params["ends"].T @ params["ends"] - y_BM) ** 2).mean() + 1e-3 * total, (means, x_BM)


def arguments():
    params = {"ends": rand(0, V, M), "front": rand(1, M, M), "layers": rand(2, L, M, M)}
    x_B = jnp.asarray(np.random.RandomState(3).randint(0, V, B), "int32")
    return params, x_B, rand(4, B, M)


F32 = partial(jax.ShapeDtypeStruct, dtype="float32")
TYPES = (
    {"ends": F32((V, M)), "front": F32((M, M)), "layers": F32((L, M, M))},
    jax.ShapeDtypeStruct((B,), "int32"),
    F32((B, M)),
)


def plain(x):
    return x


def specs(params):
    return {name: P("stage") if name == "layers" else P() for name in params}


def grad_of(outside, **how):
    def loss(params, x_B, y_BM):
        return loss_with(outside, params, x_B, y_BM)

    return sx.pipeline.value_and_grad(loss, **{"has_aux": True, "microbatches": 6, **how})


def close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, wanted)


@pytest.mark.parametrize("schedule", ["eager-1f1b", pytest.param("zb-h1", marks=pytest.mark.slow)])
def test_as_on_one_device(schedule):
    """Six microbatches, which four stages do not divide; loss, gradients and rows of results, two calls."""
    args = arguments()
    mesh = mesh_of(stage=4, data=2)
    step = sx.shard_jit(
        grad_of(sx.pipeline.outside, schedule=schedule),
        mesh=mesh,
        in_shardings=(specs(args[0]), P("data"), P("data")),
    )
    rows = [jnp.swapaxes(x.reshape(-1, 6, *x.shape[1:]), 0, 1) for x in args[1:]]

    @jax.jit
    def wanted(params):
        one = jax.value_and_grad(lambda p, *batch: loss_with(plain, p, *batch), has_aux=True)
        (value, aux), grads = lax.map(lambda batch: one(params, *batch), rows)
        return (value.mean(), aux), jax.tree.map(lambda x: x.mean(0), grads)

    for scale in 1.0, 0.5:
        params = jax.tree.map(lambda x, scale=scale: scale * x, args[0])
        close(step(params, *args[1:]), wanted(params))


def embedded_loss(params, x_B, y_BM):
    front = sx.pipeline.outside(lambda params, x_B: jnp.tanh(params["ends"][x_B] @ params["front"]))
    x_BM, _ = lax.scan(layer, front(params, x_B), params["layers"])
    return ((x_BM - y_BM) ** 2).mean()


def plain_step(params, x_B, y_BM):
    value, grads = jax.value_and_grad(embedded_loss)(params, x_B, y_BM)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


@pytest.mark.quick
@pytest.mark.parametrize("form", ["value_and_grad", "Pipeline"])
def test_what_enters_is_gathered_once_and_its_cotangents_scattered(form):
    if form == "Pipeline":
        plan = plan_of(plain_step, transforms=[sx.pipeline.Pipeline(microbatches=4)], donate_argnums=0)
    else:
        plan = plan_of(sx.pipeline.value_and_grad(embedded_loss, microbatches=4))
    found = [(c.kind, c.trips) for c in plan.collectives if c.shape[-2:] == (6, M)]
    assert sorted(each for each in found if each[0] != "ppermute") == [
        ("all_gather", 1),
        ("reduce_scatter", 1),
    ]


@pytest.mark.quick
def test_forward_alone():
    def scores(params, x_B):
        x_BM = sx.pipeline.outside(lambda params, x_B: params["ends"][x_B])(params, x_B)
        return lax.scan(lambda x, w: (layer(x, w)[0], None), x_BM, params["layers"])[0]

    step = sx.pipeline.apply(scores, microbatches=4)
    mesh = AbstractMesh((4, 2), ("stage", "data"), axis_types=AXES)
    jitted = sx.shard_jit(step, mesh=mesh, in_shardings=(specs(TYPES[0]), P("data")))
    sends = [c for c in jitted.plan(*TYPES[:2]).collectives if c.kind == "all_gather"]
    assert [(c.axes, c.shape[-2:]) for c in sends if c.nbytes > 256] == [(("stage",), (3, M))]


def plan_of(function, **how):
    mesh = AbstractMesh((4,), ("stage",), axis_types=AXES[:1])
    return sx.shard_jit(function, mesh=mesh, in_shardings=(specs(TYPES[0]), P(), P()), **how).plan(*TYPES)


@pytest.mark.quick
def test_behind_layers_is_an_error():
    def loss(params, x_B, y_BM):
        x_BM, _ = lax.scan(layer, params["ends"][x_B], params["layers"])
        return sx.pipeline.outside(lambda x_BM: ((x_BM - y_BM) ** 2).mean())(x_BM)

    with pytest.raises(ValueError, match="outside at .*reads what .*computes, which runs on the stages"):
        plan_of(sx.pipeline.value_and_grad(loss, microbatches=4))


@pytest.mark.quick
def test_in_a_loop_is_an_error():
    def loss(params, x_B, y_BM):
        inner = sx.pipeline.outside(layer)
        x_BM, _ = lax.scan(inner, params["ends"][x_B], params["layers"])
        return ((x_BM - y_BM) ** 2).mean()

    with pytest.raises(ValueError, match="stands inside a scan.*call it before the loop"):
        plan_of(sx.pipeline.value_and_grad(loss, microbatches=4))


def normalized(x_BM):
    return (x_BM - x_BM.mean(0, keepdims=True)) * lax.rsqrt(x_BM.var(0, keepdims=True) + 1e-5)


def test_statistics_are_those_of_each_microbatch():
    """Two stages compute three microbatches each at once."""

    def loss(outside, params, x_B, y_BM):
        x_BM = outside(lambda params, x_B: normalized(params["ends"][x_B] @ params["front"]))(params, x_B)
        return ((lax.scan(layer, x_BM, params["layers"])[0] - y_BM) ** 2).mean()

    args = arguments()
    grad = sx.pipeline.value_and_grad(partial(loss, sx.pipeline.outside), microbatches=6)
    step = sx.shard_jit(
        grad, mesh=mesh_of(stage=2, data=2), in_shardings=(specs(args[0]), P("data"), P("data"))
    )
    rows = [jnp.swapaxes(x.reshape(-1, 6, *x.shape[1:]), 0, 1) for x in args[1:]]
    one = jax.value_and_grad(partial(loss, plain))
    wanted = jax.jit(lambda p: jax.tree.map(lambda x: x.mean(0), lax.map(lambda b: one(p, *b), rows)))
    close(step(*args), wanted(args[0]))


@pytest.mark.parametrize("microbatches", [4, 6])
def test_random_bits_are_those_of_the_step(microbatches):
    """Of microbatches that are computed at once; stages divide their number, or do not."""

    def loss(outside, params, x_B, y_BM):
        def front(params, x_B):
            x_BM = params["ends"][x_B] @ params["front"]
            return jnp.where(jax.random.bernoulli(jax.random.key(7), 0.5, x_BM.shape), x_BM, 0)

        return ((lax.scan(layer, outside(front)(params, x_B), params["layers"])[0] - y_BM) ** 2).mean()

    args = arguments()
    pipeline = sx.pipeline.Pipeline(microbatches=microbatches)
    stages = {4: 2, 6: 4}[microbatches]
    step = sx.shard_jit(
        jax.value_and_grad(partial(loss, sx.pipeline.outside)),
        mesh=mesh_of(stage=stages, data=2),
        in_shardings=(specs(args[0]), P("data"), P("data")),
        transforms=[pipeline],
    )
    close(step(*args), jax.jit(jax.value_and_grad(partial(loss, plain)))(*args))


@pytest.mark.parametrize("form, microbatches", [("Pipeline", 5), ("value_and_grad", 7)])
def test_a_batch_that_microbatches_do_not_divide(form, microbatches):
    """Of rows that are padded what the front makes is no part of the loss, nor of results of the step."""

    def loss(outside, params, x_B, y_BM):
        value, (_, x_BM) = loss_with(outside, params, x_B, y_BM)
        return (value, x_BM) if form == "Pipeline" else value

    args, grad = arguments(), partial(jax.value_and_grad, has_aux=form == "Pipeline")
    function, transforms = partial(loss, sx.pipeline.outside), []
    if form == "Pipeline":
        function, transforms = grad(function), [sx.pipeline.Pipeline(microbatches=microbatches)]
    else:
        function = sx.pipeline.value_and_grad(function, microbatches=microbatches)
    specs_of = specs(args[0]), P("data"), P("data")
    step = sx.shard_jit(function, mesh=mesh_of(stage=4, data=2), in_shardings=specs_of, transforms=transforms)
    close(step(*args), jax.jit(grad(partial(loss, plain)))(*args))


@pytest.mark.quick
def test_gradients_of_microbatches_at_once_are_added_in_one_product():
    """Of three microbatches on each of two stages, whose gradients would be as large as three tables."""
    mesh = AbstractMesh((2,), ("stage",), axis_types=AXES[:1])
    grad = sx.pipeline.value_and_grad(embedded_loss, microbatches=6)
    plan = sx.shard_jit(grad, mesh=mesh, in_shardings=(specs(TYPES[0]), P(), P())).plan(*TYPES)
    shapes = set(shapes_in(plan.local_jaxpr.jaxpr))
    assert (V, M) in shapes and (3, V, M) not in shapes and (3, M, M) not in shapes


def shapes_in(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars if hasattr(v.aval, "shape"))
        for body in jaxprs_in_params(eqn.params):
            yield from shapes_in(body)


@pytest.mark.quick
def test_auto_counts_what_waits_outside():
    """Labels, what enters and its cotangents, on each of four stages; and its part of what is kept."""
    found = []

    def run(*args):
        call = Call.of(embedded_loss, args, {}, (0,), None, "stage", 4)
        found.append(call.of_gradients("mean", has_aux=False)[0].loop)

    mesh = AbstractMesh((4,), ("stage",), axis_types=AXES[:1])
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(run, *TYPES)
    one, rows = (B // 4) * M * 4, (B // 4) * 4
    kept = [v.aval.size * 4 for v in found[0].outside._kept]
    assert kept and set(kept) == {one}
    assert found[0]._waiting(4) == 3 * one + (sum(kept) + rows) / 4
