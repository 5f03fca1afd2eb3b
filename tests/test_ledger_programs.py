"""Plans of many programs say exactly what the lowered programs send, and, after the listed rewritings, the
compiled ones.
"""

from collections import Counter

import jax
import pytest
from jax.sharding import AxisType

from shardax.explain import hlo
from shardax.ledger.collectives import Collective
from tests.ledger_programs import PROGRAMS

pytestmark = pytest.mark.mixed_dtypes
LARGE = ("gpt2 2x4", "gpt2 2x2x2")  # compiled by `make test-slow` and `make test-tpu`


def planned_and_lowered(name: str):
    """Which agree in kinds, devices, bytes and trips: none hidden, none missing."""
    program = PROGRAMS[name]
    axis_types = (AxisType.Auto,) * len(program.mesh)
    f, args = program.make(jax.make_mesh(tuple(program.mesh.values()), tuple(program.mesh), axis_types))
    planned, lowered = f.plan(*args).collectives, f.lower(*args)
    assert hlo.counts(hlo.lowered(lowered.compiler_ir())) == hlo.counts(planned)
    return planned, lowered


def test_there_are_enough_that_send():
    assert len(PROGRAMS) >= 20


@pytest.mark.promotes_ranks
@pytest.mark.parametrize("name", [LARGE[0], pytest.param(LARGE[1], marks=pytest.mark.once)])
def test_lowered(name):
    planned_and_lowered(name)


@pytest.mark.promotes_ranks
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in PROGRAMS]
)
def test_lowered_and_compiled_for_cpu(name):
    planned, lowered = planned_and_lowered(name)
    compiled = hlo.compiled(lowered.compile().as_text())
    only_planned, only_compiled, applied = hlo.normalized(planned, compiled, "cpu")
    print(name, dict(applied))
    assert (only_planned, only_compiled) == (Counter(), Counter())


def sent(kind: str, dtype: str, size: int, trips: int = 1) -> Collective:
    return Collective(kind, ("x",), 4, 1, (jax.ShapeDtypeStruct((size,), dtype),), trips)


def test_what_is_rewritten_is_listed():
    """A bfloat16 sum as float32; of two equal ones in a program that computes twice, one. Nothing else is
    explained away.
    """
    planned = [
        sent("all_reduce", "bfloat16", 32),
        *[sent("reduce_scatter", "float32", 32)] * 2,
        sent("all_gather", "int8", 32),
    ]
    compiled = [
        sent("all_reduce", "float32", 32),
        sent("reduce_scatter", "float32", 32),
        sent("all_to_all", "int8", 8),
    ]
    only_planned, only_compiled, applied = hlo.normalized(planned, compiled, "cpu")
    assert only_planned == {("all_gather", 4, 32, ""): 1}
    assert only_compiled == {("all_to_all", 4, 8, ""): 1}
    assert applied == {"sums of bfloat16 and float16 are sent as float32": 1, hlo.CSE: 1}


def test_the_rewritings_of_tpus():
    planned = [
        sent("all_gather", "float32", 32),
        sent("reduce_scatter", "int8", 16),
        sent("all_reduce", "int8", 8, trips=3),
    ]
    compiled = [
        sent("all_gather", "bfloat16", 32),
        sent("all_reduce", "int8", 16),
        sent("all_reduce", "int8", 24),
    ]
    assert hlo.normalized(planned, compiled, "tpu")[:2] == (Counter(), Counter())
    assert sum(hlo.normalized(planned, compiled, "cpu")[0].values()) == 3


def test_what_is_half_of_one_is_not_taken_for_the_whole_of_another():
    planned = [sent("all_gather", "float32", 8), sent("all_gather", "float32", 16)]
    compiled = [sent("all_gather", "bfloat16", 8), sent("all_gather", "bfloat16", 16)]
    *left, applied = hlo.normalized(planned, compiled, "tpu")
    assert left == [Counter(), Counter()] and list(applied.values()) == [2]
