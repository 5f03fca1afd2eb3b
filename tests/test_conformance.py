"""A stratified sample of JAX's own primitive cases. `make conformance` runs them all."""

import pytest

from tests import conformance


def _failures(names):
    outcomes = [outcome for batch in conformance.batches(names) for outcome in conformance.run_batch(batch)]
    assert len(outcomes) == len(names)
    assert sum(outcome.verdict == "equal" for outcome in outcomes) > len(names) // 2
    return conformance.failures(outcomes)


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("part", range(2))
def test_one_case_of_each_primitive(part):
    assert not _failures(conformance.selected(sample=140)[part::2])


@pytest.mark.mixed_dtypes
def test_a_wrong_result_is_found(monkeypatch):
    name = "sort_dtypes_num_arrays_1_shape_float32_5_7_axis_0_isstable_False_num_keys_1"
    assert [o.verdict for o in conformance.run_batch([name])] == ["equal"]
    monkeypatch.setattr(
        conformance, "_sharded", lambda name, args, *_: conformance.cases()[name].dyn_fun(*(-x for x in args))
    )
    assert [o.verdict for o in conformance.run_batch([name])] == ["wrong"]


def test_what_fails():
    outcomes = [conformance.Outcome("sort", f"case_{v}", v, gathered) for v, gathered in OUTCOMES]
    assert [words.split(":")[:2] for words in conformance.failures(outcomes)] == [
        ["wrong", " case_wrong"],
        ["refused", " case_refused"],
        ["replicated", " case_equal"],
    ]
    assert "NOT MEANT" in conformance.table(outcomes)


OUTCOMES = [("equal", ()), ("skipped", ()), ("wrong", ()), ("refused", ()), ("equal", (("my_own", 800),))]


def test_what_is_small_is_told_and_meant():
    rev = conformance.Outcome("rev", "case", "equal", small=(("rev", 120),))
    assert not conformance.failures([rev])
    assert [line.split() for line in conformance.table([rev]).splitlines()[-2:]] == [
        ["small"],
        "rev 1 cases 120 B".split(),
    ]


# (words of the case, seed) of those that once gathered what another dim could have been split over
SPREAD = [
    ("conv_general_dilated_group_counts_lhs_float32_2_6_9_10_rhs_float32_6_3_4_5_", 42),
    ("scatter_mul_no_xla_unique_indices_shape_uint8_4_2_3_5_", 42),
    ("dot_general_different_dtypes_lhs_uint32_4_3_rhs_float32_3_6_", 1),
    ("dot_general_squeeze_lhs_float32_4_rhs_float32_4_4_", 2),
    ("cholesky_shape_float32_2_5_5_", 42),
]


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize(("words", "seed"), SPREAD)
def test_idle_axes_are_tried_on_other_dims(words, seed):
    batches = conformance.batches(conformance.selected(words=words), seed)
    outcomes = [outcome for batch in batches for outcome in conformance.run_batch(batch, seed)]
    assert {o.verdict for o in outcomes} == {"equal"} and not conformance.failures(outcomes)


def test_few_primitives_may_be_replicated():
    assert len(conformance.MEANT) <= 10 and all(conformance.MEANT.values())


def test_another_seed_draws_others():
    names = conformance.selected(sample=40)
    assert conformance.selected(sample=40) == names
    assert [conformance.mesh_of(n, 1) for n in names] != [conformance.mesh_of(n) for n in names]
