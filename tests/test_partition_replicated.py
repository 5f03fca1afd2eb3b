"""What runs replicated: what is gathered so that all devices of an axis do the same, and what has no rule."""

import warnings

import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from shardax.options import Refused
from shardax.partition.replicated import replicated, report_replicated
from tests.choices import SIZES, chosen, laid_out
from tests.graphs import graph

pytestmark = pytest.mark.quick

twice_p = Primitive("twice_without_a_rule")
twice_p.def_abstract_eval(lambda x: x)


def decisions_of(f, shapes, ins, outs=None):
    return chosen(laid_out(graph(f, *shapes), ins, outs))


def found(decisions):
    return [(r.node.name, r.axes) for r in replicated(decisions, SIZES)]


def test_what_is_split_is_not_replicated():
    decisions = decisions_of(jnp.tanh, [(64, 64)], [P("x", "y")])
    assert found(decisions) == []


def test_what_is_gathered_to_be_computed_by_all():
    """A product of one vector is gathered where it must leave whole anyway, which is no replication; a sum
    over cumulative rows of a dim that cannot stay split is."""
    decisions = decisions_of(
        lambda x: lax.linalg.cholesky(x, symmetrize_input=False), [(64, 64)], [P("x")], [P("x")]
    )
    assert found(decisions) == [("cholesky", ("x",))]


def test_what_leaves_whole_is_gathered_anyway():
    decisions = decisions_of(jnp.tanh, [(64, 64)], [P("x")], [P()])
    assert found(decisions) == []


def test_one_report_for_each_line():
    decisions = decisions_of(lambda x: twice_p.bind(twice_p.bind(x)), [(64,)], [P("x")])
    with pytest.warns(UserWarning, match=r"twice_without_a_rule at .* has no sharding rule") as seen:
        report_replicated(decisions, SIZES, strict=False)
    assert len(seen) == 1
    assert "each device sends 192 bytes" in str(seen[0].message)  # 3 times the 16 floats of a shard


def test_strict_refuses_it():
    decisions = decisions_of(lambda x: twice_p.bind(x), [(64,)], [P("x")])
    with pytest.raises(Refused, match=r"Options\(strict=True\): twice_without_a_rule"):
        report_replicated(decisions, SIZES, strict=True)


@pytest.mark.parametrize("allow", ["twice_*", "*test_partition_replicated.py:*"])
def test_what_is_allowed_is_not_reported(allow):
    decisions = decisions_of(lambda x: twice_p.bind(x), [(64,)], [P("x")])
    with warnings.catch_warnings(record=True) as seen:
        report_replicated(decisions, SIZES, strict=True, allow=[allow])
    assert seen == []
