"""Training steps as they stand, on stages: as the plain step on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.pipeline.transform import Pipeline
from shardax.transforms import Argument, Context
from tests.numpy_programs import evaluate

pytestmark = [pytest.mark.mixed_dtypes, pytest.mark.promotes_ranks]

B, S, M, V = 16, 6, 8, 11


def mesh_of(**sizes: int):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def rand(seed: int, *shape: int):
    return jnp.asarray(np.random.RandomState(seed).randn(*shape) / np.sqrt(shape[-1]), "float32")


def tokens(seed: int, batch: int = B) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, V, (batch, S), "int32")


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


def layer(w, h):
    return h + jnp.tanh(h @ w["w"] + w["b"][None, None])


def stack(*lead: int):
    return {"w": rand(1, *lead, M, M), "b": rand(2, *lead, M)}


def scanned(layers: int = 4):
    """Tied embeddings, stacked layers."""
    params = {"embed": rand(0, V, M), "layers": stack(layers)}

    def loss(params, x, y):
        h, _ = lax.scan(lambda h, w: (layer(w, h), None), params["embed"][x], params["layers"])
        return cross_entropy(h @ params["embed"].T, y).mean()

    return params, loss


def unrolled(layers: int = 4):
    params = {"embed": rand(0, V, M), "layers": [stack() for _ in range(layers)], "head": rand(9, M, V)}

    def loss(params, x, y):
        h = params["embed"][x]
        for w in params["layers"]:
            h = layer(w, h)
        return cross_entropy(h @ params["head"], y).mean()

    return params, loss


def indexed(layers: int = 4):
    """Stacked layers, unrolled."""
    params = {"embed": rand(0, V, M), "layers": stack(layers)}

    def loss(params, x, y):
        h = params["embed"][x]
        for i in range(layers):
            h = layer(jax.tree.map(lambda w, i=i: w[i], params["layers"]), h)
        return cross_entropy(h @ params["embed"].T, y).mean()

    return params, loss


def sgd(loss, params):
    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step, params


def adamw(loss, params):
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))

    def step(state, *batch):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, moments = tx.update(grads, moments, params)
        metrics = {"loss": value, "norm": optax.tree.norm(grads)}
        return (optax.apply_updates(params, updates), moments), metrics

    return step, (params, tx.init(params))


def scaled(loss, params):
    """The loss scaled, and the step left out where a gradient is not finite."""

    def step(state, *batch):
        params, scale = state
        value, grads = jax.value_and_grad(lambda p, *b: loss(p, *b) * scale)(params, *batch)
        grads = jax.tree.map(lambda g: g / scale, grads)
        ok = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        new = jax.tree.map(lambda w, g: jnp.where(ok, w - 0.1 * g, w), params, grads)
        return (new, jnp.where(ok, scale * 2, scale / 2)), value / scale

    return step, (params, jnp.float32(8.0))


def check(step, state, batch, mesh, microbatches=4, in_shardings=None, tolerance=1e-5, **how):
    """Two steps, as those of one device."""
    plain = jax.jit(step)
    pipeline = sx.pipeline.Pipeline(microbatches=microbatches, **how)
    data = P("data") if "data" in mesh.shape else P()
    shardings = (in_shardings, *[data if x.ndim else None for x in batch])
    ours = sx.shard_jit(step, mesh=mesh, in_shardings=shardings, transforms=[pipeline])
    wanted = got = state
    close = partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    for _ in range(2):
        wanted, value = plain(wanted, *batch)
        got, got_value = ours(got, *batch)
        jax.tree.map(close, (got, got_value), (wanted, value))
    return ours


BATCH = tokens(1), tokens(2)


def spec_of(params):
    return {**dict.fromkeys(params), "layers": P("stage")}


QUICKLY = {(scanned, adamw): []}  # the others are slow to compile


def steps():
    for make in (scanned, unrolled, indexed):
        for optimizer in (sgd, adamw, scaled):
            marks = QUICKLY.get((make, optimizer), [pytest.mark.slow])
            yield pytest.param(make, optimizer, marks=marks, id=f"{make.__name__}-{optimizer.__name__}")


@pytest.mark.parametrize("make, optimizer", list(steps()))
def test_steps(make, optimizer):
    params, loss = make()
    check(*optimizer(loss, params), BATCH, mesh_of(stage=2, data=2))


THREE_AXES = {"stage": 2, "data": 2, "model": 2}


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(THREE_AXES, marks=pytest.mark.once),
        *[pytest.param(s, marks=pytest.mark.slow) for s in ({"stage": 4, "data": 2}, {"stage": 3})],
    ],
    ids=str,
)
def test_meshes(sizes):
    """Layers that the stages do not divide, too."""
    params, loss = scanned(4)
    model = "model" if "model" in sizes else None
    specs = {
        "embed": P(model),
        "layers": {"w": P("stage" if sizes["stage"] < 3 else None, None, model), "b": None},
    }
    check(*sgd(loss, params), BATCH, mesh_of(**sizes), in_shardings=specs)


SCHEDULES = "naive gpipe circular eager-1f1b interleaved zb-h1 zb-h2 zb-eager zbv dualpipev".split()


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(s, marks=pytest.mark.slow) for s in SCHEDULES],
)
def test_schedules(schedule):
    params, loss = scanned(8)
    check(*sgd(loss, params), BATCH, mesh_of(stage=2, data=2), microbatches=8, schedule=schedule)


def dropout(layers: int = 4):
    """Masks for the whole batch at once, their bits of a key that the scan carries."""
    params = {"embed": rand(0, V, M), "layers": stack(layers)}

    def loss(params, x, y, key):
        def body(carry, w):
            h, key = carry
            key, own = jax.random.split(key)
            return (jnp.where(jax.random.bernoulli(own, 0.8, h.shape), layer(w, h), h), key), None

        (h, _), _ = lax.scan(body, (params["embed"][x], key), params["layers"])
        return cross_entropy(h @ params["embed"].T, y).mean()

    return params, loss


@pytest.mark.once
def test_random_bits_are_those_of_the_whole_batch():
    params, loss = dropout()
    check(*sgd(loss, params), (*BATCH, jax.random.key(3)), mesh_of(stage=2, data=2))


def masked(params, loss_of):
    def loss(params, x, y):
        mask = (x > 2).astype("float32")
        return (loss_of(params, x, y) * mask).sum() / mask.sum()

    return params, loss


@pytest.mark.once
def test_a_mean_over_what_microbatches_have_different_numbers_of():
    """And a batch that they do not divide."""
    params = {"embed": rand(0, V, M), "layers": stack(2)}

    def losses(params, x, y):
        h, _ = lax.scan(lambda h, w: (layer(w, h), None), params["embed"][x], params["layers"])
        return cross_entropy(h @ params["embed"].T, y)

    params, loss = masked(params, losses)
    check(*sgd(loss, params), BATCH, mesh_of(stage=2, data=2))
    check(*sgd(loss, params), (tokens(1, 14), tokens(2, 14)), mesh_of(stage=2))


# What cannot be pipelined

MESH = jax.sharding.AbstractMesh((2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)


def plan(step, state, batch=BATCH, mesh=MESH, **how):
    how = {"microbatches": 4, **how}
    return sx.shard_jit(step, mesh=mesh, transforms=[sx.pipeline.Pipeline(**how)]).plan(state, *batch)


def test_text_of_which_inputs_and_labels_are_both_made_is_split():
    """Small, and read twice: computing all rows in each microbatch would spare the sums of all gradients."""
    params, loss = unrolled(layers=4)

    def of_text(params, text):
        return loss(params, text[:, :-1], text[:, 1:])

    check(*sgd(of_text, params), [tokens(1)], mesh_of(stage=2))


def test_batch_norm_over_the_whole_batch_is_no_sum():
    params = {"in": rand(0, V, M), "out": rand(1, M, V)}

    def loss(params, x, y):
        h = params["in"][x]
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1.0)
        return cross_entropy(h @ params["out"], y).mean()

    with pytest.raises(ValueError, match=r"test_pipeline_transform.py:\d+.* the step is no sum over microb"):
        plan(*sgd(loss, params))


def paired(h, y):
    """Neighbours, as an image beside its caption."""
    h = h.reshape(-1, 2, *h.shape[1:])
    return h[:, 0] - h[:, 1] - y[::2]


def halves(h, y):
    """A view of the batch whose first dim is smaller than the number of microbatches."""
    return h.reshape(2, -1, *h.shape[1:]) - y.reshape(2, -1, *y.shape[1:])


def fewer_labels(h, y):
    return h - jnp.repeat(y, 2, axis=0)


@pytest.mark.parametrize(
    "compared, rows, labels", [(paired, 16, 16), (halves, 16, 16), (fewer_labels, 12, 6)]
)
def test_rows_that_are_computed_together_stay_together(compared, rows, labels):
    """Pairs are those of the step, not of rows that lie apart; a reshape may cut the batch as it likes."""
    params = [rand(i, M, M) for i in range(4)]

    def loss(params, x, y):
        for w in params:
            x = jnp.sin(x @ w)
        return (compared(x, y) ** 2).mean()

    check(*sgd(loss, params), (rand(5, rows, M), rand(6, labels, M)), mesh_of(stage=2))


def test_an_update_with_loops_in_it_is_done_once():
    """L-BFGS goes over its memory in a scan, of whose products each microbatch was to compute a part."""
    layers = {"up": rand(1, 4, 16, 64), "down": rand(2, 4, 64, 16), "scale": jnp.ones((4, 16))}
    params = {"embed": rand(0, 40, 16), "layers": layers}
    tx = optax.lbfgs(linesearch=None, memory_size=3)

    def one(h, w):
        return h + jnp.tanh((h * w["scale"]) @ w["up"]) @ w["down"], None

    def loss(params, x, y):
        h, _ = lax.scan(one, params["embed"][x], params["layers"])
        return cross_entropy(h @ params["embed"].T, y).mean()

    def step(state, *batch):
        params, memory = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, memory = tx.update(grads, memory, params)
        return (optax.apply_updates(params, updates), memory), value

    check(step, (params, tx.init(params)), (tokens(1, 20), tokens(2, 20)), mesh_of(stage=2), tolerance=1e-4)


def mixed_up(x, y):
    return 0.7 * x + 0.3 * x[::-1], 0.7 * y + 0.3 * y[::-1]


def shuffled(x, y):
    order = jax.random.permutation(jax.random.key(3), len(x))
    return x[order], y[order]


@pytest.mark.parametrize(
    "prepared",
    [
        mixed_up,
        shuffled,
        lambda x, y: (jnp.roll(x, 1, 0), y),
        lambda x, y: (x[:8] - x[8:], y[8:]),
        lambda x, y: (jnp.concatenate([x, 2 * x]), jnp.concatenate([y, -y])),
    ],
)
@pytest.mark.parametrize("sizes", [{"stage": 2}, {"stage": 2, "data": 2}])
def test_rows_of_the_batch_that_change_places_do_so_before(prepared, sizes):
    """As in mixup: what is done to the batch alone is done before the microbatches, for all of them."""
    params = [rand(i, M, M) for i in range(4)]

    def loss(params, x, y):
        x, y = prepared(x, y)
        for w in params:
            x = jnp.sin(x @ w)
        return ((x - y) ** 2).mean()

    check(*sgd(loss, params), (rand(5, 16, M), rand(6, 16, M)), mesh_of(**sizes))


def test_pairs_across_microbatches_are_no_sum():
    params = [rand(i, M, M) for i in range(4)]

    def loss(params, x):
        for w in params:
            x = jnp.sin(x @ w)
        first, second = x.reshape(2, -1, M)
        return ((first - second) ** 2).mean()

    with pytest.raises(ValueError, match=r"test_pipeline_transform.py:\d+.* the step is no sum over microb"):
        plan(*sgd(loss, params), (rand(5, 16, M),))


def of_one_array(compared):
    """A step whose one array of weights has fewer arrays beside it than the batch, and is not donated."""

    def loss(w, x, y):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
        return (compared(h, y) ** 2).mean()

    return sgd(loss, rand(0, 4, M, M))


@pytest.mark.parametrize("compared", [paired, lambda h, y: h[::2] * h[1::2]])
def test_one_array_of_weights_beside_two_of_the_batch(compared):
    check(*of_one_array(compared), (rand(5, 16, M), rand(6, 16, M)), mesh_of(stage=2, data=2))


@pytest.mark.parametrize(
    "compared",
    [
        lambda h, y: h[:8] * h[8:],
        lambda h, y: h * h[::-1],
        lambda h, y: h * jnp.roll(h, 1, 0),
        lambda h, y: jnp.sort(h, 0),
        lambda h, y: h @ h.T,
        lambda h, y: jnp.cumsum(h, 0),
        lambda h, y: h.reshape(2, 8, M).sum(0),
    ],
)
def test_the_line_that_mixes_rows_of_microbatches_is_named(compared):
    batch = rand(5, 16, M), rand(6, 16, M)
    line = compared.__code__.co_firstlineno
    with pytest.raises(
        ValueError, match=rf"what .*test_pipeline_transform.py:{line} computes .* the step is no sum"
    ):
        plan(*of_one_array(compared), batch)


def test_weights_taken_as_the_batch():
    """Nothing of their type comes back, and they have a row for each microbatch."""
    step, w = of_one_array(lambda h, y: h - y)

    def without_update(w, x, y):
        new, value = step(w, x, y)
        return value, (new**2).sum()

    with pytest.raises(
        ValueError, match="nothing in the forward pass depends on .* w is taken; .* by batch_"
    ):
        plan(without_update, w, (rand(5, 16, M), rand(6, 16, M)))


def test_weights_that_do_not_come_back_are_named_where_they_are_taken_as_the_batch():
    def step(params, x, y, frozen):
        def loss(params):
            h = x
            for w, w_frozen in zip(params, frozen, strict=True):
                h = jnp.tanh(h @ w_frozen + h @ w["a"] @ w["b"])
            return ((h - y) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    params = [{"a": rand(0, B, 4), "b": rand(1, 4, B)} for _ in range(4)]
    batch = rand(2, B, B), rand(3, B, B), [rand(4, B, B)] * 4
    with pytest.raises(ValueError, match=r"Taken as the batch are x, y, frozen/0.* by batch_argnames="):
        plan(step, params, batch)
    planned = plan(step, params, batch, batch_argnames=("x", "y"))
    assert any(c.kind == "ppermute" for c in planned.collectives)


def test_the_axis_has_to_be_in_the_mesh():
    params, loss = scanned()
    with pytest.raises(ValueError, match="axis of Pipeline is 'pipe', and the mesh .stage=2, data=2. has no"):
        plan(*sgd(loss, params), axis="pipe")


def test_more_stages_than_parts():
    def loss(params, x):
        return (x @ params).sum()

    mesh = jax.sharding.AbstractMesh((64,), ("stage",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="64 virtual stages, but the program has . parts"):
        plan(*sgd(loss, rand(0, M, M)), (rand(1, B, M),), mesh)


def test_more_microbatches_than_rows():
    with pytest.raises(
        ValueError, match=r"the batch has 16 rows \(the first dim of args\[1\]\), .* 17 microbatches; take"
    ):
        plan(*of_one_array(lambda h, y: h - y), (rand(5, 16, M), rand(6, 16, M)), microbatches=17)


def test_nothing_to_pipeline():
    params, loss = scanned()
    with pytest.raises(ValueError, match="no backward pass is found .* sx.pipeline.apply"):
        plan(lambda params, *b: (params, loss(params, *b)), params)
    with pytest.raises(ValueError, match="no batch is found among the arguments .params"):
        plan(*sgd(lambda w: (w**2).sum(), rand(0, M, M)), ())


def test_a_backward_pass_in_a_loop():
    params, loss = scanned()

    def accumulated(params, x, y):
        def part(sums, batch):
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, *batch)), None

        parts = x.reshape(4, -1, *x.shape[1:]), y.reshape(4, -1, *y.shape[1:])
        return jax.lax.scan(part, jax.tree.map(jnp.zeros_like, params), parts)[0]

    where = r"the backward pass, at .*test_pipeline_transform.py:\d+, stands inside a scan, .* more microb"
    with pytest.raises(ValueError, match=where):
        plan(accumulated, params)


@pytest.mark.quick
def test_numbers_of_numpy():
    """Programs are memoized by what is equal, as numpy's number and Python's are, and types differ in them."""
    assert type(Pipeline(microbatches=np.int64(4)).microbatches) is int  # type: ignore[arg-type]


def test_two_pipelines():
    params, loss = scanned()
    step = sx.pipeline.value_and_grad(loss, microbatches=4)
    with pytest.raises(
        ValueError, match=r"has a jax.shard_map over 'stage' already, at .*; keep one of them"
    ):
        plan(lambda *args: step(*args)[::-1], params)
    first = Pipeline(microbatches=4)
    with pytest.raises(
        ValueError, match="is pipelined over 'stage' already, as by another Pipeline; keep one"
    ):
        sx.shard_jit(sgd(loss, params)[0], mesh=MESH, transforms=[first, first]).plan(params, *BATCH)


def test_an_annotation_inside_that_names_the_axis():
    def loss(params, x):
        return sx.annotate(jnp.tanh(x @ params), P("stage")).sum()

    with pytest.raises(ValueError, match=r"annotate at .*:\d+ splits a dim over 'stage', along which"):
        plan(*sgd(loss, rand(0, M, M)), (rand(1, B, M),))


@pytest.mark.quick
def test_what_it_takes():
    with pytest.raises(ValueError, match="microbatches of Pipeline is 0"):
        sx.pipeline.Pipeline(microbatches=0)
    assert (
        str(sx.pipeline.Pipeline(microbatches=4)) == "Pipeline(axis='stage', microbatches=4, schedule='1f1b')"
    )


# What runs


def dots(jaxpr) -> int:
    """The products that run, each trip of a scan counted."""
    count = 0
    for eqn in jaxpr.eqns:
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        count += eqn.primitive.name == "dot_general"
        count += trips * sum(map(dots, jax.extend.core.jaxprs_in_params(eqn.params)))
    return count


def branches(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            yield from (dots(branch.jaxpr) for branch in eqn.params["branches"])
        else:
            for body in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from branches(body)


def test_w_computes_nothing_again():
    """Two layers on each of two stages: two products forward, two in B, two in W, and those of the ends."""
    params, loss = scanned()
    ours = plan(*sgd(loss, params), schedule="zb-h1")
    assert sum(branches(ours.local_jaxpr.jaxpr)) == 3 * (4 + 1)


def test_the_program_sends_what_value_and_grad_sends():
    """One activation or cotangent a tick; gradients are reduced once."""
    params, loss = scanned(8)
    x = jax.ShapeDtypeStruct((4096, S), "int32")
    params = jax.tree.map(lambda w: jax.ShapeDtypeStruct((*w.shape[:-1], 512), w.dtype), params)
    params["layers"]["w"] = jax.ShapeDtypeStruct((8, 512, 512), "float32")
    mesh = jax.sharding.AbstractMesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    how = {"mesh": mesh, "in_shardings": ({"embed": None, "layers": P("stage")}, P("data"), P("data"))}
    pipeline = sx.pipeline.Pipeline(microbatches=8)
    made = sx.shard_jit(sgd(loss, params)[0], transforms=[pipeline], **how).plan(params, x, x)
    large = [c for c in made.collectives if c.nbytes > 20_000]
    assert {c.operands[0].shape for c in large if c.kind == "ppermute"} == {(256, S, 512)}
    assert {c.trips for c in large if c.kind != "ppermute"} == {1}


# Its parts


@pytest.mark.quick
def test_the_batch_is_what_has_as_many_rows_as_the_first_array_that_is_no_state():
    pipeline = Pipeline(microbatches=4)
    types = ((8, 2), True), ((), False), ((16, 3), False), ((16,), False), ((8, 2), False)
    arguments = tuple(
        Argument(f"x{i}", jax.ShapeDtypeStruct(shape, "float32"), is_state=state)
        for i, (shape, state) in enumerate(types)
    )
    assert pipeline._is_batch(Context(MESH, arguments, (), sx.Options())) == [False, False, True, True, False]


@pytest.mark.quick
@pytest.mark.parametrize("dim, first", [(0, [0, 1]), (1, [0, 4])])
def test_rows_of_a_microbatch(dim, first):
    """One after the other, or, where any do, such as each of the data's devices has: of 8 rows and 4
    microbatches on 2 devices, rows 0 and 4."""
    made = jax.make_jaxpr(lambda x: Pipeline(microbatches=4)._microbatches(x, None, dim))
    (rows,) = evaluate(made(np.arange(8)), [np.arange(8)])
    assert rows.shape[dim] == 4 and rows.take(0, dim).tolist() == first
    assert sorted(rows.reshape(-1)) == list(range(8))


@pytest.mark.quick
def test_stages_are_counted_along_the_axis():
    assert Pipeline(axis="data")._stages(jax.sharding.AbstractMesh((3, 5), ("stage", "data"))) == 5


@pytest.mark.slow
@pytest.mark.parametrize("make", [scanned, unrolled])
def test_one_microbatch(make):
    """Which owes no sums."""
    params, loss = make()
    check(*adamw(loss, params), BATCH, mesh_of(stage=2), microbatches=1)


@pytest.mark.slow
def test_results_with_rows_of_a_batch_that_the_microbatches_do_not_divide():
    def step(w, x):
        def loss(w):
            h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
            return (h**2).mean(), h[:, :2]

        (value, rows), grads = jax.value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * grads, (value, rows)

    check(step, rand(0, 4, M, M), (np.asarray(rand(4, 14, M)),), mesh_of(stage=2))
