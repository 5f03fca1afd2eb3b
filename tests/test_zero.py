"""ZeRO: the state rests sharded, and what is sent and kept is as the formulas have it; losses stay what they are."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from models import gpt2, gpt2_sharding
from models.devices import make_mesh
from models.steps import State, adamw, make_init, make_step
from shardax import _jax
from shardax.zero import Zero
from tests.zero_steps import layers, step_of, two_products

pytestmark = [
    pytest.mark.mixed_dtypes,
    pytest.mark.promotes_ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

LAYERS, MODEL, HIDDEN = 4, 64, 128
STACKED = {"up": (LAYERS, MODEL, HIDDEN), "down": (LAYERS, HIDDEN, MODEL)}
PSI = sum(map(np.prod, STACKED.values()))  # parameters


def abstract(**axes):
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def shapes(tree, dtype="float32"):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in tree.items()}


def scanned_loss(params, batch):
    x_BM, y_BM = batch

    def layer(h_BM, w):
        return h_BM + jnp.tanh(h_BM @ w["up"]) @ w["down"], None

    return jnp.mean((jax.lax.scan(layer, x_BM, params)[0] - y_BM) ** 2).astype(jnp.float32)


def mixed_precision_step(state, batch):
    """Parameters in bfloat16; their float32 master and Adam's moments are the optimizer's state."""
    params, (master, moments) = state
    loss, grads = jax.value_and_grad(scanned_loss)(params, batch)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, moments = optax.scale_by_adam().update(grads, moments)
    master = jax.tree.map(lambda w, u: w - 0.1 * u, master, updates)
    return (jax.tree.map(lambda w: w.astype(jnp.bfloat16), master), (master, moments)), loss


def mixed_precision_plan(stage: int, devices: int):
    master = shapes(STACKED)
    state = shapes(STACKED, "bfloat16"), (master, jax.eval_shape(optax.scale_by_adam().init, master))
    batch = (jax.ShapeDtypeStruct((8192, MODEL), "bfloat16"),) * 2
    step = sx.shard_jit(
        mixed_precision_step,
        mesh=abstract(data=devices),
        in_shardings=(None, P("data")),
        donate_argnums=0,
        transforms=[Zero("data", stage)],
    )
    return step.plan(state, batch)


def resident(shardings, arrays) -> int:
    """Bytes on one device of what is no scalar."""
    pairs = zip(jax.tree.leaves(shardings), jax.tree.leaves(arrays), strict=True)
    return sum(int(np.prod(s.shard_shape(a.shape))) * a.dtype.itemsize for s, a in pairs if a.shape)


@pytest.mark.quick
@pytest.mark.parametrize("stage, params", [(1, 2 * PSI), (2, 2 * PSI), (3, 2 * PSI // 8)])
def test_bytes_that_rest(stage, params):
    plan = mixed_precision_plan(stage, 8)
    placed = list(plan.arguments())
    by_role = {"state/0": 0, "state/1": 0}
    for place in placed:
        if place.named[:7] in by_role and place.aval.shape:
            by_role[place.named[:7]] += place.aval.size * place.aval.dtype.itemsize // place.shards
    assert by_role == {"state/0": params, "state/1": 12 * PSI // 8}


@pytest.mark.quick
@pytest.mark.parametrize("stage, gathered, over", [(1, 1, 1), (2, 1, 1), (3, 2, LAYERS)])
def test_elements_that_are_sent(stage, gathered, over):
    """Two for each parameter, by the ring's n - 1 of n parts, and in stage 3 three: each layer's weights are gathered before
    they are used, forward and backward. All in the compute dtype.
    """
    sent, times = {}, {}
    for c in mixed_precision_plan(stage, 8).collectives:
        if c.shape:
            key = c.kind, str(c.dtype)
            sent[key] = sent.get(key, 0) + c.nbytes * c.trips
            times[c.kind] = c.trips
    part = 2 * PSI * 7 // 8
    assert sent == {("all_gather", "bfloat16"): gathered * part, ("reduce_scatter", "bfloat16"): part}
    assert times["all_gather"] == over


def test_beside_tensor_parallelism_stage_1_sends_no_more_than_none():
    """Gradients of biases are summed where they are made, though their moments rest split over both axes."""
    config, tx = replace(gpt2.SIZES["default"], layers=1), adamw(1e-3, 20, 200)
    state = jax.eval_shape(make_init(partial(gpt2.init_params, config), tx), jax.random.key(0))
    step = make_step(lambda params, text_BS, _: gpt2.loss(config, params, text_BS), tx)
    text_BS = jax.ShapeDtypeStruct((16, 129), "int32")
    without, sent = (
        gpt2_sharding.sharded_step(step, state, abstract(data=4, model=2), stage).plan(state, text_BS)
        for stage in (0, 1)
    )
    assert sent.comm_bytes <= 1.02 * without.comm_bytes
    assert [c for c in sent.collectives if c.kind == "all_to_all" and "data" in c.axes] == []


SIZES = {
    "up": (13, 24),
    "bias": (24,),
    "down": (24, 3, 7),
    "scale": (3, 7),
    "gain": (),
}  # no axis divides some of them
MATRICES = {"up": True, "bias": False, "down": False, "scale": True, "gain": False}


def mlp_loss(params, batch):
    x_BI, y_BKO = batch
    h_BH = jnp.tanh(x_BI @ params["up"] + params["bias"])
    return jnp.mean(
        (jnp.einsum("bh,hko->bko", h_BH, params["down"]) * params["scale"] * params["gain"] - y_BKO) ** 2
    )


def mlp_params():
    rng = np.random.default_rng(0)
    return {name: np.float32(rng.normal(size=shape) * 0.3 + 0.2) for name, shape in SIZES.items()}


def mlp_batch(number: int):
    rng = np.random.default_rng(number)
    return np.float32(rng.normal(size=(40, 13))), np.float32(rng.normal(size=(40, 3, 7)))


def train_step(tx):
    return step_of(mlp_loss, tx)


OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05)),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(0.02),
    "muon": lambda: optax.contrib.muon(0.05),
    "accumulating": lambda: optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation(),
    "masked": lambda: optax.chain(optax.masked(optax.trace(0.9), MATRICES), optax.lamb(0.05)),
    "injected": lambda: optax.apply_if_finite(optax.inject_hyperparams(optax.adamw)(0.05), 3),
}


def losses(step, tx, count=5):
    params = mlp_params()
    state, found = (params, jax.jit(tx.init)(params)), []
    for number in range(count):
        state, loss = step(state, mlp_batch(number))
        found.append(float(loss))
    return state, found


@pytest.fixture
def quick_compilation():
    """XLA's optimizations are not under test, and most of the time would go there."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@cache
def on_one_device(name: str):
    tx = OPTIMIZERS[name]()
    return losses(jax.jit(train_step(tx)), tx)


@pytest.mark.once
@pytest.mark.parametrize(
    "name, stage, axes",
    [
        ("adamw", 1, {"data": 8}),
        ("adamw", 2, {"data": 2, "fsdp": 2, "model": 2}),
        ("adamw", 3, {"data": 5}),
        ("adafactor", 3, {"data": 4, "model": 2}),
        ("lion", 1, {"data": 5}),
        ("muon", 3, {"data": 8}),
        ("accumulating", 2, {"data": 4, "model": 2}),
        ("masked", 1, {"data": 4, "model": 2}),
        ("injected", 3, {"data": 8}),
    ],
)
def test_losses(name, stage, axes, quick_compilation):
    tx, mesh, axis = OPTIMIZERS[name](), make_mesh(axes), ("data", "fsdp") if "fsdp" in axes else "data"
    params = {**dict.fromkeys(SIZES), "up": P(None, "model"), "down": P("model")} if "model" in axes else None
    shardings = (params, None), P(axis)
    how = {"mesh": mesh, "in_shardings": shardings, "donate_argnums": 0}
    how["options"] = sx.Options(chip="slow")  # or so small a step is not split
    step = sx.shard_jit(train_step(tx), transforms=[Zero(axis, stage)], **how)
    (state, found), (expected, wanted) = losses(step, tx), on_one_device(name)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6, err_msg=jax.tree_util.keystr(path))
    split = {
        name
        for name, x in state[0].items()
        if x.size > x.addressable_shards[0].data.size * mesh.shape.get("model", 1)
    }
    assert bool(split) == (stage == 3 and 24 % mesh.shape["data"] == 0)


def planned(step, args, zero, **how):
    how = {"mesh": abstract(data=4), "in_shardings": (None, P("data")), "donate_argnums": 0} | how
    return sx.shard_jit(step, transforms=[zero] if zero else [], **how).plan(*args)


def sent(plan) -> dict[str, int]:
    """Bytes by kind, without scalars and a few of them at once."""
    kinds: dict[str, int] = {}
    for c in plan.collectives:
        if c.nbytes > 64:
            kinds[c.kind] = kinds.get(c.kind, 0) + c.nbytes * c.trips
    return kinds


W = jax.ShapeDtypeStruct((64, 128), "float32")
X = jax.ShapeDtypeStruct((4096, 64), "float32")
STATE = {"w": W, "m": W}
WHOLE = 64 * 128 * 4  # bytes


def square(w, x_BM):
    return ((x_BM @ w) ** 2).mean()


def momentum(state, grad):
    m = 0.9 * state["m"] + grad
    return {"w": state["w"] - 0.1 * m, "m": m}


def with_metrics(state, x_BM):
    """A metric reads the moments, another the new parameters: neither makes them parameters, or data."""
    loss, grad = jax.value_and_grad(square)(state["w"], x_BM)
    new = momentum(state, grad)
    return new, (loss, optax.global_norm(new["m"]), optax.global_norm(new["w"]))


def by_hand(state, x_BM):
    """No scope says what was differentiated."""
    y_BN = x_BM @ state["w"]
    return momentum(state, x_BM.T @ y_BN), (y_BN**2).mean()


def many_steps(state, x_KBM):
    return jax.lax.scan(with_metrics, state, x_KBM)


def under_cond(state, x_BM):
    loss, grad = jax.value_and_grad(square)(state["w"], x_BM)
    return jax.lax.cond(jnp.isfinite(loss), momentum, lambda state, grad: state, state, grad), loss


def called(state, x_BM):
    return jax.jit(with_metrics)(state, x_BM)


@pytest.mark.quick
@pytest.mark.parametrize("step", [with_metrics, by_hand, under_cond, called, many_steps])
@pytest.mark.parametrize("stage", [1, 3])
def test_finds_parameters(step, stage):
    """In stage 1 they rest whole, and only they."""
    steps = step is many_steps
    x = jax.ShapeDtypeStruct((3, *X.shape), X.dtype) if steps else X
    plan = planned(
        step, (STATE, x), Zero("data", stage), in_shardings=(None, P(None, "data") if steps else P("data"))
    )
    shards = {place.named: place.shards for place in plan.arguments()}
    assert shards["state/m"] == 4 and shards["state/w"] == (1 if stage == 1 else 4)
    assert {place.path: place.shards for place in plan.results()}["0/w"] == shards["state/w"]
    kinds = sent(plan)
    assert kinds.keys() == {"reduce_scatter", "all_gather"}, "gradients are reduced where they are updated"
    assert kinds["reduce_scatter"] == (3 if steps else 1) * WHOLE * 3 // 4


def accumulated(state, x_KBM):
    """Gradients of several microbatches, before one update."""

    def add(total, x_BM):
        loss, grad = jax.value_and_grad(square)(state["w"], x_BM)
        return total + grad, loss

    total, losses = jax.lax.scan(add, jnp.zeros_like(state["w"]), x_KBM)
    return momentum(state, total), losses.mean()


@pytest.mark.quick
@pytest.mark.parametrize(
    "zero, times",
    [
        (Zero("data", 1), 1),
        (Zero("data", 2), 5),
        (Zero("data", 2, accumulate="unreduced"), 1),
        (Zero("data", 1, accumulate="scattered"), 5),
    ],
    ids=str,
)
def test_microbatches(zero, times):
    """Reduced once per step, or for each microbatch, in an accumulator of a shard's size."""
    x = jax.ShapeDtypeStruct((5, *X.shape), X.dtype)
    plan = planned(accumulated, (STATE, x), zero, in_shardings=(None, P(None, "data")))
    assert sent(plan) == {"reduce_scatter": times * WHOLE * 3 // 4, "all_gather": WHOLE * 3 // 4}


@pytest.mark.quick
def test_replicas_of_shards():
    """Hybrid: scattered within a group, the shards alone summed across groups. With its default options the update
    is shared by all groups: as many bytes, in two collectives instead of three.
    """
    mesh = abstract(replica=2, fsdp=4)
    how = {"mesh": mesh, "in_shardings": (None, P(("replica", "fsdp")))}
    plan = planned(with_metrics, (STATE, X), Zero("fsdp", 2), **how)
    by_axes = {(c.kind, c.axes): c.nbytes for c in plan.collectives if c.shape}
    assert by_axes == {
        ("reduce_scatter", ("fsdp", "replica")): WHOLE * 7 // 8,
        ("all_gather", ("fsdp", "replica")): WHOLE * 7 // 8,
    }
    plan = planned(with_metrics, (STATE, X), Zero("fsdp", 2), options=sx.Options(idle_axes=False), **how)
    by_axes = {(c.kind, c.axes): c.nbytes for c in plan.collectives if c.nbytes > 64}
    assert by_axes == {
        ("reduce_scatter", ("fsdp",)): WHOLE * 3 // 4,
        ("all_reduce", ("replica",)): WHOLE // 4,
        ("all_gather", ("fsdp",)): WHOLE * 3 // 4,
    }


@pytest.mark.quick
@pytest.mark.parametrize("again", [True, False])
def test_gathered_again(again):
    """For the backward pass of all layers but the first, where nothing reads the weights; else the peak has them all."""
    params = [jax.ShapeDtypeStruct((256, 256), "float32")] * 4
    x = jax.ShapeDtypeStruct((65536, 256), "float32")
    plan = planned(layers, ((params, params), x), Zero("data", 3, reshard_after_forward=again))
    part = 256 * 256 * 2 * 3 // 4
    assert sent(plan) == {"all_gather": (4 + 3 * again) * part, "reduce_scatter": 4 * part}
    (eqn,) = (eqn for eqn in plan.local_jaxpr.jaxpr.eqns if eqn.primitive.name == "shard_map")
    body = _jax.closed(eqn.params["jaxpr"]).jaxpr
    read = {v for eqn in body.eqns for v in eqn.invars if not _jax.is_literal(v)} | {*body.outvars}
    barriers = [eqn for eqn in body.eqns if eqn.primitive is jax.lax.optimization_barrier_p]
    assert len(barriers) == (3 + 1) * again, "one is for the loss"
    assert all(v in read for eqn in barriers for v in eqn.outvars), "or XLA drops it from the barrier"


@pytest.mark.quick
def test_results_of_the_forward_pass_come_before_the_backward_pass():
    """Or XLA keeps what they are made of, as the logits, beside the gradients: sums of these wait for them."""

    def loss(w, x_BM):
        logits_BM = jnp.sin(x_BM @ w)
        return jnp.mean(jax.nn.logsumexp(logits_BM, 1) - logits_BM[:, 0])

    w, tx = jax.ShapeDtypeStruct((256, 512), "float32"), optax.sgd(0.1, momentum=0.9)
    state, x = (w, jax.eval_shape(tx.init, w)), jax.ShapeDtypeStruct((65536, 256), "float32")

    def with_input_gradient(state, x_BM):
        (params, moments), (value, grads) = state, jax.value_and_grad(loss, (0, 1))(state[0], x_BM)
        updates, moments = tx.update(grads[0], moments, params)
        # A number is a literal among the results: optax's optimistic optimizers have one in their state.
        return (optax.apply_updates(params, updates), moments), (value, (grads[1] ** 2).sum(), 1)

    plan = planned(with_input_gradient, (state, x), Zero("data", 3))
    (local,) = (eqn for eqn in plan.local_jaxpr.jaxpr.eqns if eqn.primitive.name == "shard_map")
    body = _jax.closed(local.params["jaxpr"]).jaxpr
    (value,) = (v for v in body.outvars[2:3])
    places = {v: n for n, eqn in enumerate(body.eqns) for v in eqn.outvars}
    behind = {v for v in body.eqns[places[value]].outvars}
    assert body.eqns[places[value]].primitive is jax.lax.optimization_barrier_p
    for eqn in body.eqns[places[value] + 1 :]:
        if any(not _jax.is_literal(v) and v in behind for v in eqn.invars):
            behind.update(eqn.outvars)
    scattered = [eqn for eqn in body.eqns if eqn.primitive.name == "reduce_scatter"]
    assert scattered and all(eqn.outvars[0] in behind for eqn in scattered)


@pytest.mark.quick
def test_plan_says_what_rests():
    zero, state = Zero("data", 2), {"w": W, "m": W, "tail": jax.ShapeDtypeStruct((7, 3), "float32")}

    def step(state, x_BM):
        new, metrics = with_metrics({"w": state["w"], "m": state["m"]}, x_BM)
        return new | {"tail": state["tail"] + 1}, metrics

    plan = planned(step, (state, X), zero)
    found = zero.resident(plan)
    assert found.before == {"parameters": WHOLE, "gradients": WHOLE, "optimizer state": WHOLE + 84}
    assert found.after == {"parameters": WHOLE, "gradients": WHOLE // 4, "optimizer state": WHOLE // 4 + 84}
    assert [(w.path, w.nbytes) for w in found.whole] == [("state/tail", 84)]
    text = str(plan)
    assert "State on each device, by Zero(axis='data', stage=2)" in text and "state/tail f32[7,3]" in text


@pytest.mark.quick
@pytest.mark.parametrize("stage", [1, 3])
def test_explicit_form(stage):
    """An optimizer that says itself how its state rests makes a program that sends the same."""
    params = {"w": W, "v": jax.ShapeDtypeStruct((128, 64), "float32")}

    tx = optax.adamw(1e-3)
    state = params, jax.eval_shape(tx.init, params)
    found = planned(step_of(two_products, tx), (state, X), Zero("data", stage, reshard_after_forward=False))
    wrapped = planned(step_of(two_products, sx.zero.shard(tx, "data", stage)), (state, X), None)
    assert wrapped.in_shardings == found.in_shardings and wrapped.out_shardings == found.out_shardings
    assert sent(wrapped) == sent(found)
    moments = sx.zero.specs(state[1], abstract(data=4))
    assert moments == found.in_shardings[0][1]


@pytest.mark.quick
def test_bad_input():
    def fails(words, step=with_metrics, axis="data", **how):
        with pytest.raises(ValueError, match=words):
            planned(step, (STATE, X), Zero(axis), **how)

    fails(r"axis of Zero is 'fsdp', and the mesh \(data=4\) has no axis 'fsdp'", axis="fsdp")
    fails("'model' splits no batch: in_shardings give state/w", axis="model", mesh=abstract(data=2, model=2),
          in_shardings=({"w": P("model"), "m": None}, P("data")))  # fmt: skip
    loss = lambda state, x_BM: square(state["w"], x_BM)  # noqa: E731
    fails(
        "Zero.* finds no optimizer's update in this function.*of 3 arguments 0 come back",
        step=loss,
        donate_argnums=(),
    )
    fails("new state that is made of the old", step=jax.grad(loss), donate_argnums=())
    fails("new state that is made of the old", step=lambda state, x_BM: (state, loss(state, x_BM)))
    with pytest.raises(ValueError, match="stage of Zero is 4, of type int: give 1, 2 or 3"):
        Zero(stage=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stage of Zero is True, of type bool"):
        Zero(stage=True)  # type: ignore[arg-type]
    for axis in (), ("data", "data"):
        with pytest.raises(ValueError, match="axis of Zero is"):
            Zero(axis=axis)
    with pytest.raises(ValueError, match="axis of specs names 'x'"):
        sx.zero.specs(STATE, abstract(data=4), "x")
    with pytest.raises(ValueError, match="prefetch of Zero is 'no', of type str: give True or False"):
        Zero(stage=3, prefetch="no")  # type: ignore[arg-type]
    again = "reshard_after_forward of Zero is 'never', of type str: give True, False or None"
    with pytest.raises(ValueError, match=again):
        Zero(stage=3, reshard_after_forward="never")  # type: ignore[arg-type]


@pytest.mark.quick
def test_two_over_one_axis():
    def given(*transforms):
        return sx.shard_jit(with_metrics, mesh=abstract(data=2, model=2), transforms=transforms)

    words = r"has Zero\(axis='data', stage=1.* and Zero\(axis=\('model', 'data'\), stage=3.* rests over 'data': give"
    with pytest.raises(ValueError, match=words):
        given(Zero("data"), sx.pipeline.Pipeline("stage"), Zero(("model", "data"), stage=3))
    assert given(Zero("data"), Zero("model"))


@pytest.mark.quick
def test_numbers_where_arrays_are_meant():
    mesh, give = abstract(data=4), r"give an array, such as jnp.asarray\(x\), or a jax.ShapeDtypeStruct"
    with pytest.raises(ValueError, match=rf"tree of specs has \['a'\], which is 3, of type int: {give}"):
        sx.zero.specs({"a": 3}, mesh)
    with pytest.raises(ValueError, match=rf"params of init has \['a'\], which is 1.0, of type float: {give}"):
        sx.zero.init(optax.sgd(0.1), {"a": 1.0}, mesh)


@pytest.mark.quick
def test_state_that_is_not_donated():
    plan = planned(with_metrics, (STATE, X), Zero("data", 1), donate_argnums=())
    assert [place.shards for place in plan.arguments()] == [4, 1, 4]
    assert [place.shards for place in plan.results()][:2] == [4, 1]


@pytest.mark.parametrize("stage", [1, 3])
def test_activations_are_split_by_the_batch(stage):
    """What is stored split over an axis of the batch splits no activation along another dim."""
    config = replace(gpt2.SIZES["tiny"], scan=True, dtype=jnp.bfloat16, seq=24)
    tx = optax.adamw(1e-3)
    step = make_step(lambda params, text_BS, _: gpt2.loss(config, params, text_BS), tx)
    state = jax.eval_shape(make_init(partial(gpt2.init_params, config), tx), jax.random.key(0))
    batch = 40
    plan = planned(step, (state, jax.ShapeDtypeStruct((batch, 25), "int32")), Zero("data", stage))
    made = [v for node in plan.graph.walk() for v in node.outputs if v.shape[:1] == (batch,)]
    assert made and [v for v in made if plan.sharding(v).dims[0] != ("data",)] == []


@pytest.mark.once
@pytest.mark.parametrize(
    "stage, axes, scan",
    [
        pytest.param(2, {"data": 4, "model": 2}, True, marks=pytest.mark.slow),
        (3, {"data": 4, "model": 2}, False),
    ],
)
def test_gpt2(stage, axes, scan, quick_compilation):
    """On top of tensor parallelism, layers in a loop or not, and twice with the state that came back."""
    config = replace(gpt2.SIZES["tiny"], scan=scan, seq=16)
    tx, mesh = optax.adamw(1e-2), make_mesh(axes)
    init = make_init(partial(gpt2.init_params, config), tx)
    step = make_step(lambda params, text_BS, _: gpt2.loss(config, params, text_BS), tx)
    shapes_ = jax.eval_shape(init, jax.random.key(0))
    specs = gpt2_sharding.param_specs(shapes_.params, ["model"])
    how = {"mesh": mesh, "in_shardings": (State(specs, None, None), P("data")), "donate_argnums": 0}
    sharded = sx.shard_jit(step, transforms=[Zero("data", stage)], **how)
    batches = [np.random.default_rng(i).integers(0, 257, (20, 17)).astype("int32") for i in range(3)]
    resting = sx.abstract_state(sharded, shapes_, batches[0])
    state = jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, resting))(jax.random.key(0))
    expected, alone = jax.jit(init)(jax.random.key(0)), jax.jit(step)
    for text_BS in batches:
        state, loss = sharded(state, text_BS)
        expected, wanted = alone(expected, text_BS)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(resting), strict=True)
    assert all(x.sharding.is_equivalent_to(rest.sharding, x.ndim) for x, rest in pairs)


@pytest.mark.quick
@pytest.mark.parametrize("stage", [1, 3])
def test_explicit_axes(stage):
    """There JAX types each gradient as its parameter: that is no reason to sum it on every device."""
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    plan = planned(with_metrics, (STATE, X), Zero("data", stage), mesh=mesh)
    assert sent(plan) == {"reduce_scatter": WHOLE * 3 // 4, "all_gather": WHOLE * 3 // 4}
