"""Passes of stages one after the other, and where their sums and rows are gathered; without devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from shardax.pipeline import slots
from shardax.pipeline.call import Call
from shardax.pipeline.cut import Cut
from shardax.pipeline.gathered import Accumulator, Gathered, Summand
from shardax.pipeline.passes import Inputs
from shardax.pipeline.region import Region
from shardax.pipeline.schedules import make_schedule
from shardax.pipeline.traced import Traced
from tests.numpy_programs import evaluate

pytestmark = pytest.mark.quick

F32 = partial(jax.ShapeDtypeStruct, dtype=np.dtype("float32"))
B, M, L = 6, 4, 4
TYPES = F32((M, M)), F32((L, M, M)), F32((M, M)), F32((B, M)), jax.ShapeDtypeStruct((), "int32")


def loss(params, x):
    first, layers, last = params
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ first, layers)
    out = h @ last
    return (out * out).sum(), h.sum(1)


def step(*args):
    (value, rows), grads = jax.value_and_grad(loss, has_aux=True)(args[:3], args[3])
    return value, *grads, rows


VALUE, FIRST, LAYERS, LAST = range(4)


def on_stages(name: str = "1f1b", asked=(), stages: int = 2):
    region = Region(jax.make_jaxpr(step)(*TYPES), 3, 1, 4)
    return region._at(make_schedule(name, stages, 4), asked)


def layers(parts) -> Accumulator:
    return Accumulator(tuple((Summand(LAYERS, rows),) for rows in parts), (2, M, M))


# gathered


def test_sums_of_one_type_share_a_place_on_different_devices():
    """The first and the last matrix; each stage has its rows of the layers' in one."""
    sums = on_stages().sums
    assert isinstance(sums, Gathered)
    assert sorted(type.shape for type in sums.types) == [(), (2, M, M), (M, M)]
    places = {result.number: place for result, place in sums.places.items()}
    assert places[FIRST] == places[LAST] and len({*places.values()}) == 3


def test_an_accumulator_that_is_asked_for_has_the_parts_of_its_stages():
    sums = on_stages(asked=[layers([(0, 2), (2, 4)])]).sums
    (place,) = sums.asked
    assert place is not None and sums.types[place].shape == (2, M, M)
    made = [F32((2, *type.shape)) for type in sums.types]
    whole = jax.eval_shape(lambda *made: [x for x in sums.whole(made, 0) if x is not None], *made)
    assert [x.shape for x in whole] == [(), (M, M), (M, M)]  # but the layers'


@pytest.mark.parametrize(
    "accumulator",
    [
        layers([(2, 4), (0, 2)]),  # on the other stages
        Accumulator(((Summand(LAYERS, (0, 2)),), ()), (2, M, M)),  # not all of it
        Accumulator(((Summand(LAYERS, (0, 1)),), (Summand(LAYERS, (1, 4)),)), (3, M, M)),
    ],
)
def test_no_accumulator_of_what_is_made_elsewhere(accumulator):
    sums = on_stages(asked=[accumulator]).sums
    assert sums.asked == [None] and len(sums.types) == 3


@pytest.mark.parametrize("stages", [1, 2])
def test_summands_are_added_up_in_one_place_where_one_stage_makes_them(stages):
    """On two stages each has its own, which share one as ever."""
    together = Accumulator(((Summand(FIRST), Summand(LAST)),), (M, M), anywhere=True)
    sums = on_stages(asked=[together], stages=stages).sums
    assert len(sums.types) == 3 and (sums.asked == [None]) == (stages > 1)
    made = [F32((stages, *type.shape)) for type in sums.types]
    added = jax.eval_shape(lambda *made: [x for x in sums.accumulated(made) if x is not None], *made)
    assert [x.shape for x in added] == [(M, M)] * (stages == 1)


# traced


def passed(run, args, halved: bool):
    """The results of one microbatch: forward through all stages, backward through all."""
    params, batch, number = args[:3], args[3], args[4]
    values = run.cut.hoist(params, [])
    passes = run.passes()
    sums = [[np.zeros(type.shape, "float32")] * run.found.stages for type in run.sums.types]
    rows = [[np.zeros((1, *type.shape), "float32")] * run.found.stages for type in run.rows.types]
    kept, received, returned = {}, [], []

    def ran(kind, k, held=()):
        stage = run.cut.stages[k]
        pieces = [values[p.value][slice(*(p.rows or (None,)))] for p in stage.pieces]
        own = passes[k].of[kind]
        totals = [sums[place][k] for place in own.totals]
        made = own.run(Inputs(pieces, [batch], [], number, received, returned, kept.get(k, []), held, totals))
        for place, x in zip(own.totals, made.totals, strict=True):
            sums[place][k] = x
        for place, x in zip(own.sums, made.sums, strict=True):
            sums[place][k] = sums[place][k] + x
        for place, x in zip(own.rows, made.rows, strict=True):
            rows[place][k] = x[None]
        return made

    for k in range(run.found.stages):
        made = ran(slots.FORWARD, k)
        received, kept[k] = made.sent, made.kept
    for k in reversed(range(run.found.stages)):
        made = ran(slots.BACKWARD_INPUTS if halved else slots.BACKWARD, k)
        if halved:
            ran(slots.BACKWARD_WEIGHTS, k, made.held)
        returned = made.sent
    sums, rows = ([jnp.stack(xs) for xs in some] for some in (sums, rows))
    return [*run.sums.whole(sums, 0), *(x[0] for x in run.rows.whole(rows, 1))]


@pytest.mark.parametrize("name, stages", [("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("zb-h1", 2), ("zb-h1", 3)])
def test_the_passes_of_all_stages_make_the_step(name, stages):
    random = np.random.RandomState(0)
    args = [random.randn(*type.shape).astype("float32") for type in TYPES[:4]] + [np.int32(0)]
    run = on_stages(name, stages=stages)
    found = evaluate(jax.make_jaxpr(lambda *args: passed(run, args, name == "zb-h1"))(*TYPES), args)
    for x, y in zip(found, evaluate(jax.make_jaxpr(step)(*TYPES), args), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_w_has_no_product_that_b_has():
    run = on_stages("zb-h1")
    assert isinstance(run.cut, Cut)
    types = run.piece_types()[1], [TYPES[3]], []
    found = Traced(run, 1, list, types).passes()
    of_both, of_b, of_w = (
        str(found.of[kind].closed).count("dot_general")
        for kind in (slots.BACKWARD, slots.BACKWARD_INPUTS, slots.BACKWARD_WEIGHTS)
    )
    assert of_both == of_b + of_w == 4 and of_w == 2  # of the layers and of the last matrix
    assert found.held and not on_stages("1f1b").passes()[1].held


# call


@pytest.mark.parametrize("rows, is_even", [(8, True), (7, False)])
def test_a_call_sums_over_microbatches_of_any_size(rows, is_even):
    def loss(params, x, scale):
        return (jnp.tanh(x @ params["w"]) * scale).mean()

    mesh = AbstractMesh((2,), ("stage",), axis_types=(AxisType.Auto,))
    found = []

    def run(params, x, scale):
        call = Call.of(loss, (params, x, scale), {}, (0,), None, "stage", 4)
        assert call.rows == rows and call.is_even is is_even and call.name == "loss"
        assert jax.tree.structure(call.restored([params["w"], x, scale])) == jax.tree.structure(
            [params, x, scale]
        )
        split, _ = call.of_gradients("mean", has_aux=False)
        found.append((split.loop, split.adding.origins(split.program.jaxpr.jaxpr.outvars[1])))
        return x

    with jax.sharding.use_abstract_mesh(mesh):
        jax.make_jaxpr(run)({"w": F32((M, M))}, F32((rows, M)), F32(()))
    ((region, origins),) = found
    assert region.sums == 2 and region.flow.backward
    assert not is_even or [origin.shape for origin in origins] == [(M, M)]
    batch = [v.aval.shape for v in region.flow.of_batch]
    assert batch == ([(2, M)] if is_even else [])  # else cut by its number
