"""Arguments of a loss that are no parameters: those that are no arrays, and those by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.pipeline.others import Others, by_place

M = 4


def rand(seed: int, *shape: int):
    return jnp.asarray(np.random.RandomState(seed).randn(*shape), "float32")


def loss(params, act, x, y, train=True, *, key, reduction="mean", scale=1.0):
    for w in params:
        x = act(x @ w)
        if train:
            x = x * jax.random.bernoulli(key, 0.9, (1, M)).astype(x.dtype)
    found = ((x - y) ** 2).sum(-1) * scale
    return found.mean() if reduction == "mean" else found.sum()


CALLS = {
    "by name": ((jnp.tanh,), {"scale": 0.5}),
    "a flag": ((jnp.sin,), {"train": False}),
    "a text": ((jnp.tanh,), {"reduction": "mean", "scale": np.float32(2)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_called_as_jax_value_and_grad_is(name):
    (act,), more = CALLS[name]
    params, batch = [rand(i, M, M) for i in range(2)], {"x": rand(3, 8, M), "y": rand(4, 8, M)}

    def made(value_and_grad, params, batch):
        return value_and_grad(loss)(params, act, key=jax.random.key(0), **batch, **more)

    def pipelined(loss):
        return sx.pipeline.value_and_grad(loss, microbatches=2, batch_argnames=("x", "y"))

    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    step = sx.shard_jit(lambda *a: made(pipelined, *a), mesh=mesh, in_shardings=(None, P("data")))
    wanted = jax.jit(lambda *a: made(jax.value_and_grad, *a))(params, batch)
    for x, y in zip(jax.tree.leaves(step(params, batch)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_functions_are_arguments_of_forward_passes_too():
    params, x = [rand(i, M, M) for i in range(2)], rand(3, 8, M)

    def scores(params, act, x):
        return act(act(x @ params[0]) @ params[1])

    def step(params, x):
        return sx.pipeline.apply(scores, microbatches=2)(params, jnp.tanh, x)

    mesh = jax.make_mesh((2,), ("stage",), axis_types=(AxisType.Auto,))
    found = sx.shard_jit(step, mesh=mesh)(params, x)
    np.testing.assert_allclose(found, scores(params, jnp.tanh, x), rtol=1e-5, atol=1e-5)


def test_what_is_no_array_stays():
    x = np.ones(2, "float32")
    others, arrays = Others.of({"tree": {"a": "text", "b": x}, "none": None, "n": 3, "z": np.float32(1)})
    assert others.names == ("tree", "z") and [a.shape for a in arrays] == [(2,), ()]
    tree, none, n, z = others.restored(["x", "z"])
    assert (tree, none, n, z) == ({"a": "text", "b": "x"}, None, 3, "z")


@pytest.mark.quick
def test_names_go_to_their_places():
    assert by_place(loss, (1, 2), {"y": 4, "x": 3, "key": 5}) == ((1, 2, 3, 4), {"key": 5})
    assert by_place(loss, (1, 2, 3), {"train": 0, "y": 4, "key": 5}) == ((1, 2, 3, 4, 0), {"key": 5})
    assert by_place(len, (1,), {}) == ((1,), {})
