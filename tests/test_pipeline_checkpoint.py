"""Where `jax.checkpoint` stands: in a layer, or around layers of several stages; plans, without devices."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

pytestmark = pytest.mark.quick

M, L = 8, 4
F32 = partial(jax.ShapeDtypeStruct, dtype="float32")
MESH = AbstractMesh((2,), ("stage",), axis_types=(AxisType.Auto,))
ARGS = {"stack": F32((L, M, M)), "list": [F32((M, M))] * 2 * L}, F32((16, M))


def layer(x, w):
    return jnp.tanh(x @ w), None


def scanned(one):
    return lambda params, x: (lax.scan(one, x, params["stack"])[0] ** 2).mean()


def unrolled(several, count):
    def loss(params, x):
        for i in range(0, L, count):
            x = several(params["list"][i : i + count], x)
        return (x**2).mean()

    return loss


def together(weights, x):
    for w in weights:
        x, _ = layer(x, w)
    return x


def between_others(params, x):
    """Stages with as much to do each would part the second of three layers."""
    first, *weights, last = params["list"]
    x = x @ first
    for i in range(0, 6, 2):
        x = jax.checkpoint(together)(weights[i : i + 2], x)
    return ((x @ last) ** 2).mean()


def plan(form, loss):
    how = {"mesh": MESH, "in_shardings": ({"stack": P("stage"), "list": None}, None)}
    if form == "function":
        return sx.shard_jit(sx.pipeline.value_and_grad(loss, microbatches=4), **how).plan(*ARGS)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    transforms = [sx.pipeline.Pipeline(microbatches=4)]
    return sx.shard_jit(step, transforms=transforms, donate_argnums=0, **how).plan(*ARGS)


WITHIN = {
    "each of a scan": scanned(jax.checkpoint(layer)),
    "each": unrolled(jax.checkpoint(together), 1),
    "those of a stage": unrolled(jax.checkpoint(together), 2),
    "unequal stages": between_others,
}
ACROSS = {
    "all of a scan": jax.checkpoint(scanned(layer)),
    "all": jax.checkpoint(unrolled(together, 2)),
    "all, and each": jax.checkpoint(unrolled(jax.checkpoint(together), 1)),
}


@pytest.mark.parametrize("form", ["function", "step"])
@pytest.mark.parametrize("name", WITHIN)
def test_within_a_stage_nothing_is_sent_for_it(name, form):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = plan(form, WITHIN[name])
    assert sum(c.trips for c in found.collectives if c.kind == "ppermute") <= 12


@pytest.mark.parametrize("form", ["function", "step"])
@pytest.mark.parametrize("name", ACROSS)
def test_around_layers_of_several_stages_it_is_warned_of(name, form):
    with pytest.warns(UserWarning, match="jax.checkpoint at .* has layers of several stages, .* each layer"):
        plan(form, ACROSS[name])
