"""Padding of slices and slices of padding are one shift."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.rewrites.driver import rewritten
from shardax.rewrites.shifts import shifts
from tests.graph_text import after, graph_of

SHIFTS = {  # function, the nodes that are left
    "pad of slice": (lambda x: jnp.pad(x[1:], ((0, 1), (0, 0))), ["pad"]),
    "slice of pad": (lambda x: jnp.pad(x, ((2, 0), (0, 1)))[:-2, 1:], ["pad"]),
    "cut deeper than padded": (lambda x: jnp.pad(x, ((1, 1), (0, 0)))[2:], ["pad"]),
    "rows put back": (lambda x: jnp.pad(x[1:], ((1, 0), (0, 0))), ["slice", "pad"]),
    "every second row": (lambda x: jnp.pad(x[::2], ((1, 0), (0, 0))), ["slice", "pad"]),
    "holes": (lambda x: lax.pad(x[1:], np.float32(3), ((0, 1, 1), (0, 0, 0))), ["slice", "pad"]),
    "nothing but padding": (lambda x: jnp.pad(x, ((0, 12), (0, 0)))[9:], ["pad", "slice"]),
    "both read": (
        lambda x: (x[1:], jnp.pad(x[1:], ((0, 1), (0, 0))))[1] + jnp.pad(x, ((0, 0), (0, 0))),
        None,
    ),
    "loop": (lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.pad(y[:-1], ((1, 0), (0, 0))), x), None),
    "negative padding": (lambda x: lax.pad(x[1:], np.float32(0), ((-1, 2, 0), (0, 0, 0))), ["pad"]),
}


@pytest.mark.parametrize("name", [name for name, (_, left) in SHIFTS.items() if left])
def test_what_is_left(name):
    f, left = SHIFTS[name]
    found = rewritten(graph_of(f, np.zeros((8, 4), "float32")), [shifts])
    assert [node.name for node in found.nodes if node.name in ("pad", "slice")] == left


def test_several_in_a_row_are_one():
    def f(x):
        return lax.pad(x[2:], np.float32(0), [(0, 2, 0)])[3:]

    assert after([shifts], f, np.zeros(8, "float32"), shows=("padding_config",)) == (
        "(a:f32[8])\nb:f32[5] = pad[padding_config=((-5, 2, 0),)] a 0.0\n-> b"
    )


@pytest.mark.parametrize("rows", [8, 9])
@pytest.mark.parametrize("name", SHIFTS)
def test_shifts(name, rows):
    f, _ = SHIFTS[name]
    x = np.arange(4.0 * rows, dtype="float32").reshape(rows, 4)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    step = sx.shard_jit(lambda x: f(sx.annotate(x + 1, P("x"))), mesh=mesh)
    np.testing.assert_array_equal(step(x), jax.jit(f)(x + 1))


def test_a_shift_sends_once():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((64, 512), "float32")
    step = sx.shard_jit(SHIFTS["pad of slice"][0], mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
    assert [(c.kind, c.total) for c in step.plan(x).collectives] == [("ppermute", 512 * 4)]
