"""Rotations: rolls, static and by traced amounts, and parts put together again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.rewrites.rotations import rotations
from shardax.spmd_rules import rotation
from tests.graph_text import after

ROLLS = {
    "rows": lambda x, k: jnp.roll(x, k, 0),
    "both": lambda x, k: jnp.roll(x, (k, -k), (0, 1)),
    "flat": lambda x, k: jnp.roll(x, k),
    "gradient": lambda x, k: jax.grad(lambda x: (jnp.roll(x, k, 0) * jnp.cos(x)).sum())(x),
}


@pytest.mark.parametrize("name", ROLLS)
@pytest.mark.parametrize("rows", [16, 13, 3])
def test_rotations_by_what_is_known_when_they_run(name, rows):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = np.random.RandomState(0).randn(rows, 4096).astype("float32")
    step = sx.shard_jit(ROLLS[name], mesh=mesh, in_shardings=(P("x"), None), out_shardings=P("x"))
    for k in (0, 1, -1, 5, rows, 1000):
        np.testing.assert_allclose(
            step(x, k), jax.jit(ROLLS[name])(x, k), rtol=1e-5, atol=1e-6, err_msg=str(k)
        )


@pytest.mark.parametrize("name, times", [("rows", 1), ("gradient", 2)])
def test_a_lone_dim_rotates_step_by_step(name, times):
    """Blocks go on by 1, 2, 4 devices and to the next; to gather them is 7. (Of many columns, each device
    would roll its part.)
    """
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = np.random.RandomState(0).randn(8 * 8192, 1).astype("float32")
    step = sx.shard_jit(ROLLS[name], mesh=mesh, in_shardings=(P("x"), None), out_shardings=P("x"))
    for k in (0, -1, 5, 20000):
        np.testing.assert_allclose(
            step(x, k), jax.jit(ROLLS[name])(x, k), rtol=1e-5, atol=1e-6, err_msg=str(k)
        )
    found = [(c.kind, c.nbytes) for c in step.plan(x, 1).collectives]
    assert found == [("ppermute", 8192 * 4)] * 4 * times


def test_uneven_rotations_step_by_step(monkeypatch):
    """On as many devices as there are here, to gather sends less."""
    monkeypatch.setattr(rotation, "_hops", lambda local: 1)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = np.random.RandomState(0).randn(9100).astype("float32")  # in shards of 1138

    @sx.shard_jit(mesh=mesh)
    def step(x, k):
        return jnp.roll(sx.annotate(x, P(("y", "x"))), k, 0)

    for k in range(0, 14 * 95, 95):
        np.testing.assert_array_equal(step(x, k), jnp.roll(x, k, 0), err_msg=str(k))
    sent = [c for c in step.plan(x, 1).collectives if c.reason == "rows of rotate_by"]
    assert [(c.kind, c.nbytes) for c in sent] == [("ppermute", 1138 * 4)] * 7


def test_parts_put_together_again_send_nothing():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    parts = {
        "two": lambda x: jnp.concatenate([x[:3], x[3:]]),
        "many": lambda x: jnp.concatenate(jnp.split(x, [1, 4, 7])),
        "turned": lambda x: jnp.concatenate([x[5:], x[:2], x[2:5]]),
        "no rotation": lambda x: jnp.concatenate([x[2:5], x[5:], x[:3]]),
    }
    x = np.arange(8 * 4096.0, dtype="float32").reshape(8, 4096)
    for name, f in parts.items():
        step = sx.shard_jit(f, mesh=mesh, in_shardings=P("x"))
        np.testing.assert_array_equal(step(x), f(x))
        sends = step.plan(x).comm_bytes / (4096 * 4)  # rows
        assert sends == {"two": 0, "many": 0, "turned": 2}.get(name, sends), (name, sends)


FOUND = {
    "dim=0 first=5": lambda x: lax.concatenate([x[5:], x[:5]], 0),
    "dim=0 first=3": lambda x: lax.concatenate([x[3:5], x[5:], x[:3]], 0),
    "dim=0 first=2": lambda x: lax.concatenate(lax.split(x, (2, 6))[::-1], 0),
    "dim=0 first=0": lambda x: lax.concatenate([x[:5], x[5:]], 0),
    "dim=0 first=1": lambda x: _padded(x[1:], 0, 1) + _padded(x[:1], 7, 0),
}


def _padded(x, low, high):
    return lax.pad(x, np.float32(0), [(low, high, 0)])


@pytest.mark.parametrize("what", FOUND)
def test_found(what):
    x = np.zeros(8, "float32")
    text = f"(a:f32[8])\nb:f32[8] = rotate[{what}] a\n-> b"
    assert after([rotations], FOUND[what], x, shows=("dim", "first")) == text


NOT_FOUND = {
    "rows are missing": lambda x: lax.concatenate([x[5:], x[:4]], 0),
    "another order": lambda x: lax.concatenate([x[2:5], x[5:], x[:3]], 0),
    "of two arrays": lambda x: lax.concatenate([x[5:], (x + 1)[:5]], 0),
    "every second row": lambda x: lax.concatenate([x[::2], x[1::2]], 0),
    "not zeros": lambda x: lax.pad(x[1:], np.float32(1), [(0, 1, 0)]) + _padded(x[:1], 7, 0),
    "two windows": lambda x: lax.dynamic_slice(lax.concatenate([x, x + 1], 0), [x.astype(int)[0]], [8]),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_not_found(name):
    assert "rotate" not in after([rotations], NOT_FOUND[name], np.zeros(8, "float32"))


def test_a_window_of_an_array_beside_itself():
    """And its gradient, which goes back."""

    def rolled(x, k):
        return lax.dynamic_slice(lax.concatenate([x, x], 0), [k], [8])

    x, k = np.zeros(8, "float32"), np.uint32(3)
    assert after([rotations], rolled, x, k, shows=("dim", "back")) == (
        "(a:f32[8] b:u32[])\nc:f32[8] = rotate_by[dim=0 back=False] a b\n-> c"
    )
    back = after(
        [rotations], lambda x, k: jax.vjp(lambda x: rolled(x, k), x)[1](x), x, k, shows=("dim", "back")
    )
    assert back == "(a:f32[8] b:u32[])\nc:f32[8] = rotate_by[dim=0 back=True] a b\n-> c"
