"""The pass by which what is gathered to be sent to the host is so piece by piece."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh
from shardax.passes.in_turn import sends
from shardax.passes.moves import is_at_host
from shardax.zero import Zero
from tests.test_on_host import programs
from tests.test_zero import quick_compilation
from tests.zero_steps import step_of

pytestmark = [pytest.mark.mixed_dtypes, pytest.mark.promotes_ranks]

__all__ = ["quick_compilation"]
BOTH = ("optimizer", "parameters")
# Rows of the small ones come two by two, of which seven have one more; what is split along its first dim stays whole.
SHAPES = {"large": (25, 64, 32), "small": (7, 16, 8), "rows": (256, 3)}
SPECS = {"large": P(None, None, "model"), "small": P(None, "model"), "rows": P()}


def sharded(mesh, stage, offload):
    """A step whose parameters are each read elementwise, and are in a product."""

    def loss(params, x_B):
        parts = [jnp.sum(jnp.tanh(w * x_B.mean()) @ jnp.ones(w.shape[-1])) for w in params.values()]
        return jnp.sum(x_B) * 1e-3 + sum(parts) * 1e-3

    specs = SPECS if "model" in mesh.shape else None
    how = {"mesh": mesh, "in_shardings": ((specs, None), P("data")), "donate_argnums": 0}
    axis = ("data", "fsdp") if "fsdp" in mesh.shape else "data"
    zero = Zero(axis, stage, offload=offload)
    return sx.shard_jit(step_of(loss, optax.adamw(1e-2)), transforms=[zero], **how)


def gathers(program) -> list[Any]:
    return [eqn for eqn in program.eqns if eqn.primitive is lax.all_gather_p]


@pytest.mark.quick
@pytest.mark.parametrize("stage", [1, 2])
def test_no_new_parameter_is_whole_on_the_device(stage):
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
    state = params, jax.eval_shape(optax.adamw(1e-2).init, params)
    plan = sharded(mesh, stage, BOTH).plan(state, jax.ShapeDtypeStruct((64,), "float32"))
    found = list(programs(plan.local_jaxpr))
    sizes = {eqn.outvars[0].aval.shape for program in found for eqn in gathers(program)}
    assert SHAPES["large"] not in sizes and SHAPES["small"] not in sizes
    assert {(1, 64, 32), (2, 16, 8), (256, 3)} <= sizes
    bodies = [program for program in found if gathers(program) and any(map(sends, program.eqns))]
    assert all(is_at_host(v) for body in bodies for eqn in filter(sends, body.eqns) for v in eqn.outvars)


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "fsdp": 2, "model": 2}])
def test_results_are_equal(axes, quick_compilation):
    mesh, rng, tx = make_mesh(axes), np.random.default_rng(0), optax.adamw(1e-2)
    params = {name: rng.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}
    xs, found = rng.normal(size=(2, 64)).astype("float32"), []
    for offload in (), BOTH:
        step, state = sharded(mesh, 1, offload), (params, jax.jit(tx.init)(params))
        for x in xs:
            state, _ = step(state, x)
        found.append(state)
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(x, y)
