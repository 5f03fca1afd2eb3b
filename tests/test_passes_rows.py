"""Reductions of arrays in a row are taken apart for TPUs, where the row is nothing but its parts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.passes import rows, tpu

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
ARGS = jnp.arange(32.0).reshape(8, 4), jnp.arange(24.0).reshape(8, 1, 3), jnp.arange(8.0)


def flat(*arrays):
    return lax.concatenate([x.reshape(x.size) for x in arrays], 0)


def gradients(a, b, c, reduce=lax.psum):
    """[1, 4], [1, 1, 3] and [1], reduced in a row."""
    row = reduce(flat(a, b, c), "x")
    return row[:4].reshape(1, 4), row[4:7].reshape(1, 1, 3) * 2, row[7:]


def maxima(a, b, c):
    return gradients(a, b, c, lax.pmax)


def one_twice(a, b, c):
    row = lax.psum(flat(a, c, a), ("x", "y"))
    return row[:4].reshape(1, 4), row[4:5], row[5:9].reshape(2, 2) + row[5:9].reshape(2, 2)


def wide(a, b, c):
    """[2, 8] and [1]: none is narrow."""
    row = lax.psum(flat(jnp.tile(a, (2, 2)), c), "x")
    return row[:16].reshape(2, 8), row[16:], c


def some(a, b, c):
    """Nothing reads the sum of the first."""
    row = lax.psum(flat(a, b, c), "x")
    return row[4:7], row[7:], c


def read_whole(a, b, c):
    row = lax.psum(flat(a, b, c), "x")
    return row[:4], row[4:7], row


def read_across(a, b, c):
    row = lax.psum(flat(a, b, c), "x")
    return row[:5], row[5:7], row[7:]


def read_before(a, b, c):
    row = flat(a, b, c)
    whole = lax.psum(row, "x")
    return whole[:4], whole[4:7] * row[4:7], whole[7:]


def columns(a, b, c):
    row = lax.psum(lax.concatenate([a, b[:, 0]], 1), "x")
    return row[:, :4], row[:, 4:], c


def mapped(run):
    specs = P(("x", "y"))
    own = lambda *args: tuple(x[None] for x in run(*args))  # noqa: E731
    return jax.make_jaxpr(jax.shard_map(own, mesh=MESH, in_specs=specs, out_specs=specs, check_vma=False))(
        *ARGS
    )


def reductions(closed) -> list[tuple[int, ...]]:
    (local,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map")
    body = local.params["jaxpr"]
    return [eqn.outvars[0].aval.shape for eqn in body.eqns if eqn.primitive.name in ("psum", "pmax")]


@pytest.mark.parametrize(
    "run, shapes",
    [
        (gradients, [(1, 4), (1, 1, 3), (1,)]),
        (maxima, [(1, 4), (1, 1, 3), (1,)]),
        (one_twice, [(1, 4), (1,), (1, 4)]),
        (some, [(1, 1, 3), (1,)]),
        (wide, [(17,)]),
        (read_whole, [(8,)]),
        (read_across, [(8,)]),
        (read_before, [(8,)]),
        (columns, [(1, 7)]),
    ],
)
def test_rows_are_taken_apart(run, shapes, monkeypatch):
    closed = mapped(run)
    assert reductions(tpu.suited(closed)) == reductions(closed)  # they are small
    monkeypatch.setattr(rows, "TILE", 0)
    suited = tpu.suited(closed)
    assert reductions(suited) == shapes
    got, want = (jax.jit(jaxpr_as_fun(program))(*ARGS) for program in (suited, closed))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_is_combined_is_taken_apart():
    """A plan has one collective; on TPUs the compiler makes it of those that stand there."""

    def step(w, b, x):
        loss = lambda w, b: jnp.mean((x @ w.T + b[None]) ** 2)  # noqa: E731
        return jax.grad(loss, (0, 1))(w, b)

    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((512, 3), (512,), (1 << 20, 3))]
    how = {"mesh": MESH, "in_shardings": (None, None, P(("x", "y"))), "options": sx.Options(chip="v5e")}
    plan = sx.shard_jit(step, **how).plan(*args)
    assert [c.kind for c in plan.collectives] == ["all_reduce"]
    combined = plan.local_jaxpr
    assert reductions(combined) == [(2048,)]
    assert sorted(map(math.prod, reductions(tpu.suited(combined)))) == [512, 1536]
