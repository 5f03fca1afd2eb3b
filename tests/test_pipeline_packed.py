"""Weights at rest where their stages are: what rests where, what a step sends, and the way back; on shapes."""

import math
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.explain.reports import reports
from shardax.pipeline.packed import FLAT, STACKED, WHOLE

pytestmark = pytest.mark.quick

F32 = partial(jax.ShapeDtypeStruct, dtype="float32")
V, M, H = 512, 256, 1024
MESH = AbstractMesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
X = jax.ShapeDtypeStruct((64, 128), "int32")


def params(layers: int):
    """As Flax has them."""
    one = {"up": {"kernel": F32((M, H)), "bias": F32((H,))}, "down": {"kernel": F32((H, M))}}
    return {
        "embed": F32((V, M)),
        "head": F32((M, V)),
        "norm": F32((M,)),
        "layers": {f"layer_{i}": one for i in range(layers)},
    }


def loss(params, x, y):
    p = jax.tree.map(lambda w: w.astype("bfloat16"), params)
    h = p["embed"][x]
    for w in p["layers"].values():
        a = jax.nn.gelu(h @ w["up"]["kernel"] + w["up"]["bias"].reshape(1, 1, -1))
        h = h + a @ w["down"]["kernel"]
    logits = ((h * p["norm"].reshape(1, 1, -1)) @ p["head"]).astype("float32")
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1).mean()


def scanned(params, x, y):
    """Tied embeddings."""
    h, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), params["in"][x], params["w"])
    return -jnp.take_along_axis(jax.nn.log_softmax(h @ params["in"].T), y[..., None], -1).mean()


def grad_of(loss, **how):
    return sx.pipeline.value_and_grad(loss, microbatches=8, **how)


def packing_of(grad, shapes, **said):
    return sx.pipeline.packing(grad, shapes, X, X, mesh=MESH, **said)


def packed_plan(grad, shapes, chip=None):
    packing = packing_of(grad, shapes)
    packed = jax.eval_shape(partial(sx.pipeline.pack, packing=packing), shapes)
    how = {"in_shardings": (packing.specs, P("data"), P("data")), "options": sx.Options(chip=chip)}
    return sx.shard_jit(grad, mesh=MESH, **how).plan(packed, X, X), packed


def resident(plan, tree) -> int:
    """Bytes of a tree, the first argument, on each device."""
    pairs = zip(jax.tree.leaves(plan.in_shardings[0]), jax.tree.leaves(tree), strict=True)
    return sum(math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize for sharding, x in pairs)


@pytest.mark.parametrize("layers", [8, 7])
def test_unrolled_layers_rest_on_their_stages_and_stay_there(layers):
    """A quarter of the bytes, but for what the fullest stage has more than others; nothing is dealt out. On the
    nominal chip the embedding's gradient, which lies in one array with that of a layer, would be scattered in each
    tick of seven layers: to add up halves of it takes 0.07 % less time there.
    """
    shapes = params(layers)
    plan, packed = packed_plan(grad_of(loss), shapes, "H100")
    whole = sum(x.size * 4 for x in jax.tree.leaves(shapes))
    assert resident(plan, packed) < 0.31 * whole
    over_stages = {c.kind for c in plan.collectives if "stage" in c.axes and c.nbytes > 100}
    assert over_stages == {"ppermute"}
    assert {c.operands[0].shape[:2] for c in plan.collectives if c.kind == "ppermute"} == {(4, 128)}
    over_data = [c for c in plan.collectives if c.axes == ("data",)]
    assert {c.trips for c in over_data} == {1}
    kinds = Counter(c.kind for c in over_data)  # what is done with some sums is done by halves
    assert kinds["all_reduce"] + kinds["reduce_scatter"] <= len(jax.tree.leaves(packed)) + 1
    assert kinds["reduce_scatter"] == kinds["all_gather"] and len(kinds) <= 3


def adam_step(grad):
    import optax

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(state, x, y):
        params, moments = state
        value, grads = grad(params, x, y)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, tx.init


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize(
    "loss, shapes, schedule",
    [
        (loss, params(8), "1f1b"),
        pytest.param(loss, params(7), "zb-h1", marks=pytest.mark.once),
        (scanned, {"in": F32((64, M)), "w": F32((16, M, M))}, "interleaved"),
    ],
)
def test_the_transform_leaves_state_where_its_stage_is(loss, shapes, schedule):
    """Parameters and moments alike; it sends what `value_and_grad` sends."""
    pipeline = sx.pipeline.Pipeline(microbatches=8, schedule=schedule)
    grad = grad_of(loss, schedule=schedule)
    packing = packing_of(grad, shapes)
    step, init = adam_step(grad)
    state = jax.eval_shape(lambda p: (p, init(p)), shapes)
    packed = jax.eval_shape(partial(sx.pipeline.pack, packing=packing), state)
    how = {"mesh": MESH, "in_shardings": (packing.specs_of(state), P("data"), P("data")), "donate_argnums": 0}
    wanted = sx.shard_jit(step, **how).plan(packed, X, X)
    step, _ = adam_step(jax.value_and_grad(lambda p, *batch: loss(sx.pipeline.unpack(p), *batch)))
    plan = sx.shard_jit(step, transforms=[pipeline], **how).plan(packed, X, X)
    sent, as_sent = (
        Counter((c.kind, c.axes, c.shape, c.trips) for c in p.collectives) for p in (plan, wanted)
    )
    assert sent == as_sent and sum(sent.values())
    assert resident(plan, packed) == resident(wanted, packed)
    if loss is not scanned:  # whose embeddings are tied
        assert resident(plan, packed) < 0.27 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(packed))
        over_stages = {c.kind for c in plan.collectives if "stage" in c.axes and c.nbytes > 100}
        assert over_stages == {"ppermute"}


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_stacked_layers_rest_in_the_order_of_the_chunks(schedule):
    shapes = {"in": F32((64, M)), "w": F32((16, M, M))}
    grad = grad_of(scanned, schedule=schedule)
    plan, packed = packed_plan(grad, shapes)
    kinds = [(each.kind, each.shape) for each in packed.packing.arrays]
    assert kinds == [(STACKED, (2, M, M))] * 2 + [(WHOLE, (64, M))]
    rows = [tuple(part.rows for (part,) in each.parts) for each in packed.packing.arrays[:2]]
    later = ((8, 10), (10, 12), (12, 14), (14, 16))
    assert rows == [((0, 2), (2, 4), (4, 6), (6, 8)), later[:: -1 if schedule == "zbv" else 1]]
    large = [c for c in plan.collectives if c.operands[0].shape[-2:] == (M, M)]
    assert {(c.axes, c.trips) for c in large} == {(("data",), 1)}
    assert sum(c.kind in ("all_reduce", "reduce_scatter") for c in large) == 2  # one for each array
    assert {c.reason[:6] for c in large if c.kind == "all_gather"} <= {"result"}


def unlike(params, x, y):
    h = jax.nn.one_hot(x, M)
    for w, b in params:
        h = jnp.tanh(h @ w + b.reshape(1, 1, -1))
    return (h**2).mean()


SIZES = [M, 320, 200, 360, 240, M]
UNLIKE = [(F32((a, b)), F32((b,))) for a, b in zip(SIZES, SIZES[1:], strict=False)]


def test_unlike_layers_rest_flat():
    packing = packing_of(grad_of(unlike), UNLIKE)
    assert [each.kind for each in packing.arrays] == [FLAT]
    ends = [sum(math.prod(packing.shapes[p.leaf]) for p in parts) for parts in packing.arrays[0].parts]
    assert packing.arrays[0].shape == (max(ends),) and sum(ends) == sum(
        x.size for x in jax.tree.leaves(UNLIKE)
    )
    plan, packed = packed_plan(grad_of(unlike), UNLIKE)
    assert {c.kind for c in plan.collectives if "stage" in c.axes and c.nbytes > 100} == {"ppermute"}


def used_twice(params, x, y):
    h = jax.nn.one_hot(x, M)
    for w in params:
        h = sx.pipeline.stage(jnp.tanh(jnp.tanh(h @ w) @ w.T))
    return (h**2).mean()


@pytest.mark.parametrize("is_packed", [True, False])
def test_gradients_of_two_uses_on_one_stage_are_added_up_in_one_place(is_packed):
    shapes = [F32((M, M))] * 4
    if is_packed:
        plan, _ = packed_plan(grad_of(used_twice), shapes)
        assert {c.kind for c in plan.collectives if "stage" in c.axes and c.nbytes > 100} == {"ppermute"}
    else:
        how = {"mesh": MESH, "in_shardings": (None, P("data"), P("data"))}
        transform = sx.pipeline.Pipeline(microbatches=8)
        plan = sx.shard_jit(jax.value_and_grad(used_twice), transforms=[transform], **how).plan(shapes, X, X)
    assert reports(plan)[0].data["memory"][-1]["gradients"] == M * M * 4 + 4  # and the loss


def test_what_other_axes_split_rests_in_no_flat_array():
    specs = [(P(None, "data"), P()) for _ in UNLIKE]
    packing = packing_of(grad_of(unlike), UNLIKE, specs=specs)
    flat = [
        packing.names[p.leaf] for each in packing.arrays if each.kind == FLAT for ps in each.parts for p in ps
    ]
    assert flat and all(name.endswith("/1") for name in flat)
    specs = jax.tree.leaves(packing.specs, is_leaf=lambda x: isinstance(x, P))
    assert specs.count(P("stage", None, "data")) == len(UNLIKE)
    stacked = packing_of(
        grad_of(scanned),
        {"in": F32((64, M)), "w": F32((8, M, M))},
        specs={"in": P("data"), "w": P(None, None, "data")},
    )
    assert stacked.specs.arrays == (P("stage", None, None, "data"), P("data"))


def test_split_leaves_of_one_stage_rest_there():
    """However few stages have one of a shape: where other axes split them they fit into no flat array."""
    mesh = AbstractMesh((2, 2, 2), ("stage", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    shapes, grad = params(4), grad_of(loss)
    specs = jax.tree.map(lambda x: P(None, "model") if len(x.shape) == 2 else P(), shapes)
    packing = sx.pipeline.packing(grad, shapes, X, X, mesh=mesh, specs=specs)
    assert {each.kind for each in packing.arrays} == {FLAT, STACKED}
    packed = jax.eval_shape(partial(sx.pipeline.pack, packing=packing), shapes)
    plan = sx.shard_jit(grad, mesh=mesh, in_shardings=(packing.specs, P("data"), P("data"))).plan(
        packed, X, X
    )
    assert {c.kind for c in plan.collectives if "stage" in c.axes and c.nbytes > 1000} == {"ppermute"}


@pytest.mark.not_quick
@pytest.mark.parametrize("form", ["value_and_grad", "Pipeline"])
def test_one_microbatch(form):
    """Nothing is summed over microbatches."""
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    rows = jax.random.normal(jax.random.key(1), (8, 6))
    weights = {"layers": list(jax.random.normal(jax.random.key(0), (4, 6, 6))), "head": jnp.ones((6, 3))}

    def unrolled(params, x_BM):
        for w in params["layers"]:
            x_BM = x_BM + jnp.tanh(x_BM @ w)
        return ((x_BM @ params["head"]) ** 2).mean()

    grad = sx.pipeline.value_and_grad(unrolled, microbatches=1)
    packing = sx.pipeline.packing(grad, weights, rows, mesh=mesh)
    assert {STACKED} < {each.kind for each in packing.arrays}
    transforms = []
    if form == "Pipeline":
        grad = jax.value_and_grad(lambda packed, x_BM: unrolled(sx.pipeline.unpack(packed), x_BM))
        transforms = [sx.pipeline.Pipeline(microbatches=1)]

    def step(packed, x_BM):
        value, grads = grad(packed, x_BM)
        return jax.tree.map(lambda w, g: w - 0.1 * g, packed, grads), value

    how = {"mesh": mesh, "in_shardings": (packing.specs, P("data")), "transforms": transforms}
    new, value = sx.shard_jit(step, **how)(sx.pipeline.pack(weights, packing), rows)
    expected, grads = jax.value_and_grad(unrolled)(weights, rows)
    wanted = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), sx.pipeline.unpack(new), wanted)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_labels_are_those_of_all_leaves_of_an_array():
    """A mask for weight decay, say; where alike layers differ in it, they have to rest apart."""
    shapes, grad = params(8), grad_of(loss)
    mask = jax.tree.map(lambda x: x.ndim > 1, shapes)
    packing = packing_of(grad, shapes, labels=mask)
    said = packing.labels(mask)
    for each, decays in zip(packing.arrays, said.arrays, strict=True):
        assert {len(packing.shapes[p.leaf]) > 1 for ps in each.parts for p in ps} == {decays}
    with pytest.raises(ValueError, match="labels are .* which rest in one array; give these labels to"):
        packing_of(grad, shapes).labels(mask)


def test_trees_like_the_parameters_are_packed_wherever_they_are():
    import optax

    shapes, grad = params(8), grad_of(loss)
    packing = packing_of(grad, shapes)
    state = shapes, jax.eval_shape(optax.adam(1e-3).init, shapes)
    packed = jax.eval_shape(partial(sx.pipeline.pack, packing=packing), state)
    alike = jax.eval_shape(optax.adam(1e-3).init, packed[0])
    assert jax.tree.structure(packed[1]) == jax.tree.structure(alike)
    assert jax.eval_shape(sx.pipeline.unpack, packed) == state


def test_what_no_stage_has_alone_rests_as_it_is():
    """Shared, normed (made of the leaf by more than a cast), or read by nobody."""

    def normed(params, x, y):
        h = params["in"][x]
        for w in params["layers"]:
            h = jnp.tanh(h @ (w / jnp.sqrt((w * w).sum())))
        return (h @ params["in"].T).mean()

    shapes = {"in": F32((64, M)), "layers": [F32((M, M))] * 4, "unread": F32((3,))}
    packing = packing_of(grad_of(normed), shapes)
    assert [each.kind for each in packing.arrays] == [WHOLE] * 6


def test_bad_input():
    shapes, grad = params(8), grad_of(loss)
    packing = packing_of(grad, shapes)
    packed = jax.eval_shape(partial(sx.pipeline.pack, packing=packing), shapes)
    with pytest.raises(ValueError, match="packed for 4 stages along 'stage', and the pipeline has 2 along"):
        other = AbstractMesh((2, 4), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
        sx.shard_jit(grad, mesh=other).plan(packed, X, X)
    with pytest.raises(ValueError, match="'loss' is not pipelined; expected what sx.pipeline.value_and_grad"):
        sx.pipeline.packing(loss, shapes, X, X, mesh=MESH)
    with pytest.raises(ValueError, match=r"specs has .*'stage'.*, and 'stage' is the axis of stages"):
        packing_of(grad, shapes, specs=jax.tree.map(lambda x: P("stage"), shapes))
    with pytest.raises(
        ValueError, match="nothing in the tree has the structure and shapes of the parameters"
    ):
        sx.pipeline.pack(params(7), packing)
    several = grad_of(lambda p, q, x, y: loss(p, x, y) + q.sum(), argnums=(0, 1))
    with pytest.raises(ValueError, match="expected one argument that has all parameters to pack"):
        sx.pipeline.packing(several, shapes, F32((3,)), X, X, mesh=MESH)
