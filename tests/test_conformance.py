"""A stratified sample of JAX's own primitive cases. `make conformance` runs them all."""

import pytest

from tests import conformance


def _failures(names):
    outcomes = [outcome for batch in conformance.batches(names) for outcome in conformance.run_batch(batch)]
    assert len(outcomes) == len(names)
    assert sum(outcome.verdict == "equal" for outcome in outcomes) > len(names) // 2
    return [
        f"{o.verdict}: {o.case} on {conformance.mesh_of(o.case)}: {o.note}"
        for o in outcomes
        if o.verdict in ("wrong", "refused")
    ]


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("part", range(2))
def test_one_case_of_each_primitive(part):
    assert not _failures(conformance.selected(sample=140)[part::2])


@pytest.mark.slow
@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("part", range(4))
def test_several_cases_of_each_primitive(part):
    assert not _failures(conformance.selected(sample=840)[140 + part :: 4])


@pytest.mark.mixed_dtypes
def test_a_wrong_result_is_found(monkeypatch):
    name = "sort_dtypes_num_arrays_1_shape_float32_5_7_axis_0_isstable_False_num_keys_1"
    assert [o.verdict for o in conformance.run_batch([name])] == ["equal"]
    monkeypatch.setattr(conformance, "_sharded", lambda name, args: conformance.cases()[name].dyn_fun(*(-x for x in args)))
    assert [o.verdict for o in conformance.run_batch([name])] == ["wrong"]
