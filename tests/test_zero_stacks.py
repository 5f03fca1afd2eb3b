"""Stacks: what an update computes of separate matrices alike is one computation, and results are the same."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun, jaxprs_in_params
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks.hlo_cost import cost
from models.devices import make_mesh
from shardax import program
from shardax.cost.chips import V5E
from shardax.zero import Zero
from shardax.zero.stacks import stacked
from tests import kronecker, on_tpu, test_zero
from tests.kronecker import shampoo, soap
from tests.test_zero import abstract
from tests.zero_steps import assert_equal, assert_trained_as_alone, step_of, trained

pytestmark = [
    pytest.mark.mixed_dtypes,
    pytest.mark.promotes_ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

quick_compilation = test_zero.quick_compilation


def grafted():
    """The direction of Shampoo, in the size of AdaGrad's step (Anil et al., arXiv 2002.09018)."""
    direction, size = shampoo(1.0), optax.scale_by_rss(initial_accumulator_value=0.1)

    def init(params: Any) -> Any:
        return direction.init(params), size.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        ways, direction_state = direction.update(updates, state[0], params)
        steps, size_state = size.update(updates, state[1], params)
        one = lambda x, y: 0.02 * x * (jnp.linalg.norm(y) / jnp.linalg.norm(x))  # noqa: E731
        return jax.tree.map(one, ways, steps), (direction_state, size_state)

    return optax.GradientTransformation(init, update)


def is_up(params):
    return jax.tree.map_with_path(lambda path, _: "up" in jax.tree_util.keystr(path), params)


def matrices_and_others(params):
    return jax.tree.map(lambda w: "matrix" if w.ndim == 2 else "other", params)


def several():
    """Muon for some, by a schedule, and AdamW for the others."""
    muon = optax.contrib.muon(optax.linear_schedule(0.02, 0.01, 5), nesterov=False)
    return optax.multi_transform({"matrix": muon, "other": optax.adamw(1e-2, eps=1e-3)}, matrices_and_others)


OPTIMIZERS = kronecker.OPTIMIZERS | {
    "grafted": grafted,
    "decayed": lambda: optax.contrib.muon(0.02, weight_decay=0.1, weight_decay_mask=is_up),
    "several": lambda: optax.MultiSteps(several(), 4).gradient_transformation(),
    "injected": lambda: optax.inject_hyperparams(optax.contrib.muon)(0.02),
}
LAYERS, MODEL, HIDDEN = 6, 6, 11  # nothing divides them


def loss(params, x_BM):
    h_BM = x_BM
    for w in params["layers"]:
        h_BM = h_BM + jnp.tanh(h_BM @ w["up"] + w["bias"]) @ w["down"]
    return (((h_BM @ params["head"]) - x_BM[:, :3]) ** 2).mean()


def make_params(dtype="float32"):
    keys = iter(jax.random.split(jax.random.key(0), 100))
    layer = lambda: {  # noqa: E731
        "up": 0.4 * jax.random.normal(next(keys), (MODEL, HIDDEN), dtype),
        "bias": 0.1 * jax.random.normal(next(keys), (HIDDEN,), dtype),
        "down": 0.4 * jax.random.normal(next(keys), (HIDDEN, MODEL), dtype),
    }
    return {
        "layers": [layer() for _ in range(LAYERS)],
        "head": jax.random.normal(next(keys), (MODEL, 3), dtype),
    }


MESHES = [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2}, {"data": 5}]
ALL = [
    (name, stage, axes, form)
    for name in OPTIMIZERS
    for stage in (1, 2, 3)
    for axes in MESHES
    for form in ("as it is", "at rest")
]
CELLS = [
    ("shampoo", 2, MESHES[3], "as it is"),
    ("muon", 1, MESHES[2], "at rest"),
    ("soap", 3, MESHES[0], "at rest"),
    ("clipped", 1, MESHES[3], "as it is"),
    ("accumulating", 2, MESHES[0], "at rest"),
    ("skipping", 3, MESHES[1], "at rest"),
    ("grafted", 1, MESHES[3], "at rest"),
    ("decayed", 3, MESHES[1], "as it is"),
    ("several", 2, MESHES[2], "at rest"),
    ("injected", 1, MESHES[0], "as it is"),
]


@pytest.mark.once
@pytest.mark.parametrize(
    "name, stage, axes, form",
    CELLS + [pytest.param(*cell, marks=pytest.mark.slow) for cell in ALL if cell not in CELLS],
)
def test_results(name, stage, axes, form, quick_compilation):
    """The whole state, of a state that comes as the optimizer makes it, and of one that rests in stacks; in
    float64, but for a loop that stops by a test of float32.
    """
    with jax.enable_x64(name != "by newton"):
        params = make_params("float32" if name == "by newton" else "float64")
        specs = None
        if "model" in axes and form == "as it is":
            layer = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}
            specs = {"layers": [layer] * LAYERS, "head": None}
        tx, mesh = OPTIMIZERS[name](), make_mesh(axes)
        assert_trained_as_alone(loss, tx, params, mesh, stage, True, specs, form == "at rest")


def of_matrices(jaxpr) -> int:
    """The products and factorizations outside of what is differentiated, those in loops and branches too."""
    found = 0
    for eqn in jaxpr.eqns:
        if "jvp(" not in str(eqn.source_info.name_stack):
            bodies = jaxprs_in_params(eqn.params)
            found += sum(of_matrices(getattr(body, "jaxpr", body)) for body in bodies)
            found += eqn.primitive.name in ("dot_general", "qr", "eigh")
    return found


@pytest.mark.quick
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_computation_for_each_shape(name):
    """Under conditions and in loops too; what one array has alone stays."""
    tx = OPTIMIZERS[name]()
    params = jax.eval_shape(make_params)
    state = params, jax.eval_shape(tx.init, params)
    x_BM = jax.ShapeDtypeStruct((40, MODEL), "float32")

    def steps(state, x_KBM):
        return lax.scan(step_of(loss, tx), state, x_KBM)

    for run, args in ((step_of(loss, tx), (state, x_BM)), (steps, (state, jnp_type(3, 40, MODEL)))):
        jaxpr = jax.make_jaxpr(run)(*args)
        new = stacked(jaxpr, range(len(jax.tree.leaves(state))))
        before, after = of_matrices(jaxpr.jaxpr), of_matrices(new.jaxpr)
        assert after <= 1.2 * before * 3 / (2 * LAYERS + 1), "of all layers' up and down, and of the head"


def jnp_type(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def planned(tx, zero, axes, count=8, sizes=(640, 1920), rows=65536, state=None, transforms=None):
    def run(params, x_BM):
        for w in params:
            x_BM = jnp.tanh(x_BM @ w)[:, : sizes[0]]
        return (x_BM**2).mean()

    params = [jnp_type(*sizes)] * count
    how = {"mesh": abstract(**axes), "in_shardings": (None, P(zero.axis)), "donate_argnums": 0}
    step = sx.shard_jit(
        step_of(run, tx),
        transforms=[zero] if transforms is None else transforms,
        options=sx.Options(chip="v5p"),
        **how,
    )
    state = jax.eval_shape(tx.init, params) if state is None else state
    return step.plan((params, state), jnp_type(rows, sizes[0]))


WAYS = (None, False, True)
WIDE = {"muon": lambda: optax.contrib.muon(0.02), "soap": lambda: soap(0.02, largest=1920)}


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, stage, axes",
    [("muon", 1, MESHES[0]), ("soap", 2, MESHES[1]), ("muon", 3, MESHES[2]), ("soap", 1, MESHES[3])],
)
def test_the_faster_of_both(name, stage, axes):
    """By the plans' own estimates; the plan says which, and what both take."""
    axis = ("data", "fsdp") if "fsdp" in axes else "data"
    plans = [planned(WIDE[name](), Zero(axis, stage, dealt=dealt), axes) for dealt in WAYS]
    found, alike, stacks = (plan.estimate("v5p") for plan in plans)
    assert found.seconds == min(alike.seconds, stacks.seconds)
    plain = planned(optax.trace(0.9), Zero(axis, stage), axes).estimate("v5p").flops
    devices = np.prod([axes[a] for a in ((axis,) if isinstance(axis, str) else axis)])
    share = (stacks.flops - plain) / (alike.flops - plain)  # some products of SOAP are split in their rows
    assert share < (1.01 if name == "muon" else 3) * -(-8 // devices) / 8
    rows = [line for line in str(plans[0]).splitlines() if "dealt=" in line]
    assert [": taken" in row for row in rows] == [False, True] and "dealt=True" in rows[1]
    assert not any("the fastest" in str(plan) for plan in plans[1:])


@pytest.mark.quick
def test_ways_are_planned_once(monkeypatch):
    """The program that is taken is not planned again for the call."""
    built, build = [], program._build_one
    monkeypatch.setattr(program, "_build_one", lambda *args: built.append(args) or build(*args))
    planned(WIDE["muon"](), Zero("data", 1), {"data": 8})
    assert len(built) == 2, "with its matrices dealt out, and without"


@pytest.mark.parametrize("devices, most", [(4, 3), (8, 2), (5, 3), (64, 1)])
def test_stacks_that_go_through_products_as_one(devices, most):
    """Six matrices and six that are transposed, where the device with the most then computes with fewer; no
    two of which one is made of the other, as in the second product.
    """

    def run(state):
        ups, downs = state
        products = [x @ x.T @ x for x in (*ups, *(x.T for x in downs))]
        return products[:6], [x.T for x in products[6:]]

    jaxpr = jax.make_jaxpr(run)([[jnp_type(6, 10)] * 6, [jnp_type(10, 6)] * 6])
    new = stacked(jaxpr, range(12), devices)
    is_one = most < 2 * -(-6 // devices)
    assert of_matrices(new.jaxpr) == (2 if is_one else 4)
    state = [[np.random.default_rng(n).normal(size=s) for n in range(6)] for s in ((6, 10), (10, 6))]
    found = jaxpr_as_fun(new)(*(np.float32(x) for x in jax.tree.leaves(state)))
    for x, y in zip(found, jax.tree.leaves(run(state)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.quick
def test_fewer_matrices_than_half_of_the_devices():
    """Three on eight devices: some compute, and the others wait, which takes less time than all three do."""
    tx = WIDE["muon"]()
    alike, stacks = (planned(tx, Zero("data", 1, dealt=d), {"data": 8}, 3).estimate("v5p") for d in WAYS[1:])
    plain = planned(optax.trace(0.9), Zero("data", 1), {"data": 8}, 3).estimate("v5p")
    assert stacks.flops - plain.flops < 1.01 * (alike.flops - plain.flops) / 3
    assert stacks.seconds < alike.seconds


@pytest.mark.quick
def test_matrices_too_small_to_be_dealt():
    """Eight of 16 by 24 are computed alike in less time than they are sent in."""
    tx = optax.contrib.muon(0.02)
    plans = [planned(tx, Zero("data", 3, dealt=d), {"data": 8}, 2, (16, 24), 64) for d in WAYS]
    seconds = [plan.estimate("v5p").seconds for plan in plans]
    assert seconds[0] == min(seconds), seconds


@pytest.mark.quick
def test_what_is_not_alike_stays():
    """Loops of other constants, functions of other parameters, and single matrices; the program itself, where
    there is nothing.
    """

    def run(state):
        a, b, c = state
        first = [lax.fori_loop(0, 3, lambda _, x, k=k: x @ x.T @ x * k, w) for k, w in ((0.5, a), (0.25, b))]
        return *first, c @ c.T @ c

    types = [jnp_type(6, 10)] * 3
    jaxpr = jax.make_jaxpr(run)(types)
    assert stacked(jaxpr, range(3)) is jaxpr
    jaxpr = jax.make_jaxpr(lambda state: [3 * x + 1 for x in state])(types)
    assert stacked(jaxpr, range(3)) is jaxpr


@pytest.mark.quick
def test_conditions_of_their_own():
    """Matrices that each decide for themselves when they are factored are not one stack, of which all branches
    would run; under one condition they are, and what is no matrix stays under it.
    """

    def run(state, counts):
        def one(x, count):
            return lax.cond(count % 4 == 0, lambda: jnp.linalg.qr(x)[0], lambda: x)

        return [one(x, count) for x, count in zip(state, counts, strict=True)]

    def together(state, counts):
        def turned():
            return [jnp.linalg.qr(x)[0] if x.shape == (8, 8) else 2 * x for x in state]

        return lax.cond(counts[0] % 4 == 0, turned, lambda: state)

    matrices, vectors = [jnp_type(8, 8)] * 3, [jnp_type(5)] * 2
    counts = [jax.ShapeDtypeStruct((), "int32")] * 3
    apart = jax.make_jaxpr(run)(matrices, counts)
    assert stacked(apart, range(3)) is apart
    new = stacked(jax.make_jaxpr(together)(matrices + vectors, counts), range(5))
    taken = [[v.aval.shape for v in eqn.outvars] for eqn in new.eqns if eqn.primitive.name == "cond"]
    assert sorted(taken) == [[(3, 8, 8)], [(5,), (5,)]]


@pytest.mark.quick
def test_steps_in_a_loop_carry_stacks():
    """A state at rest in stacks is neither cut nor sent around a loop over steps."""
    tx, mesh = WIDE["muon"](), abstract(data=8)
    params = [jnp_type(640, 1920)] * 8

    def run(params, x_BM):
        for w in params:
            x_BM = jnp.tanh(x_BM @ w)[:, :640]
        return (x_BM**2).mean()

    def steps(state, x_KBM):
        return lax.scan(step_of(run, tx), state, x_KBM)

    how = {"mesh": mesh, "in_shardings": (None, P(None, "data")), "donate_argnums": 0}
    step = sx.shard_jit(steps, transforms=[Zero("data", 1)], options=sx.Options(chip="v5p"), **how)
    plan = step.plan(sx.zero.init(tx, params, mesh), jnp_type(3, 65536, 640))
    large = [c for c in plan.collectives if c.nbytes > 10_000]
    one = 8 * 640 * 1920 * 4 * 7 // 8  # bytes sent to scatter all gradients, or to gather all parameters
    assert {c.trips for c in large} == {3} and sum(c.nbytes for c in large) == 2 * one


@pytest.mark.once
def test_explicit_axes():
    tx, mesh, params = OPTIMIZERS["muon"](), make_mesh({"data": 4}), make_params()
    explicit = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Explicit,))
    state = params, jax.jit(tx.init)(params)
    wanted = trained(jax.jit(step_of(loss, tx)), state)
    how = {"mesh": explicit, "in_shardings": (None, P("data")), "donate_argnums": 0}
    step = sx.shard_jit(step_of(loss, tx), transforms=[Zero("data", 3, dealt=True)], **how)
    assert_equal(trained(step, state), wanted)


@pytest.mark.quick
def test_what_cannot_be_batched_stays():
    """A primitive without a rule for `jax.vmap`, such as a kernel, takes one matrix after the other."""
    kernel = Primitive("kernel_without_batching")
    kernel.def_abstract_eval(lambda x: x)
    jaxpr = jax.make_jaxpr(lambda state: [kernel.bind(x @ x.T) @ x for x in state])([jnp_type(6, 10)] * 3)
    new = stacked(jaxpr, range(3))
    assert [eqn.primitive for eqn in new.eqns].count(kernel) == 3
    assert of_matrices(new.jaxpr) == 2


def test_learning_rates_of_their_own():
    """What differs is a row of numbers of the stack; what is shared is one number for all."""

    def run(state, rate):
        grams = [k * (w @ w.T) for k, w in zip((1.0, 2.0, 3.0), state, strict=True)]
        return [w - rate * g @ w for w, g in zip(state, reversed(grams), strict=True)]

    state = [np.random.default_rng(n).normal(size=(4, 7)).astype("float32") for n in range(3)]
    jaxpr = jax.make_jaxpr(run)(state, 0.1)
    new = stacked(jaxpr, range(3))
    assert of_matrices(new.jaxpr) < of_matrices(jaxpr.jaxpr)
    found = jaxpr_as_fun(new)(*state, 0.1)
    for x, y in zip(found, run(state, 0.1), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.quick
def test_bad_input():
    with pytest.raises(
        ValueError, match="dealt of Zero is 'yes', of type str: give True, False, 'by cost' or None"
    ):
        Zero(dealt="yes")  # type: ignore[arg-type]


@pytest.mark.quick
@pytest.mark.parametrize("name", WIDE)
def test_state_at_rest_is_not_sent(name):
    """Made where it is computed with: gradients go there and updates back, as of gradients with momentum, and
    this is what `init` finds faster. Prints what `docs/zero.md` has.
    """
    tx, params = WIDE[name](), [jnp_type(640, 1920)] * 8
    stacks, apart = (sx.zero.init(tx, params, abstract(data=8), dealt=dealt)[1] for dealt in (None, False))
    assert isinstance(stacks, sx.zero.Bucketed) and not isinstance(apart, sx.zero.Bucketed)
    plain = planned(optax.trace(0.9), Zero("data", 1), {"data": 8})
    forms = {"alike": (apart, False), "dealt": (apart, True), "dealt, and at rest": (stacks, True)}
    plans = {"momentum": plain} | {
        form: planned(tx, Zero("data", 1, dealt=dealt), {"data": 8}, state=state)
        for form, (state, dealt) in forms.items()
    }
    for form, plan in plans.items():
        estimate = plan.estimate("v5p")
        flops = (estimate.flops - plain.estimate("v5p").flops) / 1e9
        print(
            f"{name} {form}: {estimate.seconds * 1e3:.2f} ms, {flops:.0f} GFLOP, {plan.comm_bytes / 1e6:.0f} MB"
        )
    sent = [plan.comm_bytes / plain.comm_bytes for plan in plans.values()]
    assert sent[-1] < 1.001 and sent[2] > 1.05, sent


@pytest.mark.quick
def test_all_state_of_matrices_rests_in_stacks():
    """What is read after the last product too, as the momentum of Shampoo; of what has no product none."""
    params = [jnp_type(16, 24)] * 8 + [jnp_type(24)] * 8
    for tx in (shampoo(0.02), soap(0.02)):
        state = sx.zero.init(tx, params, abstract(data=8), dealt=True)[1]
        assert not {x.shape for x in jax.tree.leaves(state)} & {(16, 24), (16, 16), (24, 24)}
    state = sx.zero.init(optax.adam(0.1), params, abstract(data=8), dealt=True)[1]
    assert not any(len(x.shape) == 3 for x in jax.tree.leaves(state))


@pytest.mark.quick
def test_state_of_few_matrices_stays_apart():
    """Of five matrices on eight devices three would have none. What is padded later is as what is made so."""
    for count, is_stack in ((5, False), (8, True)):
        tx, params = optax.contrib.muon(0.02), [jnp_type(640, 1920)] * count
        state = sx.zero.init(tx, params, abstract(data=8))[1]
        assert any(len(x.shape) > 2 for x in jax.tree.leaves(state)) is is_stack
        padded = sx.zero.pad(jax.eval_shape(tx.init, params), abstract(data=8), params=params, tx=tx)
        specs = sx.zero.specs(state, abstract(data=8), tx=tx, params=params)
        assert jax.tree.structure(padded) == jax.tree.structure(specs) == jax.tree.structure(state)
        resting = [
            spec.spec for spec, x in zip(*map(jax.tree.leaves, (specs, state)), strict=True) if x.ndim == 3
        ]
        assert resting == [P("data", None, None)] * is_stack
        assert jax.tree.structure(sx.zero.unpad(state)) == jax.tree.structure(jax.eval_shape(tx.init, params))


@pytest.mark.once
@pytest.mark.parametrize("form", ["as it is", "at rest"])
def test_results_of_the_explicit_form(form, quick_compilation):
    with jax.enable_x64(True):
        tx, mesh, params = OPTIMIZERS["soap"](), make_mesh({"data": 4}), make_params("float64")
        state = params, jax.jit(tx.init)(params)
        wanted = trained(jax.jit(step_of(loss, tx)), state)
        if form == "at rest":
            state = sx.zero.init(tx, params, mesh, dealt=True)
        how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0}
        step = sx.shard_jit(step_of(loss, sx.zero.shard(tx, dealt=True)), **how)
        assert_equal(trained(step, state), wanted)


@pytest.mark.quick
def test_explicit_form_takes_more_arguments():
    """Values that the step traces, and functions, reach the optimizer as they come."""
    tx: Any = WIDE["muon"]()
    called: list[Any] = []

    def update(updates, state, params=None, **extra: Any):
        factor, function = extra["factor"], extra["function"]
        called.append(function)
        updates, state = tx.update(updates, state, params)
        return jax.tree.map(lambda u: function(u) * factor, updates), state

    sharded = sx.zero.shard(optax.GradientTransformationExtraArgs(tx.init, update))

    def step(params, state, factor):
        return sharded.update(params, state, params, factor=factor, function=jnp.tanh)

    params = [jnp_type(640, 1920)] * 8
    how = {"mesh": abstract(data=8), "in_shardings": (None, None, None), "donate_argnums": 1}
    plan = sx.shard_jit(step, **how).plan(params, jax.eval_shape(tx.init, params), jnp_type())
    specs = {x.spec for x in jax.tree.leaves(plan.in_shardings[1]) if len(x.spec) == 2}
    assert specs == {P("data", None)} and set(called) == {jnp.tanh}


@pytest.mark.quick
def test_explicit_form_chooses_alike():
    """An optimizer that says itself how its state rests has its matrices dealt out as `Zero` has."""
    muon, params = WIDE["muon"](), [jnp_type(640, 1920)] * 8
    state, found = jax.eval_shape(muon.init, params), {}
    for dealt in WAYS:
        tx = sx.zero.shard(muon, dealt=dealt)
        plan = planned(tx, Zero("data", 1), {"data": 8}, state=state, transforms=[])
        found[dealt] = plan.estimate("v5p")
    assert found[None].seconds == min(found[True].seconds, found[False].seconds)
    assert found[True].flops < found[False].flops


@pytest.mark.tpu
@pytest.mark.slow
def test_cycles_in_the_program_for_tpu():
    """As XLA estimates them: those of the update fall, and most where its state rests as it is computed with."""
    cycles = on_tpu.found("tests.test_zero_stacks")
    assert cycles["dealt"] < 0.9 * cycles["alike"] and cycles["dealt, and at rest"] < cycles["dealt"]


def main() -> None:
    """Prints the cycles, and the bytes sent, of steps for a TPU v5e-8: eight matrices, 1024 by 4096, 8192 rows
    on each device; with momentum alone, and with Muon.
    """
    mesh = on_tpu.mesh(data=8)
    muon, momentum, params = WIDE["muon"](), optax.sgd(0.1, momentum=0.9), [jnp_type(1024, 4096)] * 8
    apart = jax.eval_shape(muon.init, params)
    forms = {
        "momentum alone": (momentum, jax.eval_shape(momentum.init, params), None),
        "alike": (muon, apart, False),
        "dealt": (muon, apart, True),
        "dealt, and at rest": (muon, sx.zero.init(muon, params, mesh)[1], True),
    }

    def run(params, x_BM):
        for w in params:
            x_BM = jnp.tanh(x_BM @ w)[:, :1024]
        return (x_BM**2).mean()

    found = {}
    for form, (tx, state, dealt) in forms.items():
        how = {"mesh": mesh, "in_shardings": (None, P("data")), "donate_argnums": 0}
        how["options"] = sx.Options(chip="v5e")
        step = sx.shard_jit(step_of(run, tx), transforms=[Zero("data", 1, dealt=dealt)], **how)
        total = cost(step.lower((params, state), jnp_type(65536, 1024)).compile().as_text(), None, V5E)
        found[form] = total.cycles
        print(f"{form}: {total.cycles / 1e6:.1f} million cycles, {total.sent.total() / 1e6:.0f} MB sent")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
