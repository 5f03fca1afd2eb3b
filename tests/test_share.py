"""What is sent once although two want it: halos of a convolution and its gradient, of stencils by slices;
totals of scans.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from tests.test_program import mesh_of

MESH = mesh_of(4)
ROW = 64 * 4


def array(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def conv(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def five_points(u):
    return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]


def pools(x):
    largest = lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME")
    return largest - lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME")


def with_a_loop(x):
    """A body shares too."""
    return lax.fori_loop(0, 3, lambda _, u: u.at[1:-1, 1:-1].add(0.1 * five_points(u)), x)


# name: function, arguments, kinds and bytes of what is sent, results in the sharding of the argument aside
CASES = {
    "differences": (
        lambda u: jnp.sum(jnp.diff(u, axis=0) ** 2) + jnp.abs(jnp.diff(u, axis=0)).sum(),
        (64, 64),
        [ROW],
    ),
    "five points": (lambda u: five_points(u).sum(), (64, 64), [2 * ROW]),
    "five points, padded": (
        lambda u: five_points(u).sum(),
        (61, 64),
        [2 * 61 * 4],
    ),  # of what is cut out already
    "rolls": (
        lambda u: jnp.roll(u, 1, 0) + jnp.roll(u, 2, 0) - jnp.roll(u, -1, 0) * jnp.roll(u, 1, 0),
        (64, 64),
        [2 * ROW, ROW],
    ),
    "two pools": (pools, (64, 64), [ROW, ROW]),
    "rows far apart": (lambda u: (jnp.roll(u, 1, 0) - jnp.roll(u, 17, 0)).sum(), (64, 64), None),
    "loop": (with_a_loop, (64, 64), None),
}


@pytest.mark.parametrize("name", CASES)
def test_stencils(name):
    f, shape, sent = CASES[name]
    x = array(*shape)
    step = sx.shard_jit(f, mesh=MESH, in_shardings=P("x"))
    halos = sorted((c.nbytes for c in step.plan(x).collectives if c.kind == "ppermute"), reverse=True)
    assert sent is None or halos == sent
    np.testing.assert_allclose(step(x), f(x), rtol=1e-4, atol=1e-4)


def test_a_convolution_and_its_gradient():
    """Rows of the image before the convolution, from both sides; for the image's gradient those of the
    cotangents.
    """
    x, kernel = array(2, 32, 16, 8), array(3, 3, 8, 8)
    loss = lambda x, kernel: (conv(x, kernel) ** 2).sum()  # noqa: E731
    halo = ("ppermute", 2 * 16 * 8 * 4, "halo of conv_general_dilated")
    for argnums, halos in ((1, 2), ((0, 1), 4)):
        step = sx.shard_jit(jax.grad(loss, argnums), mesh=MESH, in_shardings=(P(None, "x"), P()))
        sent = [(c.kind, c.nbytes, c.reason) for c in step.plan(x, kernel).collectives]
        assert sent[:-1] == [halo] * halos and sent[-1][0] == "all_reduce"
        wanted = jax.grad(loss, argnums)(x, kernel)
        for have, want in zip(jax.tree.leaves(step(x, kernel)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6 * float(abs(want).max()))


def test_a_convolution_and_its_gradient_of_uneven_blocks():
    """The gradient masks padding only behind the halo, which is thus the same as that of the convolution."""
    x, kernel = array(2, 29, 16, 8), array(3, 3, 8, 8)
    gradient = jax.grad(lambda kernel, x: (conv(x, kernel) ** 2).sum())
    step = sx.shard_jit(lambda kernel, x: gradient(kernel, sx.annotate(x, P(None, "x"))), mesh=MESH)
    assert [c.reason for c in step.plan(kernel, x).collectives if c.kind == "ppermute"] == [
        "halo of conv_general_dilated"
    ] * 2
    wanted = gradient(kernel, x)
    np.testing.assert_allclose(step(kernel, x), wanted, rtol=1e-5, atol=1e-6 * float(abs(wanted).max()))


def test_what_is_recomputed_is_sent_again():
    """Behind the barrier of remat stands another value."""
    x, kernel = array(2, 32, 16, 8), array(3, 3, 8, 8)
    f = jax.checkpoint(lambda x, kernel: jnp.sin(conv(x, kernel)).sum())
    step = sx.shard_jit(jax.value_and_grad(f, 1), mesh=MESH, in_shardings=(P(None, "x"), P()))
    barriers = str(step.plan(x, kernel).local_jaxpr).count("optimization_barrier")
    assert barriers == 1 and [c.kind for c in step.plan(x, kernel).collectives].count("ppermute") == 4


def test_the_gradient_of_a_scan_sends_no_totals_again():
    x = array(64, 8)
    f = lambda x: (lax.associative_scan(jnp.multiply, x) ** 2).sum()  # noqa: E731
    step = sx.shard_jit(jax.grad(f), mesh=MESH, in_shardings=P("x"))
    kinds = [(c.kind, c.nbytes, c.reason) for c in step.plan(x).collectives]
    assert kinds == [
        ("all_gather", 3 * 8 * 4, "totals of associative_scan"),
        ("reduce_scatter", 3 * 8 * 4, "totals of associative_scan_vjp"),
    ]
