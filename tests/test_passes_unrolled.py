"""What the TPU compiler would write out whole: the same values, with less code."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.passes import tpu
from tests import on_tpu

TABLE = 12_000, 128  # of bfloat16: 3 MB


def suited(run, *args):
    """The jaxpr for TPUs, and what it gives beside what `run` gives."""
    closed = tpu.suited(jax.make_jaxpr(run)(*args))
    got, want = jax.jit(jaxpr_as_fun(closed))(*args)[0], jax.jit(run)(*args)
    return closed.jaxpr, got, want


def primitives(jaxpr) -> set:
    return {eqn.primitive.name for eqn in jaxpr.eqns}


def table(shape=TABLE, dtype="bfloat16"):
    """Of all bits, which have infinities and numbers that are none among them."""
    bits = np.random.RandomState(0).randint(0, 1 << 16, shape).astype("uint16")
    return lax.bitcast_convert_type(bits, dtype) if dtype in ("bfloat16", "float16") else bits.astype(dtype)


def look_up(x, i, mode="clip", fill=None):
    return x.at[i].get(mode=mode, fill_value=fill, wrap_negative_indices=False)


@pytest.mark.parametrize(
    "mode, fill", [("clip", None), ("fill", None), ("fill", 3.5), ("fill", -np.inf)], ids=str
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lookups_in_words(dtype, mode, fill):
    i = jnp.asarray([[3, -1, 11_999], [12_000, 7, 3]], "int32")
    jaxpr, got, want = suited(lambda x, i: look_up(x, i, mode, fill), table(dtype=dtype), i)
    np.testing.assert_array_equal(np.asarray(got, "float32"), np.asarray(want, "float32"))
    (gather,) = [eqn for eqn in jaxpr.eqns if eqn.primitive is lax.gather_p]
    assert gather.invars[0].aval.dtype == np.uint32


@pytest.mark.parametrize(
    "x",
    {
        "small": table((1000, 128)),
        "larger than is brought": table((40_000, 128)),
        "of words": table(dtype="float32"),
        "of integers": table(dtype="uint16"),
        "of several dims": table((1500, 8, 128)),
    }.items(),
    ids=lambda x: x[0],
)
def test_lookups_left_as_they_are(x):
    _, x = x
    i = jnp.asarray([3, 5], "int32")
    assert str(tpu.suited(jax.make_jaxpr(look_up)(x, i))) == str(jax.make_jaxpr(look_up)(x, i))


def test_parts_of_rows_left_as_they_are():
    def parts(x, i):
        return jax.vmap(lambda j: lax.dynamic_slice(x, (j, 0), (1, 64)))(i)

    x, i = table(), jnp.asarray([3, 5], "int32")
    assert str(tpu.suited(jax.make_jaxpr(parts)(x, i))) == str(jax.make_jaxpr(parts)(x, i))


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, jnp.min])
@pytest.mark.parametrize("shape", [(256, 3, 2, 256), (256, 2, 256), (160, 7, 130)], ids=str)
def test_reductions_in_a_loop(shape, reduce):
    x = jnp.asarray(np.random.RandomState(1).randn(*shape), "float32")
    jaxpr, got, want = suited(lambda x: reduce(x, -1), x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert "scan" in primitives(jaxpr)


@pytest.mark.parametrize(
    "shape, axis, dtype",
    [
        ((256, 3, 2, 256), 2, "float32"),  # another dim
        ((256, 3, 2, 256), (2, 3), "float32"),
        ((256, 3, 8, 256), -1, "float32"),  # a tile of rows by rows
        ((256, 3, 2, 256), -1, "bfloat16"),
        ((8, 3, 2, 256), -1, "float32"),  # small
        ((1024, 3, 2, 256), -1, "float32"),  # more than a window
        ((257, 3, 2, 256), -1, "float32"),  # rows that are no multiple of any
        ((1536, 256), -1, "float32"),
    ],
    ids=str,
)
def test_reductions_left_as_they_are(shape, axis, dtype):
    closed = jax.make_jaxpr(
        lambda x: lax.reduce_sum_p.bind(x, axes=tuple(np.atleast_1d(axis) % len(shape)), out_sharding=None)
    )
    closed = closed(jax.ShapeDtypeStruct(shape, dtype))
    assert str(tpu.suited(closed)) == str(closed)


# Run for a TPU


@pytest.mark.tpu
def test_code_in_the_program_for_tpu():
    for name, (with_pass, without) in on_tpu.found("tests.test_passes_unrolled").items():
        assert with_pass < 0.75 * without, (name, with_pass, without)


def main() -> None:
    """Prints the bytes of code of each program with the pass for TPUs and without it, as JSON."""
    mesh = on_tpu.mesh(data=8)
    whole = P()
    args = {
        "lookup": (look_up, jnp.zeros((32_000, 128), "bfloat16"), jnp.zeros(4096, "int32")),
        "reduction": (lambda x: x.sum(-1), jnp.zeros((256, 3, 2, 256), "float32")),
    }
    found = {}
    for name, (run, *arrays) in args.items():
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        found[name] = [
            sx.shard_jit(
                run, mesh=mesh, in_shardings=(whole,) * len(types), out_shardings=whole, options=options
            )
            .lower(*types)
            .compile()
            .memory_analysis()
            .generated_code_size_in_bytes
            for options in (sx.Options(), sx.Options(passes=()))
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
