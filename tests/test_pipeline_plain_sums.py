"""Losses that are plain sums over their rows are told from means, weighted ones among them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.pipeline.cut import flat
from shardax.pipeline.plain_sums import plain_sum

pytestmark = pytest.mark.quick

W, X, KEEP = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 4), (6, 4), (6,)))


def nll(w, x):
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), jnp.zeros((6, 1), "int32"), 1)[:, 0]


def squares(w, x):
    return ((x @ w - x) ** 2).sum(-1)


SUMS = {
    "products": lambda w, x, keep: (x @ w).sum(),
    "squares": lambda w, x, keep: squares(w, x).sum(),
    "log-likelihoods": lambda w, x, keep: nll(w, x).sum(),
    "cast": lambda w, x, keep: -jnp.sum(jnp.tanh(x @ w).astype("bfloat16")).astype("float32"),
    "chosen": lambda w, x, keep: jnp.where(keep > 0, squares(w, x), 0.0).sum(),
    "dropout": lambda w, x, keep: squares(w, x * keep[:, None] / 0.9).sum(),
    "hinge": lambda w, x, keep: jax.nn.relu(1.0 - keep * (x @ w)[:, 0]).sum(),
    "logarithms of shares": lambda w, x, keep: -jnp.log(jax.nn.softmax(x @ w)[:, 0]).sum(),
    "in a call": lambda w, x, keep: jax.jit(lambda y: jnp.abs(y).sum())(x @ w),
}
MEANS = {
    "mean": lambda w, x, keep: squares(w, x).mean(),
    "divided behind": lambda w, x, keep: nll(w, x).sum() / 6,
    "divided before": lambda w, x, keep: (nll(w, x) / 6).sum(),
    "scaled": lambda w, x, keep: jnp.sum(squares(w, x) * 0.5),
    "weighted": lambda w, x, keep: (nll(w, x) * keep / keep.sum()).sum(),
    "masked": lambda w, x, keep: (nll(w, x) * keep).sum() / keep.sum(),
    "with a penalty": lambda w, x, keep: squares(w, x).mean() + (w**2).sum(),
    "of no rows": lambda w, x, keep: (w**2).sum(),
}


@pytest.mark.parametrize("name", [*SUMS, *MEANS])
def test_plain_sums(name):
    program = flat(jax.make_jaxpr((SUMS | MEANS)[name])(W, X, KEEP))
    found = plain_sum(program.jaxpr, [False, True, True])
    assert (found is not None) == (name in SUMS)


def step(reduce):
    def loss(params, x):
        layer = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
        return (jax.lax.scan(layer, x, params)[0] ** 2).sum()

    grad = sx.pipeline.value_and_grad(loss, axis="stage", microbatches=4, reduce=reduce)
    mesh = AbstractMesh((2,), ("stage",), axis_types=(AxisType.Auto,))
    return sx.shard_jit(grad, mesh=mesh, in_shardings=(P("stage"), None))


def test_the_mean_of_sums_is_refused():
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 8, 8), (16, 8))]
    with pytest.raises(
        ValueError, match=r"loss is a sum over the rows of its microbatch, taken at .*plain_sums"
    ):
        step("mean").plan(*args)
    with pytest.raises(ValueError, match=r"1/4 of the sum over the batch; give reduce='sum'"):
        step("mean").plan(*args)
    assert step("sum").plan(*args).collectives
