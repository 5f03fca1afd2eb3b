"""Losses on stages: values and gradients as those of the same microbatches without a pipeline."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

B, S, M, V = 16, 6, 8, 11


def mesh_of(**sizes: int):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def rand(seed: int, *shape: int, dtype="float32"):
    return jnp.asarray(np.random.RandomState(seed).randn(*shape) / np.sqrt(shape[-1]), dtype)


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def attend(w, q, kv):
    k, v = jnp.split(kv @ w, 2, -1)
    return jax.nn.softmax(jnp.einsum("bsm,btm->bst", q, k)) @ v


def block(w, x):
    x = x + attend(w["kv"], norm(x), norm(x))
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def layer_params(seed: int, *lead: int):
    return {
        "kv": rand(seed, *lead, M, 2 * M),
        "up": rand(seed + 1, *lead, M, 4 * M),
        "down": rand(seed + 2, *lead, 4 * M, M),
    }


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def tokens(seed: int):
    return jnp.asarray(np.random.RandomState(seed).randint(0, V, (B, S)), "int32")


# Each loss: (params, x, y) or (params, x, y, key)


def scanned(layers: int, dtype="float32", remat=False):
    """A transformer with stacked layers and tied embeddings; weights are cast to `dtype` before."""
    params = {"embed": rand(0, V, M), "layers": layer_params(1, layers), "position": rand(9, S, M)}

    def loss(params, x, y):
        params = jax.tree.map(lambda w: w.astype(dtype), params)
        step = jax.checkpoint(block) if remat else block
        h = params["embed"][x] + params["position"][None]
        h, _ = lax.scan(lambda h, w: (step(w, h), None), h, params["layers"])
        return cross_entropy((norm(h) @ params["embed"].T).astype("float32"), y)

    return loss, params


def unrolled(layers: int):
    params = {"embed": rand(0, V, M), "layers": [layer_params(10 * i) for i in range(layers)], "head": rand(9, M, V)}

    def loss(params, x, y):
        h = params["embed"][x]
        for w in params["layers"]:
            h = block(w, h)
        return cross_entropy(norm(h) @ params["head"], y)

    return loss, params


def unlike():
    """Layers of unlike sizes, one of them with a value that skips several."""
    sizes = [M, 24, 10, 40, 12, 12, M]
    params = [{"w": rand(i, a, b), "b": rand(i + 50, b)} for i, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False))]

    def loss(params, x, y):
        h = jax.nn.one_hot(x, M)
        skipped = None
        for i, w in enumerate(params):
            h = jnp.tanh(h @ w["w"] + w["b"][None, None])
            skipped = h[..., :4] if i == 1 else skipped
        return ((h[..., :4] - skipped) ** 2).mean() + cross_entropy(h, jnp.minimum(y, M - 1))

    return loss, params


def encoder_decoder():
    """Tied embeddings, a memory that all layers of the decoder read, two stacks of unequal depth."""
    params = {"embed": rand(0, V, M), "encoder": layer_params(1, 3), "decoder": layer_params(4, 5), "cross": rand(7, 5, M, 2 * M)}

    def loss(params, x, y):
        memory, _ = lax.scan(lambda h, w: (block(w, h), None), params["embed"][x], params["encoder"])

        def decode(h, w):
            return block(w[0], h) + attend(w[1], norm(h), memory), None

        h, _ = lax.scan(decode, params["embed"][y], (params["decoder"], params["cross"]))
        return cross_entropy(h @ params["embed"].T, y)

    return loss, params


def noisy():
    """Dropout by a key, results stacked layer by layer, a counter as a carry."""
    params = {"in": rand(0, V, M), "layers": rand(1, 4, M, M)}

    def loss(params, x, y, key):
        def layer(carry, w):
            h, i = carry
            mask = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, h.shape)
            h = h + jnp.where(mask, jnp.tanh(h @ w), 0.0)
            return (h, i + 1), (h**2).mean()

        (h, _), sizes = lax.scan(layer, (params["in"][x], jnp.int32(0)), params["layers"])
        return cross_entropy(h @ params["in"].T, y) + 0.1 * sizes.mean(), {"sizes": sizes, "last": h[:, 0]}

    return loss, params


@dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    key: bool = False
    tolerance: float = 1e-5

    def parts(self):
        loss, params = self.make()
        return loss, params, (tokens(1), tokens(2), *([jax.random.key(3)] if self.key else []))


CASES = {
    "scanned": Case(partial(scanned, 8)),
    "scanned, bf16": Case(partial(scanned, 4, "bfloat16"), tolerance=3e-2),
    "scanned, remat": Case(partial(scanned, 4, remat=True)),
    "scanned, 7 layers": Case(partial(scanned, 7)),
    "unrolled": Case(partial(unrolled, 4)),
    "unlike": Case(unlike),
    "encoder and decoder": Case(encoder_decoder),
    "noisy": Case(noisy, key=True),
}


@cache
def wanted(name: str, microbatches: int):
    """The same microbatches, one by one on one device."""
    loss, params, others = CASES[name].parts()
    grad = jax.jit(jax.value_and_grad(loss, has_aux=CASES[name].key))
    found = []
    for i in range(microbatches):
        found.append(grad(params, *(x[i::microbatches] for x in others[:2]), *others[2:]))
    values = [v[0] if CASES[name].key else v for v, _ in found]
    aux = [v[1] for v, _ in found] if CASES[name].key else None
    mean = jax.tree.map(lambda *xs: sum(xs) / microbatches, *[(v, g) for v, (_, g) in zip(values, found, strict=True)])
    return *mean, aux and jax.tree.map(lambda *xs: jnp.stack(xs), *aux)


def check(name: str, mesh, microbatches: int, in_shardings=None, **how):
    case = CASES[name]
    loss, params, others = case.parts()
    grad = sx.pipeline.value_and_grad(loss, microbatches=microbatches, has_aux=case.key, **how)
    shardings = (in_shardings, *[P("data") if "data" in mesh.shape else P()] * 2, *[P()] * case.key)
    step = sx.shard_jit(grad, mesh=mesh, in_shardings=shardings)
    value, gradients, aux = wanted(name, microbatches)
    close = partial(np.testing.assert_allclose, rtol=case.tolerance, atol=case.tolerance)
    for _ in range(2):
        got, got_gradients = step(params, *others)
        got, got_aux = got if case.key else (got, None)
        jax.tree.map(close, (got, got_gradients), (value, gradients))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got_aux, aux)
    return step, (params, *others)


@pytest.mark.parametrize("name", CASES)
def test_programs(name):
    check(name, mesh_of(stage=4, data=2), 4)


@pytest.mark.parametrize(
    "schedule", "naive gpipe circular 1f1b eager-1f1b interleaved zb-h1 zb-h2 zbv dualpipev".split()
)
def test_schedules(schedule):
    check("scanned", mesh_of(stage=2, data=2), 8, schedule=schedule)


@pytest.mark.parametrize(
    "sizes", [{"stage": 8}, {"stage": 2, "data": 2, "model": 2}, {"stage": 3}, {"data": 2, "stage": 1, "model": 2}], ids=str
)
def test_meshes(sizes):
    mesh = mesh_of(**sizes)
    layers = {"kv": P("stage", None, "model"), "up": P("stage", None, "model"), "down": P("stage", "model")}
    shardings = {"embed": P("model"), "layers": layers, "position": None} if "model" in sizes else None
    check("scanned", mesh, 4, shardings)
