"""Casts of weights that a loop over layers gathers stay in the loop, on TPUs."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.passes import casts, tpu
from tests import on_tpu

LAYERS, M = 4, 64


def barriers(jaxpr) -> int:
    found = sum(eqn.primitive is lax.optimization_barrier_p for eqn in jaxpr.eqns)
    return found + sum(barriers(body) for eqn in jaxpr.eqns for body in jaxprs_in_params(eqn.params))


def gathered_number():
    """Of a literal."""
    return lax.all_gather(np.float32(1.0), "x").sum().astype("bfloat16")


def layers(x, w, dtype="bfloat16", read=lambda row: 0.0, again=lambda row: row):
    """[rows, M] and [LAYERS, M, M / devices, ...], gathered layer by layer."""

    def layer(h, row):
        whole = lax.all_gather(again(row).astype(dtype), "x", axis=1, tiled=True).reshape(M, -1)
        return jnp.tanh(h @ whole[:, :M].astype(h.dtype)) + read(row), None

    return lax.scan(layer, x, w)[0]


def local(run, devices: int = 8, shape=(LAYERS, M, M), dtype="float32"):
    mesh = AbstractMesh((devices,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), P(None, None, "x")), out_specs=P(), check_vma=False)
    types = jax.ShapeDtypeStruct((2, M), "bfloat16"), jax.ShapeDtypeStruct(shape, dtype)
    return jax.make_jaxpr(mapped)(*types)


@pytest.mark.quick
@pytest.mark.parametrize(
    "held, closed",
    {
        "gathered": (1, partial(local, layers)),
        "beside a number": (1, partial(local, partial(layers, read=lambda row: gathered_number()))),
        "computed again": (1, partial(local, partial(layers, again=lax.optimization_barrier))),
        "by few": (0, partial(local, layers, devices=4)),
        "to another type": (0, partial(local, partial(layers, dtype="float16"))),
        "of another type": (0, partial(local, layers, dtype="bfloat16")),
        "in float32 too": (
            0,
            partial(local, partial(layers, read=lambda row: row.mean().astype("bfloat16"))),
        ),
        "of more dims": (0, partial(local, layers, shape=(LAYERS, M, M, 2))),
    }.values(),
)
def test_what_is_held_in_a_loop(held, closed):
    closed = closed()
    assert barriers(tpu.suited(closed).jaxpr) - barriers(closed.jaxpr) == held


def test_values_are_the_same(monkeypatch):
    """Infinities, NaNs, numbers that round to an infinity or are denormal among them."""
    monkeypatch.setattr(casts, "SEVERAL", 4)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def rows(w):
        body = lambda c, row: (c, lax.all_gather(row.astype("bfloat16"), "x", axis=1, tiled=True))  # noqa: E731
        return lax.scan(body, 0, w)[1]

    mapped = jax.shard_map(rows, mesh=mesh, in_specs=P(None, None, "x"), out_specs=P(), check_vma=False)
    w = np.random.RandomState(0).randn(LAYERS, M, M).astype("float32")
    w[0, 0, :6] = np.inf, -np.inf, np.nan, 3.4e38, 1e-40, -0.0
    closed = jax.make_jaxpr(mapped)(w)
    suited = tpu.suited(closed)
    assert barriers(suited.jaxpr) == 1
    (got,), (want,) = (jax.jit(jaxpr_as_fun(some))(w) for some in (suited, closed))
    np.testing.assert_array_equal(np.asarray(got).view("uint16"), np.asarray(want).view("uint16"))


@pytest.mark.tpu
def test_memory_in_the_program_for_tpu():
    """A device has an eighth of 8 layers of two matrices, 4096 by 16384: 128 MiB of them in bfloat16."""
    found = on_tpu.found("tests.test_passes_casts")
    assert found["in front"] - found["in the loop"] > 0.95 * 256 * 2**20


def main() -> None:
    """Prints the bytes of temporaries of a train step for a TPU v5e-8, casts before the loop and in it."""
    mesh = on_tpu.mesh(data=8)
    shapes = {"up": (8, 4096, 16384), "down": (8, 16384, 4096)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}

    def loss(params, x):
        @jax.checkpoint
        def layer(h, w):
            up, down = w["up"].astype(h.dtype), w["down"].astype(h.dtype)
            return h + jax.nn.relu(h @ up) @ down, None

        return (lax.scan(layer, x, params)[0].astype("float32") ** 2).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, jax.grad(loss)(params, x))

    found = {}
    for name, several in (("in front", 1 << 30), ("in the loop", casts.SEVERAL)):
        casts.SEVERAL = several
        jax.clear_caches()
        specs = {name: P(None, None, "data") for name in shapes}, P("data")
        f = sx.shard_jit(step, mesh=mesh, in_shardings=specs, donate_argnums=0)
        lowered = f.lower(params, jax.ShapeDtypeStruct((131072, 4096), "bfloat16"))
        found[name] = lowered.compile().memory_analysis().temp_size_in_bytes
    print(json.dumps(found))


if __name__ == "__main__":
    main()
