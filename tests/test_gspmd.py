"""GSPMD's Table 1 (arXiv 2105.04663): the shardings of a Transformer with seven annotations a layer, and what
its FFN sends.

The seven of a layer: its four weights, where they come in, and inside x_BSM, y_BSND and h_BSH. Everything
else, gradients, optimizer state and results included, gets its sharding by completion.

B batch, S sequence (T: the sequence attended to), M model, N heads, D head, H hidden.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.explain.plan import Plan

pytestmark = [pytest.mark.quick, pytest.mark.once]

WEIGHTS = {"qkv": P("x", None, "y", None), "out": P("y", None, "x"), "up": P("x", "y"), "down": P("y", "x")}


@dataclass(frozen=True)
class Attempt:
    """A column of the table: the shardings of the activations; None says nothing of them."""

    bsm: Any
    bsnd: Any
    bsh: Any


ATTEMPTS = {
    "attempt 1": Attempt(P(None, None, "x"), P(None, None, "y", None), P(None, None, "y")),
    "attempt 2": Attempt(P("x", None, None), P("x", None, "y", None), P("x", None, "y")),
    "finalized": Attempt(P("x", None, "y"), P("x", None, "y", None), P("x", None, "y")),
}


@dataclass(frozen=True)
class Dims:
    B: int
    S: int
    M: int
    N: int
    D: int
    H: int

    def of(self, names: str) -> tuple[int, ...]:
        return tuple(3 if n == "3" else getattr(self, n) for n in names)


WIDE = Dims(B=64, S=1024, M=8192, N=128, D=256, H=65536)  # Table 2, 64B, on (8, 16)
WIDE_MESH = {"x": 8, "y": 16}


def init(dims: Dims, layers: int, dtype="float32"):
    shapes = {"qkv": "M3ND", "out": "NDM", "up": "MH", "down": "HM"}
    layer = {name: jax.ShapeDtypeStruct(dims.of(d), dtype) for name, d in shapes.items()}
    return [layer] * layers


def said(x: Array, spec: P | None) -> Array:
    return x if spec is None else sx.annotate(x, spec)


def norm(x_BSM: Array) -> Array:
    x_BSM = x_BSM - x_BSM.mean(-1, keepdims=True)
    return x_BSM * jax.lax.rsqrt((x_BSM**2).mean(-1, keepdims=True) + 1e-6)


def attention(a: Attempt, weights, x_BSM: Array) -> Array:
    qkv_3BSND = jnp.einsum("bsm,mknd->kbsnd", x_BSM, weights["qkv"])
    q_BSND, k_BTND, v_BTND = qkv_3BSND
    weights_BNST = jax.nn.softmax(jnp.einsum("bsnd,btnd->bnst", q_BSND, k_BTND).astype("float32")).astype(
        x_BSM.dtype
    )
    y_BSND = said(jnp.einsum("bnst,btnd->bsnd", weights_BNST, v_BTND), a.bsnd)
    return jnp.einsum("bsnd,ndm->bsm", y_BSND, weights["out"])


def ffn(a: Attempt, weights, x_BSM: Array) -> Array:
    h_BSH = said(jax.nn.relu(jnp.einsum("bsm,mh->bsh", x_BSM, weights["up"])), a.bsh)
    return jnp.einsum("bsh,hm->bsm", h_BSH, weights["down"])


def layer(a: Attempt, x_BSM: Array, weights) -> Array:
    """float32 weights, activations of x_BSM's dtype."""
    weights = jax.tree.map(lambda w: w.astype(x_BSM.dtype), weights)
    x_BSM = said(x_BSM, a.bsm)
    x_BSM = x_BSM + attention(a, weights, norm(x_BSM))
    return x_BSM + ffn(a, weights, norm(x_BSM))


def loss(a: Attempt, params, x_BSM: Array) -> Array:
    for weights in params:
        x_BSM = jax.checkpoint(partial(layer, a))(x_BSM, weights)
    return (x_BSM.astype("float32") ** 2).mean()


def train_step(a: Attempt, tx, params, opt_state, x_BSM: Array):
    value, grads = jax.value_and_grad(partial(loss, a))(params, x_BSM)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


OPTIMIZERS: dict[str, Any] = {"adam": optax.adam(1e-3), "adafactor": optax.adafactor(1e-3)}


def step_plan(a: Attempt, tx, dims: Dims = WIDE, sizes=WIDE_MESH, layers: int = 3):
    params = init(dims, layers)
    state = jax.eval_shape(tx.init, params)
    x_BSM = jax.ShapeDtypeStruct(dims.of("BSM"), "bfloat16")
    specs = ([WEIGHTS] * layers, None, None)
    step = sx.shard_jit(
        partial(train_step, a, tx), mesh=abstract(sizes), in_shardings=specs, donate_argnums=(0, 1)
    )
    return step.plan(params, state, x_BSM)


def abstract(sizes) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def listed(a: Attempt, dims: Dims, shape: tuple[int, ...]) -> P:
    """What the table says of a value, found by the sizes of its dims, in whatever order they stand."""
    names = [next((name for name in "BSMNDH" if getattr(dims, name) == n), "1") for n in shape]
    tables = {"BSM": a.bsm, "BSND": a.bsnd, "BSH": a.bsh}
    activation = "BSH" if "H" in names else "BSND" if {"N", "D"} & {*names} else "BSM"
    where = (
        dict(zip(activation, tables[activation], strict=True))
        if "B" in names
        else {"M": "x", "N": "y", "H": "y"}
    )
    return P(*(where.get(name) for name in names))


@pytest.mark.mixed_dtypes  # optax.adam counts in int32
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_every_value_of_a_train_step(attempt, optimizer):
    """Activations, gradients, what the optimizer computes and the state that it leaves."""
    a = ATTEMPTS[attempt]
    plan = step_plan(a, OPTIMIZERS[optimizer])
    for node in plan.graph.walk():
        for value in node.outputs:
            got, want = plan.values.sharding(value).spec, listed(a, WIDE, value.shape)
            assert got == want, f"{node.name} at {node.line} {value}: {got}, not {want}"
    for leaf, sharding in zip(plan.graph.inputs, jax.tree.leaves(plan.in_shardings), strict=True):
        assert sharding.spec == listed(a, WIDE, leaf.shape), f"{leaf}: {sharding}"
    for leaf, sharding in zip(plan.graph.outputs, jax.tree.leaves(plan.out_shardings), strict=True):
        assert sharding.spec == listed(a, WIDE, leaf.shape), f"{leaf}: {sharding}"


# What one FFN sends, as the table's last column says. Bytes are those that one device sends: a ring sends
# (n-1)/n of what an all-gather makes or a reduce-scatter takes, twice that in an all-reduce; activations and
# weights are bf16.


def ring(axis: str, whole: int, *split: str) -> int:
    """Of an array of so many elements, split over these axes besides."""
    n = WIDE_MESH[axis]
    return 2 * whole // math.prod(WIDE_MESH[a] for a in split) * (n - 1) // n


BSM, BSH, MH = (math.prod(WIDE.of(names)) for names in ("BSM", "BSH", "MH"))
FORWARD = {
    "attempt 1": [("all_reduce", "x", 2 * ring("x", BSH, "y")), ("all_reduce", "y", 2 * ring("y", BSM, "x"))],
    "attempt 2": [
        ("all_gather", "x", ring("x", MH, "y")),
        ("all_gather", "x", ring("x", MH, "y")),
        ("all_reduce", "y", 2 * ring("y", BSM, "x")),
    ],
    "finalized": [
        ("all_gather", "y", ring("y", BSM, "x")),
        ("all_gather", "x", ring("x", MH, "y")),
        ("all_gather", "x", ring("x", MH, "y")),
        ("reduce_scatter", "y", ring("y", BSM, "x")),
    ],
}
# Of attempt 1 we send less: x goes to the batch, weights and what is made of them are gathered, and nothing
# is summed over x.
CHOSEN = FORWARD | {
    "attempt 1": [
        ("all_to_all", "x", ring("x", BSM, "x")),
        ("all_gather", "x", ring("x", MH, "y")),
        ("all_gather", "x", ring("x", BSH, "y")),
        ("all_reduce", "y", 2 * ring("y", BSM, "x")),
    ]
}
BACKWARD = [
    ("all_gather", "y", ring("y", BSM, "x")),  # of the gradient of what comes out, as of x_BSM on the way in
    ("reduce_scatter", "x", ring("x", MH, "y")),  # the gradients of both weights
    ("reduce_scatter", "x", ring("x", MH, "y")),
    ("reduce_scatter", "y", ring("y", BSM, "x")),  # the gradient of x_BSM
]


def planned(f: Callable[..., Any], *names: str, ins, outs, idle_axes: bool = True) -> Plan:
    args = [jax.ShapeDtypeStruct(WIDE.of(n), "bfloat16") for n in names]
    how = {"mesh": abstract(WIDE_MESH), "in_shardings": ins, "out_shardings": outs}
    return sx.shard_jit(f, **how, options=sx.Options(idle_axes=idle_axes)).plan(*args)


def sent(plan: Plan) -> list[tuple[str, str, int]]:
    return sorted((c.kind, ",".join(c.axes), c.nbytes) for c in plan.collectives)


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_ffn_forward(attempt):
    """What the table says, where axes go only where annotations suggest; else no more."""
    a = ATTEMPTS[attempt]

    def forward(up, down, x_BSM):
        return ffn(a, {"up": up, "down": down}, x_BSM)

    shardings = {"ins": (WEIGHTS["up"], WEIGHTS["down"], a.bsm), "outs": a.bsm}
    narrow, free = (
        planned(forward, "MH", "HM", "BSM", **shardings, idle_axes=idle) for idle in (False, True)
    )
    assert sent(narrow) == sorted(FORWARD[attempt])
    assert sent(free) == sorted(CHOSEN[attempt])
    assert free.comm_bytes <= narrow.comm_bytes and free.decisions.price <= narrow.decisions.price


def test_ffn_backward():
    """The weights, gathered forward, and x_BSM are there still."""
    a = ATTEMPTS["finalized"]

    def both(up, down, x_BSM, dy_BSM):
        y_BSM, vjp = jax.vjp(lambda up, down, x_BSM: ffn(a, {"up": up, "down": down}, x_BSM), up, down, x_BSM)
        return y_BSM, vjp(dy_BSM)

    ins = (WEIGHTS["up"], WEIGHTS["down"], a.bsm, a.bsm)
    plan = planned(both, "MH", "HM", "BSM", "BSM", ins=ins, outs=(a.bsm, ins[:3]))
    assert sent(plan) == sorted(FORWARD["finalized"] + BACKWARD)


# The same on real devices, small: a train step is the plain one's.

EVEN = Dims(B=4, S=6, M=8, N=4, D=2, H=16)
UNEVEN = Dims(B=3, S=5, M=10, N=3, D=2, H=14)


def random_like(tree, seed: int):
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return structure.unflatten([np.asarray(rng.normal(size=leaf.shape) * 0.3, leaf.dtype) for leaf in leaves])


@pytest.mark.not_quick
@pytest.mark.once
@pytest.mark.parametrize("dims", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "attempt", [*(pytest.param(a, marks=pytest.mark.slow) for a in [*ATTEMPTS][:2]), "finalized"]
)
def test_train_steps_are_those_of_one_device(attempt, dims):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    tx = optax.sgd(0.1, momentum=0.9)
    params = random_like(init(dims, 2), 0)
    x_BSM = random_like(jax.ShapeDtypeStruct(dims.of("BSM"), "float32"), 1)
    step = partial(train_step, ATTEMPTS[attempt], tx)
    plain_step = jax.jit(partial(train_step, Attempt(None, None, None), tx))
    sharded = sx.shard_jit(step, mesh=mesh, in_shardings=([WEIGHTS] * 2, None, None), donate_argnums=(0, 1))
    found, wanted = ((params, tx.init(params)) for _ in range(2))
    for _ in range(2):
        *found, value = sharded(*found, x_BSM)
        *wanted, plain = plain_step(*wanted, x_BSM)
        np.testing.assert_allclose(value, plain, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)
