"""Callbacks and prints in a partitioned program are called once, on the global value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

X = np.arange(15, dtype=np.float32).reshape(5, 3) - 7


def _run(f, *args):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    out = jax.block_until_ready(sx.shard_jit(f, mesh=mesh, in_shardings=P("x", "y"))(*args))
    jax.effects_barrier()
    return out


def test_print(capfd):
    _run(lambda a: jax.debug.print("{} of {}", a.sum(), a[1]), X)
    assert capfd.readouterr().out == "0.0 of [-4. -3. -2.]\n"


def test_print_in_a_loop_and_a_branch(capfd):
    def f(a):
        def trip(total, row):
            lax.cond(row[0] > 0, lambda: jax.debug.print("row {}", row), lambda: None)
            return total + row, None

        return lax.scan(trip, jnp.zeros(3), a)[0]

    _run(f, X)
    assert capfd.readouterr().out.splitlines() == ["row [2. 3. 4.]", "row [5. 6. 7.]"]


def test_callbacks_in_loops_are_called_once_a_trip():
    """On rows that are split over the devices, whose trips would not depend on each other but for the
    calls.
    """
    seen = []

    def f(a):
        return lax.map(
            lambda row: jax.pure_callback(lambda r: seen.append(np.asarray(r)) or r * 2, row, row), a
        )

    np.testing.assert_array_equal(_run(f, X), 2 * X)
    np.testing.assert_array_equal(seen, X)


@pytest.mark.parametrize("call", [jax.debug.callback, lambda f, x: io_callback(f, None, x)])
def test_callback(call):
    seen = []
    _run(lambda a: call(lambda x: seen.append(np.asarray(x)), jnp.abs(a)), X)
    np.testing.assert_array_equal(seen, [np.abs(X)])


@pytest.mark.parametrize("call", [jax.pure_callback, io_callback])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_results_of_callbacks(call, dtype):
    """Exactly what Python returned, on every device."""
    calls, answer = [], np.asarray([[0.0, 1.0, np.nan], [-0.0, 2.0, np.inf]], "float32")
    answer = (
        answer.astype(jnp.dtype(dtype))
        if dtype[0] in "fc" or dtype == "bfloat16"
        else np.asarray([[0, 1, 1], [1, 0, 1]], dtype)
    )

    def f(a):
        result = call(
            lambda x: calls.append(1) or answer, jax.ShapeDtypeStruct(answer.shape, answer.dtype), a
        )
        return sx.annotate(result, P(None, "y"))

    assert np.asarray(_run(f, X)).tobytes() == answer.tobytes()
    assert calls == [1]


def test_inspect_sharding():
    seen = []
    _run(lambda a: (jax.debug.inspect_array_sharding(a, callback=seen.append), a.sum()), X)
    assert [sharding.spec for sharding in seen] == [P("x", "y")]


def test_ordered_effects_are_refused():
    with pytest.raises(
        ValueError,
        match=r"debug_print at .*test_effects.py:\d+ is ordered, and several devices have no common",
    ):
        _run(lambda a: jax.debug.print("{}", a, ordered=True), X)
