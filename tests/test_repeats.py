"""Layers that are alike are completed and chosen once, and nothing else changes: shardings, their origins,
decisions.
"""

from collections import Counter
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks import planner
from models import gpt2
from models.gpt2_sharding import BATCH, param_specs
from models.rules import on_axes
from models.steps import State, adamw, make_init, make_step
from shardax import _jax
from shardax.completion.complete import Completion, complete
from shardax.graph import inline
from shardax.graph.graph import Graph, Node
from shardax.partition import search
from shardax.partition.choose import choose
from shardax.partition.twins import twins
from shardax.sharding import Layout, at_rest
from shardax.trace import Request, trace

pytestmark = [pytest.mark.promotes_ranks, pytest.mark.quick]

LAYERS = 8
SIZES = {"data": 4, "model": 2}


def program(f, args, specs, donated=()) -> Graph:
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)
    names = tuple(f"args[{i}]" for i in range(len(args)))
    return inline.from_jaxpr(
        _jax.dce(trace(Request(f, args, {}, names, frozenset(donated), mesh, specs)).jaxpr)
    )


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def mlp(weights, x):
    for up, down in weights:
        x = x + jax.nn.relu(x @ up) @ down
    return x


def mlp_step(weights, x):
    grads = jax.grad(lambda weights: (mlp(weights, x) ** 2).sum())(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)


MLP = [(floats(16, 64), floats(64, 16))] * LAYERS


def gpt2_step(**changes):
    """The train step of a small GPT-2: of 3 heads, over an axis of 2, and a vocabulary that nothing
    divides.
    """
    config = gpt2.Config(layers=LAYERS, heads=3, model=48, seq=16, **changes)
    tx = adamw(1e-3, 20, 100)
    init = make_init(lambda key: gpt2.init_params(config, key), tx)
    state = jax.eval_shape(init, jax.random.key(0))
    step = make_step(lambda params, text, _: gpt2.loss(config, params, text), tx)
    specs = (State(param_specs(state.params, SIZES), None, None), on_axes(BATCH, SIZES))
    return program(
        step, (state, jax.ShapeDtypeStruct((8, 17), "int32")), specs, range(len(jax.tree.leaves(state)))
    )


def adam_step(specs):
    tx = optax.adam(1e-3)

    def step(weights, state, x):
        grads = jax.grad(lambda weights: (mlp(weights, x) ** 2).sum())(weights)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    state = jax.eval_shape(tx.init, MLP)
    donated = range(len(jax.tree.leaves((MLP, state))))
    return program(step, (MLP, state, floats(8, 16)), ([specs] * LAYERS, None, P("data")), donated)


def shared_weights(weights, x):
    """Every layer has the same weights, and a bias of its own."""
    (up, down), biases = weights
    for bias in biases:
        x = jnp.tanh(x @ up + bias) @ down
    return x


def scans(weights, x):
    for up, down in weights:
        x, _ = lax.scan(lambda x, _, up=up, down=down: (jnp.sin(x @ up) @ down, None), x, None, length=2)
    return x


def branches(weights, x):
    """A branch, with a loop in it; every layer annotates in its scan, some otherwise than others."""
    for i, (up, down) in enumerate(weights):
        x = lax.cond(
            x[0, 0] > 0,
            lambda x, up=up, down=down: jnp.tanh(x @ up) @ down,
            lambda x: lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x),
            x,
        )
        spec = P("data") if i % 6 else P("data", "model")
        x, _ = lax.scan(
            lambda x, _, spec=spec: (lax.with_sharding_constraint(x * 2, spec), x.sum()), x, None, length=2
        )
    return x


def scanned_attention(weights, x):
    """Each layer goes over its keys in blocks, as attention without the whole matrix of weights does, and is
    recomputed.
    """

    @jax.checkpoint
    def layer(up, down, x):
        keys = (x @ up).reshape(8, 4, 16)

        def block(carry, k):
            most, total = carry
            scores = jnp.exp(x @ k.T)
            return (jnp.maximum(most, scores.max()), total + scores @ k), scores.sum()

        (most, total), sums = lax.scan(block, (jnp.zeros(()), jnp.zeros_like(x)), keys)
        return x + total @ up[:, :16] @ down[:16] / most + sums.sum()

    for up, down in weights:
        x = layer(up, down, x)
    return x


def conflicts(weights, x):
    """Rows and columns want the same axis in turn."""
    for i, (up, down) in enumerate(weights):
        x = lax.with_sharding_constraint(x, P("data", "model") if i % 3 else P(None, "data"))
        x = (
            jnp.sin(x @ up) @ down + x.T @ x @ x.T[: x.shape[1], :16]
            if x.shape[0] == x.shape[1]
            else jnp.sin(x @ up) @ down
        )
    return x


BIASES = ((floats(16, 64), floats(64, 16)), [floats(64)] * LAYERS)
SPLIT = [(P(None, "model"), None)] * LAYERS
STORED = [(P("data"), P("data"))] * LAYERS
PROGRAMS = {
    "forward": lambda: program(mlp, (MLP, floats(8, 16)), (None, P("data", "model"))),
    "gradient": lambda: program(
        jax.grad(lambda w, x: mlp(w, x).sum()), (MLP, floats(8, 16)), (SPLIT, P("data"))
    ),
    "update": lambda: program(mlp_step, (MLP, floats(8, 16)), (STORED, P("data")), range(2 * LAYERS)),
    "Adam": lambda: adam_step((P(None, "model"), P("model"))),
    "Adam, stored split": lambda: adam_step((P("data", "model"), P("model", "data"))),
    "GPT-2 and AdamW": gpt2_step,
    "GPT-2 with remat": lambda: gpt2_step(remat=True),
    "shared weights": lambda: program(
        jax.grad(lambda w, x: shared_weights(w, x).sum()), (BIASES, floats(8, 16)), (None, P("data", "model"))
    ),
    "loops": lambda: program(
        jax.grad(lambda w, x: scans(w, x).sum()), (MLP, floats(8, 16)), (None, P("data", "model"))
    ),
    "branches": lambda: program(
        branches, (MLP, floats(8, 16)), ([(P(None, "model"), P("model"))] * LAYERS, P("data"))
    ),
    "scanned attention": lambda: program(
        jax.grad(lambda w, x: scanned_attention(w, x).sum()), (MLP, floats(8, 16)), (SPLIT, P("data"))
    ),
    "conflicts": lambda: program(
        partial(conflicts), (MLP, floats(16, 16)), ([(P(None, "data"), P("model"))] * LAYERS, None)
    ),
}
ONCE = {
    "gradient",
    "update",
    "Adam",
    "Adam, stored split",
    "GPT-2 and AdamW",
    "GPT-2 with remat",
    "shared weights",
    "loops",
    "scanned attention",
}


def both(name: str) -> tuple[Graph, Completion, Completion]:
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        made = PROGRAMS[name]()
    return made, *(complete(made, [None] * len(made.inputs), SIZES, reuse=reuse) for reuse in (True, False))


def programs():
    """Random keys are made by the device; attention and remat take half a minute."""
    marks = {
        "GPT-2 and AdamW": pytest.mark.not_quick,
        "GPT-2 with remat": pytest.mark.slow,
        "scanned attention": pytest.mark.slow,
    }
    return [pytest.param(name, marks=marks.get(name, ())) for name in PROGRAMS]


@pytest.mark.once
@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("name", programs())
def test_the_same_plan(name):
    made, reused, plain = both(name)
    assert len(plain.blocks) == 1
    assert name not in ONCE or max(Counter(block.pattern for block in reused.blocks).values()) >= LAYERS - 4
    for value in [*made.inputs, *(v for node in made.walk() for v in node.outputs)]:
        assert reused.sharding(value) == plain.sharding(value), value
        for dim in range(len(value.shape)):
            assert reused.why(value, dim) == plain.why(value, dim), value
    ins, outs = (
        [at_rest(plain.sharding(v), v.shape, SIZES) for v in side] for side in (made.inputs, made.outputs)
    )
    layouts = [
        [Layout(s, v.shape) for s, v in zip(side, values, strict=True)]
        for side, values in ((ins, made.inputs), (outs, made.outputs))
    ]
    shared, alone = choose(made, reused, *layouts), choose(made, plain, *layouts)
    # GPT-2: neither is proven to be the least; with remat the one for all is even the cheaper
    most = 1.01 if name.startswith("GPT-2") else 1 + 1e-6
    assert shared.price <= most * alone.price


@pytest.mark.not_quick
@pytest.mark.parametrize(
    "f, spec", [(scanned_attention, (P(None, "model"), P("model"))), (branches, (None, None))]
)
def test_layers_with_loops_compute_the_same(f, spec):
    """What was decided for one layer's loop runs the others', on their own weights."""
    mesh, count = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 2), 6
    keys = jax.random.split(jax.random.key(0), count + 1)
    weights = [(jax.random.normal(k, (16, 64)) / 4, jax.random.normal(k, (64, 16)) / 8) for k in keys[1:]]
    x = jax.random.normal(keys[0], (8, 16))
    specs = [spec] * count, P("data")
    with jax.set_mesh(mesh):
        want = jax.jit(f)(jax.device_get(weights), jax.device_get(x))
        made = program(f, (weights, x), specs)
    of = twins(complete(made, [None] * len(made.inputs), SIZES))
    assert len({node for node in of if node.bodies}) >= 2
    np.testing.assert_allclose(
        sx.shard_jit(f, mesh=mesh, in_shardings=specs)(weights, x), want, rtol=1e-4, atol=1e-4
    )


@pytest.mark.not_quick
@pytest.mark.mixed_dtypes
def test_layers_in_the_order_of_their_names_compute_the_same():
    """Adam goes over the 11th layer before the third: all but the outer ones run as one, for two steps."""
    mesh, count = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3), 11
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def loss(params, x):
        for i in range(count):
            layer = params[f"layer_{i}"]
            x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
        return (x**2).mean()

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rng = np.random.default_rng(0)
    shapes = {"up": (10, 13), "bias": (13,), "down": (13, 10)}
    params = {
        f"layer_{i}": {name: rng.normal(size=shape).astype("float32") / 4 for name, shape in shapes.items()}
        for i in range(count)
    }
    x, state = rng.normal(size=(9, 10)).astype("float32"), tx.init(params)
    layer = {"up": P("a", "b"), "bias": P("b"), "down": P(("b", "c"))}
    specs = dict.fromkeys(params, layer), None, P(("a", "c"))
    sharded, plain = sx.shard_jit(step, mesh=mesh, in_shardings=specs), jax.jit(step)
    of = dict[Node, Node]()
    with mock.patch.object(search, "twins", lambda *args: of.update(twins(*args)) or of):
        found, wanted = sharded(params, state, x), plain(params, state, x)
    # apart are the outer ones and the second, since the first gives no gradient of the batch
    assert set(Counter(map(id, of.values())).values()) == {count - 4}
    for _ in range(2):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
        found, wanted = sharded(*found[:2], x), plain(*wanted[:2], x)


def test_more_layers_are_no_more_to_complete():
    """What is computed is counted, the states of all patterns: they depend on the ends of the stack, not on
    its length.
    """
    assert states(24) < 1.5 * states(12)


def states(layers: int) -> int:
    weights = [(floats(16, 64), floats(64, 16))] * layers
    made = program(
        mlp_step,
        (weights, floats(8, 16)),
        ([(P(None, "model"), None)] * layers, P("data")),
        range(2 * layers),
    )
    front = [
        pattern.root
        for pattern in {b.pattern for b in complete(made, [None] * len(made.inputs), SIZES).blocks}
    ]
    count = 0
    while front:
        front.extend(front.pop().next.values())
        count += 1
    return count


@pytest.mark.slow
@pytest.mark.mixed_dtypes
def test_the_planner_keeps_its_bounds():
    assert planner.main(["--rounds", "3"]) == 0
