"""The pass by which the host cuts out layers that share tiles with others: results are the same, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from models.devices import make_mesh
from shardax.passes.blocks import tiled_dims
from shardax.passes.layers import cut_out
from shardax.passes.moves import is_at_host
from shardax.zero.offload import at_host

DEVICE = jax.memory.Space.Device
TILED_OVER_LAYERS, TILED_WITHIN = (8, 13, 100), (8, 16, 128)


def program(reverse, shape):
    """A loop over two stacks, one at the host, that carries and gives something."""

    def run(x, at_host, on_device):
        def layer(h, rows):
            w = jax.device_put(rows[0], DEVICE)
            return jnp.tanh(h @ w) @ w.T + rows[1][None], h[0]

        return lax.scan(layer, x, (at_host, on_device), reverse=reverse)

    types = [jax.ShapeDtypeStruct(each, "float32") for each in ((4, shape[1]), shape, (shape[0], shape[1]))]
    types[1] = at_host(types[1])
    return jax.make_jaxpr(run)(*types)


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_are_cut_out(reverse):
    assert 0 in tiled_dims(TILED_OVER_LAYERS)
    with jax.sharding.use_abstract_mesh(make_mesh({"data": 1}).abstract_mesh):
        before = program(reverse, TILED_OVER_LAYERS)
        after = cut_out(before)
    (loop,) = (eqn for eqn in after.jaxpr.eqns if eqn.primitive is lax.scan_p)
    consts = [v for v in loop.invars if is_at_host(v)]
    assert consts == [after.jaxpr.invars[1]] and loop.invars.index(consts[0]) == 0
    rng = np.random.default_rng(0)
    kinds = ["pinned_host" if is_at_host(v) else "device" for v in before.jaxpr.invars]
    places = [jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind) for kind in kinds]
    args = [
        jax.device_put(rng.normal(size=a.shape).astype("float32"), place)
        for a, place in zip(before.in_avals, places, strict=True)
    ]
    for got, wanted in zip(*(jax.jit(jaxpr_as_fun(each))(*args) for each in (after, before)), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.quick
def test_layers_of_whole_tiles_stay():
    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        before = program(False, TILED_WITHIN)
        assert cut_out(before) is before
