"""What rests otherwise than wanted is priced both ways, as the ledger has it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

pytestmark = pytest.mark.quick

MESH = AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))
WIDE, ODD = jax.ShapeDtypeStruct((257, 64), "float32"), jax.ShapeDtypeStruct((257, 33), "float32")
BLOCK, GATHER = (
    65 * 64 // 4 * 3 * 4,
    65 * 33 * 3 * 4,
)  # bytes: an all_to_all of 65 rows of 64, a gather of 65 rows of 33


def moved(f, *args, **options):
    plan = sx.shard_jit(f, mesh=MESH, **options).plan(*args)
    assert sum(map(plan.cost_at_rest, plan.at_rest)) == plan.comm_bytes, [str(c) for c in plan.collectives]
    return [(m.path, str(m.requested), str(m.stored), m.came, m.left) for m in plan.at_rest]


WANTED, ASIDE, WHOLE = "P('d', None)", "P(None, 'd')", "P(None, None)"


def sort_rows(x):
    return jnp.sort(x, axis=1)


def test_in_and_out():
    assert moved(sort_rows, WIDE, in_shardings=P("d"), out_shardings=P("d")) == [
        ("argument x", WANTED, ASIDE, BLOCK, 0),
        ("result", WANTED, ASIDE, 0, BLOCK),
    ]


def test_a_donated_argument_counts_what_succeeds_it():
    assert moved(sort_rows, WIDE, in_shardings=P("d"), donate_argnums=0) == [
        ("argument x", WANTED, ASIDE, BLOCK, BLOCK)
    ]


def test_results_that_nobody_annotated():
    """Two of them that are alike, each with its own price."""
    slow = sx.Options(chip="slow")  # on others every device computes so little for itself
    assert moved(lambda x, y: (x * 2, y + 1), ODD, ODD, in_shardings=P("d"), options=slow) == [
        ("argument x", WANTED, WHOLE, 0, 0),
        ("argument y", WANTED, WHOLE, 0, 0),
        ("result 0", WANTED, WHOLE, 0, GATHER),
        ("result 1", WANTED, WHOLE, 0, GATHER),
    ]


@pytest.mark.parametrize("rows", [256, 4])
def test_what_divides_is_not_listed(rows):
    assert moved(lambda x: x * 2, jax.ShapeDtypeStruct((rows, 33), "float32"), in_shardings=P("d")) == []
