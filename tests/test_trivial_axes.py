"""Meshes with axes of one device, as configurations have them that name every axis and use few: results, and
the shardings in which they come, are those of `jax.jit`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.check import ramp

pytestmark = [pytest.mark.mixed_dtypes, pytest.mark.promotes_ranks]
AXES = ("stage", "data", "fsdp", "model")
AUTO = (AxisType.Auto,) * 4
X = ramp(8, 16)


def mesh_of(*sizes, types=AUTO):
    return jax.make_mesh(sizes, AXES, axis_types=types, devices=jax.devices()[: np.prod(sizes)])


MESH = mesh_of(1, 4, 1, 2)


@pytest.mark.parametrize("sizes", [(1, 4, 1, 2), (1, 1, 1, 1), (1, 1, 8, 1)], ids=str)
@pytest.mark.parametrize("spec", [P("fsdp"), P(("fsdp", "data"), "stage"), P("data", "fsdp"), P()], ids=str)
def test_results_come_in_the_shardings_that_were_asked_for(sizes, spec):
    mesh = mesh_of(*sizes)
    step = sx.shard_jit(
        lambda x, w: jnp.sin(x) @ w, mesh=mesh, in_shardings=(spec, P("fsdp", "model")), out_shardings=spec
    )
    wanted = jax.jit(lambda x, w: jnp.sin(x) @ w, out_shardings=NamedSharding(mesh, spec))(X, X.T)
    for _ in range(2):
        found = step(X, X.T)
        assert found.sharding == wanted.sharding
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert step.plan(X, X.T).in_shardings[0].spec == P(*spec, *[None] * (2 - len(spec)))


def test_state_that_comes_back_is_taken_as_it_is():
    step = sx.shard_jit(lambda s: s + 1, mesh=MESH, in_shardings=P("fsdp", "data"), donate_argnums=0)
    state = jax.device_put(X, NamedSharding(MESH, P("fsdp", "data")))
    after = step(step(state))
    assert state.is_deleted()
    assert after.sharding.spec == P("fsdp", "data")
    np.testing.assert_array_equal(after, X + 2)


def collectives(s):
    s = lax.all_gather(s, "fsdp", axis=0, tiled=True)
    s = lax.psum_scatter(s, "fsdp", scatter_dimension=0, tiled=True)
    s = lax.ppermute(lax.all_to_all(s, "fsdp", 0, 1, tiled=True), "fsdp", [(0, 0)])
    place = lax.axis_index("fsdp") + lax.axis_index(("fsdp", "stage")) + lax.axis_size(("stage", "fsdp"))
    return lax.psum(s, ("stage", "fsdp")) * place + lax.axis_index(("data", "fsdp"))


def varying(s):
    s = lax.pcast(s, ("fsdp", "stage"), to="varying")
    s, _ = lax.scan(lambda c, _: (c + lax.axis_index("fsdp") + 1, None), s, None, length=3)
    return lax.pmean(s, ("fsdp", "stage")) * lax.axis_size("data")


def nested(s):
    return jax.shard_map(
        lambda s: lax.psum(s, "stage") + lax.axis_index("stage"),
        in_specs=P("stage"),
        out_specs=P("stage"),
        axis_names={"stage"},
    )(s)


@pytest.mark.parametrize(
    "body, how",
    [
        (collectives, {"in_specs": P("data", "fsdp"), "out_specs": P("data", "fsdp"), "check_vma": False}),
        (varying, {"in_specs": P("data"), "out_specs": P("data")}),
        (nested, {"in_specs": P("data"), "out_specs": P("data"), "axis_names": {"data"}}),
        (
            nested,
            {
                "in_specs": P(("fsdp", "data")),
                "out_specs": P(("data", "fsdp")),
                "axis_names": {"fsdp", "data"},
            },
        ),
    ],
)
def test_islands_may_name_them(body, how):
    island = jax.shard_map(body, mesh=MESH, **how)

    def f(x):
        return jax.grad(lambda x: jnp.sum(island(jnp.sin(x)) ** 2))(x)

    for specs in ((P("data", "fsdp"),), (P(None, "model"),)):
        found = sx.shard_jit(f, mesh=MESH, in_shardings=specs)(X)
        np.testing.assert_allclose(found, jax.jit(f)(X), rtol=1e-5)


def test_types_name_them():
    """In Explicit axes the type of a result is that of `jax.jit`."""
    mesh = mesh_of(1, 4, 1, 2, types=(AxisType.Explicit,) * 4)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P(("data", "fsdp"))))
        w = jax.device_put(X.T, NamedSharding(mesh, P(None, ("stage", "model"))))
        found, wanted = (compiled(jnp.dot)(x, w) for compiled in (sx.shard_jit, jax.jit))
        assert jax.typeof(found) == jax.typeof(wanted)
        assert found.sharding == wanted.sharding
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_what_is_chosen_does_not_name_them():
    step = sx.shard_jit(lambda x, w: x @ w, mesh=MESH, in_shardings=(P(("data", "fsdp")), P("fsdp", "model")))
    plan = step.plan(X, X.T)
    layouts = [
        layout for _, decision in plan.decisions.pairs() for layout in (*decision.operands, *decision.results)
    ]
    assert layouts
    assert not {"stage", "fsdp"}.intersection(*[lay.sharding.axes for lay in layouts])
    assert not plan.collectives
