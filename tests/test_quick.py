"""The quick tests have no devices, compile nothing, and are there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
QUICK = [path for path in ROOT.glob("tests/test_*.py") if "mark.quick" in path.read_text()]
OWN_TESTS = (
    "completion",
    "cost",
    "graph",
    "ledger",
    "meshes",
    "partition",
    "pipeline",
)  # each of their modules is tested directly, too

SAMPLE = """
import jax, numpy, pytest
@pytest.mark.quick
def test_good(): assert jax.make_jaxpr(jax.numpy.sin)(numpy.ones(3, "float32")).eqns
@pytest.mark.quick
def test_compiles(): assert jax.jit(lambda x: x + 3)(numpy.ones(3, "float32")).sum() == 12
@pytest.mark.quick
def test_devices(): assert jax.devices()
@pytest.mark.quick
@pytest.mark.not_quick
def test_opted_out(): assert jax.devices()
def test_other(): assert jax.devices()
"""


def run(*options) -> subprocess.CompletedProcess[str]:
    command = ["-m", "pytest", "-q", "-c", "pyproject.toml", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    return subprocess.run(
        [sys.executable, *command, *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "options, failed, counts",
    [
        (["--quick"], ["compiles", "devices"], "2 failed, 1 passed, 2 deselected"),
        ([], ["compiles", "devices"], "2 failed, 3 passed"),
    ],
)
def test_devices_and_compilation_are_errors(tmp_path, options, failed, counts):
    """Among the other tests too, where there are devices."""
    file = tmp_path / "test_sample.py"
    file.write_text(SAMPLE)
    done = run("-p", "tests.conftest", *options, file)
    assert re.findall(r"^FAILED .*::test_(\w+)", done.stdout, re.M) == failed, done.stdout + done.stderr
    assert counts in done.stdout
    assert ("a quick test compiled" if not options else "no_devices_in_quick_tests") in done.stdout


def test_they_are_many():
    """A mark that is lost would be missed by nobody."""
    assert len(QUICK) >= 40


@pytest.mark.not_quick
def test_their_files_are_imported_without_devices():
    """Of the quick run itself, this is what shows where there are devices."""
    found = run("--quick", "--collect-only", "tests")
    assert found.returncode == 0, found.stdout
    assert len(re.findall(r"^tests/\S+::", found.stdout, re.M)) >= 700


@pytest.mark.parametrize("room", OWN_TESTS)
def test_every_module_has_tests_of_its_own(room):
    texts = [path.read_text() for path in QUICK]
    modules = sorted(path.stem for path in ROOT.glob(f"shardax/{room}/*.py") if path.stem != "__init__")
    imports = r"^from shardax\.{0}\.{1} import |^from shardax\.{0} import .*\b{1}\b"
    assert [m for m in modules if not any(re.search(imports.format(room, m), t, re.M) for t in texts)] == []
