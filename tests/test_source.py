"""`Plan.source`: executed, it gives the results of the program; its text is what a person would write."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import gpt2
from shardax.explain import hlo

TYPES = (AxisType.Auto,) * 2


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=TYPES)


def normal(*shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(sum(shape)), shape, dtype)


def mlp_gradient(params, x_BM):
    def loss(params):
        h_BH = jax.nn.gelu(x_BM @ params["up"])
        return jnp.mean((h_BH @ params["down"]) ** 2)

    return jax.value_and_grad(loss)(params)


def attention(q_BTHD, k_BTHD, v_BTHD):
    scores = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD) / 2.0
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v_BTHD)


def label_loss(table, tokens):
    logits = table[tokens] @ table.T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
    return -picked.mean()


def scanned(weights, x):
    def layer(x, w):
        return jnp.tanh(x @ w), x.sum()

    return lax.scan(layer, x, weights)


def while_loop(x):
    return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 1.5 + c[1].sum()), (0, x))


def branches(flag, x):
    return lax.cond(flag > 0, lambda x: x.sum(0), lambda x: x[0] * 2.0, x)


def dropout(key, x):
    a, b = jax.random.split(key)
    keep = jax.random.bernoulli(a, 0.5, x.shape)
    return jnp.where(keep, x / 0.5, 0.0) + jax.random.normal(jax.random.fold_in(b, 3), x.shape)


def convolved(image, kernel):
    y = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def uneven(x, w):
    return jnp.mean(x @ w, axis=0), jax.nn.softmax(x, axis=0)


def rematerialized(w, x):
    @jax.checkpoint
    def layer(w, x):
        return jnp.sin(x @ w)

    return jax.grad(lambda w: layer(w, layer(w, x)).sum())(w)


def ordered(x):
    return jnp.sort(x, axis=0), jnp.argsort(x, axis=1), jnp.cumsum(x, axis=0), jnp.flip(x, 0), lax.top_k(x, 3)


def scattered(x, at):
    return (
        x.at[at].add(1.0),
        x.at[2:5].set(0.0),
        jnp.concatenate([x[3:], x[:3]]),
        x.astype(jnp.bfloat16).sum(0),
    )


X = np.ones((8, 4), np.float32)
LARGE = np.linspace(0, 1, 16 * 32, dtype=np.float32).reshape(16, 32)


def closing_over(x):
    return (x + LARGE) * jnp.arange(32.0), x.sum() + 2.0


LONG = (
    "kernel_of_a_layer_whose_name_is_so_long_that_little_fits_beside_it",
    "mean_of_its_gradient",
    "noise_added_to_it",
)


def long_lines(params, x):
    """Statements that are broken: strings with commas in calls, and parentheses that are no calls."""
    kernel, mean, noise = params.values()
    return kernel + 0.5 * (mean + noise), jnp.einsum("bsd,dhk->bshk", x, kernel, precision="highest")


PROGRAMS = {
    "mlp_gradient": (mlp_gradient, ({"up": P(None, "model"), "down": P("model")}, P("data")), lambda: (
        {"up": normal(16, 32), "down": normal(32, 16)}, normal(8, 16))),
    "attention": (attention, P("data", None, "model"), lambda: (normal(4, 6, 2, 8), normal(4, 6, 2, 8), normal(4, 6, 2, 8))),
    "label_loss": (label_loss, (P("model"), P("data")), lambda: (normal(30, 16), jnp.arange(32).reshape(8, 4) % 30)),
    "scanned": (scanned, (P(None, None, "model"), P("data")), lambda: (normal(3, 16, 16), normal(8, 16))),
    "while_loop": (while_loop, P("data"), lambda: (normal(8, 3),)),
    "branches": (branches, (None, P("data")), lambda: (jnp.int32(1), normal(8, 4))),
    "dropout": (dropout, (None, P("data")), lambda: (jax.random.key(1), normal(10, 16))),
    "convolved": (convolved, (P(None, "data", "model"), P()), lambda: (normal(2, 16, 8, 3), normal(3, 3, 3, 4))),
    "uneven": (uneven, (P("data"), P(None, "model")), lambda: (normal(13, 6), normal(6, 7))),
    "rematerialized": (rematerialized, (P("model"), P("data")), lambda: (normal(16, 16), normal(8, 16))),
    "ordered": (ordered, (P("data"),), lambda: (normal(12, 16),)),
    "scattered": (scattered, (P("data"), None), lambda: (normal(12, 4), jnp.array([1, 5, 5, 40]))),
    "long_lines": (long_lines, (P("model"), P("data")), lambda: (
        {name: normal(6, 3, 2) for name in LONG}, normal(8, 5, 6))),
    "closing_over": (closing_over, P("data", "model"), lambda: (normal(16, 32),)),
}  # fmt: skip


def executed(plan):
    namespace = plan.source_objects()
    exec(plan.source(), namespace)
    return jax.jit(namespace["program"](mesh()))


@pytest.mark.parametrize(
    "fun, args",
    [
        (
            lambda s, x: (s * 2, s.astype(jnp.float32) * 2.0, x * s, jnp.broadcast_to(s, (8, 4)), s * 1j),
            (2.0, X),
        ),
        (lambda i, x: (i / 2, i % 3, jnp.full((8, 4), 0.5), 3.0, True, x.sum()), (3, X)),
        (lambda s: lax.fori_loop(0, 3, lambda i, c: c * 2, s), (1.0,)),
        (lambda x, s: (jnp.where(x[0, 0] > 0, s, 0.0), jnp.asarray(s, jnp.bfloat16)), (X, 1.5)),
    ],
)
def test_results_are_of_weak_types_where_they_were(fun, args):
    plan = sx.shard_jit(fun, mesh=mesh(), in_shardings=None).plan(*args)
    results, expected = executed(plan)(*args), jax.tree.leaves(jax.jit(fun)(*args))
    assert [jax.typeof(x).weak_type for x in results] == [jax.typeof(x).weak_type for x in expected]
    for have, want in zip(results, expected, strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have, want)


@pytest.mark.promotes_ranks
@pytest.mark.once
@pytest.mark.parametrize("name", PROGRAMS)
def test_executing_the_source_gives_the_results(name):
    fun, specs, make = PROGRAMS[name]
    args = make()
    plan = sx.shard_jit(fun, mesh=mesh(), in_shardings=specs).plan(*args)
    results = executed(plan)(*jax.tree.leaves(args))
    expected = jax.tree.leaves(jax.jit(fun)(*args))
    assert len(results) == len(expected)
    for have, want in zip(results, expected, strict=True):
        assert have.dtype == want.dtype and have.shape == want.shape
        tolerance = 2e-2 if want.dtype == jnp.bfloat16 else 2e-5
        np.testing.assert_allclose(have.astype(float), want.astype(float), rtol=tolerance, atol=tolerance)


GOLDEN = '''\
"""What each of 8 devices runs, on a mesh of data=4, model=2."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P


def on_shards(up, down, x_BM):
    # tests/test_source.py:LINE: h_BH = jax.nn.relu(x_BM @ up)
    h_BH = x_BM @ up  # f32[2,16]
    h_BH_1 = jnp.maximum(h_BH, 0.0)  # f32[2,16]

    # tests/test_source.py:LINE: y_BM = h_BH @ down
    y_BM = h_BH_1 @ down  # f32[2,16]
    y_BM_1 = lax.psum(y_BM, "model")  # f32[2,16]: sum of dot_general

    # tests/test_source.py:LINE: return lax.scan(lambda c, _: (jnp.tanh(c), None), y_BM, None, length=3)[0]
    def step(y_BM_2, _):
        tanh = jnp.tanh(y_BM_2)  # f32[2,16]
        return tanh, ()

    y_BM_3, _ = lax.scan(step, y_BM_1, None, length=3)
    return (y_BM_3,)


def program(mesh):
    """`on_shards` on a mesh of data=4, model=2: leaves of the arguments in, leaves of the results out."""
    in_specs = (
        P(None, "model"),  # up
        P("model"),  # down
        P("data"),  # x_BM
    )
    out_specs = (P("data"),)
    return jax.shard_map(on_shards, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
'''


def test_text():
    def mlp(up, down, x_BM):
        h_BH = jax.nn.relu(x_BM @ up)
        y_BM = h_BH @ down
        return lax.scan(lambda c, _: (jnp.tanh(c), None), y_BM, None, length=3)[0]

    abstract = AbstractMesh((4, 2), ("data", "model"), axis_types=TYPES)
    f = sx.shard_jit(mlp, mesh=abstract, in_shardings=(P(None, "model"), P("model"), P("data")))
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 32), (32, 16), (8, 16))]
    assert re.sub(r"\.py:\d+", ".py:LINE", f.plan(*shapes).source()) == GOLDEN


def test_the_same_results_as_collectives():
    """What the source sends is what the plan says."""
    fun, specs, make = PROGRAMS["mlp_gradient"]
    args = make()
    plan = sx.shard_jit(fun, mesh=mesh(), in_shardings=specs).plan(*args)
    lowered = executed(plan).lower(*jax.tree.leaves(args)).compiler_ir()
    assert hlo.counts(hlo.lowered(lowered)) == hlo.counts(plan.collectives)


@pytest.mark.promotes_ranks
def test_small_constants_are_text_and_large_ones_objects():
    fun, specs, make = PROGRAMS["label_loss"]
    plan = sx.shard_jit(fun, mesh=mesh(), in_shardings=specs).plan(*make())
    assert "\nconstant = jnp.array([[[29]]], jnp.int32)\n" in plan.source() and plan.source_objects() == {}
    fun, specs, make = PROGRAMS["closing_over"]
    objects = sx.shard_jit(fun, mesh=mesh(), in_shardings=specs).plan(*make()).source_objects()
    assert list(objects) == ["closed_over"]
    np.testing.assert_array_equal(objects["closed_over"], LARGE)


@pytest.mark.slow
@pytest.mark.mixed_dtypes
@pytest.mark.promotes_ranks
def test_the_train_step_of_a_gpt2(monkeypatch):
    """Its state, loss and all, from what is drawn for a tiny one of a single layer."""
    monkeypatch.setitem(gpt2.SIZES, "tiny", replace(gpt2.SIZES["tiny"], layers=1))
    f, shapes = gpt2.program(mesh(), size="tiny", batch=8, seq=16)
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    args = jax.tree.map(lambda x: drawn(next(keys), x), shapes)
    results, expected = (
        executed(f.plan(*args))(*jax.tree.leaves(args)),
        jax.tree.leaves(f(*jax.tree.map(jnp.copy, args))),
    )
    assert len(results) == len(expected) > 50
    for have, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


def drawn(key, x):
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jax.random.randint(key, x.shape, 0, 5, x.dtype)
    return 0.02 * jax.random.normal(key, x.shape, x.dtype) ** 2
