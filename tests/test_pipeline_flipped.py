"""Layers that are read in reverse: as a scan that goes backwards over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.graph.evaluate import evaluate
from shardax.pipeline.flipped import unflipped

MESH = AbstractMesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)


def layer(h, w):
    return h + jnp.tanh(h @ w), h.sum()


FORMS = {
    "reverse": lambda w, x: lax.scan(layer, x, w, reverse=True)[0],
    "sliced": lambda w, x: lax.scan(layer, x, w[::-1])[0],
    "flipped": lambda w, x: lax.scan(layer, x, jnp.flip(w, 0))[0],
    "scaled": lambda w, x: lax.scan(layer, x, 2.0 * w[::-1])[0],
}


def sent(form, pipelined):
    def loss(w, x, y):
        return ((FORMS[form](w, x) - y) ** 2).mean()

    value_and_grad = (
        jax.value_and_grad(loss) if pipelined else sx.pipeline.value_and_grad(loss, microbatches=4)
    )

    def step(w, x, y):
        value, grad = value_and_grad(w, x, y)
        return w - 0.1 * grad, value

    transforms = [sx.pipeline.Pipeline(microbatches=4)] if pipelined else []
    how = {"mesh": MESH, "in_shardings": (P("stage"), P("data"), P("data")), "donate_argnums": 0}
    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 32, 32), (64, 32)))
    return sx.shard_jit(step, transforms=transforms, **how).plan(w, x, x).comm_bytes


@pytest.mark.quick
@pytest.mark.parametrize("pipelined", [True, False])
def test_sends(pipelined):
    """Weights go to the stage that runs them first, and gradients back, once in a step: a shard each."""
    backwards = sent("reverse", pipelined)
    assert {form: sent(form, pipelined) for form in FORMS} == dict.fromkeys(FORMS, backwards)
    assert backwards == 34 * 1024 + 10


def rand(seed, *shape):
    return np.float32(np.random.default_rng(seed).normal(size=shape) / 4)


def stacked_too(w, b, x):
    """Rows that are not reversed, and results that are stacked, as they are and reversed."""

    def body(h, row):
        return jnp.tanh(h @ row[0] + row[1]), h + row[1]

    h, ys = lax.scan(body, x, (w[::-1], b))
    return h, ys, ys[::-1], jnp.sin(ys)[::-1]


def with_gradient(w, b, x):
    return jax.value_and_grad(lambda w: stacked_too(w.astype("float32")[::-1][::-1], b, x)[0].sum())(w)


@pytest.mark.parametrize("function", [stacked_too, with_gradient])
def test_same_values(function):
    args = rand(0, 5, 4, 4), rand(1, 5, 4), rand(2, 4)
    closed = jax.make_jaxpr(function)(*args)
    found, wanted = evaluate(unflipped(closed), args), jax.tree.leaves(function(*args))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, wanted)


@pytest.mark.quick
def test_scan_goes_the_other_way():
    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((5, 4, 4), (5, 4), (4,))]
    eqns = unflipped(jax.make_jaxpr(stacked_too)(*types)).jaxpr.eqns
    (scan,) = (eqn for eqn in eqns if eqn.primitive.name == "scan")
    reversed_of = [eqn.invars[0].aval.shape for eqn in eqns if eqn.primitive.name == "rev"]
    assert scan.params["reverse"] and sorted(reversed_of) == [(5, 4), (5, 4)], "b, and the stack as it is"
