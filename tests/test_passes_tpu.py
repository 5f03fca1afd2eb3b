"""all_to_alls as the TPU compiler likes them: the same values, and only whole leading pieces are sent."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.passes import tpu

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def on_devices(run, rank, axes, dim):
    """`run` on shards split along `dim`, which leaves what it makes stacked in front, as a jaxpr of one
    argument.
    """
    spec = [None] * rank
    spec[dim] = axes
    mapped = jax.shard_map(
        lambda x: run(x)[None], mesh=MESH, in_specs=P(*spec), out_specs=P(("x", "y")), check_vma=False
    )
    return lambda x: jax.make_jaxpr(mapped)(x)


def all_to_alls(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.all_to_all_p:
            yield eqn
        for param in eqn.params.values():
            yield from (
                all_to_alls(getattr(param, "jaxpr", param))
                if hasattr(param, "eqns") or hasattr(param, "jaxpr")
                else ()
            )


def same_values(jaxpr, x):
    suited = tpu.suited(jaxpr)
    (got,), (want,) = jax.jit(jaxpr_as_fun(suited))(x), jax.jit(jaxpr_as_fun(jaxpr))(x)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    return list(all_to_alls(suited.jaxpr))


@pytest.mark.parametrize("axes", ["y", ("x", "y"), ("y", "x")], ids=str)
@pytest.mark.parametrize("cut, join", list(itertools.permutations(range(3), 2)))
def test_every_pair_of_dims(cut, join, axes):
    x = jnp.arange(8 * 16 * 24, dtype=jnp.bfloat16).reshape(8, 16, 24)
    run = on_devices(lambda x: lax.all_to_all(x, axes, cut, join, tiled=True), 3, axes, join)
    (eqn,) = same_values(run(x), x)
    assert (eqn.params["split_axis"], eqn.params["concat_axis"]) == (0, 0)


@pytest.mark.parametrize(
    "shape, cut, join",
    [
        ((8, 64, 4, 24), 0, 3),  # narrow pieces whose rows fill the lanes
        ((8, 3, 40), 0, 2),  # and whose rows do not
        ((4, 256, 2048), 2, 1),  # large ones, cut from a dim and joined along another one
        ((4, 2048, 256), 1, 2),
        ((4, 512, 4, 128), 1, 2),  # few heads on each device, in front of the features of each
        ((4, 256, 64, 128), 2, 1),
        ((8, 2, 3, 5), 0, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("axes", ["y", ("x", "y")], ids=str)
def test_large_pieces_and_narrow_ones(shape, cut, join, axes):
    x = jnp.asarray(np.random.RandomState(0).randn(*shape), jnp.bfloat16)
    run = on_devices(lambda x: lax.all_to_all(x, axes, cut, join, tiled=True), len(shape), axes, join)
    shards = jnp.concatenate([x] * (8 if len(axes) == 2 else 2), join)
    (eqn,) = same_values(run(shards), shards)
    assert (eqn.params["split_axis"], eqn.params["concat_axis"]) == (0, 0)


LONG_SUMS = [
    # rows, width, indices, how many of them at once; what becomes of indices past the rows
    (50, 256, (4, 1024), 2048, "drop"),
    (50, 256, (4, 1024), 2048, "clip"),
    (50, 128, (4096,), 2048, "promise_in_bounds"),
    (50, 384, (8, 1023), 2046, "drop"),
    (50, 384, (5, 1021), 1021, "drop"),
    (50, 200, (4096,), None, "drop"),
    (50, 256, (2048,), None, "drop"),
    (50, 256, (4099,), None, "drop"),  # a prime number
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows, width, shape, at_once, mode", LONG_SUMS)
def test_long_sums_of_rows_by_index(rows, width, shape, at_once, mode, dtype):
    """Whole numbers, whose sums bfloat16 has exactly."""
    rng, most = np.random.RandomState(0), rows if mode == "promise_in_bounds" else 2 * rows
    indices = jnp.asarray(rng.randint(0, most, shape), "int32")
    values = jnp.asarray(rng.choice([-1, 0, 0, 0, 1], (*shape, width)), dtype)
    x = jnp.asarray(rng.randint(-4, 5, (rows, width)), dtype)

    def run(x, indices, values):
        return x.at[indices].add(values, mode=mode)

    jaxpr = jax.make_jaxpr(run)(x, indices, values)
    suited = tpu.suited(jaxpr)
    (sums,) = (eqn for eqn in walk(suited.jaxpr) if eqn.primitive is lax.scatter_add_p)
    assert sums.invars[1].aval.shape == ((at_once, 1) if at_once else (*shape, 1))
    (got,), (want,) = (jax.jit(jaxpr_as_fun(j))(x, indices, values) for j in (suited, jaxpr))
    np.testing.assert_array_equal(got, want)


def walk(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from walk(inner)


def test_sums_that_stay():
    """Windows are no rows, indices come in order or once, or each row of a batch has its own."""
    x, indices = jnp.ones((50, 256)), jnp.zeros(4096, "int32")
    for run in (
        lambda x, i: jnp.zeros((256, 50)).at[:, i].add(jnp.ones((256, 4096))),
        lambda x, i: jnp.zeros((50, 256)).at[i, 3].add(x[0, 0]),
        lambda x, i: x.at[i].add(jnp.ones((4096, 256)), indices_are_sorted=True),
        lambda x, i: x.at[i].add(jnp.ones((4096, 256)), unique_indices=True),
        lambda x, i: jax.vmap(lambda x, i: x.at[i].add(1.0))(x[None].repeat(2, 0), i.reshape(2, 2048)),
    ):
        jaxpr = jax.make_jaxpr(run)(x, indices)
        assert tpu.suited(jaxpr) is jaxpr


def test_in_a_loop():
    def run(x):
        def step(x, _):
            return (
                lax.all_to_all(lax.all_to_all(x, "x", 1, 0, tiled=True), "x", 0, 1, tiled=True) + 1.0,
                None,
            )

        return lax.scan(step, x, length=3)[0]

    x = jnp.arange(32.0).reshape(8, 4)
    eqns = same_values(on_devices(run, 2, "x", 0)(x), x)
    assert [(eqn.params["split_axis"], eqn.params["concat_axis"]) for eqn in eqns] == [(0, 0)] * 2


def test_what_stays():
    """One dim that is cut and joined, and what is not tiled."""
    x = jnp.arange(64.0).reshape(8, 8)
    for run in (lambda x: lax.all_to_all(x, "x", 1, 1, tiled=True), lambda x: lax.psum(x, "x")):
        jaxpr = on_devices(run, 2, "x", 0)(x)
        assert tpu.suited(jaxpr) is jaxpr


def scattered_products(order, extra=lambda scattered, product: ()):
    """Products whose sums are scattered along dim 0 and then transposed, on each device's shard of 2 rows."""

    def run(x):
        product = jnp.einsum("bi,bjk->ijk", x, x[:, :8].reshape(*x.shape[:1], 2, 4))
        scattered = lax.psum_scatter(product, "x", scatter_dimension=0, tiled=True)
        return (jnp.transpose(scattered, order), *extra(scattered, product))

    return run


def primitives_of(jaxpr):
    (mapped,) = jaxpr.jaxpr.eqns
    return [eqn.primitive.name for eqn in mapped.params["jaxpr"].eqns]


def scattered_on_devices(run, width=8):
    mapped = jax.shard_map(run, mesh=MESH, in_specs=P("x"), out_specs=P(), check_vma=False)
    return jax.make_jaxpr(mapped)(jnp.arange(8.0 * width).reshape(8, width))


@pytest.mark.parametrize("width", [8, 1024])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:], ids=str)
def test_products_are_transposed_before_their_sums_are_scattered(order, width):
    """But where little of the minor-most dim would be left by that: such a scatter becomes an all_reduce."""
    jaxpr = scattered_on_devices(scattered_products(order), width)
    names = ["reduce_scatter", "transpose"]
    assert primitives_of(jaxpr)[-2:] == names
    suited = tpu.suited(jaxpr)
    stays = order[-1] == 0 and width == 8
    assert primitives_of(suited)[-2:] == (names if stays else names[::-1])
    x = jnp.arange(8.0 * width).reshape(8, width) % 7
    (got,), (want,) = (jax.jit(jaxpr_as_fun(j))(x) for j in (suited, jaxpr))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "extra",
    [lambda scattered, product: (scattered,), lambda scattered, product: (product + 1.0,)],
    ids=["the sum is read", "the product is read"],
)
def test_what_others_read_too_stays(extra):
    jaxpr = scattered_on_devices(scattered_products((1, 0, 2), extra))
    assert tpu.suited(jaxpr) is jaxpr


def test_what_is_scattered_is_so_before_slices_are_taken():
    def run(x):
        scattered = lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True)
        return lax.dynamic_slice_in_dim(scattered, lax.axis_index("y"), 1, 0)

    suited = tpu.suited(jaxpr := scattered_on_devices(run))
    names = primitives_of(suited)
    assert names[names.index("reduce_scatter") + 1] == "optimization_barrier"
    x = jnp.arange(64.0).reshape(8, 8)
    (got,), (want,) = (jax.jit(jaxpr_as_fun(j))(x) for j in (suited, jaxpr))
    np.testing.assert_array_equal(got, want)


def test_a_literal_that_is_transposed_stays():
    jaxpr = jax.make_jaxpr(lambda x: lax.transpose_p.bind(2.0, permutation=()) * x)(1.0)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["transpose", "mul"]
    assert tpu.suited(jaxpr) is jaxpr


def test_lowered_for_tpus_only():
    def swap(x):
        return sx.annotate(sx.annotate(x * 2.0, P("x", None)) * 3.0, P(None, "x"))

    jitted = sx.shard_jit(swap, mesh=MESH, in_shardings=P("x", None))
    traced = jitted.trace(jax.ShapeDtypeStruct((8, 256), "float32"))
    texts = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("tpu", "cuda")}
    cuts = {platform: "split_dimension = 0" in text for platform, text in texts.items()}
    assert all("all_to_all" in text for text in texts.values()) and cuts == {"tpu": True, "cuda": False}
