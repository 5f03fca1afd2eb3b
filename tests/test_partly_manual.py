"""Islands over some of the axes: the others split what is inside as they split what is outside."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

MESH = jax.make_mesh((2, 2, 2), ("s", "x", "y"), axis_types=(AxisType.Auto,) * 3)
RING = [(0, 1), (1, 0)]
over_s = partial(jax.shard_map, mesh=MESH, axis_names={"s"}, check_vma=False)


def _rand(*shape, dtype="float32"):
    return jnp.asarray(np.random.RandomState(len(shape)).randn(*shape) / 8, dtype)


def _mlp(w, x):
    """Its hidden dim is split over y, so a sum over y settles inside."""
    return over_s(
        lambda w, x: lax.ppermute(jnp.tanh(x @ w[0]) @ w[0].T, "s", RING),
        in_specs=(P("s"), P()),
        out_specs=P(),
    )(w, x)


def _branches(w, x):
    """The two devices along s are at different branches, each of which sums over y and has a halo over x."""

    def branch(k, h):
        return (
            jnp.convolve(h.sum(1) * k, jnp.array([1.0, 2.0, 3.0]), mode="same")[:, None]
            + h @ w[0, :, :8] @ w[0, :, :8].T
        )

    def local(w, x):
        place = lax.axis_index("s")
        h = lax.switch(place, [partial(branch, 1.0), partial(branch, 2.0)], x)
        return lax.psum(h, "s")

    return over_s(local, in_specs=(P("s"), P()), out_specs=P())(w, x)


def _trips(w, x):
    """A while whose trips differ along s, with a sum over the axes that split x in each."""

    def local(x):
        count = lax.axis_index("s") + 2
        _, x = lax.while_loop(
            lambda c: c[0] < count, lambda c: (c[0] + 1, c[1] - c[1].mean(0)[None] / 2), (0, x)
        )
        return x[None]

    return over_s(local, in_specs=P(), out_specs=P("s"))(x)


def _cut(w, x):
    """What collectives over s cut and join is whole, the other dims stay split."""

    def local(x):
        a = lax.all_gather(x, "s", axis=1) + 1  # [n, 2, m]
        b = lax.psum_scatter(a * jnp.sin(a), "s", scatter_dimension=1)
        c = lax.all_to_all(jnp.stack([b, b], 0), "s", 0, 0, tiled=True).sum(0)
        return lax.psum_scatter(c, "s", scatter_dimension=1, tiled=True)

    return over_s(local, in_specs=P(), out_specs=P(None, "s"))(x)


def _two_dims(w, x):
    """Both manual axes on one dim, then one on each of two."""
    both = partial(jax.shard_map, mesh=MESH, axis_names={"s", "x"}, check_vma=False)
    y = both(
        lambda a: a + lax.axis_index(("s", "x")).astype(a.dtype),
        in_specs=P(None, ("s", "x")),
        out_specs=P(None, ("s", "x")),
    )(x)
    z = both(lambda a: jnp.cumsum(a, 0), in_specs=P(None, None, ("s",)), out_specs=P(None, "x", "s"))(
        w[:, :4]
    )
    return y, z


def _nested(w, x):
    inner = partial(
        jax.shard_map, axis_names={"x"}, in_specs=P(None, "x"), out_specs=P(None, "x"), check_vma=False
    )

    def local(x):
        h = inner(lambda a: a + lax.psum(a, ("x",)))(x)
        return lax.psum(h * (lax.axis_index("s") + 1).astype(h.dtype), "s") @ x.T

    return over_s(local, in_specs=P(), out_specs=P())(x)


PROGRAMS = {
    "mlp": _mlp,
    "branches": _branches,
    "trips": _trips,
    "cut": _cut,
    "two dims": _two_dims,
    "nested": _nested,
    "gradient": jax.grad(lambda w, x: (_mlp(w, x) ** 2).sum(), (0, 1)),
    "gradient of branches": jax.grad(lambda w, x: (_branches(w, x) ** 2).sum(), (0, 1)),
}


@pytest.mark.parametrize("rows", [12, 13])
@pytest.mark.parametrize("program", PROGRAMS)
def test_partly_manual(program, rows):
    w, x = _rand(2, 8, 32), _rand(rows, 8)
    fun, specs = PROGRAMS[program], (P("s", None, "y"), P("x"))
    step = sx.shard_jit(fun, mesh=MESH, in_shardings=specs)
    want = jax.jit(fun)(w, x)
    for _ in range(2):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), step(w, x), want)


def test_only_what_the_program_needs_is_sent():
    plan = sx.shard_jit(_mlp, mesh=MESH, in_shardings=(P("s", None, "y"), P("x")), out_shardings=P("x")).plan(
        _rand(2, 256, 512, dtype="bfloat16"), _rand(64, 256, dtype="bfloat16")
    )
    sent = [(c.kind, c.axes, c.shape) for c in plan.collectives]
    assert sent == [("all_reduce", ("y",), (32, 256)), ("ppermute", ("s",), (32, 256))]


def test_no_ppermute_where_devices_part():
    """All devices would have to meet there. Those of a group at an all_gather do meet."""
    plan = sx.shard_jit(_branches, mesh=MESH, in_shardings=(P("s", None, "y"), P("x"))).plan(
        _rand(2, 8, 32), _rand(1024, 8)
    )
    kinds = {(c.kind, c.axes) for c in plan.collectives}
    assert ("all_gather", ("x",)) in kinds and not any(kind == "ppermute" for kind, _ in kinds), kinds
