"""Indices that count along a dim: nothing is sent along it, and the values are those of the plain
function.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.check import ramp
from shardax.rewrites.batched_indices import batched_indices
from shardax.rewrites.driver import rewritten
from tests.graph_text import graph_of

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
ROWS = jnp.arange


def pick(x, i):
    return x[ROWS(len(x)), i]


def pick_from_behind(x, i):
    return x.T[i, ROWS(len(x), dtype="int16")]


def several(x, i):
    return x[ROWS(len(x))[:, None], i[:, None] - ROWS(3)]


def written(x, i):
    return x.at[ROWS(len(x)), i].set(-1.0, mode="drop")


def loss(x, i):
    return jax.grad(lambda x: -pick(jax.nn.log_softmax(x), i).sum())(x)


def decoded(x, i):
    """A cache that is appended to in a loop, at an iota from outside."""
    rows = ROWS(len(x))

    def step(carry, row):
        cache, i = carry
        cache = cache.at[rows, i].set(row)
        return (cache, i + 1), jnp.einsum("bt,b->b", cache, row) + cache[rows, i]

    return lax.scan(step, (x, i), x.T[:3])


def batched(x, i):
    return jax.vmap(pick)(jnp.stack([x, 2 * x]), jnp.stack([i, i]))


def diagonal(x, i):
    return jax.grad(lambda x: (jnp.diag(x) ** 2).sum())(x[:, : len(x)])


PROGRAMS = (pick, pick_from_behind, several, written, loss, decoded, batched, diagonal)


def arguments(n):
    return ramp(n, 16), np.arange(n, dtype="int32") * 5 % 13


def check(f, n, ins, inside=None):
    args, wanted = arguments(n), jax.jit(f)(*arguments(n))

    def annotated(x, i):
        return f(*(lax.with_sharding_constraint(v, inside) for v in (x, i)))

    sharded = sx.shard_jit(annotated if inside else f, mesh=MESH, in_shardings=ins)
    with jax.set_mesh(MESH):
        for got, want in zip(jax.tree.leaves(sharded(*args)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max(initial=1))
        return sharded.plan(*args)


@pytest.mark.promotes_ranks
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_sends_nothing(f):
    assert not check(f, 8, P("x")).collectives


@pytest.mark.promotes_ranks
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_uneven(f):
    check(f, 7, None, P("x"))


@pytest.mark.parametrize("start", [0, 1])
def test_an_iota_elsewhere(start):
    """Rows of a part of the operand, and rows that count from one: they point."""

    def f(x, i):
        return x[start + ROWS(7), i[:7]]

    np.testing.assert_array_equal(
        sx.shard_jit(f, mesh=MESH, in_shardings=P("x"))(*arguments(8)), f(*arguments(8))
    )


COUNT = np.arange(8)


@pytest.mark.parametrize("rows", [COUNT, jnp.arange(8), COUNT.astype("int8")], ids=["numpy", "jax", "int8"])
def test_constants_that_count(rows):
    """What the function closes over is known: nothing is sent, and it is no argument."""
    f = sx.shard_jit(lambda x, i: (x[rows, i], x.at[rows, i].add(1.0)), mesh=MESH, in_shardings=P("x"))
    args = tuple(map(jnp.asarray, arguments(8)))
    plan = f.plan(*args)
    assert not plan.collectives and len(plan.global_jaxpr.in_avals) == 2
    for got, want in zip(
        f(*args), (args[0][COUNT, args[1]], args[0].at[COUNT, args[1]].add(1.0)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("rows", [COUNT[::-1], COUNT + 1, COUNT * 0, COUNT[::2]])
def test_constants_that_do_not_count(rows):
    def f(x, i):
        return x[rows, i[: len(rows)]] * (rows % 8 > -1), jnp.asarray(rows), jnp.asarray(rows > 3)

    args = tuple(map(jnp.asarray, arguments(8)))
    for got, want in zip(sx.shard_jit(f, mesh=MESH, in_shardings=P("x"))(*args), f(*args), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def columns(*parts):
    return lax.concatenate([part[:, None] for part in parts], 1)


def taken(x, *parts):
    """One element for each row of the indices."""
    dims = tuple(range(x.ndim))
    numbers = lax.GatherDimensionNumbers((), dims, dims)
    return lax.gather(x, columns(*parts), numbers, (1,) * x.ndim, mode="clip")


def put(x, y, *parts):
    dims = tuple(range(x.ndim))
    return lax.scatter(x, columns(*parts), y, lax.ScatterDimensionNumbers((), dims, dims))


def test_the_column_that_counts_goes():
    """What is left of the indices is the other column, or the others side by side."""
    i = np.zeros(4, "int32")
    gather = rewritten(
        graph_of(lambda x, i: taken(x, lax.iota("int32", 4), i), np.zeros((4, 9)), i), [batched_indices]
    )
    scatter = rewritten(
        graph_of(
            lambda x, i, y: put(x, y, i, lax.iota("int32", 4), i + 1), np.zeros((9, 4, 9)), i, np.zeros(4)
        ),
        [batched_indices],
    )
    assert (
        str(gather)
        == """\
(a:f32[4,9] b:i32[4])
c:i32[4,1] = broadcast_in_dim b
d:f32[4] = gather a c
-> d"""
    )
    assert (
        str(scatter)
        == """\
(a:f32[9,4,9] b:i32[4] c:f32[4])
d:i32[4] = add b 1
e:i32[4,1] = broadcast_in_dim b
f:i32[4,1] = broadcast_in_dim d
g:i32[4,2] = concatenate e f
h:f32[9,4,9] = scatter a g c
-> h"""
    )
    numbers = [graph.nodes[-1].params["dimension_numbers"] for graph in (gather, scatter)]
    assert (numbers[0].start_index_map, numbers[0].operand_batching_dims) == ((1,), (0,))
    assert (numbers[1].scatter_dims_to_operand_dims, numbers[1].operand_batching_dims) == ((0, 2), (1,))


@pytest.mark.parametrize("n, first", [(4, 1), (3, 0)])
def test_columns_that_point_stay(n, first):
    """Rows that count from one, and rows of a part of the operand."""
    graph = graph_of(
        lambda x, i: taken(x, first + lax.iota("int32", n), i), np.zeros((4, 9)), np.zeros(n, "int32")
    )
    assert rewritten(graph, [batched_indices]) is graph
