"""Every optimizer of optax, five steps, sharded over two and three axes, against plain `jax.jit` on one
device.

Sizes: `up` divides its mesh, `down` does not, and rests where it can; `bias` and `gain` have one dim and
none. How optimizer states rest is completion's doing alone: the annotations say how parameters and batch do.
"""

import re
from collections.abc import Mapping
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh, mesh_text
from tests.optimizers import COMBINATIONS, make, names

pytestmark = [
    pytest.mark.promotes_ranks,
    pytest.mark.mixed_dtypes,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

STEPS = 5
SHAPES = {"up": (10, 12), "bias": (12,), "down": (12, 3, 7), "gain": ()}
WITHOUT_SCALARS = {"sm3", "scale_by_sm3"}  # optax's own fail on a parameter of rank 0
PER_EXAMPLE = {"dpsgd", "differentially_private_aggregate"}  # their gradients have a leading batch dim
SECOND_ORDER = {"sophia", "hutchinson_estimator_diag_hessian"}  # they want the loss itself
WITHOUT_EXTRA = {"sam"}  # it refuses the loss, which line searches want
MEETS_NAN = {"apply_if_finite", "multi_steps_skipping", "zero_nans", "zero_nans_then_adam"}
FAST_AND_SLOW = {"lookahead", "lookahead_of_masked"}

TOLERANCE = 1e-5  # of a leaf's largest element: some units in the last place of f32, five times over
LOOSER = dict.fromkeys(("lbfgs", "scale_by_lbfgs"), 1e-4)  # quotients of differences of gradients

MESHES: tuple[tuple[Mapping[str, int], Mapping[str, P]], ...] = (
    (
        {"data": 2, "model": 4},
        {"up": P("data", "model"), "bias": P("model"), "down": P("model", None, "data"), "gain": P()},
    ),
    (
        {"data": 2, "fsdp": 2, "model": 2},
        {"up": P("fsdp", "model"), "bias": P("model"), "down": P("model", "fsdp"), "gain": P()},
    ),
)
BATCH = (P("data"), P(("data", "fsdp")))


@pytest.fixture(autouse=True)
def quick_compilation():
    """XLA's optimizations are not under test here, and most of the time would go there."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def loss(params, batch):
    x_BI, y_BKO = batch
    h_BH = jnp.tanh(x_BI @ params["up"] + params["bias"])
    return jnp.mean((jnp.einsum("bh,hko->bko", h_BH, params["down"]) * params.get("gain", 1.0) - y_BKO) ** 2)


def init_params(name: str):
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=shape) * 0.3 + 0.1, jnp.float32) for k, shape in SHAPES.items()}
    if name in WITHOUT_SCALARS:
        del params["gain"]
    return optax.LookaheadParams(params, jax.tree.map(jnp.copy, params)) if name in FAST_AND_SLOW else params


@cache
def batches(name: str):
    rng = np.random.default_rng(1)
    made = [(rng.normal(size=(6, 10)), rng.normal(size=(6, 3, 7))) for _ in range(STEPS)]
    if name in MEETS_NAN:
        made[2][0][3, 4] = np.nan
    return [jax.tree.map(np.float32, batch) for batch in made]


def transformation(name: str):
    return optax.with_extra_args_support(COMBINATIONS[name]() if name in COMBINATIONS else make(name))


def gradients(name: str, params, batch):
    trained = params.fast if name in FAST_AND_SLOW else params
    if name in PER_EXAMPLE:
        one = jax.vmap(jax.value_and_grad(loss), (None, 0))
        values, grads = one(trained, jax.tree.map(lambda x: x[:, None], batch))
        return values.mean(), grads
    return jax.value_and_grad(loss)(trained, batch)


def make_step(name: str, tx):
    def step(state, batch):
        params, opt_state = state
        value, grads = gradients(name, params, batch)

        def again(params, **extra):
            return loss(params, batch)

        extra = {"value": value, "grad": grads, "value_fn": again} | (
            {"obj_fn": again} if name in SECOND_ORDER else {}
        )
        updates, opt_state = tx.update(grads, opt_state, params, **({} if name in WITHOUT_EXTRA else extra))
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def run(name: str, tx, step):
    params = init_params(name)
    state, losses = (params, jax.jit(tx.init)(params)), []
    for batch in batches(name):
        state, value = step(state, batch)
        losses.append(float(value))
    return state, losses


def specs_of(name: str, specs):
    kept = {k: s for k, s in specs.items() if k in SHAPES and not (k == "gain" and name in WITHOUT_SCALARS)}
    return optax.LookaheadParams(kept, kept) if name in FAST_AND_SLOW else kept


@cache
def on_one_device(name: str):
    tx = transformation(name)
    return run(name, tx, jax.jit(make_step(name, tx)))


def sharded(name: str, number: int):
    (shape, specs), batch = MESHES[number], BATCH[number]
    tx = transformation(name)
    shardings = ((specs_of(name, specs), None), batch)
    return tx, sx.shard_jit(
        make_step(name, tx), mesh=make_mesh(shape), in_shardings=shardings, donate_argnums=0
    )


def leaf_equal(path, found, expected, tolerance: float) -> None:
    path = jax.tree_util.keystr(path)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), path
    if jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
        found, expected = jax.random.key_data(found), jax.random.key_data(expected)
    if not np.issubdtype(expected.dtype, np.inexact):
        np.testing.assert_array_equal(found, expected, path)
    elif expected.size:
        scale = max(float(np.nanmax(abs(expected), initial=0)), 1e-6)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale, err_msg=path)


def spec(x) -> tuple:
    return _padded(x.sharding.spec, x.ndim)


def _padded(spec: P, rank: int) -> tuple:
    return tuple(spec) + (None,) * (rank - len(spec))


UNLIKE = {
    "flatten": r"\.(mu|nu)$",  # of all parameters in a row
    "galore": r"\.(projector|trace)\['up'\]",  # a basis of its rank, and what is written in that
    "scale_by_galore": r"\.(projector|trace)\['up'\]",
}
OF_NO_PARAMETER = r"\.(ns_coeffs|key|weights_memory|[rmvs])$"  # small vectors


def check_resting(name: str, number: int, state) -> None:
    """Moments rest as their parameters do, what kept some of their dims as those dims do, all else whole.

    A parameter whose annotation does not divide it rests otherwise; what kept a dim of it may rest as that
    dim was annotated.
    """
    params, opt_state = state
    params = params.fast if isinstance(params, optax.LookaheadParams) else params
    for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
        leaf = jax.tree_util.keystr(path)
        key = next((k for k in params if re.search(rf"\['{k}'\](\[\d\])?$", leaf)), None)
        if x.size <= 1 or re.search(OF_NO_PARAMETER, leaf):
            assert not any(spec(x)), leaf
        elif name not in UNLIKE or not re.search(UNLIKE[name], leaf):
            assert key, leaf
            kept = _kept(params[key].shape, x.shape)
            assert kept is not None, leaf
            likes = [spec(params[key])] + [_padded(MESHES[number][1][key], params[key].ndim)] * (
                x.shape != params[key].shape
            )
            assert spec(x) in [tuple(None if d is None else like[d] for d in kept) for like in likes], (
                leaf,
                spec(x),
                likes,
            )


def _kept(full: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int | None, ...] | None:
    """For each dim of a state the dim of the parameter that it is, None for one of size 1 or a leading one of
    history.
    """
    if shape[1:] == full:
        return (None, *range(len(full)))
    if len(shape) == len(full) and all(n in (1, m) for n, m in zip(shape, full, strict=True)):
        return tuple(d if n > 1 else None for d, n in enumerate(shape))
    kept = tuple(full.index(n) if n in full else -1 for n in shape)
    return kept if -1 not in kept and list(kept) == sorted(set(kept)) else None


def abstract_state(name: str, tx, step):
    """How the state rests, known from shapes alone; those after a step, which a few of optax's change."""
    batch = batches(name)[0]
    first = jax.eval_shape(lambda: (params := init_params(name), tx.init(params)))
    later, _ = jax.eval_shape(make_step(name, tx), first, batch)
    return sx.abstract_state(step, later, batch)


def trains_alike(name: str, number: int) -> None:
    expected, expected_losses = on_one_device(name)
    tx, step = sharded(name, number)
    state, losses = run(name, tx, step)
    tolerance = LOOSER.get(name, TOLERANCE)
    np.testing.assert_allclose(losses, expected_losses, rtol=tolerance)
    jax.tree_util.tree_map_with_path(partial(leaf_equal, tolerance=tolerance), state, expected)
    if name not in MEETS_NAN:
        assert losses[-1] != losses[0]
    assert jax.tree.map(spec, state) == jax.tree.map(spec, abstract_state(name, tx, step))
    check_resting(name, number, state)


QUICK = {
    *("adafactor", "adamw", "apply_if_finite", "chain", "inject_hyperparams", "lion", "lookahead", "masked"),
    *("multi_transform", "multi_steps_skipping", "scale_by_lbfgs", "sm3", "under_cond"),
}


def cases():
    everything = [*names(), *COMBINATIONS]
    for number, (shape, _) in enumerate(MESHES):
        for i, name in enumerate(everything):
            slow = name not in QUICK or number != i % 2
            yield pytest.param(
                name, number, id=f"{name}-{mesh_text(shape)}", marks=[pytest.mark.slow] if slow else []
            )


@pytest.mark.parametrize(("name", "number"), list(cases()))
def test_optimizer(name, number):
    trains_alike(name, number)


def test_every_transformation_can_be_made():
    """A new one of optax shows up here, where its signature does not say how to make it."""
    made = [make(name) for name in names()]
    assert len(made) >= 120
    assert all(isinstance(tx, optax.GradientTransformation) for tx in made)
