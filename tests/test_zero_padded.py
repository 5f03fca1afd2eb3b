"""States of sizes that nothing divides: they rest padded, of equal shards, and no step or optimizer sees it."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh
from shardax.zero import Padded, Zero
from tests import test_zero
from tests.test_zero import abstract, mixed_precision_step, planned, sent, shapes, train_step
from tests.zero_steps import step_of, two_products

pytestmark = [
    pytest.mark.mixed_dtypes,
    pytest.mark.promotes_ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

quick_compilation = test_zero.quick_compilation

SIZES = {"up": (13, 101), "bias": (101,), "down": (101, 3, 7), "scale": (3, 7), "gain": ()}
OPTIMIZERS = test_zero.OPTIMIZERS | {
    "masked": lambda: optax.chain(
        optax.masked(optax.trace(0.9), {name: len(shape) > 1 for name, shape in SIZES.items()}),
        optax.lamb(0.05),  # norms of single arrays
    )
}


def make_params(dtype="float32"):
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.normal(size=s) * 0.3 + 0.2).astype(dtype) for name, s in SIZES.items()}


def is_padded(x):
    return isinstance(x, Padded)


def padded_in(tree):
    return [x for x in jax.tree.leaves(tree, is_leaf=is_padded) if is_padded(x)]


def run(step, state, numbers=range(4)):
    found = []
    for number in numbers:
        state, loss = step(state, test_zero.mlp_batch(number))
        found.append(float(loss))
    return state, found


@cache
def on_one_device(name: str):
    tx, params = OPTIMIZERS[name](), make_params()
    return run(jax.jit(train_step(tx)), (params, jax.jit(tx.init)(params)))


def sharded_step(tx, mesh, stage, axis="data", specs=None, **how):
    return sx.shard_jit(
        train_step(tx),
        mesh=mesh,
        in_shardings=((specs, None), P(axis)),
        donate_argnums=0,
        transforms=[Zero(axis, stage, **how)],
    )


def split_over(x, axes):
    dims = [(d,) if isinstance(d, str) else d or () for d in x.sharding.spec]
    return set(axes) <= {axis for dim in dims for axis in dim}


@pytest.mark.once
@pytest.mark.parametrize(
    "name, stage, axes",
    [
        pytest.param("adamw", 1, {"data": 8}, marks=pytest.mark.slow),
        pytest.param("adamw", 3, {"data": 5}, marks=pytest.mark.slow),
        ("adafactor", 3, {"data": 5}),
        pytest.param("adafactor", 2, {"data": 2, "fsdp": 2, "model": 2}, marks=pytest.mark.slow),
        ("lion", 2, {"data": 2, "fsdp": 2, "model": 2}),
        pytest.param("muon", 2, {"data": 2, "fsdp": 2, "model": 2}, marks=pytest.mark.slow),
        pytest.param("accumulating", 2, {"data": 8}, marks=pytest.mark.slow),
        ("masked", 3, {"data": 5}),
        pytest.param("masked", 3, {"data": 4, "model": 2}, marks=pytest.mark.slow),
        pytest.param("masked", 1, {"data": 2, "fsdp": 2, "model": 2}, marks=pytest.mark.slow),
        pytest.param("injected", 3, {"data": 8}, marks=pytest.mark.slow),
    ],
)
def test_losses(name, stage, axes, quick_compilation):
    """As without ZeRO, and nothing is replicated but single numbers, before and after."""
    tx, mesh, axis = OPTIMIZERS[name](), make_mesh(axes), ("data", "fsdp") if "fsdp" in axes else "data"
    specs = {**dict.fromkeys(SIZES), "up": P(None, "model"), "down": P("model")} if "model" in axes else None
    step = sharded_step(tx, mesh, stage, axis, specs)
    before = sx.zero.init(tx, make_params(), mesh, axis, stage, requested=specs, bucket=0)
    made = [x.sharding for x in jax.tree.leaves(before)]
    state, found = run(step, before)
    for sharding, x in zip(made, jax.tree.leaves(state), strict=True):
        assert sharding.is_equivalent_to(x.sharding, x.ndim) or "model" in axes
    expected, wanted = on_one_device(name)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    plain = sx.zero.unpad(state)
    for (path, x), y in zip(jax.tree.leaves_with_path(plain), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=5e-6, err_msg=jax.tree_util.keystr(path))
    rests = state if stage == 3 else state[1]
    assert padded_in(rests) and bool(padded_in(state[0])) == (stage == 3)
    assert all(split_over(x, Zero(axis).axes) for x in jax.tree.leaves(rests) if x.size > 1)
    for x in padded_in(state):
        value = np.array(x.value)
        value[tuple(map(slice, x.shape))] = 0
        assert not value.any(), "the tail is zeros"


STACKED = {"up": (3, 61, 127), "down": (3, 127, 61)}
PSI = sum(map(np.prod, STACKED.values()))


def mixed_precision_plan(stage, mesh, axis):
    """As in tests/test_zero.py, of sizes that nothing divides."""
    low, master = shapes(STACKED, "bfloat16"), shapes(STACKED)
    optimizer = sx.zero.pad((master, jax.eval_shape(optax.scale_by_adam().init, master)), mesh, axis)
    state = (sx.zero.pad(low, mesh, axis) if stage == 3 else low), optimizer
    batch = (jax.ShapeDtypeStruct((8192, 61), "bfloat16"),) * 2
    return planned(
        mixed_precision_step, (state, batch), Zero(axis, stage), mesh=mesh, in_shardings=(None, P(axis))
    )


@pytest.mark.quick
@pytest.mark.parametrize("axes", [{"data": 5}, {"data": 2, "fsdp": 2}], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_formulas_within_the_padding(stage, axes):
    """Bytes at rest, 4Ψ+12Ψ/N, 2Ψ+14Ψ/N, 16Ψ/N, and sent, 2Ψ, 2Ψ, 3Ψ, of (N-1)/N: where split, Ψ is the padded size."""
    count = int(np.prod(list(axes.values())))
    longer = min(2 * 3 * (127 + 61 - n) * (-(-n // count) * count) for n in (127, 61))
    plan = mixed_precision_plan(stage, abstract(**axes), tuple(axes))
    found = Zero(tuple(axes), stage).resident(plan)
    gradients = 2 * PSI if stage == 1 else 2 * longer // count
    parameters = 2 * PSI if stage < 3 else 2 * longer // count
    assert found.before == {"parameters": 2 * PSI, "gradients": 2 * PSI, "optimizer state": 12 * PSI}
    optimizer = 12 * longer // count
    assert found.after == {"parameters": parameters, "gradients": gradients, "optimizer state": optimizer}
    assert not found.whole and len(found.padded) == (8 if stage == 3 else 6)
    assert found.padded[0].nbytes == 2 * longer // count - 2 * PSI // count
    part = 2 * longer * (count - 1) // count
    assert sent(plan) == {"reduce_scatter": part, "all_gather": part * (2 if stage == 3 else 1)}


@pytest.mark.quick
def test_plan_says_what_rests_padded():
    plan = mixed_precision_plan(1, abstract(data=8), "data")
    text = str(plan)
    assert "padded, so that the axis divides one of their dims: 552 B" in text
    assert "state/1/1/mu/up/value f32[3,61,127] as f32[3,61,128]" in text


@pytest.mark.quick
@pytest.mark.parametrize("bucket, elements", [(0, 2 * 61 * 128), (2**20, 2 * 61 * 127 + 2)])
def test_explicit_form(bucket, elements):
    """`sx.zero.shard(tx)` takes padded state too, and the program sends what `Zero` sends."""
    shape = partial(jax.ShapeDtypeStruct, dtype="float32")
    params, x_BM, tx = {"w": shape((61, 127)), "v": shape((127, 61))}, shape((4096, 61)), optax.adamw(1e-3)

    state = sx.zero.init(tx, params, abstract(data=4), bucket=bucket)
    found = planned(step_of(two_products, tx), (state, x_BM), Zero("data", 1))
    wrapped = planned(step_of(two_products, sx.zero.shard(tx, "data", 1)), (state, x_BM), None)
    part = 4 * elements * 3 // 4
    assert sent(wrapped) == sent(found) == {"reduce_scatter": part, "all_gather": part}
    for left, right in [
        (wrapped.in_shardings, found.in_shardings),
        (wrapped.out_shardings, found.out_shardings),
    ]:
        assert jax.tree.leaves(left) == jax.tree.leaves(right)
    third = sx.zero.init(tx, params, abstract(data=4), stage=3)
    with pytest.raises(ValueError, match="params of the optimizer that sx.zero.shard made are padded"):
        jax.eval_shape(sx.zero.shard(tx).update, params, third[1], third[0])


def by_hand(state, x_BM):
    """No scope says what was differentiated, and a metric reads the new moments."""
    y_BN = x_BM @ state["w"]
    m = 0.9 * state["m"] + x_BM.T @ y_BN
    return {"w": state["w"] - 0.1 * m, "m": m}, ((y_BN**2).mean(), optax.global_norm(m))


W, X = jax.ShapeDtypeStruct((61, 13), "float32"), jax.ShapeDtypeStruct((4096, 61), "float32")


@pytest.mark.quick
def test_finds_parameters():
    mesh = abstract(data=4)
    state = {"w": W, "m": sx.zero.pad(W, mesh)}
    plan = planned(by_hand, (state, X), Zero("data", 1))
    assert {place.named: place.shards for place in plan.arguments()} == {
        "state/m/value": 4,
        "state/w": 1,
        "x_BM": 4,
    }


def step_on_parts(params, moments, x_BM):
    """All of one structure: parameters, moments, gradients."""
    loss = lambda p: ((x_BM @ p["w"] + p["b"]) ** 2).mean()  # noqa: E731
    grads = jax.grad(loss)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda w, m: w - m, params, moments), moments, grads


PARTS = {"w": W, "b": jax.ShapeDtypeStruct((13,), "float32")}


@pytest.mark.quick
@pytest.mark.parametrize("form", ["arguments", "dict", "tuple", "arrays"])
def test_parts_of_state(form):
    """State in other trees than it came in: each part goes with what has its name, else in order."""
    moments, whole = sx.zero.pad(PARTS, abstract(data=4)), (None, None, P("data"))
    if form == "arguments":
        step = lambda p, m, x: step_on_parts(p, m, x)[:2]  # noqa: E731
        new = planned(step, (PARTS, moments, X), Zero("data", 1), in_shardings=whole, donate_argnums=(0, 1))
        params, moments = new.out_shardings
    elif form == "tuple":
        step = lambda state, x: (0.0, *step_on_parts(*state, x)[:2])  # noqa: E731
        _, params, moments = planned(step, ((PARTS, moments), X), Zero("data", 1)).out_shardings
    elif form == "arrays":

        def step(w, m, x_BM):
            new = step_on_parts({"w": w, "b": 0.0}, {"w": m, "b": 0.0}, x_BM)
            return [tree["w"] for tree in new[:2]]

        args = PARTS["w"], moments["w"], X
        params, moments = planned(step, args, Zero("data", 1), in_shardings=whole).out_shardings
    else:

        def step(state, x_BM):
            params, moments, grads = step_on_parts(state["params"], state["moments"], x_BM)
            return {"params": params, "metrics": grads, "moments": moments}

        state = {"params": PARTS, "moments": moments}
        new = planned(step, (state, X), Zero("data", 1)).out_shardings
        params, moments = new["params"], new["moments"]
        assert not padded_in(new["metrics"])
    assert padded_in(moments) and not padded_in(params)


@pytest.mark.quick
def test_bad_input():
    mesh, tx = abstract(data=4), optax.sgd(0.1, momentum=0.9)
    state = {"w": W, "m": sx.zero.pad(W, mesh)}

    def fails(words, step=by_hand, args=(state, X), axis="data", **how):
        with pytest.raises(ValueError, match=words):
            planned(step, args, Zero(axis), **how)

    both = abstract(data=2, fsdp=2)
    fails(r"argument 0\['m'\] is padded for 'data', and axis of Zero is 'fsdp'", axis="fsdp", mesh=both)
    fails(
        r"state/m/value of shape \[61, 13\] is padded to \[64, 13\], and there are 5 devices along 'data' "
        r"\(mesh data=5\): it was padded for another mesh; sx.zero.unpad",
        mesh=abstract(data=5),
    )
    parts, batch_last = (PARTS, sx.zero.pad(PARTS, mesh), X), (None, None, P("data"))
    several = (
        r"argument 0 rests padded, and 3 results have the structure and shapes of argument 0, argument 1"
    )
    fails(
        several.replace("0 rests", "1 rests"),
        step_on_parts,
        parts,
        in_shardings=batch_last,
        donate_argnums=(0, 1),
    )
    none = r"argument 0\['m'\] rests padded, and no results have .* of argument 0\['m'\], argument 0\['w'\]:"
    fails(none, lambda state, x_BM: by_hand(state, x_BM)[1], donate_argnums=())
    with pytest.raises(ValueError, match="axis of init names 'x', and the mesh"):
        sx.zero.init(tx, W, mesh, "x")
    with pytest.raises(ValueError, match="mesh of pad, for arrays, is"):
        sx.zero.pad(np.zeros(13), mesh)
    with pytest.raises(ValueError, match="mesh of init is None"):
        sx.zero.init(tx, W)


def test_unpad():
    """Of arrays, NumPy arrays and shapes; a tree that is padded already stays."""
    mesh, tree = make_mesh({"data": 8}), {"a": np.arange(13.0, dtype="float32"), "n": np.int32(3)}
    state = sx.zero.pad(tree, mesh)
    assert [x.sharding.spec for x in jax.tree.leaves(state)] == [P("data"), P()]
    assert sx.zero.pad(state, mesh)["a"].value.shape == (16,)
    for plain in (sx.zero.unpad(state), sx.zero.unpad(jax.device_get(state))):
        np.testing.assert_array_equal(plain["a"], tree["a"])
    assert isinstance(sx.zero.unpad(jax.device_get(state))["a"], np.ndarray)
    assert jax.eval_shape(sx.zero.unpad, state)["a"].shape == (13,)


@pytest.mark.once
def test_checkpoints_have_true_shapes(tmp_path, quick_compilation):
    """Saved by orbax from 8 devices in stage 3, restored on 5 in stage 1, and without ZeRO: losses go on as they would."""
    tx = OPTIMIZERS["lion"]()
    expected, wanted = on_one_device("lion")
    mesh, other = make_mesh({"data": 8}), make_mesh({"data": 5})
    state, found = run(sharded_step(tx, mesh, 3), sx.zero.init(tx, make_params(), mesh, stage=3), range(2))
    plain = sx.zero.unpad(state)
    with ocp.StandardCheckpointer() as orbax:
        orbax.save(tmp_path / "state", plain)
        orbax.wait_until_finished()
        restored = orbax.restore(tmp_path / "state", jax.tree.map(np.zeros_like, jax.device_get(plain)))
    assert jax.tree.map(jnp.shape, restored) == jax.tree.map(jnp.shape, expected)
    on_five = restored[0], sx.zero.pad(restored[1], other)
    state, later = run(sharded_step(tx, other, 1), on_five, range(2, 4))
    np.testing.assert_allclose(found + later, wanted, rtol=1e-5)
    assert {x.value.shape[0] for x in padded_in(state) if x.shape == (101,)} == {105}
    _, alone = run(jax.jit(train_step(tx)), jax.tree.map(jnp.asarray, restored), range(2, 4))
    np.testing.assert_allclose(later, alone, rtol=1e-5)


@pytest.mark.once
def test_bfloat16(quick_compilation):
    """Parameters of two bytes, padded as their master copies are; two calls."""
    mesh, batch = make_mesh({"data": 8}), np.random.default_rng(1).normal(size=(2, 32, 61)) * 0.5
    rng = np.random.default_rng(0)
    master = {name: np.float32(rng.normal(size=s) / 8) for name, s in STACKED.items()}
    state = (
        jax.tree.map(lambda w: w.astype(jnp.bfloat16), master),
        (master, optax.scale_by_adam().init(master)),
    )
    how = {
        "mesh": mesh,
        "in_shardings": (None, P("data")),
        "donate_argnums": 0,
        "transforms": [Zero("data", 3)],
    }
    step, alone = sx.shard_jit(mixed_precision_step, **how), jax.jit(mixed_precision_step)
    padded, batch = sx.zero.pad(state, mesh), tuple(batch.astype(jnp.bfloat16))
    for rtol in (1e-2, 5e-2):  # in Adam's first update the sign of a gradient counts, however small it is
        padded, found = step(padded, batch)
        state, wanted = alone(state, batch)
        np.testing.assert_allclose(found, wanted, rtol=rtol)
    assert padded_in(padded[0])[0].value.dtype == jnp.bfloat16
