"""What users' tests call, and the texts with which they fail."""

import json
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.testing import assert_max_bytes, assert_no_collectives, assert_plan

pytestmark = pytest.mark.quick

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def shapes(*shapes):
    return tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)


ARGS = shapes((8, 16), (16, 32), (32, 16))


def mlp(x, up, down):
    return jax.nn.relu(x @ up) @ down


def on_mesh(specs, fun=mlp, mesh=MESH):
    return sx.shard_jit(fun, mesh=mesh, in_shardings=specs)


MEGATRON = (P("data"), P(None, "model"), P("model"))
OTHER = (P("data"), P(None, "model"), P(None, "model"))


def written(path):
    with pytest.warns(
        UserWarning,
        match=f"assert_plan wrote the plan of mlp to {re.escape(str(path))}: read it, and commit it",
    ):
        assert_plan(on_mesh(MEGATRON), ARGS, path)
    return path


def failure(error, *args, **kwargs) -> str:
    with pytest.raises(error) as raised:
        assert_plan(*args, **kwargs)
    return re.sub(r"\S*/(?=plan.json)", "", str(raised.value))


def test_the_file(tmp_path):
    assert json.loads(written(tmp_path / "plans" / "plan.json").read_text()) == {
        "program": "mlp",
        "mesh": "data=4, model=2",
        "types": {"x": "f32[8,16]", "up": "f32[16,32]", "down": "f32[32,16]"},
        "comm_bytes": 128,
        "collectives": [
            "all_reduce over model of f32[2,16], 128 B each (test_testing.py: sum of dot_general)"
        ],
        "arguments": {"x": "P('data')", "up": "P(None, 'model')", "down": "P('model')"},
        "results": {"": "P('data')"},
        "place": "test_testing.py",
    }


def test_the_same_plan_passes(tmp_path):
    path = written(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_plan(on_mesh(MEGATRON), ARGS, str(path))


def test_another_plan_fails(tmp_path):
    assert failure(AssertionError, on_mesh(OTHER), ARGS, written(tmp_path / "plan.json")) == (
        "the plan of mlp is not that of plan.json:\n  - all_reduce over model of f32[2,16], 128 B each "
        "(test_testing.py: sum of dot_general)\n  + all_gather over model of f32[2,16], 128 B each "
        "(test_testing.py: dot_general in P('data', None))\n  argument down: P(None, 'model'), not "
        "P('model')\n  result (the value): P('data', 'model'), not P('data')\nIf that is meant, write the "
        "file anew: assert_plan(..., update=True)"
    )


def test_update(tmp_path):
    path = written(tmp_path / "plan.json")
    with pytest.warns(UserWarning, match="wrote the plan of mlp"):
        assert_plan(on_mesh(OTHER), ARGS, path, update=True)
    assert_plan(on_mesh(OTHER), ARGS, path)


def test_a_plan_of_another_program(tmp_path):
    path = written(tmp_path / "plan.json")

    def other(x, up, down):
        return x @ up @ down

    assert failure(ValueError, on_mesh(MEGATRON, other), ARGS, path) == (
        "plan.json is the plan of another program: it was written for mlp (test_testing.py) on the mesh "
        "data=4, model=2, this is other (test_testing.py) on data=4, model=2. Give each its own file, or "
        "write this one anew: assert_plan(..., update=True)"
    )


def test_a_plan_of_a_function_of_the_same_name_elsewhere(tmp_path):
    path = written(tmp_path / "plan.json")
    path.write_text(path.read_text().replace('"test_testing.py"', '"other.py"'))
    words = failure(ValueError, on_mesh(MEGATRON), ARGS, path)
    assert (
        "it was written for mlp (other.py) on the mesh data=4, model=2, this is mlp (test_testing.py) on"
        in words
    )


def test_a_plan_on_another_mesh(tmp_path):
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    words = failure(ValueError, on_mesh(MEGATRON, mesh=mesh), ARGS, written(tmp_path / "plan.json"))
    assert (
        "is the plan of mlp (test_testing.py) on another mesh, data=4, model=2; this is on data=2, "
        "model=4. Give" in words
    )


def test_a_plan_of_other_arguments(tmp_path):
    args = shapes((8, 16), (16, 64), (64, 16))
    assert failure(ValueError, on_mesh(MEGATRON), args, written(tmp_path / "plan.json")) == (
        "plan.json is the plan of mlp (test_testing.py) on other arguments:\n"
        "  up: f32[16,64], not f32[16,32]\n"
        "  down: f32[64,16], not f32[32,16]\n"
        "Give each its own file, or write this one anew: assert_plan(..., update=True)"
    )


@pytest.mark.parametrize("text", ["", "[]", '{"program": "mlp"}'])
def test_no_plan(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    words = (
        "plan.json is no plan: neither assert_plan nor Plan.to_json wrote it. Delete it, or give another file"
    )
    assert failure(ValueError, on_mesh(MEGATRON), ARGS, path) == words


def test_lines_may_move(tmp_path):
    """Edits above a line, and the folder that the repository lies in, change nothing."""

    def program(blank):
        text = "\n" * blank + "def f(x):\n    return sx.annotate(x, P()) * 2\n"
        namespace = {"sx": sx, "P": P}
        exec(compile(text, f"/home/{'a' * blank}/model.py", "exec"), namespace)
        return on_mesh(P("data"), namespace["f"])

    args = shapes((8, 16))
    with pytest.warns(UserWarning):
        assert_plan(program(1), args, tmp_path / "plan.json")
    assert "(model.py: annotate in P(None, None))" in (tmp_path / "plan.json").read_text()
    assert_plan(program(7), args, tmp_path / "plan.json")


def test_no_collectives():
    assert_no_collectives(on_mesh((P("data"), P(), P())), ARGS)
    assert_no_collectives(on_mesh(MEGATRON), ARGS, kinds=("all_gather",))
    with pytest.raises(AssertionError) as error:
        assert_no_collectives(on_mesh(MEGATRON), ARGS)
    assert re.sub(r"/\S*:\d+", "LINE", str(error.value)) == (
        "mlp sends, 128 B per call and device:\n  128 B: all_reduce over model of f32[2,16]: sum of "
        "dot_general, at LINE"
    )


def test_max_bytes():
    assert_max_bytes(on_mesh(MEGATRON), ARGS, 128)
    with pytest.raises(
        AssertionError,
        match="each device sends 128 bytes in a call of mlp, which is more than 127:\n  128 B: ",
    ):
        assert_max_bytes(on_mesh(MEGATRON), ARGS, 127)


def test_more_bytes_are_said_first(tmp_path):
    path = written(tmp_path / "plan.json")
    path.write_text(path.read_text().replace('"comm_bytes": 128', '"comm_bytes": 64'))
    assert "plan.json:\n  each device sends 128 bytes per call, not 64\n" in failure(
        AssertionError, on_mesh(MEGATRON), ARGS, path
    )


@pytest.mark.parametrize(
    "args, kwargs, words",
    [
        ((mlp, ARGS), {}, "mlp has no plan: give what shardax.shard_jit made of it"),
        (
            (on_mesh(MEGATRON), ARGS[0]),
            {},
            "args of mlp is of type ShapeDtypeStruct: give the tuple of the arguments of a call",
        ),
        (
            (on_mesh(MEGATRON), ARGS),
            {"kinds": ("allgather",)},
            "there is no 'allgather'; give some of all_gather, all_reduce,",
        ),
    ],
)
def test_what_cannot_be_asserted(args, kwargs, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        assert_no_collectives(*args, **kwargs)


def test_one_kind():
    with pytest.raises(AssertionError, match="all_reduce over model"):
        assert_no_collectives(on_mesh(MEGATRON), ARGS, kinds="all_reduce")
