"""The program of one microbatch of a step, and what the step does before and after; without devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from shardax.graph.evaluate import evaluate as traced
from shardax.options import Options
from shardax.pipeline.adding import Adding
from shardax.pipeline.region import Made
from shardax.pipeline.split import BATCH, Split
from shardax.pipeline.virtual import AXIS, Microbatch, is_sent, microbatch
from shardax.transforms import Argument, Context
from tests.numpy_programs import evaluate

pytestmark = pytest.mark.quick

F32 = partial(jax.ShapeDtypeStruct, dtype=np.dtype("float32"))
ROWS, M, COUNT = 8, 3, 4
W, X = F32((M, M)), F32((ROWS, M))


def context(*types):
    """The first argument is the state, the others are the batch."""
    arguments = tuple(Argument(f"x{i}", type, is_state=not i) for i, type in enumerate(types))
    return Context(AbstractMesh((2,), ("stage",), axis_types=(AxisType.Auto,)), arguments, (), Options())


def of_one(step, *types, count: int = COUNT) -> Microbatch:
    is_batch = [False, *(True for _ in types[1:])]
    return microbatch(jax.make_jaxpr(step)(*types), context(*types), is_batch, count)


def sent(found: Microbatch):
    return [(eqn.primitive.name, eqn.invars[0].aval.shape) for eqn in found.jaxpr.eqns if is_sent(eqn)]


def gradient(w, x):
    """Updates the weights; gives the loss too."""
    value, grads = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) * x).sum() / ROWS)(w)
    return w - 0.1 * grads, value


def positions(w, x):
    """Each row has its number in the batch added."""
    return gradient(w, x + lax.iota("float32", x.shape[0])[:, None])


def masked(w, x):
    """A mean over rows that the microbatches have different numbers of."""
    keep = (x[:, 0] < 0.5).astype("float32")

    def loss(w):
        return (jnp.tanh(x @ w).sum(1) * keep).sum() / keep.sum()

    value, grads = jax.value_and_grad(loss)(w)
    return w - 0.1 * grads, value


def scores(w, x):
    """Gives a row of results for each of the batch."""
    return gradient(w, x)[0], jnp.tanh(x @ w)


def twice(w, x):
    """The weights are used in two places."""
    value, grads = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) @ w.T).sum())(w)
    return w - 0.1 * grads, value


def normed(w, x):
    def loss(w):
        h = x @ w
        return jnp.tanh(h - h.mean(0)[None]).sum()

    return w - jax.grad(loss)(w), loss(w)


# virtual


def test_one_microbatch_has_its_rows_and_owes_sums():
    found = of_one(gradient, W, X)
    assert [aval.shape for aval in found.jaxpr.in_avals] == [(M, M), (ROWS // COUNT, M), ()]
    assert found.is_batch == (False, True) and found.results == (None, None) and not found.is_in_order
    assert {name for name, _ in sent(found)} <= {"psum", "psum_invariant"}
    assert sorted(shape for _, shape in sent(found)) == [(), (M, M)]


def test_results_that_have_rows_stay_split():
    assert of_one(scores, W, X).results == (None, 0)


def test_what_depends_on_the_place_in_the_batch_reads_the_number():
    assert of_one(positions, W, X).is_in_order
    assert not of_one(masked, W, X).is_in_order


def test_a_batch_that_the_microbatches_do_not_divide_comes_in_whole():
    found = of_one(gradient, W, X, count=3)
    assert [aval.shape for aval in found.jaxpr.in_avals] == [(M, M), (ROWS, M), ()]
    assert found.is_batch == (False, False) and found.is_in_order


def test_what_is_sent_is_sent_along_the_axis_of_microbatches():
    def local(x):
        return lax.psum(x, AXIS), lax.psum(x, "model"), x + x

    mesh = AbstractMesh((2, 2), (AXIS, "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        made = jax.make_jaxpr(jax.shard_map(local, in_specs=jax.P(), out_specs=jax.P(), check_vma=False))(X)
    (eqn,) = made.jaxpr.eqns
    assert [is_sent(e) for e in eqn.params["jaxpr"].eqns] == [True, False, False]


# split


def split(step, *types, count: int = COUNT) -> Split:
    return Split(
        of_one(step, *types, count=count), [True, *(False for _ in types[1:])], [False, True], ["x1"]
    )


def run(found: Split, *types, count: int = COUNT):
    """All microbatches one after the other, in place of stages."""
    dim = found.program.batch_dim

    def pipelined(region, params, batch, rest, asked):
        made = [
            traced(
                region.closed,
                [*params, *(lax.index_in_dim(x, i, dim, False) for x in batch), *rest, jnp.int32(i)],
            )
            for i in range(count)
        ]
        results = list(zip(*made, strict=True))
        sums = [sum(xs[1:], xs[0]) for xs in results[: region.sums]]
        return Made(sums, [jnp.stack(xs) for xs in results[region.sums :]], [])

    def microbatches(_, x):
        lead = (-1, count) if dim else (count, -1)
        return x.reshape(*lead, *x.shape[1:])

    return jax.make_jaxpr(lambda *args: found.run(args, count, microbatches, pipelined))(*types)


STEPS = [gradient, positions, masked, scores, twice]


@pytest.mark.parametrize(
    "step, count",
    [(step, count) for step in STEPS for count in (1, 3, COUNT) if (step, count) != (masked, 3)],
)
def test_microbatches_make_the_step(step, count):
    """Three do not divide the batch."""
    random = np.random.RandomState(0)
    args = [random.randn(*type.shape).astype("float32") for type in (W, X)]
    wanted = evaluate(jax.make_jaxpr(step)(W, X), args)
    for x, y in zip(
        evaluate(run(split(step, W, X, count=count), W, X, count=count), args), wanted, strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_summands_are_added_behind_their_sums():
    """Of two uses of a weight, each has its own sum, and what moves and adds them runs once."""
    found = split(twice, W, X)
    assert sorted(v.aval.shape for v in found.sums) == [(), (M, M), (M, M)] and not found.rows
    behind = {eqn.primitive.name for eqn in found.after}
    assert {"transpose", "add_any"} <= behind
    inside = [eqn for eqn in found.region if eqn.outvars[0].aval.shape == (M, M)]
    assert {eqn.primitive.name for eqn in inside} == {"dot_general"}


def test_what_is_linear_runs_once_behind_the_sum():
    """By the facts of the registry: of weights whose rows are reversed the gradient is reversed after it is
    summed."""

    def turned(w, x):
        value, grads = jax.value_and_grad(lambda w: jnp.tanh(x @ lax.rev(w, (0,))).sum())(w)
        return w - 0.1 * grads, value

    found = split(turned, W, X)
    inside = [eqn for eqn in found.region if eqn.outvars[0].aval.shape == (M, M)]
    made = [eqn for eqn in inside if found.kind_of(eqn.outvars[0]) == BATCH]
    assert {eqn.primitive.name for eqn in made} == {"dot_general"}
    assert "rev" in {eqn.primitive.name for eqn in found.after}


def test_summands_of_one_gradient_are_to_be_added_up_in_one_place():
    """Where one stage makes both; one of them is transposed first."""
    found = split(twice, W, X)
    assert isinstance(found.adding, Adding) and not found.adding.packed
    ((value, accumulator, chain),) = found.adding.together
    (parts,) = accumulator.parts
    numbers = [i for i, v in enumerate(found.sums) if v.aval.shape]
    assert accumulator.anywhere and sorted(part.number for part in parts) == numbers and chain == ()
    assert sorted(len(part.moves) % 2 for part in parts) == [0, 1] and value.aval.shape == (M, M)
    assert not split(gradient, W, X).adding.together


def test_a_sum_that_is_read_twice_is_added_up_alone():
    def step(w, x):
        loss = lambda v, w: (jnp.tanh(x @ v) @ w.T).sum()  # noqa: E731
        first, second = jax.grad(loss, argnums=(0, 1))(w, w)
        return w - (first + second), first

    adding = split(step, W, X).adding
    assert not adding.together


def test_sums_of_the_batch_alone_run_before():
    """The number of rows that are not masked, of which each microbatch's gradients are made."""
    found = split(masked, W, X)
    assert [eqn.invars[0].aval.shape for eqn in found.early] == [()]
    assert len(found.sums) == 2
    assert split(gradient, W, X).early == []


def test_results_with_rows_are_stacked():
    found = split(scores, W, X)
    assert [v.aval.shape for v in found.rows] == [(ROWS // COUNT, M)]
    assert [aval.shape for aval in run(found, W, X).out_avals] == [(M, M), (ROWS, M)]


def test_what_is_no_sum_is_refused():
    with pytest.raises(ValueError, match=r"test_pipeline_split.py:\d+ .* beside what is made of a part: the"):
        split(normed, W, X)

    def shifted(w, x):
        return gradient(w, x + lax.sort(x @ w, dimension=0))

    with pytest.raises(ValueError, match="needs rows of other microbatches"):
        split(shifted, W, X)
