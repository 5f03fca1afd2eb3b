"""A step with the transform, and one with the function of its loss: the same program; on shapes."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.explain.reports import reports

pytestmark = pytest.mark.quick

M = 64
MESH = AbstractMesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
F32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")  # noqa: E731
ARGS = {"layers": F32(8, M, M), "head": F32(M, 32)}, F32(128, M), F32(128, 32)


def loss(params, x, y):
    h, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
    return ((h @ params["head"] - y) ** 2).mean()


def both(schedule):
    """The plans of the two forms."""

    def step(grad):
        def run(params, x, y):
            value, grads = grad(params, x, y)
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

        return run

    shardings = {"layers": P("stage"), "head": None}, P("data"), P("data")
    how = {"mesh": MESH, "in_shardings": shardings, "donate_argnums": 0}
    pipeline = sx.pipeline.Pipeline(microbatches=8, schedule=schedule)
    grad = sx.pipeline.value_and_grad(loss, microbatches=8, schedule=schedule)
    return (
        sx.shard_jit(step(grad), **how).plan(*ARGS),
        sx.shard_jit(step(jax.value_and_grad(loss)), transforms=[pipeline], **how).plan(*ARGS),
    )


def primitives(body) -> Counter:
    found = Counter()
    for eqn in getattr(body, "jaxpr", body).eqns:
        found[eqn.primitive.name] += 1
        for inner in jaxprs_in_params(eqn.params):
            found += primitives(inner)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("auto", marks=pytest.mark.once)])
def test_both_forms_make_the_same_program(schedule):
    """What is sent, multiplied and kept; where the loss is scaled alone differs."""
    plans = both(schedule)
    sent = [Counter((c.kind, c.axes, c.shape, c.trips) for c in plan.collectives) for plan in plans]
    assert sent[0] == sent[1] and sum(sent[0].values())
    counted = [primitives(plan.local_jaxpr) for plan in plans]
    for name in ("cond", "dot_general", "dynamic_update_slice", "ppermute", "scan", "tanh", "transpose"):
        assert counted[0][name] == counted[1][name], name
    told = [reports(plan)[0].data for plan in plans]
    for name in ("schedule", "memory"):
        assert told[0][name] == told[1][name]
