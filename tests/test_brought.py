"""The pass by which unrolled code brings arrays at the host shortly before it reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType

from models.devices import make_mesh
from shardax import _jax
from shardax.passes.brought import brought
from shardax.passes.moves import is_at_host
from shardax.zero.offload import at_host

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
MESH = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))

pytestmark = pytest.mark.quick


def bring(x):
    return jax.device_put(x, DEVICE)


def program(function, x, *ws):
    """The jaxpr of an array of shape `x`, and of others at the host, before the pass and after it."""
    with jax.sharding.use_abstract_mesh(MESH):
        types = [at_host(jax.ShapeDtypeStruct(shape, "float32")) for shape in ws]
        before = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(x, "float32"), *types)
        after = brought(before)
    made = [v for eqn in after.jaxpr.eqns for v in eqn.outvars]
    assert len(made) == len(set(made))
    return before, after


def steps(closed) -> list[str]:
    """Its products, and for each copy of an array its place among the arguments, and what it waits for."""
    jaxpr, said, source = closed.jaxpr, [], {}
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for n, v in enumerate(jaxpr.invars):
        source[v] = str(n)
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.optimization_barrier_p and source.get(eqn.invars[1]):
            waits = makers[eqn.invars[0]].primitive.name if eqn.invars[0] in makers else "argument"
            source[eqn.outvars[1]] = f"{source[eqn.invars[1]]} after {waits}"
        elif eqn.primitive.name == "device_put" and _jax.is_literal(eqn.invars[0]) is False:
            (v,), (out,) = eqn.invars, eqn.outvars
            if str(out.aval).find("<host>") >= 0:
                source[out] = source[v]
            else:
                said.append(f"bring {source[v]}")
        elif eqn.primitive in (lax.dot_general_p, lax.scan_p):
            said.append(eqn.primitive.name)
    return said


def layers(x, *ws):
    for w in ws:
        x = jnp.tanh(x @ bring(w))
    return x


def test_each_waits_for_the_one_before():
    before, after = program(layers, (8, 16), *[(16, 16)] * 4)
    assert steps(before) == [s for n in range(1, 5) for s in (f"bring {n}", "dot_general")]
    assert steps(after) == [
        *("bring 1", "bring 2", "dot_general"),  # nothing is computed before the first product
        *("bring 3 after tanh", "dot_general"),
        *("bring 4 after tanh", "dot_general", "dot_general"),
    ]


def test_the_backward_pass_brings_again():
    """But for the last layer, with which it begins."""

    def gradient(x, *ws):
        def loss(x):
            return layers(x, *ws).sum()

        return jax.grad(loss)(x)

    _, after = program(gradient, (8, 16), *[(16, 16)] * 3)
    found = [s.split()[1] for s in steps(after) if s.startswith("bring")]
    assert found == ["1", "2", "3", "2", "1"]
    waiting = [s for s in steps(after) if s.startswith("bring") and "after" in s]
    assert len(waiting) == 3, "all but the first two"


def test_the_first_waits_for_what_it_is_computed_with():
    """As logits behind a loop over layers: it would be there all the time."""

    def f(x, stack, w, *_):
        x = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, lax.slice(stack, (0, 0, 0), (2, 16, 16)))[0]
        return x @ bring(w)

    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 16), (3, 16, 16))]
    before = jax.make_jaxpr(f)(*types, at_host(jax.ShapeDtypeStruct((16, 16), "float32")))
    eqns = brought(before).jaxpr.eqns
    (barrier,) = (eqn for eqn in eqns if eqn.primitive is lax.optimization_barrier_p)
    (loop,) = (eqn for eqn in eqns if eqn.primitive is lax.scan_p)
    assert barrier.invars == [loop.outvars[0], before.jaxpr.invars[2]]


def test_a_cast_goes_along_and_before_a_barrier():
    """As checkpointed layers read: what waits at the barrier is half as large."""

    def f(x, *ws):
        for w in ws:
            w, x = lax.optimization_barrier((bring(w), x))
            x = jnp.tanh(x @ w.astype("bfloat16").astype("float32"))
        return x

    _, after = program(f, (8, 16), *[(16, 16)] * 3)
    barriers = [eqn for eqn in after.jaxpr.eqns if eqn.primitive is lax.optimization_barrier_p]
    own = [eqn for eqn in barriers if not any(map(is_at_host, eqn.invars))]
    assert ["bfloat16" in {str(v.aval.dtype) for v in eqn.invars} for eqn in own] == [True] * 3
    casts = [n for n, eqn in enumerate(after.jaxpr.eqns) if eqn.outvars[0].aval.dtype == jnp.bfloat16]
    assert casts


def test_what_is_near_is_brought_once():
    """And what is far is brought anew, such as an embedding that the logits read again."""

    def f(x, *ws):
        x = x @ bring(ws[0])
        x = layers(x, *ws)
        return x @ bring(ws[0])

    _, after = program(f, (8, 16), *[(16, 16)] * 12)
    found = [s.split()[1] for s in steps(after) if s.startswith("bring")]
    assert found == ["1", *map(str, range(2, 13)), "1"]


def test_norms_come_one_after_the_other():
    def f(x, *ws):
        total = x.sum()
        for w in ws:
            total = total + (bring(w) ** 2).sum()
        return total

    _, after = program(f, (8, 16), *[(16, 16)] * 4)
    found = [s for s in steps(after) if "after" in s]
    assert len(found) == 4


def test_small_arrays_and_loops_stay():
    def f(x, *ws):
        x = layers(x, ws[0]) + bring(ws[1])[None]
        return lax.scan(lambda h, w: (jnp.tanh(h @ bring(w)), None), x, ws[2])[0]

    before, after = program(f, (8, 256), (256, 256), (256,), (3, 256, 256))
    assert steps(after) == steps(before)
    for one, other in zip(*(x.jaxpr.eqns[-1].params.values() for x in (before, after)), strict=True):
        assert one is other or not _jax.is_jaxpr(one) or str(one) == str(other)


@pytest.mark.not_quick
def test_results_are_equal():
    device = jax.devices()[0]
    with jax.sharding.use_abstract_mesh(make_mesh({"data": 1}).abstract_mesh):
        types = [at_host(jax.ShapeDtypeStruct((16, 16), "float32")) for _ in range(4)]
        f = lambda x, *ws: jax.value_and_grad(lambda x: layers(x, *ws).sum())(x)  # noqa: E731
        before = jax.make_jaxpr(f)(jax.ShapeDtypeStruct((8, 16), "float32"), *types)
        after = brought(before)
    rng = np.random.default_rng(0)
    place = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    ws = [jax.device_put(rng.normal(size=(16, 16)).astype("float32"), place) for _ in range(4)]
    x = rng.normal(size=(8, 16)).astype("float32")
    for got, wanted in zip(*(jax.jit(jaxpr_as_fun(p))(x, *ws) for p in (after, before)), strict=True):
        np.testing.assert_array_equal(got, wanted)
