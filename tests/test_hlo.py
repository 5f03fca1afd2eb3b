"""What compiled programs say of where they come from: every collective by the user's line, every other
operation as it was.
"""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.explain import hlo

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
HERE = "tests/test_hlo.py"
COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"}


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x_BM):
        h_BH = jnp.sin(nn.Dense(32, name="up")(x_BM))  # up
        return nn.Dense(16, name="down")(h_BH)  # down


def loss(params, x_BM):
    y_BM = MLP().apply({"params": params}, x_BM)
    with jax.named_scope("error"):
        return jnp.mean((y_BM - x_BM) ** 2)  # error


def place(comment: str) -> str:
    number = next(
        i
        for i, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if line.endswith(f"# {comment}")
    )
    return f"{HERE}:{number}"


def places(op: hlo.Operation) -> list[str]:
    return ["/".join(line.split("/")[-2:]) for line in op.lines]


def compiled(fun, specs, *args) -> list[hlo.Operation]:
    step = sx.shard_jit(
        fun, mesh=MESH, in_shardings=specs, options=sx.Options(chip="slow")
    )  # on others so little is gathered
    return list(hlo.operations(step.lower(*args).compile().as_text()))


@pytest.fixture(scope="module")
def step() -> list[hlo.Operation]:
    shapes = jax.eval_shape(lambda key: MLP().init(key, jnp.ones((1, 16)))["params"], jax.random.key(0))
    specs = {"up": {"kernel": P(None, "model"), "bias": None}, "down": None}, P("data")
    return compiled(jax.value_and_grad(loss), specs, shapes, jax.ShapeDtypeStruct((8, 16), "float32"))


def test_every_collective_has_the_users_line_as_a_scope(step):
    found = [op for op in step if op.opcode.removesuffix("-start") in COLLECTIVES]
    assert len(found) >= 2  # XLA combines
    for op in found:
        scope = re.search(rf"(?:^|[/(])(\w+):({HERE}:\d+)(?=[/)]|$)", op.scopes)
        name = op.opcode.removesuffix("-start").replace("collective-permute", "ppermute").replace("-", "_")
        assert scope and scope[1] == name, op
        assert scope[2] in places(op), op
    assert any(place("down") in op.scopes for op in found) and any(
        place("error") in op.scopes for op in found
    )


def test_local_operations_keep_their_lines_and_scopes(step):
    sines = [op for op in step if op.scopes.endswith("/sin")]
    assert sines and all(place("up") in places(op) for op in sines)
    dots = [op for op in step if op.opcode in ("dot", "custom-call") and "dot_general" in op.scopes]
    assert {place("up"), place("down")} <= {line for op in dots for line in places(op)}
    assert all(re.search(r"MLP\)*/(up|down)/", op.scopes) for op in dots), dots
    assert any("transpose(jvp(MLP" in op.scopes for op in dots)
    assert any("error" in op.scopes and place("error") in places(op) for op in step)


def test_collectives_that_rules_make_inside_are_named_too():
    """Halo exchanges, totals of cumulative sums, sorts; inside loops and branches as well."""

    def f(x):
        with jax.named_scope("outer"):
            x = lax.scan(
                lambda c, _: (jnp.cumsum(c, axis=0) + jnp.roll(c, 1, axis=0), None), x, None, length=2
            )[0]
        return lax.cond(x[0, 0] > 0, lambda x: jnp.sort(x, axis=0), lambda x: jnp.flip(x, 0), x)

    ops = [
        op
        for op in compiled(f, P("data"), jax.ShapeDtypeStruct((8, 4), "float32"))
        if op.opcode in COLLECTIVES
    ]
    assert {"collective-permute", "all-gather"} <= {op.opcode for op in ops}
    assert all(re.search(rf"[a-z_]+:{HERE}:\d+/", op.scopes) for op in ops), ops
    assert any("outer" in op.scopes for op in ops)


def test_collectives_at_the_boundary_belong_to_shard_jit():
    f = sx.shard_jit(lambda x: x, mesh=MESH, in_shardings=P("data"), out_shardings=P(None, "data"))
    (op,) = [
        op for op in hlo.operations(f.lower(jnp.ones((8, 8))).compile().as_text()) if op.opcode in COLLECTIVES
    ]
    assert "/all_to_all:shard_jit/" in op.scopes or "/all_to_all:tests/test_hlo.py:" in op.scopes
