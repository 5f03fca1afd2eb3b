"""To what sizes the parts of a program are padded, each by itself."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.partition.paddings import joined_axes, paddings_of

pytestmark = pytest.mark.quick

MESH = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def finely(a):
    """Ten rows over eight devices: padded to 16."""
    return sx.annotate(jnp.tanh(sx.annotate(a * 2, P(("x", "y")))), P(("x", "y")))


def coarsely(a):
    """Ten rows over four devices: padded to 12."""
    return sx.annotate(jnp.sin(sx.annotate(a * 3, P("x"))), P("x"))


def padded(f, *args):
    """The padded sizes that the arrays of a program's operations have, over x."""
    plan = sx.shard_jit(f, mesh=MESH).plan(*args)
    paddings = paddings_of(plan.graph, plan.values)
    return [paddings.of(v).padded(10, ("x",)) for node in plan.graph.nodes for v in node.outputs]


def test_what_stands_side_by_side_is_padded_apart():
    assert set(padded(lambda a, b: finely(a), floats(10, 8), floats(10, 8))) == {16}
    sizes = padded(lambda a, b: (finely(a), coarsely(b)), floats(10, 8), floats(10, 8))
    assert sizes == [16] * (len(sizes) // 2) + [12] * (len(sizes) // 2)


def test_what_is_made_of_one_another_is_padded_alike():
    """Across bodies too; numbers join nothing."""
    assert set(padded(lambda a: coarsely(finely(a)), floats(10, 8))) == {16}

    def looped(a, b):
        body = lambda c, _: (finely(c), None)  # noqa: E731
        return lax.scan(body, coarsely(a), None, length=2)[0], coarsely(b)

    sizes = padded(looped, floats(10, 8), floats(10, 8))
    assert sizes[:3] == [16] * 3 and sizes[-3:] == [12] * 3


def test_a_program_sends_no_more_beside_one_that_is_split_more_finely():
    def one(a):
        return jnp.sum(finely(a) ** 2)

    def other(b, w):
        return sx.annotate(coarsely(b @ w), P(None, "x"))

    def sent(f, *args):
        return sx.shard_jit(f, mesh=MESH).plan(*args).comm_bytes

    a, b, w = floats(10, 8), floats(10, 64), floats(64, 64)
    both = sent(lambda a, b, w: (one(a), other(b, w)), a, b, w)
    assert both == sent(one, a) + sent(other, b, w)


def test_axes_that_a_part_only_uses_together():
    """In one part x and y split a dim together, in the other x alone does."""

    def both(a, b):
        return finely(a), coarsely(b)

    plan = sx.shard_jit(both, mesh=MESH).plan(floats(16, 8), floats(16, 8))
    joined = joined_axes(plan.graph, plan.values)
    assert [joined.get(v, ()) for v in plan.graph.outputs] == [(("x", "y"),), ()]
    alone = sx.shard_jit(lambda b: coarsely(b), mesh=MESH).plan(floats(16, 8))
    assert not joined_axes(alone.graph, alone.values)
