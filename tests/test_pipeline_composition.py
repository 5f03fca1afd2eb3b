"""Pipelined steps on packed weights with what else a training step has: ZeRO, clipping, loss scaling, remat,
other axes, donated state, checkpoints; as the same step on one device.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from tests.test_pipeline import V, cross_entropy, mesh_of, rand, tokens

pytestmark = pytest.mark.mixed_dtypes

M = 16


def net(layers: int, dtype="float32", policy=None):
    """Unrolled layers, which the program casts and, with a policy, computes again."""
    params = {
        "in": rand(0, V, M),
        "layers": [{"up": rand(i + 1, M, 2 * M), "down": rand(i + 50, 2 * M, M)} for i in range(layers)],
        "norm": jnp.ones(M),
        "out": rand(99, M, V),
    }

    def block(w, h):
        return h + jnp.tanh(h @ w["up"]) @ w["down"]

    def loss(params, x, y):
        p = jax.tree.map(lambda w: w.astype(dtype), params)
        h, layer = p["in"][x], jax.checkpoint(block, policy=policy) if policy else block
        for w in p["layers"]:
            h = layer(w, h)
        logits = (h * p["norm"].reshape(1, 1, -1)) @ p["out"]
        return cross_entropy(logits.astype("float32"), y)

    return loss, params


HUGE = 2.0**127  # as the scale of a loss: it overflows
SPLIT = {"up": P(None, "model"), "down": P("model")}


def packing_of(grad, params, mesh, *others):
    specs = None
    if "model" in mesh.shape:
        specs = {**jax.tree.map(lambda _: P(), params), "layers": [SPLIT] * len(params["layers"])}
    return sx.pipeline.packing(grad, params, *others, tokens(0), tokens(0), mesh=mesh, specs=specs)


def norm_of(tree):
    return jnp.sqrt(sum((x * x).sum() for x in jax.tree.leaves(tree)))


def train_step(grad, tx):
    def step(state, x, y):
        params, opt_state = state
        value, gradients = grad(params, x, y)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (value, norm_of(gradients))

    return step


def compare(ours, theirs, state, steps: int, tolerance: float):
    """Both steps from one state, ours packed; the packed state afterwards."""
    packed, plain = jax.tree.map(jnp.copy, state)
    for i in range(steps):
        batch = tokens(2 * i), tokens(2 * i + 1)
        packed, got = ours(packed, *batch)
        plain, want = theirs(plain, *batch)
        np.testing.assert_allclose(got, want, rtol=tolerance)
    check = partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    jax.tree.map(check, sx.pipeline.unpack(packed), plain)
    return packed, plain


@pytest.mark.parametrize(
    "stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2, 3))], ids=str
)
def test_zero_and_clipping(stage):
    """Moments are split over the stages, and over the batch's axis too; the norm is that of all weights."""
    loss, params = net(4)
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    grad = sx.pipeline.value_and_grad(loss, microbatches=2)
    mesh = mesh_of(stage=2, data=4)
    packing = packing_of(grad, params, mesh)
    state = params, tx.init(params)
    step = sx.shard_jit(
        train_step(grad, tx),
        mesh=mesh,
        in_shardings=((packing.specs, None), P("data"), P("data")),
        donate_argnums=0,
        transforms=[sx.zero.Zero("data", stage=stage)] if stage else (),
    )
    single = jax.jit(train_step(jax.value_and_grad(loss), tx))
    packed, _ = compare(step, single, (sx.pipeline.pack(state, packing), state), 2, 1e-5)
    moments = [x for x in jax.tree.leaves(packed[1]) if x.ndim]
    axes = {axes for x in moments for axes in x.sharding.spec if axes}
    assert axes == ({"stage", "data"} if stage else {"stage"})


def test_the_transform_takes_packed_weights():
    """On three axes, in a schedule with W."""
    loss, params = net(4)
    tx, mesh = optax.adamw(1e-2), mesh_of(stage=2, data=2, model=2)
    packing = packing_of(sx.pipeline.value_and_grad(loss, microbatches=4, schedule="zb-h1"), params, mesh)
    state = params, tx.init(params)

    def of_packed(params, x, y):
        return loss(sx.pipeline.unpack(params), x, y)

    step = sx.shard_jit(
        train_step(jax.value_and_grad(of_packed), tx),
        mesh=mesh,
        in_shardings=((packing.specs, None), P("data"), P("data")),
        donate_argnums=0,
        transforms=[sx.pipeline.Pipeline(microbatches=4, schedule="zb-h1")],
    )
    single = jax.jit(train_step(jax.value_and_grad(loss), tx))
    packed, _ = compare(step, single, (sx.pipeline.pack(state, packing), state), 2, 1e-5)
    specs = [x.sharding.spec for x in jax.tree.leaves(packed) if x.ndim]
    assert specs == 3 * specs[: len(packing.arrays)] and specs[0] == P("stage", None, "model")


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_a_stage_uses_twice(dtype):
    """Cast and scaled; of gradients that rest packed, and of those that do not."""

    def loss(params, x, y):
        h = params["in"][x]
        for w in params["layers"]:
            w = w.astype(dtype) * 0.5
            h = sx.pipeline.stage(h + jnp.tanh(h.astype(dtype) @ w) @ w.T)
        return cross_entropy(h.astype("float32") @ params["out"], y)

    _, params = net(2)
    params = {"in": params["in"], "layers": [w["up"] for w in params["layers"]], "out": params["out"]}
    grad, mesh = sx.pipeline.value_and_grad(loss, microbatches=4), mesh_of(stage=2, data=2)
    packing, batch = packing_of(grad, params, mesh), (tokens(1), tokens(2))
    split = packing.specs, P("data"), P("data")
    got = sx.shard_jit(grad, mesh=mesh, in_shardings=split)(sx.pipeline.pack(params, packing), *batch)
    pipeline = sx.pipeline.Pipeline(microbatches=4)
    step = sx.shard_jit(jax.value_and_grad(loss), mesh=mesh, transforms=[pipeline])
    want, tolerance = jax.value_and_grad(loss)(params, *batch), 1e-5 if dtype == "float32" else 3e-2
    check = partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    jax.tree.map(check, sx.pipeline.unpack(got), want)
    jax.tree.map(check, step(params, *batch), want)


@pytest.mark.once
def test_loss_scaling_skips_steps_that_overflow():
    """In bfloat16 on three axes; the scale is an argument of the loss, the update a branch."""
    loss, params = net(2, "bfloat16")

    def scaled(params, scale, x, y):
        return 64 * loss(params, x, y) * scale

    grad = sx.pipeline.value_and_grad(scaled, microbatches=4)
    tx, mesh = optax.adam(1e-2), mesh_of(stage=2, data=2, model=2)
    packing = packing_of(grad, params, mesh, jnp.float32(1))

    def step_of(grad):
        def step(state, x, y):
            params, opt_state, scale = state
            value, gradients = grad(params, scale, x, y)
            gradients = jax.tree.map(lambda g: g / scale, gradients)
            finite = jnp.isfinite(norm_of(gradients))

            def update():
                updates, new = tx.update(gradients, opt_state, params)
                return optax.apply_updates(params, updates), new

            params, opt_state = lax.cond(finite, update, lambda: (params, opt_state))
            return (params, opt_state, jnp.where(finite, scale, scale * 2.0**-120)), value / scale

        return step

    plain = params, tx.init(params), jnp.float32(HUGE)
    packed = sx.pipeline.pack(plain, packing)
    step = sx.shard_jit(
        step_of(grad),
        mesh=mesh,
        in_shardings=((packing.specs, None, None), P("data"), P("data")),
        donate_argnums=0,
    )
    single = jax.jit(step_of(jax.value_and_grad(scaled)))
    packed, state = compare(step, single, (packed, plain), 3, 2e-2)
    assert state[1][0].count == packed[1][0].count == 2  # of three: the first overflowed


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_remat_policies(schedule):
    loss, params = net(8, policy=jax.checkpoint_policies.dots_saveable)
    grad = sx.pipeline.value_and_grad(loss, microbatches=4, schedule=schedule)
    mesh, tx = mesh_of(stage=2, data=2, model=2), optax.sgd(0.1)
    packing, state = packing_of(grad, params, mesh), (params, tx.init(params))
    step = sx.shard_jit(
        train_step(grad, tx), mesh=mesh, in_shardings=((packing.specs, None), P("data"), P("data"))
    )
    single = jax.jit(train_step(jax.value_and_grad(loss), tx))
    compare(step, single, (sx.pipeline.pack(state, packing), state), 2, 1e-5)


@pytest.mark.slow
def test_other_functions_and_schedules_take_packed_weights():
    """Which cut elsewhere: what they want on another stage is dealt out."""
    loss, params = net(8)
    mesh, batch = mesh_of(stage=2, data=2), (tokens(1), tokens(2))
    packing = packing_of(sx.pipeline.value_and_grad(loss, microbatches=4, schedule="zbv"), params, mesh)
    packed, split = sx.pipeline.pack(params, packing), (packing.specs, P("data"), P("data"))
    grad = sx.pipeline.value_and_grad(loss, microbatches=4, schedule="interleaved")
    got = sx.pipeline.unpack(sx.shard_jit(grad, mesh=mesh, in_shardings=split)(packed, *batch))
    want = jax.value_and_grad(loss)(params, *batch)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)

    def scores(params, x):
        return loss(params, x, x) + x.sum(-1) * params["norm"][0]

    scored = sx.pipeline.apply(scores, microbatches=1)
    got = sx.shard_jit(scored, mesh=mesh, in_shardings=split[:2])(packed, batch[0])
    np.testing.assert_allclose(got, scores(params, batch[0]), rtol=1e-5)


@pytest.mark.once
def test_a_checkpoint_of_four_stages_is_restored_to_two_and_to_none(tmp_path):
    """Saved plain, each leaf split over the stages; packed where it is restored. No device has all of it."""
    from models.checkpoints import Checkpoints

    loss, params = net(8)
    tx, shapes = optax.adam(1e-2), jax.eval_shape(lambda: params)
    grad = sx.pipeline.value_and_grad(loss, microbatches=2)
    state = jax.eval_shape(lambda p: (p, tx.init(p)), shapes)

    def resting(mesh):
        """Of the plain state."""
        return sx.zero.specs(state, mesh, "stage")

    def moves(mesh):
        packing = packing_of(grad, shapes, mesh)
        specs = packing.specs_of(state)
        pack = partial(sx.pipeline.pack, packing=packing)
        return (
            sx.shard_jit(pack, mesh=mesh, in_shardings=(resting(mesh),), out_shardings=specs),
            sx.shard_jit(sx.pipeline.unpack, mesh=mesh, out_shardings=resting(mesh)),
        )

    four, two = mesh_of(stage=4), mesh_of(stage=2)
    pack, unpack = moves(four)
    packed = pack((params, tx.init(params)))
    with Checkpoints(tmp_path, 1, {}, lambda text: pytest.fail(text)) as kept:
        kept.save(unpack(packed), [0.0], last=True)
    restored, _ = moves(two)
    with Checkpoints(tmp_path, 1, {}, lambda text: pytest.fail(text)) as kept:
        on_two = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spec),
            state,
            resting(two),
        )
        found = kept.at(1, on_two)
        plain = kept.at(1, jax.tree.map(np.zeros_like, (params, tx.init(params))))
    jax.tree.map(np.testing.assert_array_equal, plain, (params, tx.init(params)))
    jax.tree.map(np.testing.assert_array_equal, sx.pipeline.unpack(restored(found)), plain)


@pytest.mark.parametrize("padded", [False, True])
def test_without_jit_the_step_itself_runs(padded):
    """Of a pipeline with ZeRO too, on the state as it is or padded."""
    loss, params = net(3)
    mesh, tx, batch = mesh_of(stage=2, data=2), optax.sgd(0.1), (tokens(0), tokens(1))
    step = train_step(jax.value_and_grad(loss), tx)
    transforms = [sx.pipeline.Pipeline("stage", microbatches=4), sx.zero.Zero("data", stage=3)]
    how = {"mesh": mesh, "in_shardings": (None, P("data"), P("data")), "transforms": transforms}
    state = params, tx.init(params)
    given = sx.zero.init(tx, params, mesh, stage=3) if padded else state
    with jax.disable_jit():
        new, values = sx.shard_jit(step, **how)(given, *batch)
    wanted = jax.jit(step)(state, *batch)
    for a, b in zip(jax.tree.leaves((sx.zero.unpad(new), values)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
