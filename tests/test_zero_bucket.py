"""States whose small arrays rest flat in one bucket: the step is the same, and each bucket has one collective."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh
from shardax.zero import Bucketed, Zero
from shardax.zero.bucket import bucketed
from shardax.zero.padded import padded_as
from shardax.zero.together import together
from tests import test_zero
from tests.test_zero import abstract, planned
from tests.test_zero_padded import (
    OPTIMIZERS,
    SIZES,
    make_params,
    on_one_device,
    run,
    sharded_step,
    split_over,
)
from tests.zero_steps import step_of

pytestmark = [
    pytest.mark.mixed_dtypes,
    pytest.mark.promotes_ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

quick_compilation = test_zero.quick_compilation


def is_bucketed(x):
    return isinstance(x, Bucketed)


def buckets_in(tree):
    return [x for x in jax.tree.leaves(tree, is_leaf=is_bucketed) if is_bucketed(x)]


@pytest.mark.once
@pytest.mark.parametrize(
    "name, stage, axes",
    [
        ("adamw", 3, {"data": 5}),
        pytest.param("adafactor", 3, {"data": 5}, marks=pytest.mark.slow),
        pytest.param("lion", 1, {"data": 8}, marks=pytest.mark.slow),
        pytest.param("muon", 2, {"data": 2, "fsdp": 2, "model": 2}, marks=pytest.mark.slow),
        ("accumulating", 2, {"data": 2, "fsdp": 2, "model": 2}),
        ("masked", 1, {"data": 4, "model": 2}),
        pytest.param("injected", 3, {"data": 8}, marks=pytest.mark.slow),
    ],
)
def test_losses(name, stage, axes, quick_compilation):
    """As without ZeRO, after four calls; nothing is replicated but single numbers, and the tail of a bucket is zeros."""
    tx, mesh, axis = OPTIMIZERS[name](), make_mesh(axes), ("data", "fsdp") if "fsdp" in axes else "data"
    specs = {**dict.fromkeys(SIZES), "up": P(None, "model"), "down": P("model")} if "model" in axes else None
    step = sharded_step(tx, mesh, stage, axis, specs)
    state, found = run(step, sx.zero.init(tx, make_params(), mesh, axis, stage, requested=specs))
    expected, wanted = on_one_device(name)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    plain = sx.zero.unpad(state)
    assert jax.tree.structure(plain) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(plain), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=5e-6, err_msg=jax.tree_util.keystr(path))
    rests = state if stage == 3 else state[1]
    assert buckets_in(rests) and bool(buckets_in(state[0])) == (stage == 3)
    whole = [
        jax.tree_util.keystr(path)
        for path, x in jax.tree.leaves_with_path(rests)
        if x.size > 1 and not split_over(x, Zero(axis).axes)
    ]
    assert not whole


SHAPES = {"w": (64, 128), "bias": (13,), "gain": (), "norm": (3, 7), "scale": (101,)}
IN_BUCKET = 13 + 21 + 101
W = jax.ShapeDtypeStruct((64, 128), "float32")
X = jax.ShapeDtypeStruct((4096, 64), "float32")


def loss(p, x_BM):
    h_BN = jnp.tanh(x_BM @ p["w"])
    normed = (h_BN[:, :21].reshape(-1, 3, 7) * p["norm"]).mean()
    return (
        ((h_BN[:, :13] * p["bias"]) ** 2).mean() * p["gain"]
        + normed**2
        + ((h_BN[:, :101] + p["scale"]) ** 2).mean()
    )


def plan_of(tx, stage):
    mesh = abstract(data=8)
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
    state = sx.zero.init(tx, params, mesh, "data", stage)
    return planned(step_of(loss, tx), (state, X), Zero("data", stage), mesh=mesh)


@pytest.mark.quick
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "accumulating", "injected", "lamb"])
def test_one_collective(name, stage):
    """Of all that is in the bucket; norms, conditions and steps that are left out send single numbers besides."""
    tx = optax.lamb(0.05) if name == "lamb" else OPTIMIZERS[name]()
    sent = [(c.kind, c.nbytes) for c in plan_of(tx, stage).collectives if c.shape and c.nbytes > 64]
    part = (IN_BUCKET + 1) // 8 * 7 * 4
    of_bucket = [(kind, n) for kind, n in sent if n < 64 * 4 * 7 // 8 * 8]
    factored = (64 * 4 * 7 // 8, 128 * 4 * 7 // 8)  # Adafactor's moments of w
    of_bucket = [(kind, n) for kind, n in of_bucket if name != "adafactor" or n not in factored]
    assert sorted(of_bucket) == [("all_gather", part), ("reduce_scatter", part)]


@pytest.mark.quick
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["adamw", "accumulating"])
def test_one_collective_in_each_trip(name, stage):
    """Of steps in a loop, which carries the bucket: it is neither cut nor gathered around the loop."""
    mesh, tx = abstract(data=8), OPTIMIZERS[name]()
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
    state = sx.zero.init(tx, params, mesh, "data", stage)

    def steps(state, x_KBM):
        return jax.lax.scan(step_of(loss, tx), state, x_KBM)

    how = {"mesh": mesh, "in_shardings": (None, P(None, "data")), "donate_argnums": 0}
    x_KBM = jax.ShapeDtypeStruct((3, *X.shape), "float32")
    plan = sx.shard_jit(steps, transforms=[Zero("data", stage)], **how).plan(state, x_KBM)
    sent = [(c.kind, c.trips, c.nbytes) for c in plan.collectives if c.shape and 64 < c.nbytes < 4096]
    part = (IN_BUCKET + 1) // 8 * 7 * 4
    assert sorted(sent) == [("all_gather", 3, part), ("reduce_scatter", 3, part)]


@pytest.mark.once
@pytest.mark.parametrize("stage", [1, 3])
def test_losses_of_steps_in_a_loop(stage, quick_compilation):
    tx, mesh, size = OPTIMIZERS["adamw"](), make_mesh({"data": 5}), 20
    params = {name: jnp.ones(shape) for name, shape in (SHAPES | {"w": (9, 101)}).items()}
    x_KBM = np.random.default_rng(0).normal(size=(3, size, 9)).astype("float32")

    def steps(state, x_KBM):
        return jax.lax.scan(step_of(loss, tx), state, x_KBM)

    how = {"mesh": mesh, "in_shardings": (None, P(None, "data")), "donate_argnums": 0}
    state = sx.zero.init(tx, params, mesh, "data", stage)
    assert buckets_in(state[1])
    state, found = sx.shard_jit(steps, transforms=[Zero("data", stage)], **how)(state, x_KBM)
    expected, wanted = jax.jit(steps)((params, jax.jit(tx.init)(params)), x_KBM)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(sx.zero.unpad(state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


@pytest.mark.quick
def test_what_is_printed_stays():
    """An equation without results is none of those that a bucket computes."""
    tx = optax.adam(1e-3)
    one = step_of(loss, tx)

    def step(state, x_BM):
        jax.debug.print("bias {}", state[0]["bias"][0])
        return one(state, x_BM)

    mesh = abstract(data=8)
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
    state = sx.zero.init(tx, params, mesh, "data", 1)
    how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0}
    plan = sx.shard_jit(step, transforms=[Zero("data", 1)], **how).plan(state, X)
    assert "debug_" in str(plan.local_jaxpr)


@pytest.mark.quick
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_that_rest(stage):
    """A bucket has less padding than there are devices, of which each has a part."""
    found = Zero("data", stage).resident(plan_of(optax.adam(1e-3), stage))
    whole, shard = 4 * (64 * 128 + IN_BUCKET), 4 * (64 * 128 + IN_BUCKET + 1) // 8
    assert found.after == {
        "parameters": whole if stage < 3 else shard,
        "gradients": whole if stage < 2 else shard,
        "optimizer state": 2 * shard,
    }
    assert [p.rests for p in found.padded] == ["f32[136]"] * (2 if stage < 3 else 3)


@pytest.mark.quick
def test_what_is_in_buckets():
    """Of two dtypes two; large arrays, such as the axis divides, and single ones of a dtype rest by themselves."""
    shape = jax.ShapeDtypeStruct
    params = {
        "a": shape((13,), "float32"),
        "b": [shape((13,), "bfloat16"), shape((3, 5), "bfloat16")],
        "c": shape((7,), "float16"),
        "d": shape((16,), "float32"),
        "e": shape((1023, 1023), "float32"),
        "f": shape((5,), "float32"),
    }
    made = sx.zero.pad(params, abstract(data=8), params=params)
    assert isinstance(made, Bucketed)
    assert {d: x.value.shape for d, x in made.buckets.items()} == {"float32": (24,), "bfloat16": (32,)}
    assert [made.rest["c"].value.shape, made.rest["d"].shape, made.rest["e"].value.shape] == [
        (8,),
        (16,),
        (1024, 1023),
    ]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), sx.zero.unpad(made)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), params
    )
    again = sx.zero.pad(params, abstract(data=8), params=params, bucket=2**23)
    assert again.buckets["float32"].value.shape == (1023 * 1023 + 18 + 5,)
    assert sx.zero.pad(params, abstract(data=8)).keys() == params.keys(), "without params there are none"


@pytest.mark.quick
def test_parts_that_have_holes():
    """A masked optimizer's state is like the parameters but for some leaves."""
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
    tx = optax.masked(optax.trace(0.9), {name: name != "norm" for name in SHAPES})
    _, state = sx.zero.init(tx, params, abstract(data=8))
    (found,) = buckets_in(state)
    assert found.buckets["float32"].shape == (13 + 101,)
    assert jax.tree.structure(sx.zero.unpad(state)) == jax.tree.structure(jax.eval_shape(tx.init, params))


def flats(jaxpr):
    """The elementwise equations and joins on the bucket, in order."""
    found = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.outvars[0].aval.shape == (IN_BUCKET,)]
    return [eqn.primitive.name for eqn in found if eqn.primitive.name not in ("iota", "ge", "lt", "and")]


def on_bucket(change):
    """The program of a function of a tree in a bucket and of one that is in none, packed."""
    names = ("bias", "norm", "scale")
    tree = {name: jax.ShapeDtypeStruct(SHAPES[name], "float32") for name in names}
    made = bucketed(tree, [True] * 3)

    def run(bucket, other):
        return padded_as(change(sx.zero.unpad(bucket), other), made)

    return together(jax.make_jaxpr(run)(made, tree))


@pytest.mark.quick
@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda a, g: jax.tree.map(lambda a, g: 2 * a + g, a, g), ["concatenate", "mul", "add"]),
        (lambda a, g: jax.tree.map(lambda a: a * jnp.sum(a), a), ["broadcast_in_dim", "select_n"] * 3 + ["concatenate", "mul"]),
        (lambda a, g: {"bias": 2 * a["bias"], "norm": 3 * a["norm"], "scale": 4 * a["scale"]}, ["concatenate", "mul"]),
        (lambda a, g: {**a, "bias": jnp.sort(a["bias"])}, ["concatenate"]),
        (lambda a, g: jax.lax.cond(g["bias"][0] > 0, lambda: a, lambda: jax.tree.map(jnp.sin, a)), ["cond"]),
        (lambda a, g: a, []),
    ],
    ids=["alike", "sums", "unlike scalars", "unlike", "branches", "same"],
)  # fmt: skip
def test_packs(change, expected):
    assert flats(on_bucket(change)) == expected


@pytest.mark.quick
def test_packs_that_depend_on_each_other():
    """Each member is made of the one before: nothing is packed."""

    def change(a, g):
        bias = a["bias"] * 2.0
        norm = a["norm"] * bias.sum()
        return {"bias": bias, "norm": norm, "scale": a["scale"] * norm.sum()}

    assert flats(on_bucket(change)) == ["concatenate"]


@pytest.mark.quick
def test_other_packs_stay():
    """What is alike before and behind those that depend on each other is computed of buckets."""

    def change(a, g):
        new = jax.tree.map(lambda a, g: jnp.tanh(a + g), a, g)
        norm = jnp.sin(new["norm"] + jnp.sin(new["bias"]).sum())
        new = {"bias": jnp.sin(new["bias"]), "norm": norm, "scale": jnp.sin(new["scale"] + norm.sum())}
        return jax.tree.map(jnp.cos, new)

    found = flats(on_bucket(change))
    assert [name for name in found if name != "concatenate"] == ["add", "tanh", "cos"]


@pytest.mark.quick
def test_bad_input():
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}

    def fails(words, made_for, mesh, axis="data"):
        tx = optax.trace(0.9)
        state = sx.zero.init(tx, params, made_for)
        with pytest.raises(ValueError, match=words):
            planned(step_of(loss, tx), (state, X), Zero(axis), mesh=mesh)

    fails(
        "trace is padded for 'data', and axis of Zero is 'fsdp'",
        abstract(data=2),
        abstract(fsdp=2, data=2),
        "fsdp",
    )
    padded = (
        r"state/1/trace/buckets/float32/value of shape \[135\] is padded to \[136\], and there are 5 devices"
    )
    fails(padded, abstract(data=8), abstract(data=5))
    small = {"a": jax.ShapeDtypeStruct((13,), "float32"), "b": jax.ShapeDtypeStruct((2,), "float32")}

    def by_hand(state, x_B):
        grads = jax.grad(lambda p: (x_B * p["a"].sum() * p["b"].sum()).mean())(state["params"])
        m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
        return {"params": jax.tree.map(jnp.subtract, state["params"], m), "m": m}

    state = {"params": small, "m": sx.zero.pad(small, abstract(data=5), params=small)}
    with pytest.raises(
        ValueError, match=r"m/buckets/float32 of shape \[15\] is padded to \[15\], and there are 4"
    ):
        planned(by_hand, (state, jax.ShapeDtypeStruct((8,), "float32")), Zero("data"))
    with pytest.raises(ValueError, match="bucket of init is None, of type NoneType: give a number of bytes"):
        sx.zero.init(optax.trace(0.9), params, abstract(data=8), bucket=None)


@pytest.mark.once
def test_checkpoints_have_true_shapes(tmp_path, quick_compilation):
    """Saved by orbax from 8 devices in stage 3, restored in buckets on 5 in stage 1: losses go on as they would."""
    tx = OPTIMIZERS["lion"]()
    _, wanted = on_one_device("lion")
    mesh, other = make_mesh({"data": 8}), make_mesh({"data": 5})
    state, found = run(sharded_step(tx, mesh, 3), sx.zero.init(tx, make_params(), mesh, stage=3), range(2))
    plain = sx.zero.unpad(jax.device_get(state))
    assert all(isinstance(x, np.ndarray | np.generic) for x in jax.tree.leaves(plain))
    with ocp.StandardCheckpointer() as orbax:
        orbax.save(tmp_path / "state", plain)
        orbax.wait_until_finished()
        restored = orbax.restore(tmp_path / "state", jax.tree.map(np.zeros_like, plain))
    on_five = restored[0], sx.zero.pad(restored[1], other, params=restored[0])
    state, later = run(sharded_step(tx, other, 1), on_five, range(2, 4))
    np.testing.assert_allclose(found + later, wanted, rtol=1e-5)
    assert buckets_in(state[1])
