"""What a plan shows of a pipeline: seconds, bytes and places, those of the program that runs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.cost import noted
from shardax.cost.chips import CHIPS, NOMINAL
from shardax.cost.network import Network
from shardax.explain.reports import reports
from shardax.explain.roofline import work
from shardax.ledger.collectives import collectives
from shardax.options import in_effect
from shardax.pipeline import make_schedule
from shardax.pipeline.auto import costs as costs_of
from shardax.pipeline.begins import Begin, Place
from shardax.pipeline.call import Call
from shardax.pipeline.region import Region
from shardax.pipeline.report import why
from shardax.pipeline.simulate import simulate

pytestmark = pytest.mark.quick

MESH = AbstractMesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
M, ROWS, LAYERS = 256, 2048, 8


def layer(x_BM, w_MM):
    return x_BM + jnp.tanh(x_BM @ w_MM), None


def loss(params, x_BM, y_BM):
    out_BM, _ = jax.lax.scan(layer, x_BM, params["layers"])
    return ((out_BM @ params["head"] - y_BM) ** 2).mean()


def scores(params, x_BM, y_BM):
    return jax.lax.scan(layer, x_BM, params["layers"])[0] * y_BM


ARGS = (
    {
        "layers": jax.ShapeDtypeStruct((LAYERS, M, M), "float32"),
        "head": jax.ShapeDtypeStruct((M, M), "float32"),
    },
    *[jax.ShapeDtypeStruct((ROWS, M), "float32")] * 2,
)
SHARDINGS = {"layers": P("stage"), "head": None}, P("data"), P("data")


def planned(schedule="1f1b", microbatches=8, **options):
    grad = sx.pipeline.value_and_grad(loss, microbatches=microbatches, schedule=schedule)
    return sx.shard_jit(grad, mesh=MESH, in_shardings=SHARDINGS, options=sx.Options(**options)).plan(*ARGS)


def data(plan):
    (found,) = json.loads(plan.to_json())["reports"].values()
    return found


def test_bytes_and_slots_are_those_of_the_program():
    found = data(planned())
    microbatch, square = ROWS // 2 // 8 * M * 4, M * M * 4  # on each device
    assert found["sent_per_tick"] == microbatch
    memory = found["memory"]
    assert [row["weights"] for row in memory] == [2 * square, 2 * square, 2 * square, 3 * square, 3 * square]
    assert [row["gradients"] // square * square for row in memory] == [row["weights"] for row in memory]
    kept = [row["saved"] for row in memory[:3]]
    assert kept == [kept[2] // 2 * n for n in (4, 3, 2)]  # as many microbatches as there are stages before
    assert kept[2] // 2 % microbatch == 0


def test_the_timeline_is_that_of_the_schedule():
    found, schedule = data(planned("zb-h1")), make_schedule("zb-h1", 4, 8)
    assert [(d, i) for d, i, *_ in found["runs"]] == [(d, str(i)) for _, d, i in schedule.instructions()]
    seconds = {(d, i[0]): end - start for d, i, start, end in found["runs"]}
    for stage in found["stages"]:
        d = stage["stage"]
        expected = [stage[name] for name in ("forward", "inputs", "weights")]
        np.testing.assert_allclose([seconds[d, kind] for kind in "FBW"], expected, rtol=1e-6)


def test_a_slower_chip_takes_longer():
    nominal, v3 = data(planned()), data(planned(chip="v3"))
    assert v3["chip"] == "v3" and v3["seconds"] > nominal["seconds"]


def test_why_a_stage_begins_where_it_does():
    begins = [stage["begins"] for stage in data(planned())["stages"]]
    assert begins[0] is None
    assert [begin["here"]["layer"] for begin in begins[1:]] == [[2, LAYERS], [4, LAYERS], [6, LAYERS]]
    assert [begin["here"]["crossing"] for begin in begins[1:]] == 3 * [ROWS // 8 * M * 4]
    assert begins[1]["other"] is None  # layers are dealt out evenly
    assert begins[3]["other"]["slower"] >= begins[3]["here"]["slower"]  # before the head


@pytest.mark.parametrize(
    "other, marked, words",
    [
        (Place("/a/f.py:9", (3, 8), 2048, 2e-3), False, "next best, from a/f.py:9, layer 3 of 8"),
        (None, True, "the only place that is marked"),
        (None, False, "the only place between those of its neighbours"),
    ],
)
def test_why_in_words(other, marked, words):
    assert words in why(Begin(Place("/a/f.py:7", None, 1024, 1e-3), other, marked))


def test_text_fits_and_says_all():
    text = planned("interleaved").text(110)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 110
    first = next(i for i, line in enumerate(lines) if line.startswith("Pipeline of loss over stage"))
    part = "\n".join(lines[first:])
    for words in ("bubbles", "stage 3 ", "stage 3 chunk 1 from", "layer 7 of 8", "each holds"):
        assert words in part


def test_page_has_the_timeline(tmp_path):
    planned().to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert 'id="pipeline-loss"' in page and page.count("backward of microbatch") == 4 * 8
    assert "next best, from" in page


def test_forward_alone_and_several():
    """Two pipelines in one program; none where what they make is not used."""

    def both(params, x_BM, y_BM):
        made = sx.pipeline.apply(scores, microbatches=4)(params, x_BM, y_BM)
        value, _ = sx.pipeline.value_and_grad(loss, microbatches=8)(params, x_BM, y_BM)
        return made, value

    def of(f):
        return [r.data["name"] for r in reports(sx.shard_jit(f, mesh=MESH).plan(*ARGS))]

    assert sorted(of(both)) == ["loss", "scores"]
    assert of(lambda *args: both(*args)[0]) == ["scores"]
    assert of(lambda *args: jax.jit(jax.checkpoint(lambda *a: both(*a)[1]))(*args)) == ["loss"]


def test_a_second_plan_has_it_too():
    grad = sx.shard_jit(sx.pipeline.value_and_grad(loss, microbatches=8), mesh=MESH)
    first, second = grad.plan(*ARGS), grad.plan(*ARGS)
    assert data(first) == data(second)
    derived = sx.shard_jit(lambda *args: grad(*args)[0] * 2.0, mesh=MESH).plan(*ARGS)
    assert [r.data["name"] for r in reports(derived)] == ["loss"]


# The choice of a schedule


def chosen(memory=None, chip=None):
    grad = sx.pipeline.value_and_grad(loss, microbatches=8, schedule="auto", memory=memory)
    return sx.shard_jit(grad, mesh=MESH, in_shardings=SHARDINGS, options=sx.Options(chip=chip)).plan(*ARGS)


def choice(memory=None, chip=None):
    """What is compared for it."""
    found = []

    def run(*args):
        call = Call.of(loss, args, {}, (0,), None, "stage", 8)
        found.append(call.of_gradients("mean", has_aux=False)[0].loop)

    with jax.sharding.use_abstract_mesh(MESH), in_effect(sx.Options(chip=chip)):
        jax.eval_shape(run, *ARGS)
        return found[0].choice(4, 8, None, "stage", memory)


LIMITS = [(None, None), (11e6, None), (12e6, None), (None, dataclasses.replace(CHIPS["v5e"], memory=11e6))]


@pytest.mark.parametrize("memory, chip", LIMITS)
def test_auto_is_the_fastest_that_fits(memory, chip):
    """Simulated again, one by one. None that does not fit is chosen, however fast."""
    found = choice(memory, chip)
    names = [c.schedule.name for c in found.candidates]
    assert {"gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "naive"} <= {*names}
    costs = found.candidates[0].simulation.costs
    made = {name: simulate(make_schedule(name, 4, 8), costs) for name in names}
    fits = {name for name, each in made.items() if found.limit is None or each.kept <= found.limit}
    assert found.schedule.name in fits
    fastest = min(made[name].seconds for name in fits)
    np.testing.assert_allclose(made[found.schedule.name].seconds, fastest, rtol=1e-8)
    is_limited = memory is not None or chip is not None
    assert (len(fits) < len(made)) == ("over the limit" in str(found)) == is_limited


@pytest.mark.once
@pytest.mark.parametrize("memory, chip", [LIMITS[1], LIMITS[3]])
def test_what_is_held_in_the_end_is_what_was_allowed(memory, chip):
    plan = data(chosen(memory, chip))
    assert plan["schedule"]["name"] == choice(memory, chip).schedule.name
    assert plan["chosen"] == str(choice(memory, chip))
    held = plan["memory"][-1]
    batch = 2 * ROWS // 2 * M * 4
    assert sum(held[name] for name in ("weights", "saved", "waiting", "gradients")) + batch <= 11e6


@pytest.mark.parametrize(
    "memory, words",
    [(1e6, "memory is 1,000,000 bytes, and the weights of a stage"), (-1, "memory of value_")],
)
def test_too_little_memory(memory, words):
    with pytest.raises(ValueError, match=words):
        chosen(memory)


def test_seconds_of_passes_and_bytes_kept():
    """Of products: the forward pass multiplies once, the backward pass for each of inputs and weights."""
    x = jax.ShapeDtypeStruct((4096, 512), "float32")
    w = jax.ShapeDtypeStruct((LAYERS, 512, 512), "float32")
    grad = jax.value_and_grad(lambda w, x: (jax.lax.scan(layer, x, w)[0] ** 2).mean())
    closed = jax.make_jaxpr(lambda w, x, _: grad(w, x))(w, x, jax.ShapeDtypeStruct((), "int32"))
    chip = dataclasses.replace(NOMINAL, memory_rate=1e18)  # products alone count
    network = Network({"stage": 4, "data": 2}, chip)
    whole, halved = (Region(closed, 1, 1, 2)._at(make_schedule(n, 4, 8)).passes() for n in ("1f1b", "zb-h1"))
    costs = costs_of(whole, halved, network, "stage")
    product = 2 * 4096 * 512 * 512 / chip.flops / 2  # shared by two
    for name, products in {"forward": 2, "inputs": 2, "weights": 2, "backward": 4}.items():
        np.testing.assert_allclose(costs.of(name)[1], products * product, rtol=1e-2)
    assert min(costs.of("saved")) + costs.boundary >= 2 * 4096 * 512 * 4 / 2  # of both layers what tanh gave
    assert min(costs.of("held")) >= 2 * 4096 * 512 * 4 / 2  # and the cotangents of their products


# Branches by table


def switched(table, big=64, apart=False):
    """A loop whose devices take branches by a table: one multiplies, one multiplies twice, one idles. `apart`:
    the dearest in a cond of its own."""
    branches = [lambda x: x, lambda x: x @ x, lambda x: x @ x @ x]
    once, twice = ([0, 1, 0], [0, 0, 1]) if apart else ([0, 1, 2], [])

    def run(x):
        def tick(x, row):
            mine = row[jax.lax.axis_index("stage")]
            with noted.branches(table, once):
                x = jax.lax.switch(jnp.asarray(once)[mine], branches[: max(once) + 1], x)
            if twice:
                with noted.branches(table, twice):
                    x = jax.lax.switch(jnp.asarray(twice)[mine], branches[::2], x)
            return x, None

        return jax.lax.scan(tick, x, jnp.asarray(table))[0]

    with jax.sharding.use_abstract_mesh(MESH):
        island = jax.shard_map(run, in_specs=P(), out_specs=P(), axis_names={"stage"}, check_vma=False)
        return jax.make_jaxpr(island)(jnp.ones((big, big)))


@pytest.mark.not_quick
@pytest.mark.parametrize(
    "table, products",
    [
        ([[0, 0], [1, 0], [0, 1]], 2),  # as many as the longest of each trip
        ([[1, 2], [2, 1], [1, 1]], 5),
        ([[0, 0], [0, 0], [0, 0], [0, 2]], 2),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_a_trip_takes_as_long_as_its_longest_branch(table, products, apart):
    flops = sum(w.trips * w.flops for w in work(switched(np.array(table), apart=apart)))
    assert flops == products * 2 * 64**3


def test_a_branch_that_few_take_sends_as_often():
    """Of the devices along `stage`, those count that send most."""
    table = np.array([[0, 1], [0, 1], [1, 0], [0, 0], [0, 1]])

    def run(x):
        def tick(x, row):
            with noted.branches(table):
                send = [lambda x: x, lambda x: jax.lax.psum(x, "data")]
                return jax.lax.switch(row[jax.lax.axis_index("stage")], send, x), None

        return jax.lax.scan(tick, x, table)[0]

    with jax.sharding.use_abstract_mesh(MESH):
        island = jax.shard_map(run, in_specs=P(), out_specs=P(), check_vma=False)
        jaxpr = jax.make_jaxpr(island)(jax.ShapeDtypeStruct((4,), "float32"))
    (found,) = collectives(jaxpr, MESH.shape)
    assert (found.kind, found.trips, found.other_branch) == ("all_reduce", 3, False)
