"""The benchmark that compiles for TPUs: reading costs off compiled text, its workloads, and the figures that
it prints.
"""

import json
import os
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType

import shardax as sx
from benchmarks import ticks, tpu
from benchmarks.hlo_cost import Cost, branches, cost
from benchmarks.shifting_buffer import shifting_buffer
from benchmarks.workloads import workloads
from shardax.cost import noted
from shardax.cost.chips import V3
from shardax.pipeline.schedules import make_schedule
from tests import on_tpu

pytestmark = pytest.mark.once

LOOP = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}

%all-reduce-scatter.1 (input: bf16[8,64]) -> bf16[2,64] {
  %input = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[8,64]{1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %zero = u32[] constant(0)
  ROOT %slice = bf16[2,64]{1,0} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={2,64}
}

%first_half (p: bf16[2,64]) -> bf16[2,64] {
  %p = bf16[2,64]{1,0} parameter(0)
  ROOT %sent.1 = bf16[2,64]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}, frontend_attributes={chain_id="7"}
}

%second_half (p: bf16[2,64]) -> bf16[2,64] {
  %p.1 = bf16[2,64]{1,0} parameter(0)
  ROOT %sent.2 = bf16[2,64]{1,0} collective-permute(%p.1), source_target_pairs={{0,1},{1,0}}, frontend_attributes={chain_id="7"}
}

%body (state: (s32[], bf16[2,64])) -> (s32[], bf16[2,64]) {
  %state = (s32[]{:T(256)}, bf16[2,64]{1,0}) parameter(0)
  %i = s32[]{:T(256)} get-tuple-element(%state), index=0
  %i.copy = s32[]{:T(256)S(6)} copy(%i)
  %step = s32[]{:T(256)} constant(STEP)
  %next = s32[]{:T(256)} add(%i.copy, %step)
  %x.1 = bf16[2,64]{1,0} get-tuple-element(%state), index=1
  %all-gather.1 = bf16[8,64]{1,0} all-gather(%x.1), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %product = bf16[8,64]{1,0} fusion(%all-gather.1), kind=kOutput, calls=%add, backend_config={"estimated_cycles":"1000"}
  %fusion.1 = bf16[2,64]{1,0} fusion(%product), kind=kCustom, calls=%all-reduce-scatter.1
  %fusion.2 = bf16[2,64]{1,0} fusion(%fusion.1), kind=kLoop, calls=%first_half, backend_config={"estimated_cycles":"10"}
  %fusion.3 = bf16[2,64]{1,0} fusion(%fusion.2), kind=kLoop, calls=%second_half, backend_config={"estimated_cycles":"10"}
  ROOT %result = (s32[]{:T(256)}, bf16[2,64]{1,0}) tuple(%next, %fusion.3)
}

%condition (state.1: (s32[], bf16[2,64])) -> pred[] {
  %bound = s32[]{:T(256)} constant(32)
  %state.1 = (s32[]{:T(256)}, bf16[2,64]{1,0}) parameter(0)
  %i.1 = s32[]{:T(256)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(1024)} compare(%i.1, %bound), direction=LT
}

ENTRY %main (p.2: bf16[2,64]) -> bf16[2,64] {
  %p.2 = bf16[2,64]{1,0} parameter(0)
  %start = s32[]{:T(256)} constant(START)
  %start.1 = s32[]{:T(256)} copy(%start)
  %scaled = bf16[2,64]{1,0} multiply(%p.2, %p.2), backend_config={"window_config":{"estimated_cycles":"5"}}
  %initial = (s32[]{:T(256)}, bf16[2,64]{1,0}) tuple(%start.1, %scaled)
  %while.1 = (s32[]{:T(256)}, bf16[2,64]{1,0}) while(%initial), condition=%condition, body=%body
  ROOT %x.2 = bf16[2,64]{1,0} get-tuple-element(%while.1), index=1
}
"""


def loop(start: int = 0, step: int = 1) -> str:
    return LOOP.replace("START", str(start)).replace("STEP", str(step))


@pytest.mark.parametrize("start, step, trips", [(0, 1, 32), (0, 2, 16), (1, 1, 31), (1, 2, 16), (40, 1, 0)])
def test_a_loop_costs_its_body_times_its_trips(start, step, trips):
    """Of a gathered or scattered bf16[8,64] a device sends three quarters; a chain of permutes is one."""
    found = cost(loop(start, step))
    assert found.cycles == 5 + trips * 1020
    assert found.sent == +Counter(all_gather=trips * 768, reduce_scatter=trips * 768, ppermute=trips * 256)
    assert found.times == dict.fromkeys(found.sent, trips)


@pytest.mark.parametrize(
    "known, unknown",
    [
        (
            "%bound = s32[]{:T(256)} constant(32)",
            "%bound = s32[]{:T(256)} get-tuple-element(%state.1), index=0",
        ),
        ("%step = s32[]{:T(256)} constant(1)", "%step = s32[]{:T(256)} negate(%i)"),
        ("%start = s32[]{:T(256)} constant(0)", "%start = s32[]{:T(256)} get-dimension-size(%p.2)"),
        ("while(%initial)", "while(%p.2)"),
    ],
)
def test_a_loop_that_counts_by_no_constants(known, unknown):
    assert known in loop()
    with pytest.raises(
        ValueError, match="the loop %while.1 does not count from a constant by a constant up to one"
    ):
        cost(loop().replace(known, unknown))


def test_of_a_branch_the_dearest_counts():
    branches = """%dear (p.3: bf16[2,64]) -> bf16[2,64] {
  ROOT %p.3 = bf16[2,64]{1,0} negate(%p.3), backend_config={"estimated_cycles":"70"}
}

%cheap (p.4: bf16[2,64]) -> bf16[2,64] {
  ROOT %p.4 = bf16[2,64]{1,0} negate(%p.4), backend_config={"estimated_cycles":"7"}
}

ENTRY"""
    for names in ("branch_computations={%cheap, %dear}", "true_computation=%dear, false_computation=%cheap"):
        chosen = f"  %chosen = bf16[2,64]{{1,0}} conditional(%p.2, %p.2, %p.2), {names}\n  %start ="
        text = loop().replace("ENTRY", branches).replace("  %start =", chosen)
        assert cost(text).cycles == cost(loop()).cycles + 70


BRANCHES = "".join(
    f"""%branch_{cycles} (p: bf16[2,64]) -> bf16[2,64] {{
  ROOT %q_{cycles} = bf16[2,64]{{1,0}} negate(%p), backend_config={{"estimated_cycles":"{cycles}"}}
}}

"""
    for cycles in (1, 10, 100)
)
SWITCH = (
    "  %made = bf16[2,64]{1,0} conditional(%i, %x.1, %x.1, %x.1), "
    "branch_computations={%branch_1, %branch_10, %branch_100}\n  %next ="
)


def scheduled() -> str:
    before, after = loop().split("%body (", 1)
    return before + BRANCHES + "%body (" + after.replace("  %next =", SWITCH, 1)


def test_a_tick_is_as_long_as_its_longest_branch():
    """32 ticks of two stages: in 5 of them one stage runs the long branch, in one both the middle one."""
    table = np.zeros((32, 2), int)
    table[:5, 1], table[5] = 2, 1
    assert cost(scheduled(), table).cycles == cost(loop()).cycles + 5 * 100 + 10 + 26
    assert cost(scheduled()).cycles == cost(loop()).cycles + 32 * 100
    each = branches(scheduled(), table)
    assert [branch.cycles for branch in each] == [1, 10, 100]
    assert ticks.bubbles(table, each, V3) == pytest.approx(1 - (5 * 50.5 + 10 + 26) / 536)


def test_parts_of_an_instruction_in_several_conditionals():
    """The second conditional has one more for instruction 2, which the first one idles through."""
    table = np.zeros((32, 2), int)
    table[:5, 1], table[5] = 2, 1
    names = '{}, metadata={{op_name="jit(f)/while/body/branches {} by table/cond"}}'
    first = "branch_computations={%branch_1, %branch_10}"
    second = "true_computation=%branch_100, false_computation=%branch_1"
    parts = "".join(
        f"  %made.{i} = bf16[2,64]{{1,0}} conditional(%i, %x.1, %x.1), {names.format(each, taken)}\n"
        for i, (each, taken) in enumerate([(first, "0.1.0"), (second, "0.0.1")])
    )
    text = scheduled().replace(SWITCH, parts + "  %next =")
    assert [branch.cycles for branch in branches(text, table)] == [2, 11, 101]
    assert cost(text, table).cycles == cost(loop()).cycles + 5 * 101 + 11 + 26 * 2


def test_a_table_that_does_not_fit():
    table = np.zeros((31, 2), int)
    table[0, 0] = 2
    with pytest.raises(ValueError, match="0 conditionals have the schedule's 3 branches and 31 ticks"):
        cost(scheduled(), table)


@pytest.mark.parametrize(
    "schedule, chunks", [("1f1b", 1), ("eager-1f1b", 1), ("interleaved", 2), ("zb-h1", 1)]
)
def test_branches_of_a_pipelined_program(schedule, chunks):
    """The table is that of the program."""
    table = ticks.branch_table(make_schedule(schedule, 4, 8, chunks))
    np.testing.assert_array_equal(table, program_table(schedule, chunks))


def program_table(schedule: str, chunks: int) -> np.ndarray:
    mesh = AbstractMesh((4,), ("stage",), axis_types=(AxisType.Auto,))

    def loss(params, x):
        return (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2).mean()

    grad = sx.pipeline.value_and_grad(loss, microbatches=8, schedule=schedule, chunks=chunks)
    args = jax.ShapeDtypeStruct((16, 8, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
    with jax.sharding.use_abstract_mesh(mesh):
        closed = jax.make_jaxpr(grad)(*args)
    return next(table for table in tables(closed.jaxpr) if table.shape[1] > 1)


def tables(jaxpr):
    """Those by which conditionals take branches."""
    for eqn in jaxpr.eqns:
        if note := noted.branches_of(eqn):
            yield note.table
        for inner in jaxprs_in_params(eqn.params):
            yield from tables(inner)


def test_seconds_are_cycles_over_the_clock_and_bytes_over_the_links():
    total = cost(loop())
    assert total.compute_seconds(V3) == total.cycles / 0.94e9
    assert total.seconds(V3) == total.compute_seconds(V3) + 32 * (768 + 768 + 256) / 164e9
    assert (total * 3).sent["all_gather"] == 3 * total.sent["all_gather"]
    assert total + Cost() == total


# The workloads.


@pytest.mark.parametrize(
    "name", [name for name, w in workloads().items() if w.published and w.published.utilization]
)
def test_utilization_is_the_papers(name):
    """At its step time. It does not print its formula, and its two figures for (8, 32) contradict each
    other.
    """
    workload = workloads()[name]
    assert workload.published is not None and workload.published.utilization is not None
    found = workload.utilization(workload.published.seconds)
    assert found == pytest.approx(
        0.241 if name == "table3-16b-8x32" else workload.published.utilization, rel=0.03
    )


SIZES = {
    "64b": 64,
    "128b": 128,
    "256b": 256,
    "512b": 512,
    "1t": 1024,
    "16b": 16,
}  # in units of 2^30, as the paper counts


@pytest.mark.parametrize("name", [name for name in workloads() if name.startswith("table")])
def test_models_have_the_sizes_that_their_names_say(name):
    sizes = [SIZES[word] for word in name.split("-") if word in SIZES] or [64]
    assert [parameters(name, "layers") / 2**30] == pytest.approx(sizes)


def test_llamas_sizes():
    assert parameters("llama-8b") == 8_030_261_248
    assert (
        parameters("llama-1b-accumulated") == 1_498_482_688
    )  # 1.24 billion, and logits that are not the embedding


@pytest.mark.promotes_ranks
@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("name, billions", [("2b", 2.02), ("4b", 4.01), ("8b", 7.87), ("16b", 15.99)])
def test_gpt2s_sizes(name, billions):
    assert parameters(f"zero-gpt2-{name}") / 1e9 == pytest.approx(billions, rel=0.005)


def parameters(name: str, part: str | None = None) -> int:
    params, _, _ = abstract_step(name).args
    return sum(array.size for array in jax.tree.leaves(params[part] if part else params))


@pytest.mark.promotes_ranks
@pytest.mark.mixed_dtypes  # optax mixes them
@pytest.mark.parametrize(
    "name", ["tiny", "llama-8b", "llama-1b-accumulated", "tiny-pipelined", "zero-gpt2-4b"]
)
def test_a_step_gives_what_it_takes(name):
    step = abstract_step(name)
    params, state, loss = jax.eval_shape(step.run, *step.args)
    assert jax.tree.map(described, (params, state)) == jax.tree.map(described, step.args[:2])
    assert loss.shape == ()


def abstract_step(name: str):
    axes = workloads()[name].axes
    return workloads()[name].step(
        AbstractMesh((*axes.values(),), (*axes,), axis_types=(AxisType.Auto,) * len(axes))
    )


def described(array) -> tuple:
    return array.shape, array.dtype


def test_columns_of_tables():
    tables = "table1", "table2", "table3", "table4", "conformer"
    assert [sum(name.startswith(table) for name in workloads()) for table in tables] == [3, 7, 6, 5, 6]
    of_zero, others = (
        {w.devices for name, w in workloads().items() if name.startswith("zero") == zero}
        for zero in (True, False)
    )
    assert of_zero == {4, 8, 16, 32, 64}
    assert others == {8, 16, 64, 128, 256, 512, 2048}


@pytest.mark.parametrize(
    "name", [name for name, w in workloads().items() if w.published and w.published.bubbles]
)
def test_bubbles_of_the_buffer_are_the_papers(name):
    """It measured them: about a percent less than by the formula."""
    workload = workloads()[name]
    assert workload.published is not None
    assert workload.ways["buffer"].bubbles == pytest.approx(workload.published.bubbles, rel=0.15)
    stages = workload.axes["stage"]
    assert all(way.table is None or way.table.shape[1] == stages for way in workload.ways.values())


@pytest.mark.parametrize("stages, repeats", [(3, 1), (3, 2), (2, 3)])
def test_a_shifting_buffer_computes_what_its_layers_do(stages, repeats):
    """Values and gradients; with several repeats the stack is in the order of stages."""
    w, x = (
        jax.random.normal(jax.random.key(i), shape) / 2 for i, shape in enumerate([(12, 4, 4), (5, 3, 4)])
    )
    order = np.arange(12).reshape(repeats, stages, -1).swapaxes(0, 1).reshape(-1)

    def layer(x, w):
        return x + jnp.tanh(x @ w)

    def buffered(w, x):
        return (shifting_buffer(layer, stages, repeats=repeats)(w[order], x) ** 2).sum()

    def plain(w, x):
        return (lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2).sum()

    found, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(w, x) for f in (buffered, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), found, wanted)


def test_too_few_microbatches_for_a_buffer():
    run = shifting_buffer(lambda x, w: x @ w, 3, repeats=2)
    with pytest.raises(ValueError, match="2 microbatches go round 3 stages"):
        run(jnp.ones((6, 4, 4)), jnp.ones((2, 3, 4)))


# What is printed and written.


def test_table():
    workload = workloads()["table2-64b-8x16"]
    total = cost(loop()) * 10**6
    found = tpu.figures(workload, total) | {"peak HBM, GiB": 3.0}
    text = tpu.table(
        {"jax.jit": found, "shard_jit": found | {"seconds": 2 * found["seconds"]}, "paper": {"seconds": 5.74}}
    )
    rows = {line[:30].strip(): line[30:].split() for line in text.splitlines()}
    assert rows[""] == ["jax.jit", "shard_jit", "paper", "ratio"]
    assert rows["seconds"] == ["35.1", "70.2", "5.74", "2.000"]
    assert rows["GB sent in all"] == ["57.3", "57.3", "1.000"]
    assert rows["collectives run"] == ["96,000,000", "96,000,000", "1.000"]
    assert "GB sent by all_to_all" not in rows
    assert rows["peak HBM, GiB"] == ["3.00", "3.00", "1.000"]


def test_list_and_wrong_names(capsys):
    assert tpu.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(workloads())
    for names, message in (
        (["zero-tiny", "--ways", "jax.jit"], "--ways jax.jit: name two or more of jax.jit, zero 3, zero 2,"),
        (["zero-tiny", "--ways", "jax.jit,zero 4"], "--ways jax.jit,zero 4: name two or more of jax.jit"),
        (["tiny", "gpt-5"], "no such workload: gpt-5 (--list shows them)"),
        ([], "name a workload"),
    ):
        with pytest.raises(SystemExit):
            tpu.main(names)
        assert message in capsys.readouterr().err


def test_json_is_never_there_in_part(tmp_path):
    tpu.write(tmp_path / "figures.json", {"tiny": {}})
    assert json.loads((tmp_path / "figures.json").read_text()) == {"tiny": {}}
    assert os.listdir(tmp_path) == ["figures.json"]


@pytest.mark.tpu
def test_a_small_step_compiles_for_a_tpu(tmp_path):
    on_tpu.run("benchmarks.tpu", "tiny", "--json", str(tmp_path / "figures.json"))
    columns = json.loads((tmp_path / "figures.json").read_text())["tiny"]
    assert set(columns) == {"jax.jit", "shard_jit"}
    # 0.716 of the bytes and 0.976 of the seconds, for 1.013 of the memory; another plan of the same price, to the
    # picosecond, and of as many bytes has 0.966 of the seconds
    for what, most in {"GB sent in all": 0.72, "seconds": 0.98, "peak HBM, GiB": 1.02}.items():
        assert columns["shard_jit"][what] <= most * columns["jax.jit"][what], what
    for figures in columns.values():
        assert 0 < figures["of it in use at once"] <= figures["peak HBM, GiB"]
        assert figures["code, MiB"] > 0


@pytest.mark.tpu
def test_a_small_pipelined_step_compiles_for_a_tpu(tmp_path):
    file = tmp_path / "figures.json"
    on_tpu.run("benchmarks.tpu", "tiny-pipelined", "--json", str(file))
    columns = json.loads(file.read_text())["tiny-pipelined"]
    assert set(columns) == {"buffer", "eager-1f1b"}
    assert columns["eager-1f1b"]["seconds"] < 1.25 * columns["buffer"]["seconds"]
    for figures in columns.values():
        assert 0 < figures["bubbles, %"] < 40
