"""What a pipeline adds up: only what adds to a sum touches it, and over other axes sums are reduced once."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

pytestmark = pytest.mark.quick

M = 512
PARAMS = {
    "layers": jax.ShapeDtypeStruct((8, M, M), "float32"),
    "head": jax.ShapeDtypeStruct((M, M), "float32"),
}


def mesh_of(**sizes: int):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def loss(params, x_BM, y_BM):
    out_BM, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x_BM, params["layers"])
    return ((out_BM @ params["head"] - y_BM) ** 2).mean()


def descent(gradient):
    def step(params, x_BM, y_BM):
        value, grads = gradient(params, x_BM, y_BM)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def planned(schedule: str, rows: int, transform: bool):
    """The plan of a step on 4 stages and 2 devices for the data."""
    how = {"axis": "stage", "microbatches": 8, "schedule": schedule}
    gradient = jax.value_and_grad(loss) if transform else sx.pipeline.value_and_grad(loss, **how)
    specs = {"layers": P("stage"), "head": None}, P("data"), P("data")
    transforms = [sx.pipeline.Pipeline(**how)] if transform else []
    step = sx.shard_jit(
        descent(gradient),
        mesh=mesh_of(stage=4, data=2),
        in_shardings=specs,
        donate_argnums=0,
        transforms=transforms,
    )
    x = jax.ShapeDtypeStruct((rows, M), "float32")
    return step.plan(PARAMS, x, x)


@pytest.mark.parametrize(
    "schedule, rows, transform",
    [("zb-h1", 8192, False), ("zb-h1", 8192, True), ("zbv", 4096, False), ("1f1b", 4096, True)],
)
def test_no_tick_sends_anything_over_the_axis_of_data(schedule, rows, transform):
    """Where W makes the gradients, too: these stay owed until all are added up."""
    large = [c for c in planned(schedule, rows, transform).collectives if c.nbytes > 10_000]
    assert {c.trips for c in large if "data" in c.axes} == {1}
    assert {c.kind for c in large if c.trips > 1} == {"ppermute"}


def test_of_a_small_batch_no_gradient_is_reduced():
    """However small the batch, no tick reduces one. Of 40 rows on a device the search splits the features of
    the layers over the axis of data instead: ticks send activations, and each device makes its half of the
    gradients. All in all 8,093,706 B: to gather activations in each tick sends 5,799,946, and takes 1.2 %
    longer by price.
    """
    plan = planned("1f1b", 640, True)
    large = [c for c in plan.collectives if c.nbytes > 10_000]
    assert {c.shape[0] for c in large if c.trips > 1} == {40, 80}  # rows
    assert not any("reduce" in c.kind for c in large if c.trips == 1) and plan.comm_bytes <= 8_093_706


def branches(jaxpr):
    """Of all conditionals, those that are loops' bodies included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            yield [branch.jaxpr for branch in eqn.params["branches"]]
        for inner in jaxprs_in_params(eqn.params):
            yield from branches(inner)


def test_sums_pass_through_the_branches_that_do_not_add_to_them():
    gradient = sx.pipeline.value_and_grad(loss, microbatches=8, schedule="1f1b")
    x = jax.ShapeDtypeStruct((64, M), "float32")
    with jax.sharding.use_abstract_mesh(mesh_of(stage=4)):
        closed = jax.make_jaxpr(gradient)(PARAMS, x, x)
    switched, *alone, _ = branches(closed.jaxpr)  # the last sends
    # idle; F of the first stage, of those between; of the last: the loss, which is all that they add to
    assert [passed(branch) for branch in switched] == [1, 1, 1, 0]
    # B of the last layers and head, of other layers, of the first: what is made stays where another one runs
    assert [(passed(other), len(other.outvars)) for other, _ in alone] == [(3, 3), (2, 2), (1, 1)]


def passed(branch):
    return sum(v in branch.invars for v in branch.outvars)
