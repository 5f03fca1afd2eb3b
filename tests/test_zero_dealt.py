"""Optimizers of matrices: each device computes with some of the matrices, whole, and results are the same."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh
from shardax.zero import Zero, dealt
from shardax.zero.whole import repeated_products
from tests.kronecker import soap
from tests.test_zero import abstract
from tests.zero_steps import step_of

pytestmark = [
    pytest.mark.mixed_dtypes,
    pytest.mark.promotes_ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

LAYERS, MODEL, HIDDEN = 8, 64, 128
ITERATIONS = 5  # of Newton and Schulz
MUON = ITERATIONS * 2 * (2 * MODEL * MODEL * HIDDEN + MODEL**3) * LAYERS  # FLOPs


def stacked(params, x_BM):
    def layer(h_BM, w):
        return jnp.tanh(h_BM @ w)[:, :MODEL], None

    return (jax.lax.scan(layer, x_BM, params)[0] ** 2).mean()


def listed(params, x_BM):
    for w in params:
        x_BM = jnp.tanh(x_BM @ w)[:, :MODEL]
    return (x_BM**2).mean()


def of_stack(count):
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    tx = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers)
    return stacked, tx, jax.ShapeDtypeStruct((count, MODEL, HIDDEN), "float32")


def flops(loss, tx, params, stage):
    """Of the update alone, as it stands: those of a step, without those of one of SGD."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((16384, MODEL), "float32")
    how = {
        "mesh": mesh,
        "in_shardings": (None, P("data")),
        "donate_argnums": 0,
        "transforms": [Zero("data", stage, dealt=False)],
    }

    def plan(tx):
        return sx.shard_jit(step_of(loss, tx), **how).plan((params, jax.eval_shape(tx.init, params)), x)

    with_update, plain = plan(tx), plan(optax.sgd(0.1, momentum=0.9))
    extra = with_update.comm_bytes - plain.comm_bytes
    return (with_update.estimate("v5p").flops - plain.estimate("v5p").flops) / MUON, extra


@pytest.mark.quick
@pytest.mark.parametrize("stage", [1, 2])
def test_one_matrix_per_device(stage):
    """Of a stack, without a word; of a list, where it is dealt; else each device computes with all of them."""
    size = MODEL * HIDDEN * 4 * LAYERS // 8
    share, extra = flops(*of_stack(LAYERS), stage)
    assert share == pytest.approx(1 / 8, rel=0.01) and extra <= 1.1 * size
    params, tx = [jax.ShapeDtypeStruct((MODEL, HIDDEN), "float32")] * LAYERS, optax.contrib.muon(0.1)
    assert flops(listed, dealt(tx), params, stage)[0] == pytest.approx(1 / 8, rel=0.01)
    assert flops(listed, tx, params, stage)[0] == pytest.approx(1, rel=0.01)


@pytest.mark.quick
def test_plan_says_what_is_computed_alike():
    """The products of separate matrices, and nothing of dealt ones."""
    params = [jax.ShapeDtypeStruct((MODEL, HIDDEN), "float32")] * LAYERS
    mesh, x = (
        AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)),
        jax.ShapeDtypeStruct((4096, MODEL), "float32"),
    )
    how = {
        "mesh": mesh,
        "in_shardings": (None, P("data")),
        "donate_argnums": 0,
        "transforms": [Zero("data", 1, dealt=False)],
    }
    for tx, shown in ((optax.contrib.muon(0.1), True), (dealt(optax.contrib.muon(0.1)), False)):
        step = sx.shard_jit(step_of(listed, tx), **how)
        plan = step.plan((params, jax.eval_shape(tx.init, params)), x)
        assert ("computed alike on all devices along data" in str(plan)) is shown
        found = repeated_products(plan, ("data",))
        assert sum(found.values()) == pytest.approx(MUON if shown else 0, rel=0.01)


@pytest.mark.quick
def test_uneven_stack():
    share, _ = flops(*of_stack(12), 1)
    assert share == pytest.approx(2 / 8, rel=0.01), "two of twelve on each device, where eight count as one"


def planned(tx, state, stage=1, transforms=None, loss=listed):
    mesh, x = abstract(data=8), jax.ShapeDtypeStruct((16384, MODEL), "float32")
    how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0}
    transforms = [Zero("data", stage)] if transforms is None else transforms
    step = sx.shard_jit(step_of(loss, tx), transforms=transforms, **how)
    return step.plan(state, x), sx.abstract_state(step, state, x)


def specs_in(tree):
    return [x.spec for x in jax.tree.leaves(tree)]


@pytest.mark.quick
@pytest.mark.parametrize("tx", [optax.contrib.muon(0.1), soap(0.1, largest=HIDDEN)])
def test_made_state_rests_where_it_is_computed_with(tx):
    """What makes a state finds in the update of its optimizer what a step finds in itself."""
    tx, params = dealt(tx), [jax.ShapeDtypeStruct((MODEL, HIDDEN), "float32")] * LAYERS
    state = jax.eval_shape(tx.init, params)
    _, (_, rests) = planned(tx, (params, state))
    wanted = [x.sharding.spec for x in jax.tree.leaves(rests)]
    assert {spec[0] for spec in wanted} == {"data"}
    assert specs_in(sx.zero.specs(state, abstract(data=8), tx=tx, params=params)) == wanted
    assert jax.tree.structure(sx.zero.init(tx, params, abstract(data=8))[1]) == jax.tree.structure(state)
    sharded = sx.zero.shard(tx)
    _, (_, rests) = planned(sharded, (params, state), transforms=[])
    assert [x.sharding.spec for x in jax.tree.leaves(rests)] == wanted


@pytest.mark.once
def test_made_on_devices():
    """Where it is made it lies as it rests under Zero, and no step moves it; in true shapes too."""
    tx, mesh = dealt(optax.contrib.muon(0.1)), make_mesh({"data": 4})
    for shape, layers, padded in ((6, 8), 4, (4, 6, 8)), ((5, 7), 3, (4, 5, 7)):
        params, state = sx.zero.init(tx, [np.ones(shape, "float32")] * layers, mesh)
        (rests,) = [x for x in jax.tree.leaves(state) if x.ndim == 3]
        assert rests.shape == padded and rests.sharding.spec[0] == "data"
        again = sx.zero.pad(tx.init(params), mesh, params=params, bucket=0, tx=tx)
        (alike,) = [x for x in jax.tree.leaves(again) if x.ndim == 3]
        assert alike.shape == rests.shape and alike.sharding == rests.sharding


@pytest.mark.quick
def test_padded_stack():
    """Of a stack that nothing divides the number is padded, not the matrices, and less is sent."""
    tx, params = dealt(soap(0.1, largest=128)), [jax.ShapeDtypeStruct((MODEL, MODEL + 1), "float32")] * 12
    padded, true = sx.zero.init(tx, params, abstract(data=8)), (params, jax.eval_shape(tx.init, params))
    assert {x.shape for x in jax.tree.leaves(padded[1]) if len(x.shape) == 3} == {
        (12, 64, 64),
        (12, 64, 65),
        (16, 65, 65),
    }
    assert planned(tx, padded)[0].comm_bytes < 0.9 * planned(tx, true)[0].comm_bytes


@pytest.mark.quick
def test_layers_of_a_loop():
    """A stack of parameters may be gone over by a loop: its moments rest along another dim, as in a step."""
    loss, tx, params = of_stack(LAYERS)
    state = jax.eval_shape(tx.init, params)
    _, (_, rests) = planned(tx, (params, state), loss=loss)
    found = sx.zero.specs(state, abstract(data=8), tx=tx, params=params)
    assert specs_in(found) == [x.sharding.spec for x in jax.tree.leaves(rests)]


@pytest.mark.once
def test_results():
    """Two sizes and a vector, beside clipping by the norm of all."""
    rng = np.random.default_rng(0)
    params = [np.float32(rng.normal(size=s)) for s in ((6, 10), (6, 10), (10, 6), (6, 10), (6,))]

    def loss(params, x_B6):
        a, b, c, d, e = params
        return ((x_B6 @ a @ c + e) ** 2).mean() + ((x_B6 @ b - x_B6 @ d) ** 2).mean()

    results = []
    for form, wrap in ((dealt, True), (lambda tx: tx, False)):
        tx = optax.chain(optax.clip_by_global_norm(1.0), form(optax.contrib.muon(0.05, weight_decay=0.1)))
        how = {"mesh": make_mesh({"data": 4}), "in_shardings": (None, P("data")), "donate_argnums": 0}
        jitted = (
            sx.shard_jit(step_of(loss, tx), transforms=[Zero("data", 1)], **how)
            if wrap
            else jax.jit(step_of(loss, tx))
        )
        state = params, jax.jit(tx.init)(params)
        for k in range(3):
            state, value = jitted(state, np.float32(np.random.default_rng(k).normal(size=(8, 6))))
        results.append((state[0], value))
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-5)


UNLIKE = {"in": (1024, 3072), "out": (1024, 1024), "up": (1024, 4096), "down": (4096, 1024)}


@pytest.mark.quick
@pytest.mark.parametrize("axes, less", [({"x": 8}, False), ({"x": 16}, False), ({"x": 8, "y": 8}, True)])
def test_unlike_matrices(axes, less):
    """Padded into one stack, 12 of each of four shapes: of 64 devices each has one matrix at most, instead of
    one of each shape, so that the update takes less time; else as much, or up to a quarter more, where its
    pieces are narrow. By cost no device has more than by size, and the one with most is near the least that it
    could have.
    """

    def loss(params, x_BM):
        for w in params:
            x_BM = x_BM + jnp.tanh((x_BM @ w["in"])[:, :1024]) @ w["out"]
            x_BM = x_BM + jnp.tanh(x_BM @ w["up"]) @ w["down"]
        return (x_BM**2).mean()

    params = [{name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in UNLIKE.items()}] * 12
    x = jax.ShapeDtypeStruct((16384 * np.prod(list(axes.values())), 1024), "float32")

    def estimated(tx, dealt=False):
        how = {"mesh": abstract(**axes), "in_shardings": (None, P(tuple(axes))), "donate_argnums": 0}
        how["options"] = sx.Options(chip="v5p")
        step = sx.shard_jit(step_of(loss, tx), transforms=[Zero(tuple(axes), 1, dealt=dealt)], **how)
        return step.plan((params, jax.eval_shape(tx.init, params)), x).estimate("v5p")

    tx = optax.contrib.scale_by_muon()
    plain, apart, together = map(estimated, (optax.trace(0.9), dealt(tx), dealt(tx, padded=True)))
    muon = optax.contrib.muon(0.1)
    alike, found, by_cost = (estimated(muon, dealt) for dealt in (False, True, "by cost"))
    forms = {"alike": alike, "by Zero": found, "by cost": by_cost, "apart": apart, "padded": together}
    for form, its in forms.items():
        print(axes, form, f"{its.seconds * 1e3:.1f} ms,", f"{(its.flops - plain.flops) / 1e9:.0f} GFLOP")
    ratio = (together.seconds - plain.seconds) / (apart.seconds - plain.seconds)
    assert ratio < 0.5 if less else 0.9 < ratio < 1.25
    as_many = found.flops - plain.flops < 1.02 * (apart.flops - plain.flops)
    assert as_many or found.seconds < apart.seconds  # on 8 x 8 it takes 48 GFLOP more, and 0.9 ms less in all
    assert found.seconds < alike.seconds
    each = [ITERATIONS * 2 * (2 * min(s) * np.prod(s) + min(s) ** 3) for s in UNLIKE.values()]
    least = max(12 * sum(each) / np.prod(list(axes.values())), *each)
    assert least <= 1.001 * (by_cost.flops - plain.flops) <= 1.2 * least
    assert by_cost.flops < found.flops and by_cost.seconds < 1.001 * found.seconds


def test_padded_is_exact():
    """Zero rows and columns change nothing of an orthogonalized matrix, nor does it matter how it lies."""
    rng = np.random.default_rng(0)
    shapes = {"in": (8, 24), "out": (8, 8), "up": (8, 32), "down": (32, 8), "bias": (7,), "tail": (5, 3)}
    params = {name: jnp.asarray(rng.normal(size=shape), "float32") for name, shape in shapes.items()}
    is_matrix = {name: "matrix" if len(shape) == 2 else "other" for name, shape in shapes.items()}
    numbers = lambda tree: jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), tree)  # noqa: E731
    single = optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)
    dealt_out = dealt(optax.contrib.scale_by_muon(), padded=True)
    tx, padded = (
        optax.partition({"matrix": of_matrices, "other": optax.adam(0.1)}, is_matrix)
        for of_matrices in (single, dealt_out)
    )
    states = tx.init(params), padded.init(params)
    assert {x.shape for x in jax.tree.leaves(states[1]) if x.ndim == 3} == {(5, 8, 32)}
    for _ in range(3):
        grads = {name: jnp.asarray(rng.normal(size=shape), "float32") for name, shape in shapes.items()}
        made = [form.update(grads, state, params) for form, state in zip((tx, padded), states, strict=True)]
        states = [state for _, state in made]
        for name in shapes:
            np.testing.assert_allclose(made[1][0][name], made[0][0][name], rtol=1e-4, atol=1e-5)


@pytest.mark.quick
def test_bad_input():
    with pytest.raises(ValueError, match="tx of dealt is 0.1, of type float: give an optax optimizer"):
        dealt(0.1)
    tx, w = optax.trace(0.9), jax.ShapeDtypeStruct((8, 4), "float32")
    with pytest.raises(
        ValueError, match="specs is given an optimizer tx whose state of these params is .*: give"
    ):
        sx.zero.specs(w, abstract(data=8), tx=tx, params=w)
    with pytest.raises(ValueError, match="tx of pad is 0.1, of type float: give an optax optimizer"):
        sx.zero.pad(w, abstract(data=8), tx=0.1, params=w)


@pytest.mark.quick
def test_update_that_takes_more():
    """Then no dim counts as mixed, and a warning says why and what to do."""
    tx, w = optax.contrib.reduce_on_plateau(), jax.ShapeDtypeStruct((8, 4), "float32")
    with pytest.warns(UserWarning, match="its update needs whole is not known .*value.*: give an optimizer"):
        sx.zero.init(tx, w, abstract(data=8))
    sx.zero.init(optax.GradientTransformation(tx.init, partial(tx.update, value=0.0)), w, abstract(data=8))
