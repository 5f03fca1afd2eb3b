"""What a plan says beside its ledger of collectives: why, shardings, memory, differences, JSON."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.explain.live import live, traffic
from shardax.explain.values import intermediates
from shardax.spmd_rules.registry import RULES, Entry

pytestmark = [pytest.mark.promotes_ranks, pytest.mark.quick]

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
KIB = 1024


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def loss(params, x_BM):
    h_BH = jax.nn.relu(x_BM @ params["up"])
    y_BM = checkpoint_name(h_BH @ params["down"], "second")
    y_BM, _ = lax.scan(lambda c, _: (jnp.tanh(c), None), y_BM, None, length=3)
    return jnp.mean((y_BM + params["bias"]) ** 2)


PARAMS = {"up": shape(16, 32), "down": shape(32, 16), "bias": shape(16)}
SPECS = ({"up": P(None, "model"), "down": None, "bias": None}, P("data"))


ARGS = (PARAMS, shape(8, 16))


def make_plan(fun=loss, specs=SPECS, args=ARGS, **kwargs):
    return sx.shard_jit(fun, mesh=MESH, in_shardings=specs, **kwargs).plan(*args)


def lines_hidden(text: str) -> str:
    return re.sub(r"\.py:\d+", ".py:LINE", text)


@pytest.mark.parametrize("what", ["params/down", "0/down"])
def test_why_of_an_argument(what):
    assert lines_hidden(make_plan().why(what)) == (
        "argument params/down f32[32,16]: P('model')\n  dim 0 is split over model:\n    "
        "tests/test_explain.py:LINE (dot_general) ties it to h_BH f32[8,32] at "
        "tests/test_explain.py:LINE\n    tests/test_explain.py:LINE (max, dot_general) ties that to "
        "argument params/up f32[16,32]\n    in_shardings[0]['up'] says so"
    )


def test_why_of_what_nothing_splits():
    assert make_plan().why("params/bias") == (
        "argument params/bias f32[16]: replicated\n  no annotation asks that it be split"
    )


WHY_H = """\
h_BH f32[8,32] at tests/test_explain.py:LINE: P('data', 'model') (and 1 more there alike)
  dim 0 is split over data:
    tests/test_explain.py:LINE (dot_general) ties it to argument x_BM f32[8,16]
    in_shardings[1] says so
  dim 1 is split over model:
    tests/test_explain.py:LINE (dot_general) ties it to argument params/up f32[16,32]
    in_shardings[0]['up'] says so"""


def test_why_of_a_variable_and_of_its_line():
    here = next(
        i
        for i, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if line.startswith("    h_BH = ")
    )
    plan = make_plan()
    assert lines_hidden(plan.why("h_BH")) == WHY_H
    assert plan.why(f"test_explain.py:{here}") == plan.why("h_BH")


def test_why_of_a_name():
    assert make_plan().why("second").startswith("y_BM f32[8,16] at ")


def test_why_of_a_loop():
    story = make_plan(
        lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x), P("data"), (shape(8, 16),)
    ).why("x")
    assert (
        story == "argument x f32[8,16]: P('data')\n  dim 0 is split over data:\n    in_shardings[0] says so"
    )


@pytest.mark.not_quick
def test_why_of_committed_arguments():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, P("data")))
    plan = sx.shard_jit(lambda x: jnp.sin(x), mesh=mesh).plan(x)
    assert plan.why("x").endswith("\n    argument x rests so")


def test_why_of_annotations_inside():
    plan = make_plan(lambda x: jnp.sin(sx.annotate(jnp.cos(x), P("data"))), None, (shape(8, 4),))
    assert plan.why("x").splitlines()[-1].strip().startswith("annotate")


def test_why_of_state_at_rest():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(x @ w))(w)

    plan = make_plan(step, (P("model"), P("data")), (shape(257, 64), shape(8, 257)), donate_argnums=0)
    assert "state is updated as it rests" in plan.why(
        next(v.line for v in intermediates(plan) if v.primitive == "sub")
    )


def test_why_of_nothing():
    with pytest.raises(ValueError) as error:
        make_plan().why("nothing")
    assert str(error.value) == (
        "why('nothing'): no argument, line or variable of this program is called so. Give an argument's path "
        "('params/bias'), a line of the program ('model.py:12'), or a variable that a line of it assigns"
    )


SHARDINGS = """\
Values, by the line that makes them
tests/test_explain.py:LINE h_BH = jax.nn.relu(x_BM @ params["up"])
dot_general f32[8,32] P('data', 'model')
max f32[8,32] P('data', 'model')
tests/test_explain.py:LINE y_BM = checkpoint_name(h_BH @ params["down"], "second")
dot_general f32[8,16] P('data')
name f32[8,16] P(('data', 'model'))
tests/test_explain.py:LINE y_BM, _ = lax.scan(lambda c, _: (jnp.tanh(c), None), y_BM, None, length=3)
tanh f32[8,16] P(('data', 'model'))
scan f32[8,16] P(('data', 'model'))"""


def words(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in lines_hidden(text).splitlines())


def test_shardings():
    text = make_plan().shardings()
    assert words(text).startswith(SHARDINGS)
    assert max(map(len, text.splitlines())) <= 110


VALUES = """\
tests/test_explain.py:LINE h_BH = jax.nn.relu(x_BM @ params["up"])
P('data', 'model') by x_BM, params/up 2 f32[8,32]
tests/test_explain.py:LINE y_BM = checkpoint_name(h_BH @ params["down"], "second")
P('data') by x_BM 1 f32[8,16]
P(('data', 'model')), chosen over P('data') by x_BM 1 f32[8,16]"""


def test_values_with_what_led_to_their_shardings():
    assert VALUES in words(make_plan().text())


def test_values_of_equal_layers_are_led_to_by_all_of_their_arguments():
    def f(layers, x):
        for layer in layers:
            x = x @ layer["up"]
            x = x @ layer["down"]
        return x

    specs = [{"up": P(None, "model"), "down": P("model")}] * 3, P("data")
    args = [{"up": shape(16, 32), "down": shape(32, 16)}] * 3, shape(8, 16)
    assert "P('data', 'model') by x, layers/{0..2}/up 3 f32[8,32]" in words(make_plan(f, specs, args).text())


def peak(fun, *shapes):
    jaxpr = jax.make_jaxpr(fun)(*map(lambda n: shape(n), shapes)).jaxpr
    return live(jaxpr, jaxpr.invars, jaxpr.invars).peak


def test_what_is_not_read_again_is_freed():
    """Each sort makes a new array: the argument lives on, and two more at a time."""
    assert peak(lambda x: lax.sort(lax.sort(lax.sort(lax.sort(x)))), 256) == 3 * KIB


def test_elementwise_equations_are_fused():
    assert peak(lambda x: jnp.sum(jnp.sin(x) * 2 + 1), 256) == KIB + 4


def test_what_is_read_later_lives_on():
    def f(x):
        a = lax.sort(x)
        b = lax.sort(a)
        return lax.sort(b) @ a

    assert peak(f, 256) == 4 * KIB


def test_the_operands_of_what_is_fused_live_on():
    """sin(a) is computed where it is used, so a lives until then."""

    def f(x):
        a = lax.sort(x)
        kept = jnp.sin(a)
        b = lax.sort(lax.sort(x))
        return kept + b

    assert peak(f, 256) == 4 * KIB


pass_p = Primitive("pass_on")
pass_p.multiple_results = True
pass_p.def_abstract_eval(lambda *xs: list(xs))


@pytest.mark.parametrize("primitive", [lax.optimization_barrier_p, pass_p])
def test_the_results_of_what_moves_nothing_are_its_operands(monkeypatch, primitive):
    """As the registry says, of those of users too."""
    monkeypatch.setitem(RULES, "pass_on", Entry("pass_on", "..., ... -> ..., ...", reads="none"))

    def f(x):
        x, y = primitive.bind(lax.sort(x), lax.sort(x[::-1]))
        return lax.sort(x) @ lax.sort(y)

    through = [
        nbytes for eqn, nbytes in traffic(jax.make_jaxpr(f)(shape(256)).jaxpr) if eqn.primitive is primitive
    ]
    assert peak(f, 256) == 4 * KIB and through == [0]


def test_bodies_add_what_they_make():
    def f(x):
        return lax.scan(lambda c, y: (lax.sort(lax.sort(c)) + y, None), x, jnp.ones((4, 256)))[0]

    # the argument, the stack, the result of the loop; in its body a slice of the stack, two sorts at a time
    assert peak(f, 256) == (1 + 4 + 1 + 1 + 2) * KIB


def test_of_branches_the_dearest_counts():
    def f(x):
        return lax.cond(x[0] > 0, lambda x: x, lambda x: lax.sort(lax.sort(lax.sort(x))) + 1, x)

    assert peak(f, 256) >= 4 * KIB


def test_donated_arguments_are_freed():
    def f(x):
        return lax.sort(lax.sort(x))

    kept = make_plan(f, P(), (shape(256),)).memory()
    donated = make_plan(f, P(), (shape(256),), donate_argnums=0).memory()
    assert (kept.peak, donated.peak) == (3 * KIB, 2 * KIB)


def test_memory():
    memory = make_plan(jax.value_and_grad(loss)).memory(threshold=64)
    assert memory.arguments == {
        "params/bias": 64,
        "params/down": 16 * 16 * 4,
        "params/up": 16 * 16 * 4,
        "x_BM": 2 * 16 * 4,
    }
    assert memory.results == 4 + 64 + 2 * 16 * 16 * 4
    assert sum(t.nbytes for t in memory.tensors) == memory.peak
    assert ("f32[16]", "argument params/bias") in [(x.array, x.origin) for x in memory.replicated]
    assert [t.nbytes for t in memory.tensors] == sorted((t.nbytes for t in memory.tensors), reverse=True)


def layer(x, w):
    h = checkpoint_name(jnp.sin(x @ w), "hidden")
    return jnp.tanh(h @ w.T), None


def scanned_loss(w, x):
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    y, _ = lax.scan(jax.checkpoint(layer, policy=policy), x, w)
    return (layer(checkpoint_name(lax.sort(y), "last"), w[0])[0] ** 2).sum()


def test_what_is_saved_for_the_backward_pass_by_name():
    """Of the loop what the policy names, stacked, and its carry; after it all."""
    args = shape(3, 16, 16), shape(4096, 16)
    memory = make_plan(jax.value_and_grad(scanned_loss), (P(), P(("data", "model"))), args).memory()
    named = {(t.name, t.array): t.nbytes for t in memory.saved if t.name}
    assert named == {
        ("hidden", "f32[3,512,16]"): 3 * 512 * 16 * 4,
        ("hidden", "f32[512,16]"): 512 * 16 * 4,
        ("last", "f32[512,16]"): 512 * 16 * 4,
    }
    assert [t.nbytes for t in memory.saved] == sorted((t.nbytes for t in memory.saved), reverse=True)
    assert "'hidden' tests/test_explain.py:LINE h = checkpoint_name(" in words(str(memory))


def test_a_constant_that_is_saved_has_no_name():
    grad = jax.grad(lambda x: (x * jnp.full(16, 2.0)).sum() ** 2)
    assert {t.name for t in make_plan(grad, (P("data"),), (shape(16),)).memory().saved} == {""}


def test_without_differentiation_nothing_is_saved():
    memory = make_plan().memory()
    assert memory.saved == () and "Saved" not in str(memory)


def test_text_of_memory():
    text = str(make_plan(jax.value_and_grad(loss)).memory(threshold=64))
    assert re.match(
        r"Memory on each device: [\d.]+ KiB at most, at tests/test_explain.py:\d+\n  Arguments\n", text
    )
    assert "\nargument params/down f32[16,16] 1.0 KiB\n" in words(text)
    assert re.search(
        r"\nReplicated, arrays of 64 B and more\n(.*\n)*argument params/bias ", words(text) + "\n"
    )
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.not_quick
def test_lowering_and_compiling_add_to_the_phases():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    f = sx.shard_jit(lambda x: jnp.sin(x).sum(), mesh=mesh, in_shardings=P("data"))
    plan, x = f.plan(shape(8, 4)), jnp.ones((8, 4))
    assert list(plan.phases) == ["trace", "graph", "completion", "choice", "emission", "passes"]
    lowered = f.lower(shape(8, 4))
    assert list(plan.phases)[6:] == ["lower"]
    compiled = lowered.compile()
    assert list(plan.phases)[7:] == ["XLA"] and min(plan.phases.values()) > 0
    assert compiled(jax.device_put(x, compiled.input_shardings[0][0])) == f(x)
    assert "XLA" in plan.text().splitlines()[-1] or "XLA" in plan.text().splitlines()[-2]


def test_diff():
    specs = ({"up": P(None, "model"), "down": P(None, "model"), "bias": None}, P("data"))
    before, after = make_plan(), make_plan(specs=specs)
    assert before.diff(make_plan()) == ""
    lines = before.diff(after).splitlines()
    assert lines[0] == f"each device sends {after.comm_bytes:,} bytes per call, not {before.comm_bytes:,}"
    assert (
        "- reduce_scatter over model of f32[2,16], 64 B each (test_explain.py: sum of dot_general)" in lines
    )
    assert "argument params/down: P(None, 'model'), not P('model')" in lines
    assert any(line.startswith("+ ") for line in lines)


def test_diff_with_a_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(make_plan().to_json())
    assert make_plan().diff(path) == ""
    other = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    lines = sx.shard_jit(loss, mesh=other, in_shardings=SPECS).plan(*ARGS).diff(str(path)).splitlines()
    assert "the mesh is data=4, model=2, not data=2, model=4" in lines


def test_a_file_of_another_program_is_refused(tmp_path):
    """Both places are named."""
    path = tmp_path / "plan.json"
    path.write_text(make_plan().to_json())
    with pytest.raises(ValueError) as error:
        make_plan(scanned_loss, args=(shape(3, 16, 32), shape(8, 16)), specs=None).diff(path)
    assert (
        f"{path} is the plan of another program: it was written for loss (test_explain.py) on the mesh data=4"
        in str(error.value)
    )
    assert "this is scanned_loss (test_explain.py) on data=4, model=2" in str(error.value)
    with pytest.raises(ValueError, match="missing.json is no plan: No such file or directory"):
        make_plan().diff(tmp_path / "missing.json")


def test_the_program_has_its_place():
    assert re.fullmatch(r"loss at tests/test_explain.py:\d+", make_plan().program)
    assert re.fullmatch(r"loss at tests/test_explain.py:\d+", make_plan(jax.value_and_grad(loss)).program)


def test_json():
    plan = make_plan()
    read = json.loads(plan.to_json())
    assert read["mesh"] == {"data": 4, "model": 2}
    assert read["comm_bytes"] == plan.comm_bytes == sum(c["total"] for c in read["collectives"])
    assert read["arguments"][1] == {
        "path": "params/down",
        "array": "f32[32,16]",
        "sharding": "P('model', None)",
    }
    assert {"primitive", "array", "line", "nbytes", "sharding", "shards"} == set(read["values"][0])
    assert read["memory"]["peak"] == plan.memory().peak
    assert {"trace", "completion", "choice", "emission"} <= set(read["phases"])
