"""Matrices of several sizes, dealt out together: the most loaded device has the least to do, and results are the
same.
"""

import functools
import itertools
import json
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks.hlo_cost import cost
from models.devices import make_mesh
from shardax.cost.chips import SLOW, V5E, V5P
from shardax.zero import Zero
from shardax.zero.by_cost import Costs, is_dealt_by_cost
from shardax.zero.loads import MOST_LOADS, Size, loads, longest, rows
from shardax.zero.stacks import stacked
from tests import on_tpu, test_zero
from tests.kronecker import OPTIMIZERS
from tests.test_zero import abstract
from tests.zero_steps import assert_equal, assert_trained_as_alone, step_of, trained

pytestmark = [
    pytest.mark.mixed_dtypes,
    pytest.mark.promotes_ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

quick_compilation = test_zero.quick_compilation

BY_COST: Any = "by cost"

# Loads

SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 100)), min_size=1, max_size=6)


@pytest.mark.quick
@settings(max_examples=300, deadline=None)
@given(SIZES, st.integers(1, 40), st.sampled_from([0.0, 0.1, 3.0]))
def test_loads_of_random_sizes(sizes, devices, sent):
    """All matrices are dealt out, in few loads; with what is sent never more than by size, and without it what
    is left when the last one is dealt out is no longer than that.
    """
    sizes = [Size(count, float(seconds), sent) for count, seconds in sizes]
    found = loads(sizes, devices)
    assert len(found) == devices and len(set(found)) <= MOST_LOADS
    assert all(sum(own) >= size.count for own, size in zip(zip(*found, strict=True), sizes, strict=True))
    by_size = [-(-size.count // devices) for size in sizes]
    most = longest(found, sizes) + sum(n * sent for n in rows(found))
    assert most <= longest([by_size], sizes) + sum(n * sent for n in by_size)
    if not sent and devices <= MOST_LOADS:
        total, largest = sum(x.count * x.seconds for x in sizes), max(x.seconds for x in sizes)
        assert longest(found, sizes) <= total / devices + largest * (1 - 1 / devices) + 1e-9


def best(sizes, devices) -> float:
    """The least that the most loaded device can take, of all ways there are."""
    jobs = sorted((x.seconds for x in sizes for _ in range(x.count)), reverse=True)

    @functools.cache
    def of(k: int, taken: tuple[float, ...]) -> float:
        if k == len(jobs):
            return max(taken)
        nexts = {tuple(sorted((*taken[:d], x + jobs[k], *taken[d + 1 :]))) for d, x in enumerate(taken)}
        return min(of(k + 1, each) for each in nexts)

    return of(0, (0.0,) * devices)


@pytest.mark.quick
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=3), st.integers(1, 4))
def test_loads_are_near_the_best(sizes, devices):
    """Within a third of what trying all ways finds (Graham 1969)."""
    sizes = [Size(count, float(seconds)) for count, seconds in sizes]
    assert longest(loads(sizes, devices), sizes) <= (4 / 3 - 1 / (3 * devices)) * best(sizes, devices) + 1e-9


@pytest.mark.quick
def test_loads_are_few():
    """On many devices these are in groups, within which all have as much to do."""
    sizes = [Size(37, 7.0), Size(101, 5.0), Size(53, 4.0), Size(77, 3.0), Size(99, 2.0), Size(13, 0.5)]
    for devices in (48, 64, 512):
        found = loads(sizes, devices)
        by_size = sum(-(-x.count // devices) * x.seconds for x in sizes)
        assert len(set(found)) <= MOST_LOADS and longest(found, sizes) < by_size


# Programs

FOUR = {"in": (1024, 3072), "out": (1024, 1024), "up": (1024, 4096), "down": (2048, 1024)}
ITERATIONS = 5  # of Newton and Schulz


def muon_flops(shape) -> float:
    small, large = sorted(shape)
    return ITERATIONS * 2 * (2 * small * small * large + small**3)


def of_four(params, x_BM):
    for w in params:
        x_BM = x_BM + jnp.tanh((x_BM @ w["in"])[:, :1024]) @ w["out"]
        x_BM = x_BM + jnp.tanh(x_BM @ w["up"])[:, :2048] @ w["down"]
    return (x_BM**2).mean()


FAST = replace(V5P, link_rate=1e18, latency=0.0, start=0.0, copies=0.0)  # links


def planned(tx, dealt, axes, layers=3, stage=1, chip: Any = V5P):
    params = [{name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in FOUR.items()}] * layers
    x = jax.ShapeDtypeStruct((4096 * int(np.prod(list(axes.values()))), 1024), "float32")
    how = {"mesh": abstract(**axes), "in_shardings": (None, P(tuple(axes))), "donate_argnums": 0}
    transform = Zero(tuple(axes), stage, dealt=dealt)
    step = sx.shard_jit(step_of(of_four, tx), transforms=[transform], options=sx.Options(chip=chip), **how)
    return step.plan((params, jax.eval_shape(tx.init, params)), x)


@pytest.mark.quick
@pytest.mark.parametrize("axes", [{"x": 8}, {"x": 5}, {"x": 4, "y": 2}])
@pytest.mark.parametrize("stage", [1, 3])
def test_most_loaded_device(axes, stage):
    """Of four sizes with three matrices each: by size three devices compute, one size after the other, or all
    do alike; over two axes the products are split over the second, which makes it 1.6 times as quick. What
    links take counts too; were it nothing, the most loaded device would have what the loads say.
    """
    devices = int(np.prod(list(axes.values())))
    each = [muon_flops(shape) for shape in FOUR.values()]
    sizes = [Size(3, flops) for flops in each]
    plain = planned(optax.trace(0.9), None, axes, stage=stage).estimate("v5p").flops

    def of_update(dealt, chip):
        plan = planned(optax.contrib.muon(0.1), dealt, axes, stage=stage, chip=chip)
        return plan.estimate("v5p").flops - plain

    by_size, by_cost = (of_update(dealt, V5P) for dealt in (True, BY_COST))
    assert by_cost < 0.7 * sum(each) and by_cost <= (0.8 if "y" in axes else 0.75) * by_size
    assert of_update(BY_COST, FAST) == pytest.approx(longest(loads(sizes, devices), sizes), rel=0.02)


@pytest.mark.quick
def test_matrices_of_sizes_of_their_own():
    """One of each size: by size there is no stack, and all devices compute with all of them; by cost the one
    with the largest has that alone.
    """
    axes, muon = {"x": 8}, optax.contrib.muon(0.1)
    plain, alike, by_size, by_cost = (
        planned(tx, dealt, axes, layers=1).estimate("v5p")
        for tx, dealt in ((optax.trace(0.9), None), (muon, False), (muon, True), (muon, BY_COST))
    )
    assert by_size.flops == alike.flops
    largest = max(map(muon_flops, FOUR.values()))
    assert by_cost.flops - plain.flops == pytest.approx(largest, rel=0.02)


@pytest.mark.quick
def test_the_fastest_of_three():
    """The plan says which, and what each takes."""
    muon, axes = optax.contrib.muon(0.1), {"x": 8}
    plans = {dealt: planned(muon, dealt, axes) for dealt in (None, True, BY_COST)}
    seconds = {dealt: plan.estimate("v5p").seconds for dealt, plan in plans.items()}
    assert seconds[None] == seconds[BY_COST] < seconds[True]
    shown = [line for line in str(plans[None]).splitlines() if "dealt=" in line]
    assert [": taken" in line for line in shown] == [False, False, True] and "'by cost'" in shown[2]
    assert not any("the fastest" in str(plans[dealt]) for dealt in (True, BY_COST))


@pytest.mark.quick
def test_nothing_is_computed_alike():
    """What devices compute at branches of their own is not listed as what all of them do."""
    shown = {dealt: str(planned(optax.contrib.muon(0.1), dealt, {"x": 8})) for dealt in (False, BY_COST)}
    assert ["computed alike on all devices" in text for text in shown.values()] == [True, False]


def branches_in(jaxpr) -> list[int]:
    """The numbers of branches of conds in islands that are dealt out by cost."""
    found = []
    for eqn in jaxpr.eqns:
        found += [len(eqn.params["branches"])] if eqn.primitive.name == "cond" else []
        found += [
            n for body in jaxprs_in_params(eqn.params) for n in branches_in(getattr(body, "jaxpr", body))
        ]
    return found


def products_of(state):
    return [x - 0.5 * (x @ x.T @ x) for x in state]


def equations_in(jaxpr) -> int:
    bodies = (body for eqn in jaxpr.eqns for body in jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(equations_in(getattr(body, "jaxpr", body)) for body in bodies)


@pytest.mark.quick
@pytest.mark.parametrize("devices", [8, 64, 512])
def test_program_stays_small(devices):
    """There is a branch for each load that differs, however many devices there are, and no branch is larger
    than all sizes are.
    """
    state = [jax.ShapeDtypeStruct((8 * k, 8 * k + 8), "float32") for k in range(1, 7) for _ in range(11 * k)]
    jaxpr = jax.make_jaxpr(products_of)(state)
    costs = Costs(abstract(data=devices), ("data",), V5P)
    by_size = stacked(jaxpr, range(len(state)), devices)
    new = stacked(jaxpr, range(len(state)), devices, costs=Costs(costs.mesh, costs.axes, SLOW))
    assert is_dealt_by_cost(new) and not is_dealt_by_cost(by_size)
    (count,) = branches_in(new.jaxpr)
    assert 1 < count <= MOST_LOADS
    assert equations_in(new.jaxpr) < equations_in(by_size.jaxpr) + MOST_LOADS * 6 * 12 + 8 * len(state)


RANDOM = st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9), st.integers(2, 4)), min_size=2, max_size=4)


@settings(max_examples=12, deadline=None)
@given(RANDOM, st.sampled_from([{"data": 8}, {"data": 5}, {"data": 2, "model": 2}]), st.integers(0, 3))
def test_random_programs(sizes, axes, kind):
    """Chains of products of each size, what they share, and norms over all between them."""
    shapes = [(m, n) for m, n, count in sizes for _ in range(count)]
    state = [np.float32(np.random.default_rng(k).normal(size=shape)) for k, shape in enumerate(shapes)]

    def run(state, rate):
        rows = [x @ x.T for x in state]
        if kind == 1:
            size = sum(jnp.sum(r) for r in rows)
            rows = [r / (1 + size**2) for r in rows]
        new = [rate * (r @ x) + x for r, x in zip(rows, state, strict=True)]
        if kind == 2:
            new = [jnp.linalg.qr(x @ x.T + jnp.eye(len(x), dtype=x.dtype))[0] @ x for x in new]
        if kind == 3:
            new = [lax.cond(rate > 0, lambda x=x: x @ (x.T @ x), lambda x=x: x) for x in new]
        return new, [r[0] for r in rows]

    mesh = make_mesh(axes)
    jaxpr = jax.make_jaxpr(run)(state, 0.1)
    costs = Costs(mesh, ("data",), SLOW)
    new = stacked(jaxpr, range(len(state)), costs.devices, costs=costs)
    step = sx.shard_jit(jaxpr_as_fun(new), mesh=mesh, options=sx.Options(chip="slow"))
    found, wanted = step(*state, np.float32(0.1)), jax.tree.leaves(run(state, np.float32(0.1)))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * max(1, np.abs(y).max()))


@pytest.mark.quick
def test_what_depends_on_others_is_apart():
    """A size of whose products another is made is not computed at once with it, but before."""

    def run(state):
        firsts, seconds = state
        made = [x @ x.T @ x for x in firsts]
        size = sum(jnp.sum(x) for x in made)
        return made, [size * (y @ y.T @ y) for y in seconds], [(size * y) @ (y.T @ y) for y in seconds]

    types = [[jax.ShapeDtypeStruct(shape, "float32")] * 3 for shape in ((8, 16), (8, 24))]
    jaxpr = jax.make_jaxpr(run)(types)
    new = stacked(jaxpr, range(6), 8, costs=Costs(abstract(data=8), ("data",), SLOW))
    islands = [eqn for eqn in new.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    shapes = [sorted({v.aval.shape[1:] for v in eqn.outvars}) for eqn in islands]
    assert ((8, 16) in shapes[0]) and all((8, 16) not in own for own in shapes[1:])


# Results

SHAPES = {"a": (6, 11), "b": (11, 5), "c": (5, 9), "d": (9, 6)}
LAYERS = 3


def loss(params, x_BM):
    h_BM = x_BM
    for w in params["layers"]:
        first = jnp.tanh(jnp.tanh(h_BM @ w["a"] + w["bias"]) @ w["b"])
        h_BM = h_BM + jnp.tanh(first @ w["c"]) @ w["d"]
    return (((h_BM @ params["head"]) - x_BM[:, :3]) ** 2).mean()


def make_params(dtype="float32"):
    keys = iter(jax.random.split(jax.random.key(0), 100))
    draw = lambda *shape: 0.4 * jax.random.normal(next(keys), shape, dtype)  # noqa: E731
    layers = [
        {name: draw(*shape) for name, shape in SHAPES.items()} | {"bias": draw(11)} for _ in range(LAYERS)
    ]
    return {"layers": layers, "head": draw(6, 3)}


MESHES = [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2}, {"data": 5}]
ALL = list(itertools.product(OPTIMIZERS, (1, 2, 3), MESHES, ("as it is", "at rest")))
CELLS = [
    ("muon", 3, MESHES[3], "at rest"),
    ("soap", 1, MESHES[0], "as it is"),
    ("clipped", 2, MESHES[2], "as it is"),
    ("skipping", 3, MESHES[1], "at rest"),
]


@pytest.mark.once
@pytest.mark.parametrize(
    "name, stage, axes, form",
    CELLS + [pytest.param(*cell, marks=pytest.mark.slow) for cell in ALL if cell not in CELLS],
)
def test_results(name, stage, axes, form, quick_compilation):
    """The whole state, of steps one after the other, in float64, but for a loop that stops by a test of
    float32.
    """
    with jax.enable_x64(name != "by newton"):
        params, specs = make_params("float32" if name == "by newton" else "float64"), None
        if axes == MESHES[1] and form == "as it is":
            layer = {"a": P(None, "model"), "b": P("model"), "c": None, "d": None, "bias": P("model")}
            specs = {"layers": [layer] * LAYERS, "head": None}
        tx, mesh = OPTIMIZERS[name](), make_mesh(axes)
        plan = assert_trained_as_alone(loss, tx, params, mesh, stage, BY_COST, specs, form == "at rest")
        is_dealt = is_dealt_by_cost(plan.global_jaxpr)
        assert is_dealt


@pytest.mark.once
def test_results_in_bfloat16(quick_compilation):
    """Parameters and momentum of two bytes: as far from float32 as one device is."""
    tx, mesh, params = OPTIMIZERS["muon"](), make_mesh({"data": 8}), make_params("bfloat16")
    how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0}
    step = sx.shard_jit(
        step_of(loss, tx),
        transforms=[Zero("data", 1, dealt=BY_COST)],
        options=sx.Options(chip="slow"),
        **how,
    )
    state = params, jax.jit(tx.init)(params)
    exact = jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, state)
    alone = jax.jit(step_of(loss, tx))
    runs = [trained(own, its)[0] for own, its in ((alone, exact), (alone, state), (step, state))]
    wanted, *others = ([np.float32(x) for x in jax.tree.leaves(params)] for params in runs)
    errors = [max(np.abs(x - y).max() for x, y in zip(own, wanted, strict=True)) for own in others]
    assert errors[1] < 2 * errors[0]


@pytest.mark.once
def test_explicit_axes():
    tx, mesh, params = OPTIMIZERS["muon"](), make_mesh({"data": 8}), make_params()
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,))
    state = params, jax.jit(tx.init)(params)
    wanted = trained(jax.jit(step_of(loss, tx)), state)
    how = {"mesh": explicit, "in_shardings": (None, P("data")), "donate_argnums": 0}
    step = sx.shard_jit(step_of(loss, tx), transforms=[Zero("data", 3, dealt=BY_COST)], **how)
    is_dealt = is_dealt_by_cost(step.plan(state, np.zeros((40, 6), "float32")).global_jaxpr)
    assert is_dealt
    assert_equal(trained(step, state), wanted)


@pytest.mark.once
@pytest.mark.parametrize("name", ["muon", "soap"])
def test_results_of_the_explicit_form(name, quick_compilation):
    with jax.enable_x64(True):
        tx, mesh, params = OPTIMIZERS[name](), make_mesh({"data": 8}), make_params("float64")
        state = params, jax.jit(tx.init)(params)
        wanted = trained(jax.jit(step_of(loss, tx)), state)
        how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0}
        step = sx.shard_jit(step_of(loss, sx.zero.shard(tx, dealt=BY_COST)), **how)
        is_dealt = is_dealt_by_cost(step.plan(state, np.zeros((40, 6))).global_jaxpr)
        assert is_dealt
        assert_equal(trained(step, state), wanted)


@pytest.mark.once
def test_several_steps_in_one_call(quick_compilation):
    """The update is in a loop there, and in a branch of it where steps are accumulated."""
    with jax.enable_x64(True):
        tx, mesh, params = OPTIMIZERS["accumulating"](), make_mesh({"data": 8}), make_params("float64")

        def steps(state, x_KBM):
            return lax.scan(step_of(loss, tx), state, x_KBM)

        how = {"mesh": mesh, "in_shardings": (None, P(None, "data")), "donate_argnums": 0}
        how["options"] = sx.Options(chip="slow")
        step = sx.shard_jit(steps, transforms=[Zero("data", 1, dealt=BY_COST)], **how)
        state, x_KBM = (params, jax.jit(tx.init)(params)), np.random.default_rng(0).normal(size=(4, 40, 6))
        is_dealt = is_dealt_by_cost(step.plan(state, x_KBM).global_jaxpr)
        assert is_dealt
        wanted = jax.jit(steps)(state, x_KBM)
        assert_equal(step(state, x_KBM), wanted)


@pytest.mark.quick
def test_bad_input():
    with pytest.raises(ValueError, match="dealt of Zero is 'cost', of type str: give True, False, 'by cost'"):
        Zero(dealt="cost")  # type: ignore[arg-type]
    tx, w = optax.trace(0.9), jax.ShapeDtypeStruct((8, 4), "float32")
    with pytest.raises(ValueError, match="dealt of init is 'by cost', of type str: give True, False or None"):
        sx.zero.init(tx, w, abstract(data=8), dealt=BY_COST)
    with pytest.raises(ValueError, match="dealt of pad is 'by cost', of type str: give True, False or None"):
        sx.zero.pad(w, abstract(data=8), dealt=BY_COST)


@pytest.mark.tpu
@pytest.mark.slow
def test_cycles_in_the_program_for_tpu():
    """As XLA estimates them, of the branch that takes longest."""
    cycles = on_tpu.found("tests.test_zero_by_cost", "2", "by size", "by cost")
    assert cycles["by cost"] < cycles["by size"]


FORMS = {"alike": False, "by size": True, "by cost": BY_COST}


def main(count: str = "3", *forms: str) -> None:
    """Prints the cycles, and the bytes sent, of steps of Muon for a TPU v5e-8: three matrices of each of four
    sizes, 4096 rows on each device.
    """
    mesh, muon = on_tpu.mesh(x=8), optax.contrib.muon(0.1)
    params = [{name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in FOUR.items()}] * int(count)
    state, found = (params, jax.eval_shape(muon.init, params)), {}
    for form in forms or FORMS:
        how = {"mesh": mesh, "in_shardings": (None, P("x")), "donate_argnums": 0}
        how["options"] = sx.Options(chip="v5e")
        step = sx.shard_jit(step_of(of_four, muon), transforms=[Zero("x", 1, dealt=FORMS[form])], **how)
        lowered = step.lower(state, jax.ShapeDtypeStruct((8 * 4096, 1024), "float32"))
        total = cost(lowered.compile().as_text(), None, V5E)
        found[form] = total.cycles
        print(f"{form}: {total.cycles / 1e6:.1f} million cycles, {total.sent.total() / 1e6:.0f} MB sent")
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
