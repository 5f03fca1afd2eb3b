"""Microbatches at once: how many fit, and that sums over them are one operation. (What is computed is
compared in `test_pipeline_together.py`, on devices.)
"""

import itertools

import jax
import jax.numpy as jnp
import pytest

from shardax.pipeline.together import Together, group_size

pytestmark = pytest.mark.quick

COUNT = 3


@pytest.mark.parametrize("own", [1, 2, 6, 7, 12])
def test_group_sizes(own):
    """A divisor, one more microbatch never with less memory, all of them with enough, one with none."""
    jaxpr = jax.make_jaxpr(lambda x: jnp.tanh(x @ x))(jax.ShapeDtypeStruct((64, 64), "float32"))
    sizes = [group_size(jaxpr, own, memory) for memory in (0, *(2.0**k for k in range(12, 32)))]
    assert all(own % size == 0 for size in sizes) and sizes == sorted(sizes)
    assert sizes[0] == 1 and sizes[-1] == own


def at_once(function, params, rows):
    """The jaxpr of `function(params, rows)` for several rows, of which all results but the last are sums."""
    one = jax.make_jaxpr(function)(params, rows)
    count = len(one.jaxpr.outvars) - 1
    params_of, rows_of = one.jaxpr.invars

    def run(params, rows):
        return Together(one.jaxpr.eqns, {params_of: params}, {rows_of: rows}).run(one.jaxpr.outvars, count)

    many = jax.ShapeDtypeStruct((COUNT, *rows.shape), rows.dtype)
    return jax.make_jaxpr(run)(params, many).jaxpr


def gradient(params, rows):
    """Of weights whose transpose is multiplied, so that nothing stands behind the gradient's product. (In a
    pipeline what is linear there is moved behind the sum.)"""
    value, grad = jax.value_and_grad(lambda w: (jnp.tanh(jnp.einsum("bm,nm->bn", rows, w)) ** 2).mean())(
        params
    )
    return grad, value


@pytest.mark.parametrize("rows, inner, outer", [(8, 16, 32), (5, 7, 33)])
def test_a_sum_of_products_is_one_product(rows, inner, outer):
    """No array has the weights' gradient of each microbatch."""
    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((outer, inner), (rows, inner))]
    jaxpr = at_once(gradient, *types)
    shapes = {v.aval.shape for e in jaxpr.eqns for v in e.outvars}
    assert not shapes & {(COUNT, *order) for order in itertools.permutations((inner, outer))}
    assert [v.aval.shape for v in jaxpr.outvars] == [(outer, inner), (COUNT,)]
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(products) == 2  # forward, and that of the gradient


def test_what_does_not_depend_on_rows_is_computed_once():
    def function(params, rows):
        return rows.sum(), (jnp.exp(params) * rows).sum()

    jaxpr = at_once(function, *[jax.ShapeDtypeStruct((6,), "float32")] * 2)
    (exponential,) = [e for e in jaxpr.eqns if e.primitive.name == "exp"]
    assert exponential.outvars[0].aval.shape == (6,)
