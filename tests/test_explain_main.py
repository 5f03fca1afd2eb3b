"""`python -m shardax.explain`: the plan of a program of a module, without devices; what is wrong is said in
one line.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardax.explain.__main__ import main

pytestmark = [pytest.mark.promotes_ranks, pytest.mark.quick]

ROOT = Path(__file__).parents[1]
GPT2 = (
    "models.gpt2",
    "--mesh",
    "data=4,model=2",
    "--set",
    "size=tiny",
    "--set",
    "batch=16",
    "--set",
    "seq=64",
)

PROGRAM = """
import jax, shardax as sx
from jax.sharding import PartitionSpec as P

def program(mesh, rows=8):
    return sx.shard_jit(lambda x: x.sum(0), mesh=mesh, in_shardings=P("data")), (jax.ShapeDtypeStruct((rows, 4), "float32"),)

def refused(mesh):
    raise ValueError("this program wants an axis 'expert'")

def nothing(mesh):
    return 3

number = 5
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "broken.py").write_text("import not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mine", "broken"):
        sys.modules.pop(name, None)
    return "mine"


@pytest.mark.not_quick
@pytest.mark.once
def test_gpt2_in_a_process_of_its_own(tmp_path):
    """On 2048 devices; everything is printed and written."""
    html, text = tmp_path / "plan.html", tmp_path / "plan.json"
    command = [
        sys.executable,
        "-m",
        "shardax.explain",
        "models.gpt2",
        "--mesh",
        "data=16,model=128",
        "--set",
        "size=default",
    ]
    done = subprocess.run(
        [*command, "--html", html, "--json", text], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    parts = [part.splitlines()[0] for part in done.stdout.split("\n\n")]
    begin = [
        "2048 devices",
        "It runs on the common",
        "Arguments at rest",
        "Results at rest",
        "Stored otherwise than",
    ]
    begin += ["Collectives", "Totals", "Values"]
    begin += ["Memory on each", "Estimate by roofline", "Planned in", "Written:", "Written:", "In all"]
    assert [part[: len(b)] for part, b in zip(parts, begin, strict=True)] == begin
    assert json.loads(text.read_text())["mesh"] == {"data": 16, "model": 128}
    assert html.read_text().startswith("<!doctype html>")


def test_a_users_own_module(module, capsys):
    assert main([module, "--mesh", "data=4", "--set", "rows=32"]) == 0
    assert "x " in capsys.readouterr().out.split("P('data')")[1].splitlines()[1]


@pytest.mark.once
@pytest.mark.not_quick
@pytest.mark.mixed_dtypes
def test_only_parts(capsys):
    main([*GPT2, "--why", "state/params/embed/embedding", "--chip", "v5e", "--source"])
    out = capsys.readouterr().out
    assert out.startswith("argument state/params/embed/embedding f32[257,32]: P('model')\n")
    assert " s on v5e, bound by " in out and "def on_shards(" in out and "Arguments at rest" not in out


@pytest.mark.not_quick
@pytest.mark.once
@pytest.mark.mixed_dtypes
def test_against_another_mesh_and_a_file(tmp_path, capsys):
    main([*GPT2, "--json", str(tmp_path / "plan.json")])
    capsys.readouterr()
    main([*GPT2, "--against", str(tmp_path / "plan.json")])
    assert "no difference" in capsys.readouterr().out
    main([*GPT2, "--against", "data=8,model=1"])
    assert "the mesh is data=8, model=1, not data=4, model=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: program, --mesh"),
        (["mine"], "the following arguments are required: --mesh"),
        (
            ["mine", "--mesh", "data"],
            "--mesh data: 'data' is not of the form axis=size, as in --mesh data=16,model=128",
        ),
        (["mine", "--mesh", "data=0"], "'data=0' is not of the form axis=size"),
        (["mine", "--mesh", "data=2,data=2"], "--mesh data=2,data=2: axis data is named twice"),
        (
            ["mine", "--mesh", "model=2"],
            "mine cannot be planned on the mesh model=2: argument x of shape (8, 4) is given P('data')",
        ),
        (["mine", "--mesh", "data=2", "--set", "rows"], "--set rows: not of the form name=value"),
        (
            ["mine", "--mesh", "data=2", "--set", "columns=2"],
            "mine takes (mesh, rows=8), and is given the mesh and {'columns': 2}",
        ),
        (["mine", "--mesh", "data=2", "--why", "nothing"], "why('nothing'): no argument, line or variable"),
        (["mine", "--mesh", "data=2", "--chip", "v9"], "argument --chip: invalid choice: 'v9'"),
        (
            ["mine", "--mesh", "data=2", "--html", "missing/plan.html"],
            "missing/plan.html cannot be written: No such file",
        ),
        (
            ["mine", "--mesh", "data=2", "--against", "mine.py"],
            "mine.py is no plan: neither assert_plan nor Plan.to_json",
        ),
        (
            ["mine:number", "--mesh", "data=2"],
            "mine.py) has no function 'number': write one that takes a mesh and",
        ),
        (
            ["mine:refused", "--mesh", "data=2"],
            "mine:refused on the mesh data=2: this program wants an axis 'expert'",
        ),
        (
            ["mine:nothing", "--mesh", "data=2"],
            "mine:nothing returned 3: it must return (what shard_jit made, the tuple of",
        ),
        (
            ["mine.py", "--mesh", "data=2"],
            "'mine.py' is a file: give the module as Python imports it, such as mine",
        ),
        (
            ["./models/mine.py", "--mesh", "data=2"],
            "is a file: give the module as Python imports it, such as models.mine",
        ),
        (["theirs", "--mesh", "data=2"], "no module 'theirs' in "),
        (["broken", "--mesh", "data=2"], "broken imports not_there, which is not installed"),
        pytest.param(
            ["models.gpt2", "--mesh", "data=2,expert=2"],
            "unknown axis 'expert': the shardings of models.gpt2 know stage, data, fsdp, model",
            marks=pytest.mark.not_quick,
        ),
        (
            ["models.gpt2", "--mesh", "data=2", "--set", "size=huge"],
            "size='huge': there are tiny, default, gpt2, gpt2-xl",
        ),
    ],
)
def test_bad_input(module, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert words in str(stopped.value) and "\nTraceback" not in str(stopped.value)
    assert str(stopped.value).startswith("shardax.explain: ")
