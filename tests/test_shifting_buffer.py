"""GSPMD's way to pipeline (arXiv 2105.04663 §3.3), written for `shard_jit`: a stage under vmap and a buffer that shifts
along the dim of stages. One ppermute in each tick, and nothing else; results are collected after the loop.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.rewrites.driver import rewritten
from shardax.rewrites.splits import unread_parts
from tests.graph_text import graph_of

pytestmark = pytest.mark.quick

STAGES = 4


def shifting(style: str, batch: str | None):
    """[stages, M, M], [microbatches, B, M] -> [microbatches, B, M]"""
    spec = P("stage", batch)

    def run(w_SMM, x_TBM):
        empty_TBM = jnp.zeros((STAGES - 1, *x_TBM.shape[1:]), x_TBM.dtype)

        def tick(buffer_SBM, new_BM):
            if style == "roll":
                buffer_SBM = jnp.roll(buffer_SBM, 1, 0).at[0].set(new_BM)
            else:
                buffer_SBM = jnp.concatenate([new_BM[None], buffer_SBM[:-1]])
            buffer_SBM = sx.annotate(buffer_SBM, spec)
            buffer_SBM = sx.annotate(jax.vmap(lambda w, x: jnp.tanh(x @ w))(w_SMM, buffer_SBM), spec)
            return buffer_SBM, buffer_SBM[-1]

        buffer_SBM = jnp.zeros((STAGES, *x_TBM.shape[1:]), x_TBM.dtype)
        _, out_TBM = jax.lax.scan(tick, buffer_SBM, jnp.concatenate([x_TBM, empty_TBM]))
        return out_TBM[STAGES - 1 :]

    return run


def loss(style: str, batch: str | None):
    run = shifting(style, batch)
    return jax.value_and_grad(lambda w_SMM, x_TBM: (run(w_SMM, x_TBM) ** 2).mean())


MESHES = {"stages": ((4,), ("stage",), None), "stages and data": ((4, 2), ("stage", "data"), "data")}


@pytest.mark.parametrize("rows", [256, 255], ids=["even", "uneven"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("style", ["roll", "concatenate"])
@pytest.mark.parametrize("microbatches, chip", [(4, "v5e"), (8, "v5p"), (32, "v5e"), (128, "H200")])
def test_one_ppermute_in_each_tick(style, mesh, rows, microbatches, chip):
    """Forward, and in its transpose backward. The sum over stages of which the results are collected, once."""
    check(style, mesh, rows, microbatches, chip)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("style", ["roll", "concatenate"])
def test_one_ppermute_in_each_tick_of_the_nominal_chip(style, mesh):
    """There an all_to_all costs next to nothing beside its bytes. With more microbatches, or uneven ones, the buffer is
    split by rows instead: 1.5 microbatches are sent in each tick, but results need no sum, their cotangent no all_gather.
    """
    check(style, mesh, 256, 4, None)


def check(style, mesh, rows, microbatches, chip):
    sizes, axes, batch = MESHES[mesh]
    ticks = microbatches + STAGES - 1
    args = (
        jax.ShapeDtypeStruct((STAGES, 512, 512), "float32"),
        jax.ShapeDtypeStruct((microbatches, rows, 512), "float32"),
    )
    on = {"mesh": AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes))}
    on |= {"in_shardings": (P("stage"), P(None, batch)), "options": sx.Options(chip=chip)}
    for function, loops in ((shifting(style, batch), 1), (loss(style, batch), 2)):
        plan = sx.shard_jit(function, **on).plan(*args)
        inside = Counter((c.kind, c.trips) for c in plan.collectives if c.trips > 1)
        assert inside == {("ppermute", ticks): loops}
        microbatch = -(-rows // (sizes[1] if batch else 1)) * 512 * 4
        assert {c.nbytes for c in plan.collectives if c.trips > 1} == {microbatch}
        collected = [c for c in plan.collectives if c.trips == 1 and "sum of slice" in c.reason]
        assert [c.axes for c in collected] == [("stage",)]


@pytest.mark.not_quick
@pytest.mark.parametrize("style", ["roll", "concatenate"])
def test_values_and_gradients(style):
    mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    random = np.random.RandomState(0)
    w_SMM = jnp.asarray(random.randn(STAGES, 6, 6) / 3, "float32")
    x_TBM = jnp.asarray(random.randn(5, 7, 6), "float32")
    step = sx.shard_jit(loss(style, "data"), mesh=mesh, in_shardings=(P("stage"), P(None, "data")))

    def plain(w_SMM, x_TBM):
        for w in w_SMM:
            x_TBM = jnp.tanh(x_TBM @ w)
        return (x_TBM**2).mean()

    expected = jax.jit(jax.value_and_grad(plain))(w_SMM, x_TBM)
    for _ in range(2):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), step(w_SMM, x_TBM), expected
        )


def test_parts_of_a_split_that_nobody_reads():
    def parts(x):
        a, b, c = jnp.split(x, (1, 4), 0)
        return a, c

    def names(f):
        return [n.name for n in rewritten(graph_of(f, np.zeros((8, 4), "float32")), [unread_parts]).nodes]

    assert names(parts) == ["slice", "slice"]
    assert names(lambda x: jnp.split(x, (1, 4), 0)) == ["split"]
