"""Losses on stages: values and gradients as those of the same microbatches without a pipeline."""

from collections import Counter
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
from shardax.pipeline import make_schedule
from shardax.pipeline.region import Region

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
    params = {
        "embed": rand(0, V, M),
        "layers": [layer_params(10 * i) for i in range(layers)],
        "head": rand(9, M, V),
    }

    def loss(params, x, y):
        h = params["embed"][x]
        for w in params["layers"]:
            h = block(w, h)
        return cross_entropy(norm(h) @ params["head"], y)

    return loss, params


def unlike():
    """Layers of unlike sizes, one of them with a value that skips several."""
    sizes = [M, 24, 10, 40, 12, 12, M]
    params = [
        {"w": rand(i, a, b), "b": rand(i + 50, b)}
        for i, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False))
    ]

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
    params = {
        "embed": rand(0, V, M),
        "encoder": layer_params(1, 3),
        "decoder": layer_params(4, 5),
        "cross": rand(7, 5, M, 2 * M),
    }

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
    mean = jax.tree.map(
        lambda *xs: sum(xs) / microbatches, *[(v, g) for v, (_, g) in zip(values, found, strict=True)]
    )
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


def plain(layers: int, dim: int = M):
    """Of little to compile."""
    params = {"in": rand(0, V, dim), "w": rand(1, layers, dim, dim)}

    def loss(params, x, y):
        h, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), params["in"][x], params["w"])
        return cross_entropy(h @ params["in"].T, y)

    return loss, params


CASES["plain"] = Case(partial(plain, 4))
QUICKLY = {"scanned": [], "unlike": [pytest.mark.once]}  # the others are slow to compile


@pytest.mark.parametrize("name", [pytest.param(n, marks=QUICKLY.get(n, [pytest.mark.slow])) for n in CASES])
def test_programs(name):
    check(name, mesh_of(stage=4, data=2), 4)


SCHEDULES = "naive gpipe circular 1f1b eager-1f1b interleaved zb-h1 zb-h2 zb-eager zbv dualpipev".split()


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(s, marks=pytest.mark.once if s in ("interleaved", "zbv") else pytest.mark.slow)
        for s in SCHEDULES
    ],
)
def test_schedules(schedule):
    check("plain", mesh_of(stage=2, data=2), 8, schedule=schedule)


@pytest.mark.once
def test_a_schedule_as_text():
    check("plain", mesh_of(stage=2), 2, schedule="F0 F1 - B0 B1\n- F0 B0 F1 B1")


@pytest.mark.once
def test_auto_is_as_fast_as_any():
    """Ticks of a program are locked, so forward and backward passes in turn on all stages; few are kept."""
    loss, params = plain(8)
    ours = sx.pipeline.value_and_grad(loss, microbatches=8, schedule="auto")
    step = sx.shard_jit(ours, mesh=jax.sharding.AbstractMesh((4,), ("stage",), axis_types=(AxisType.Auto,)))
    plan = step.plan(params, tokens(1), tokens(2))
    ticks = {n for (kind, _, _), n in sent_times(plan).items() if kind == "ppermute"}
    assert ticks == {len(sx.pipeline.make_schedule("eager-1f1b", 4, 8).ticks)}


THREE_AXES = {"stage": 2, "data": 2, "model": 2}


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(THREE_AXES, marks=pytest.mark.once),
        *[pytest.param(s, marks=pytest.mark.slow) for s in ({"stage": 8}, {"stage": 3}, {"stage": 1})],
    ],
    ids=str,
)
def test_meshes(sizes):
    shardings = {"in": P("model"), "w": P("stage", None, "model")} if "model" in sizes else None
    check("plain" if sizes["stage"] < 8 else "scanned", mesh_of(**sizes), 4, shardings)


@pytest.mark.once
def test_explicit_axes():
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AxisType.Explicit,) * 2)
    check("plain", mesh, 4, {"in": P(), "w": P("stage")})


def test_every_gradient_is_reduced_once_and_every_activation_sent_once_a_tick():
    loss, params = plain(8, 512)
    grad = sx.pipeline.value_and_grad(loss, microbatches=8, schedule="1f1b")
    mesh = jax.sharding.AbstractMesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((4096, 6), "int32")
    shardings = {"in": None, "w": P("stage")}, P("data"), P("data")
    plan = sx.shard_jit(grad, mesh=mesh, in_shardings=shardings).plan(params, x, x)
    ticks = len(sx.pipeline.make_schedule("1f1b", 4, 8).ticks)
    assert sent_times(plan, 10_000) == {
        ("ppermute", ("stage",), (256, 6, 512)): ticks,
        ("reduce_scatter", ("data",), (2, 512, 512)): 1,  # what is done with the sum is done by halves
        ("all_gather", ("data",), (1, 512, 512)): 1,
        ("all_reduce", ("data", "stage"), (V, 512)): 1,
    }


def sent_times(plan, least: int = 0) -> Counter:
    """How often what is larger than `least` is sent, in ticks of all kinds."""
    found = Counter()
    for c in plan.collectives:
        if c.nbytes > least and not c.other_branch:
            found[c.kind, c.axes, tuple(c.shape)] += c.trips
    return found


@pytest.mark.slow
def test_in_flight_memory_of_the_compiled_program():
    """1F1B holds as many microbatches as there are stages, GPipe all of them."""
    loss, params = plain(4, 64)
    mesh = mesh_of(stage=2, data=2)

    def temporary(schedule: str, microbatches: int) -> int:
        grad = sx.pipeline.value_and_grad(loss, microbatches=microbatches, schedule=schedule)
        x = jax.ShapeDtypeStruct((64 * microbatches, 32), "int32")
        step = sx.shard_jit(
            grad, mesh=mesh, in_shardings=({"in": None, "w": P("stage")}, P("data"), P("data"))
        )
        return step.lower(params, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary("1f1b", 16) <= 1.1 * temporary("1f1b", 4)
    assert temporary("1f1b", 8) <= 0.6 * temporary("gpipe", 8)


@pytest.mark.parametrize("form", ["function", "step"])
def test_the_batch_is_not_copied(form):
    """Of a batch of activations, in 1F1B: what the program holds beside its arguments does not grow with
    the number of microbatches."""
    mesh, params = mesh_of(stage=2), jax.ShapeDtypeStruct((4, 32, 32), "float32")

    def loss(params, x_BM):
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x_BM, params)[0] ** 2).mean()

    def temporary(microbatches: int) -> int:
        x_BM = jax.ShapeDtypeStruct((64 * microbatches, 32), "float32")
        function, transforms = sx.pipeline.value_and_grad(loss, microbatches=microbatches), []
        if form == "step":
            function, transforms = (
                jax.value_and_grad(loss),
                [sx.pipeline.Pipeline(microbatches=microbatches)],
            )

        def step(params, x_BM):
            value, gradient = function(params, x_BM)
            return params - 0.1 * gradient, value

        step = sx.shard_jit(step, mesh=mesh, in_shardings=(P("stage"), None), transforms=transforms)
        return step.lower(params, x_BM).compile().memory_analysis().temp_size_in_bytes

    assert temporary(16) <= 1.02 * temporary(4)


@pytest.mark.mixed_dtypes
def test_training():
    """A step with an optimizer and donated state, many times."""
    import optax

    loss, params = plain(4)
    tx, mesh = optax.adam(1e-2), mesh_of(stage=2, data=2)

    def step(grad, state, x, y):
        params, opt_state = state
        value, gradients = grad(params, x, y)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    state = params, tx.init(params)
    spec = {"in": None, "w": P("stage")}
    pipelined = sx.shard_jit(
        partial(step, sx.pipeline.value_and_grad(loss, microbatches=4)),
        mesh=mesh,
        in_shardings=((spec, None), P("data"), P("data")),
        donate_argnums=0,
    )
    single = jax.jit(partial(step, jax.value_and_grad(loss)))
    ours, theirs = jax.tree.map(jnp.copy, state), state
    for i in range(100):
        batch = tokens(2 * i), tokens(2 * i + 1)
        ours, got = pipelined(ours, *batch)
        theirs, want = single(theirs, *batch)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert ours[0]["w"].sharding.spec[0] == "stage"


@pytest.mark.once
def test_apply_gives_the_rows_of_the_batch_in_their_order():
    loss, params = plain(5)

    def scores(params, x):
        h, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), params["in"][x], params["w"])
        return {"last": h[:, -1], "tokens": x.sum(1)}

    score = sx.shard_jit(
        sx.pipeline.apply(scores, microbatches=4),
        mesh=mesh_of(stage=4, data=2),
        in_shardings=(None, P("data")),
    )
    got, want = score(params, tokens(1)), scores(params, tokens(1))
    np.testing.assert_allclose(got["last"], want["last"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got["tokens"], want["tokens"])


def scores_of(w, x, product=jnp.matmul):
    return lax.scan(lambda h, w: (h + jnp.tanh(product(h, w)), None), x, w)[0]


@pytest.mark.parametrize("form", ["apply", "value_and_grad"])
def test_what_is_pipelined_is_differentiated(form):
    def loss(w, x):
        return (scores_of(w, x) ** 2).mean()

    def pipelined(w, x):
        if form == "apply":
            return (sx.pipeline.apply(scores_of, microbatches=4)(w, x) ** 2).mean()
        return sx.pipeline.value_and_grad(loss, microbatches=4)(w, x)[0]

    w, x = rand(0, 4, M, M), rand(1, 8, M)
    got = sx.shard_jit(jax.grad(pipelined), mesh=mesh_of(stage=2, data=2))(w, x)
    np.testing.assert_allclose(got, jax.grad(loss)(w, x), rtol=1e-5, atol=1e-6)


def test_an_island_over_another_axis_in_each_layer():
    mesh = mesh_of(stage=2, model=2)
    specs = P(None, "model"), P("model", None)

    def loss(w, x):
        product = jax.shard_map(
            lambda h, w: lax.psum(h @ w, "model"),
            mesh=mesh,
            in_specs=specs,
            out_specs=P(),
            axis_names={"model"},
        )
        return (scores_of(w, x, product) ** 2).mean()

    w, x = rand(0, 4, M, M), rand(1, 8, M)
    got = sx.shard_jit(sx.pipeline.value_and_grad(loss, microbatches=4), mesh=mesh)(w, x)
    want = jax.value_and_grad(lambda w: (scores_of(w, x) ** 2).mean())(w)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_where_stages_begin():
    """At marks where there are any; else where they take equally long."""
    w = rand(0, 6, M, M)

    def loss(w, x):
        h = jax.nn.one_hot(x, M)
        for i in range(6):
            h = jnp.tanh(h @ w[i])
            h = sx.pipeline.stage(h, f"after {i}") if i in (0, 4) else h
        return (h**2).mean()

    def lines(loss, stages):
        closed = jax.make_jaxpr(lambda w, x, _: loss(w, x))(w, tokens(1), 0)
        region = Region(closed, 1, 1, 1, forward=True)
        return [stage.pieces for stage in region.cut(make_schedule("forward", stages, 4)).stages]

    marked = lines(loss, 3)
    assert list(map(len, marked)) == [1, 4, 1]

    def scanned_loss(w, x):
        w = jnp.tile(w, (1, 64, 64))
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), jax.nn.one_hot(x, 512), w)
        return (h**2).mean()

    assert [pieces[0].rows for pieces in lines(scanned_loss, 3)] == [(0, 2), (2, 4), (4, 6)]
    rows = [piece.rows for pieces in lines(scanned_loss, 4) for piece in pieces]
    assert max(b - a for a, b in rows) == 2 and rows[0][0] == 0 and rows[-1][1] == 6
    with pytest.raises(
        ValueError,
        match=r"4 virtual stages need 3 marks at least, and the program has 2 \(after 0, after 4\)",
    ):
        lines(loss, 4)


def _raises(words: str, loss=None, mesh=None, batch=None, **how):
    own, params = plain(2)
    how = {"microbatches": 4, **how}
    x = tokens(1) if batch is None else batch
    mesh = mesh or jax.sharding.AbstractMesh((2,), ("stage",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match=words):
        sx.shard_jit(sx.pipeline.value_and_grad(loss or own, **how), mesh=mesh).plan(params, x, x)


def test_bad_input():
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    _raises("batch of 16 rows .* and there are 17 microbatches; take as many", microbatches=17)
    _raises(
        "16 rows, which 5 microbatches do not divide, and has_aux",
        microbatches=5,
        has_aux=True,
        loss=lambda p, x, y: (p["in"][x].mean(), x),
    )
    _raises(r"the mesh \(data=2\) has no axis 'stage'", mesh=mesh)
    _raises("expected the name of a mesh axis", axis=("stage",))
    _raises("microbatches is 0; expected an int", microbatches=0)
    _raises("microbatches is True; expected an int", microbatches=True)
    _raises("argnums of value_and_grad is 'params', of type str: give the number", argnums="params")
    _raises("reduce is 'max'; expected 'mean' or 'sum'", reduce="max")
    _raises("returns float32.*expected a scalar of floats", loss=lambda p, x, y: p["in"][x].mean(-1))
    _raises(
        r"returns \(float32\[\], float32\[3\]\); expected a scalar.*the loss and others, give has_aux=True\n",
        loss=lambda p, x, y: (p["in"][x].mean(), p["in"][0, :3]),
    )
    _raises("returns None; expected a scalar of floats, .* its microbatch\n", loss=lambda p, x, y: None)
    _raises(
        r"returns float32\[\]; expected .* with has_aux a pair of it and others\n",
        loss=lambda p, x, y: p["in"][x].mean(),
        has_aux=True,
    )
    _raises(
        "virtual stages, but the program has",
        loss=lambda p, x, y: p["in"][x].mean(),
        mesh=jax.sharding.AbstractMesh((64,), ("stage",), axis_types=(AxisType.Auto,)),
    )
    w = P(None, "stage")
    _raises(
        "splits a dim over 'stage', along which",
        loss=lambda p, x, y: sx.annotate(p["in"][x].sum(0), w).mean(),
    )
    _raises(
        r"differentiates <lambda> by argument 1, in .* no array of floats; .* argnums=",
        argnums=1,
        batch_argnames="y",
        loss=lambda p, x, y: 0.0,
    )
    _raises(
        r"no array that has rows .* besides the parameters \(arguments 0, 1, 2, as argn", argnums=(0, 1, 2)
    )
    marked = lambda p, x, y: jax.checkpoint(lambda h: sx.pipeline.stage(h, "head"))(p["in"][x]).mean()  # noqa: E731
    _raises(r"stage\(x, 'head'\) at .*test_pipeline.py:\d+ stands inside a", loss=marked)
    with pytest.raises(ValueError, match="no mesh is in context"):
        sx.pipeline.value_and_grad(plain(2)[0], microbatches=4)(plain(2)[1], tokens(1), tokens(1))
    with pytest.raises(ValueError, match="name of stage is 3, of type int: give a text"):
        sx.pipeline.stage(jnp.ones(2), 3)
    with pytest.raises(ValueError, match="packing of pack is None.* what sx.pipeline.packing returns"):
        sx.pipeline.pack([jnp.ones(2)], None)


@pytest.mark.once
def test_a_key_that_is_carried_is_sent():
    def loss(params, x, y, key):
        def layer(carry, w):
            h, key = carry
            key, own = jax.random.split(key)
            return (h + jax.random.normal(own, h.shape) * (h @ w), key), None

        (h, _), _ = lax.scan(layer, (params["in"][x], key), params["w"])
        return cross_entropy(h @ params["in"].T, y)

    params, key = plain(4)[1], jax.random.key(0)
    step = sx.shard_jit(sx.pipeline.value_and_grad(loss, microbatches=4), mesh=mesh_of(stage=2))
    got, _ = step(params, tokens(1), tokens(2), key)
    parts = [loss(params, tokens(1)[i::4], tokens(2)[i::4], key) for i in range(4)]
    np.testing.assert_allclose(got, sum(parts) / 4, rtol=1e-5)


def test_annotations_inside():
    """On axes of the stages' own; a jit inside keeps its shardings; layers that differ in their backward pass alone."""

    def loss(params, x, y):
        h = params["in"][x]
        for i in range(4):
            h = jax.lax.with_sharding_constraint(h + jnp.tanh(h @ params["w"][i]), P("data"))
            h = jax.jit(jnp.sin, out_shardings=jax.NamedSharding(mesh, P("data")))(h)
            h = _scaled_backward(i + 1.0)(h)
        return cross_entropy(h @ params["in"].T, y)

    mesh = mesh_of(stage=4, data=2)
    params = plain(4)[1]
    batch = tokens(1), tokens(2)
    grad = sx.pipeline.value_and_grad(loss, microbatches=2)
    step = sx.shard_jit(grad, mesh=mesh, in_shardings=(None, P("data"), P("data")))
    with jax.set_mesh(mesh):
        want = jax.jit(jax.value_and_grad(loss))(params, *batch)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), step(params, *batch), want)


def _scaled_backward(factor: float):
    """The identity, whose cotangent is scaled."""

    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (x, None), lambda _, g: (g * factor,))
    return scaled
