"""Refs (`jax.new_ref`) that a function closes over: read and written as under `jax.jit`, and they stay where
they are.
"""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

MESHES = {
    kind: jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    for kind in (AxisType.Auto, AxisType.Explicit)
}


def ramp(*shape):
    return np.arange(np.prod(shape), dtype="float32").reshape(shape)


def adds(ref, _):
    def f(x):
        ref[...] += x
        return x * 2.0, ref[...].sum(0)

    return f


def reads(ref, _):
    return lambda x: x * ref[...]


def has_one_of_its_own(ref, _):
    def f(x):
        own = jax.new_ref(x)
        own[...] += ref[...]
        ref[...] = own[...] * 2.0
        return own[...]

    return f


def swaps_two(ref, other):
    def f(x):
        ref[...], other[...] = other[...] + x, ref[...]
        return x.T

    return f


def writes_rows(ref, _):
    def f(x):
        ref[2] = x[0] * 3.0
        return jax.lax.fori_loop(0, 4, lambda i, y: y + ref[i].sum(), x)

    return f


def called(make, jit, kind, spec):
    """What two calls return, what the Refs hold then, and the shardings of these."""
    mesh = MESHES[kind]
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    refs = jax.new_ref(put(ramp(8, 8), *spec)), jax.new_ref(put(ramp(8, 8) + 1.0))
    with jax.set_mesh(mesh):
        f = jit(make(*refs))
        returned = f(put(ramp(8, 8), "x")), f(put(ramp(8, 8) * 2.0, "x"))
    return jax.tree.leaves((returned, [ref[...] for ref in refs])), [ref[...].sharding for ref in refs], f


@pytest.mark.parametrize("spec", [("x",), (None, "y"), ("x", "y")])
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("make", [adds, reads, has_one_of_its_own, swaps_two, writes_rows])
def test_as_under_jit(make, kind, spec):
    if make is writes_rows and kind is AxisType.Explicit:
        pytest.skip("JAX indexes no Ref of an Explicit type")
    got, rests, _ = called(make, sx.shard_jit, kind, spec)
    want, want_rests, _ = called(make, jax.jit, kind, spec)
    assert rests == want_rests
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_plan_reads_and_writes_nothing():
    """It knows where the Ref rests, and stays: only what lies otherwise is sent."""
    mesh = MESHES[AxisType.Auto]
    ref = jax.new_ref(jax.device_put(ramp(8, 8), NamedSharding(mesh, P("x"))))
    f = sx.shard_jit(lambda x: ref.__setitem__(..., ref[...] + x), mesh=mesh, in_shardings=P("x"))
    plan = f.plan(ramp(8, 8))
    assert plan.comm_bytes == 0 and "closed over" not in str(plan)
    np.testing.assert_array_equal(ref[...], ramp(8, 8))
    f = sx.shard_jit(lambda x: ref.__setitem__(..., x), mesh=mesh, in_shardings=P(None, "y"))
    assert f.plan(ramp(8, 8)).comm_bytes > 0


def test_uneven_and_beside_arrays():
    mesh, weights = MESHES[AxisType.Auto], ramp(7, 5)
    ref = jax.new_ref(jax.device_put(ramp(7, 5), NamedSharding(mesh, P())))

    def f(x):
        ref[...] = ref[...] * 2.0 + x * weights
        return ref[...].sum(0)

    out = sx.shard_jit(f, mesh=mesh, in_shardings=P("x"))(ramp(7, 5))
    want = ramp(7, 5) * 2.0 + ramp(7, 5) ** 2
    np.testing.assert_allclose(ref[...], want)
    np.testing.assert_allclose(out, want.sum(0))
