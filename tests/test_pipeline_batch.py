"""What is cut into microbatches: what is taken for the batch, and what is said to be it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import shardax as sx
from shardax.pipeline.batch import of_batch

ROWS = 16
F32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")  # noqa: E731
ABSTRACT = jax.sharding.AbstractMesh((2,), ("stage",), axis_types=(AxisType.Auto,))


def rand(seed: int, *shape: int):
    return np.float32(np.random.RandomState(seed).randn(*shape) / np.sqrt(shape[-1]))


def loss(params, x, y, scale, w):
    """`scale` and `w` have as many rows as the batch, and are none."""
    for each in params:
        x = jnp.tanh(x @ each)
    return ((x @ w * scale.mean() - y) ** 2).mean()


ARGS = (
    [rand(i, ROWS, ROWS) for i in range(4)],
    rand(5, ROWS, ROWS),
    rand(6, ROWS, ROWS),
    rand(7, ROWS),
    rand(8, ROWS, ROWS),
)


def step(params, x, y, scale, w):
    value, grads = jax.value_and_grad(loss)(params, x, y, scale, w)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


@pytest.mark.once
def test_arrays_with_as_many_rows_that_are_no_batch():
    mesh = jax.make_mesh((2,), ("stage",), axis_types=(AxisType.Auto,))
    grad = sx.pipeline.value_and_grad(loss, microbatches=4, batch_argnames=("x", "y"))
    value, grads = sx.shard_jit(grad, mesh=mesh)(*ARGS)
    pipelined = sx.shard_jit(
        step, mesh=mesh, transforms=[sx.pipeline.Pipeline(microbatches=4, batch_argnames=("x", "y"))]
    )
    params, again = pipelined(*ARGS)
    wanted, wanted_value = jax.jit(step)(*ARGS)
    np.testing.assert_allclose([value, again], [wanted_value] * 2, rtol=1e-5)
    for w, g, new, expected in zip(ARGS[0], grads, params, wanted, strict=True):
        np.testing.assert_allclose(w - 0.1 * g, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_a_batch_of_a_parameters_type():
    """It looks like state, of which an array of its type comes back."""
    shapes = jax.tree.map(lambda x: F32(*x.shape), ARGS)
    said = sx.pipeline.Pipeline(microbatches=4, batch_argnames=("x", "y"))
    planned = sx.shard_jit(step, mesh=ABSTRACT, transforms=[said]).plan(*shapes)
    assert sum(c.trips for c in planned.collectives if c.kind == "ppermute") > 4


@pytest.mark.quick
def test_predictions_of_the_type_of_the_batch():
    """They come back as if tokens and labels were state, and what is donated says that they are none."""

    def step(params, x, y):
        def loss(params):
            h = jax.nn.one_hot(x, ROWS)
            for each in params:
                h = jnp.tanh(h @ each)
            return -(jax.nn.log_softmax(h) * jax.nn.one_hot(y, ROWS)).mean(), h.argmax(-1).astype("int32")

        (value, predicted), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value, predicted

    tokens = jax.ShapeDtypeStruct((ROWS, 6), "int32")
    plans = [
        sx.shard_jit(
            step, mesh=ABSTRACT, donate_argnums=0,
            transforms=[sx.pipeline.Pipeline(microbatches=4, batch_argnames=names)],
        ).plan([F32(ROWS, ROWS)] * 4, tokens, tokens)
        for names in (None, ("x", "y"))
    ]  # fmt: skip
    assert plans[0].comm_bytes == plans[1].comm_bytes > 0


@pytest.mark.quick
def test_weights_before_the_batch_whose_rows_microbatches_divide():
    """Taken for the batch they are refused, and said not to be it they are weights."""

    def lookup(params, frozen, x):
        def loss(params):
            return (jnp.tanh(params["in"][x] @ frozen) @ params["out"] ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(jnp.subtract, params, grads), value

    args = {"in": F32(11, 8), "out": F32(8, 11)}, F32(8, 8), jax.ShapeDtypeStruct((16, 6), "int32")
    plans = [
        sx.shard_jit(
            lookup, mesh=ABSTRACT, transforms=[sx.pipeline.Pipeline(microbatches=4, batch_argnames=names)]
        ).plan
        for names in (None, "x")
    ]
    with pytest.raises(ValueError, match="Taken as the batch are frozen; .* by batch_argnames="):
        plans[0](*args)
    assert any(c.kind == "ppermute" for c in plans[1](*args).collectives)


@pytest.mark.quick
def test_what_is_taken():
    names, types = ["key", "x", "x", "y", "w"], [F32(), F32(8, 2), F32(8), F32(8, 3), F32(4, 4)]
    assert of_batch(names, types, [True] * 5, None, "f") == [False, True, True, True, False]
    assert of_batch(names, types, [True, False, False, False, True], None, "f") == [False] * 4 + [True]
    assert of_batch(names, types, [False] * 5, ("key", "y"), "f") == [False, False, False, True, False]
    assert of_batch(["key"], [F32()], [True], None, "f") == [False]


@pytest.mark.quick
def test_rows_are_at_least_as_many_as_microbatches():
    """A key of an old kind is an array of two numbers."""
    names, types = ["key", "x", "y"], [F32(2), F32(8, 3), F32(8)]
    assert of_batch(names, types, [True] * 3, None, "f", 4) == [False, True, True]
    assert of_batch(names, types, [True] * 3, None, "f", 9) == [True, False, False]  # and is refused


def planned(microbatches=2, **how):
    """`value_and_grad` of a loss of weights, frozen layers, and a batch: a plan."""

    def loss(head, frozen, x, y):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, frozen)
        return ((x @ head - y) ** 2).mean()

    grad = sx.pipeline.value_and_grad(loss, microbatches=microbatches, **how)
    return sx.shard_jit(grad, mesh=ABSTRACT).plan(F32(4, 4), F32(6, 4, 4), F32(8, 4), F32(8, 4))


@pytest.mark.quick
def test_frozen_layers_are_no_batch():
    """Half of them for each half of the batch would be a loss, and a wrong one."""
    with pytest.raises(ValueError, match=r"arrays of 6 \(frozen\) and 8 \(x\) rows .* by batch_argnames="):
        planned()
    assert any(c.kind == "ppermute" for c in planned(batch_argnames=("x", "y")).collectives)
    assert any(c.kind == "ppermute" for c in planned(microbatches=8).collectives)  # more than layers


@pytest.mark.quick
def test_a_batch_that_is_differentiated():
    with pytest.raises(ValueError, match="loss has 'x', which argnums says is differentiated; .*Pipeline"):
        planned(argnums=(0, 2), batch_argnames=("x", "y"))
    with pytest.raises(TypeError, match="incompatible shapes") as raised:
        planned(argnums=(0, 1, 2))
    wanted = "with one of 2 microbatches: 4 rows of y, and all else whole; batch_argnames= says what is cut"
    assert any(wanted in note for note in raised.value.__notes__)


@pytest.mark.quick
@pytest.mark.parametrize(
    "given, words",
    [
        ("z", "batch_argnames of f has 'z'; expected names of arguments, of which there are x, w$"),
        (("x", "w"), r"batch_argnames of f is \('x', 'w'\), whose arrays have 8 \(x\) and 4 \(w\) rows"),
    ],
)
def test_bad_names(given, words):
    with pytest.raises(ValueError, match=words):
        of_batch(["x", "w"], [F32(8, 2), F32(4)], [True] * 2, given, "f")


@pytest.mark.quick
@pytest.mark.parametrize(
    "make",
    [lambda names: sx.pipeline.Pipeline(batch_argnames=names)]
    + [
        lambda names, f=f: f(loss, microbatches=2, batch_argnames=names)
        for f in (sx.pipeline.value_and_grad, sx.pipeline.apply)
    ],
)
def test_no_names(make):
    with pytest.raises(
        ValueError, match="batch_argnames of .* is 1, of type int: give the name of an argument"
    ):
        make(1)


# Microbatches that do not divide the batch


def masked(params, x, y, keep):
    """A mean over rows that are not masked, of which microbatches have different numbers."""
    for each in params:
        x = jnp.tanh(x @ each)
    return (((x - y) ** 2).mean(-1) * keep).sum() / keep.sum()


@pytest.mark.once
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_rows_that_microbatches_do_not_divide(schedule):
    """Fourteen in four and three: each row counts alike, be the mean over all or over some."""
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    params, x, y = ARGS[0], ARGS[1][:14], ARGS[2][:14]
    keep = np.float32(np.arange(14) % 3 > 0)
    for count in (4, 3):
        grad = sx.pipeline.value_and_grad(masked, microbatches=count, schedule=schedule)
        found = sx.shard_jit(grad, mesh=mesh)(params, x, y, keep)
        wanted = jax.jit(jax.value_and_grad(masked))(params, x, y, keep)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


@pytest.mark.quick
@pytest.mark.parametrize("hidden", [84, 840])
def test_no_product_is_split_otherwise_than_by_rows(hidden):
    """24 rows in 7 microbatches are 4 in each; features would be split evenly, and take less time, if what is sent
    between microbatches were allowed at any price.
    """

    def loss(params, x_BSM):
        for up_MH, down_HM in params:
            h_BSH = jnp.tanh(jnp.einsum("bsm,mh->bsh", x_BSM, up_MH))
            x_BSM += jnp.einsum("bsh,hm->bsm", h_BSH, down_HM)
        return (x_BSM**2).mean()

    grad = sx.pipeline.value_and_grad(loss, microbatches=7, batch_argnames="x_BSM")
    params = [(F32(84, hidden), F32(hidden, 84))] * 2
    assert sx.shard_jit(grad, mesh=ABSTRACT).plan(params, F32(24, 84, 84)).collectives


@pytest.mark.quick
def test_no_gradient_of_rows_is_gathered_to_spare_a_sum():
    """However large the table whose gradient is summed, and small the rows that were looked up."""

    def loss(params, tokens_B):
        table_VM, w_MM = params
        return (jnp.tanh(table_VM[tokens_B] @ w_MM) ** 2).mean()

    grad = sx.pipeline.value_and_grad(loss, microbatches=7, batch_argnames="tokens_B")
    tokens_B = jax.ShapeDtypeStruct((24,), "int32")
    assert sx.shard_jit(grad, mesh=ABSTRACT).plan([F32(10**8, 8), F32(8, 8)], tokens_B).collectives


@pytest.mark.quick
def test_a_loss_that_is_no_sum_needs_microbatches_of_one_size():
    """Batch norm, say; the line is told, and the way out."""

    def normed(params, x):
        for w in params:
            h = x @ w
            x = jnp.tanh(h / jnp.sqrt((h**2).mean(0, keepdims=True)))
        return (x**2).mean()

    shapes = [F32(ROWS, ROWS)] * 4
    grad = sx.shard_jit(sx.pipeline.value_and_grad(normed, microbatches=4), mesh=ABSTRACT)
    assert grad.plan(shapes, F32(16, ROWS)).collectives
    with pytest.raises(
        ValueError, match=r"pipeline of normed: what .*test_pipeline_batch.py.* divides the 14"
    ):
        grad.plan(shapes, F32(14, ROWS))
    score = sx.pipeline.apply(lambda params, x: x @ params[0], microbatches=4)
    with pytest.raises(ValueError, match="14 rows, which 4 microbatches do not divide; take a number"):
        sx.shard_jit(score, mesh=ABSTRACT).plan(shapes, F32(14, ROWS))
