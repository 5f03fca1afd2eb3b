"""Associative scans along a split dim: found in what JAX expands them into, run on blocks, the totals
exchanged.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.rewrites.associative import associative_scans, reversed_scans
from shardax.rewrites.driver import rewritten
from tests.graph_text import after, graph_of
from tests.test_program import mesh_of
from tests.test_random_programs import poisoned_padding

MESH = mesh_of(4, 2)
SCANS_ONLY = [associative_scans, reversed_scans]


def array(*shape):
    return np.random.default_rng(0).choice([-1.0, -0.5, 0.5, 1.0], shape).astype("float32")


def linear(left, right):
    """h = a h + b, as in S5, Mamba and RG-LRU."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def matrices(left, right):
    """h = A h + b."""
    return right[0] @ left[0], jnp.einsum("nij,nj->ni", right[0], left[1]) + right[1]


def segmented(left, right):
    """Sums that begin anew."""
    return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])


def latest(left, right):
    """The latest that is large, else the first: not commutative."""
    return jnp.where(right > 0.6, right, left)


SCANS = {
    "add": lambda a, b, **how: lax.associative_scan(jnp.add, a, **how),
    "linear": lambda a, b, **how: lax.associative_scan(linear, (a, b), **how),
    "one of two": lambda a, b, **how: lax.associative_scan(linear, (a, b), **how)[1],
    "latest": lambda a, b, **how: lax.associative_scan(latest, a, **how),
    "or": lambda a, b, **how: lax.associative_scan(jnp.logical_or, a > 0.7, **how),
}


def found(f, *args):
    graph = rewritten(graph_of(f, *args), SCANS_ONLY)
    return [
        (node.params["dim"], node.params["reverse"])
        for node in graph.nodes
        if node.name == "associative_scan"
    ]


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("n", [8, 31])
def test_scans_are_found(name, n):
    x = array(3, n)
    assert found(lambda a, b: SCANS[name](a, b, axis=1), x, x) == [(1, False)]
    assert found(lambda a, b: SCANS[name](a, b, axis=1, reverse=True), x, x) == [(1, True)]


NOT_SCANS = {
    "depends on the place": lambda a: lax.associative_scan(
        lambda x, y: x + y * jnp.arange(len(x))[:, None, None], a
    ),
    "depends on the size": lambda a: lax.associative_scan(lambda x, y: x + y * len(x), a),
    "mixes rows": lambda a: lax.associative_scan(lambda x, y: x + y[::-1], a),
    "sums over rows": lambda a: lax.associative_scan(lambda x, y: x + y.sum(0), a),
    "not associative": lambda a: lax.associative_scan(jnp.subtract, a),
    "associative where positive": lambda a: lax.associative_scan(lambda x, y: jnp.minimum(x + y, 1), a),
    "associative but for a millionth": lambda a: lax.associative_scan(lambda x, y: x + y * 1.0001, a),
    "ties": lambda a: jax.grad(lambda a: (lax.associative_scan(jnp.maximum, a) ** 2).sum())(a),
    "other slices": lambda a: a[0:-1:2] + a[1::2],
}


@pytest.mark.promotes_ranks
@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("name", NOT_SCANS)
def test_not_found(name):
    assert found(NOT_SCANS[name], array(8 if name.startswith("other") else 9, 3, 3)) == []


def test_what_is_between_may_be_read():
    """Then only what is below is a scan."""

    def f(a):
        return lax.associative_scan(jnp.multiply, a), a[0:-1:2] * a[1::2] + 1

    assert found(f, array(16)) == [(0, False)]
    np.testing.assert_array_equal(
        sx.shard_jit(f, mesh=MESH, in_shardings=P("x"))(array(16))[0], f(array(16))[0]
    )


def cubes(a):
    return a[..., None] * array(4, 4)


GRADIENTS = {
    "multiply": lambda a, b, **how: lax.associative_scan(jnp.multiply, a, **how),
    "linear": lambda a, b, **how: lax.associative_scan(linear, (a, b), **how)[1],
    "both": lambda a, b, **how: sum(lax.associative_scan(linear, (a, b), **how)),
    "latest": lambda a, b, **how: lax.associative_scan(latest, a, **how) * b,
    "matmul": lambda a, b, **how: lax.associative_scan(jnp.matmul, cubes(a) / 2, **how)[:, 0] * b,
    "matrices": lambda a, b, **how: lax.associative_scan(matrices, (cubes(a) / 2, b), **how)[1],
    "segmented": lambda a, b, **how: lax.associative_scan(segmented, (b[:, :1] > 0.7, a), **how)[1],
}


def loss(name, **how):
    return lambda a, b: (GRADIENTS[name](a, b, **how) ** 2).sum()


@pytest.mark.promotes_ranks
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("n", [8, 31])
def test_found_in_gradients(name, n):
    """Nothing of the expansion is left: no slices with strides, no paddings."""
    x, f = array(n, 4), loss(name)
    for grad in (jax.grad(f), jax.value_and_grad(f, (0, 1)), jax.grad(jax.checkpoint(f))):
        graph = rewritten(graph_of(grad, x, x), SCANS_ONLY)
        names = [node.name for node in graph.nodes]
        assert names.count("associative_scan") == names.count("associative_scan_vjp") == 1
        assert not [
            node for node in graph.nodes if node.name == "slice" and 2 in (node.params["strides"] or ())
        ]


def test_two_layers_are_found():
    """Each with its gradient; what has no elements is the same in both."""
    f = lambda a, b: (GRADIENTS["linear"](jnp.tanh(a), GRADIENTS["linear"](a, b)) ** 2).sum()  # noqa: E731
    x = array(16, 4)
    assert len(found(jax.grad(f, (0, 1)), x, x)) == 2


@pytest.mark.promotes_ranks
@pytest.mark.parametrize("name, n, spec, reverse", [
    ("multiply", 16, P("y", "x"), False),
    ("linear", 9, P(("x", "y")), True),
    ("linear", 13, P("x"), False),
    ("both", 13, P("x", "y"), True),
    ("latest", 9, P(("x", "y")), False),
    ("matmul", 13, P("x"), True),
    ("matrices", 9, P("x"), False),
    ("segmented", 13, P(("x", "y")), True),
])  # fmt: skip
def test_same_gradients(name, n, spec, reverse):
    args = array(n, 4), array(n, 4)

    def f(constrain):
        moved = lambda a, b: loss(name, reverse=reverse)(constrain(a), constrain(b))  # noqa: E731
        return lambda a, b: jax.tree.map(constrain, jax.grad(moved, (0, 1))(a, b))

    wanted = jax.jit(f(lambda x: x))(*args)
    with poisoned_padding():
        got = sx.shard_jit(f(lambda x: sx.annotate(x, NamedSharding(MESH, spec))), mesh=MESH)(*args)
    for have, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("n, spec", [(16, P("y", "x")), (13, P("x")), (9, P(("x", "y")))])
def test_scans_on_blocks_give_what_scans_on_one_device_give(name, n, spec):
    """Blocks of one row, padded ones, such as hold nothing but padding; both ways."""
    args = array(n, 4), array(n, 4)

    def both(constrain):
        def f(a, b):
            a, b = constrain(a), constrain(b)
            results = SCANS[name](a, b), SCANS[name](a, b, reverse=True)
            return jax.tree.map(
                lambda x: ~constrain(x) if x.dtype == bool else constrain(x) * 3, jax.tree.leaves(results)
            )

        return f

    wanted = jax.jit(both(lambda x: x))(*args)
    with poisoned_padding():
        got = sx.shard_jit(both(lambda x: sx.annotate(x, NamedSharding(MESH, spec))), mesh=MESH)(*args)
    for have, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_sends_the_totals(reverse):
    args = [array(2, 1024, 8)] * 2
    f = lambda a, b: lax.associative_scan(linear, (a, b), axis=1, reverse=reverse)[1]  # noqa: E731
    plan = sx.shard_jit(f, mesh=MESH, in_shardings=P(None, "x"), out_shardings=P(None, "x")).plan(*args)
    assert [(c.kind, c.nbytes, c.reason) for c in plan.collectives] == [
        ("all_gather", 3 * 2 * 8 * 4, "totals of associative_scan")
    ] * 2


@pytest.mark.parametrize(
    "f", [lambda x: lax.cummax(x, 0), lambda x: lax.associative_scan(jnp.minimum, x, reverse=True)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_equal_numbers_of_16_bits(f, dtype):
    """What each of equal numbers gets depends on JAX's order of steps: such a gradient is no scan."""
    x = (array(16, 4) * 2).astype("int32").astype(dtype)
    grad = jax.grad(lambda x: (f(x) * jnp.arange(16, dtype=dtype)[:, None]).sum())
    got = sx.shard_jit(grad, mesh=MESH, in_shardings=P("x"))(x)
    np.testing.assert_array_equal(got, jax.jit(grad)(x))


@pytest.mark.parametrize("reverse", [False, True])
def test_what_is_left(reverse):
    """A node for the scan, and one for its gradient, whichever end is first."""

    def scan(a):
        return lax.associative_scan(jnp.multiply, a, reverse=reverse)

    def both(a, ct):
        result, back = jax.vjp(scan, a)
        return result, *back(ct)

    shows = ("dim", "reverse", "seeds")
    assert after(SCANS_ONLY, scan, array(5), shows=shows) == (
        f"(a:f32[5])\nb:f32[5] = associative_scan[dim=0 reverse={reverse}] a\n-> b"
    )
    assert after(SCANS_ONLY, both, array(5), array(5), shows=shows).split("\n") == [
        "(a:f32[5] b:f32[5])",
        f"c:f32[5] = associative_scan[dim=0 reverse={reverse}] a",
        f"d:f32[5] = associative_scan_vjp[dim=0 reverse={reverse} seeds=(0,)] a b",
        "-> c d",
    ]
