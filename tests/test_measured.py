"""Which tests are long enough to be left out, and where that is written down."""

import pathlib
from types import SimpleNamespace

import pytest

from tests import measured

pytestmark = pytest.mark.quick


def test_the_shortest_cell_of_a_test_runs():
    took = {f"a.py::f[{i}]": 6.0 + i for i in range(4)}
    assert measured.marks(took, took) == {
        "a.py::f[0]": "once",
        **{f"a.py::f[{i}]": "slow" for i in (1, 2, 3)},
    }


def test_a_test_that_nobody_measured_runs():
    assert measured.marks(["a.py::f", "a.py::g[0]"], {"a.py::g[1]": 90.0}) == {}


def test_a_very_long_test_does_not():
    assert measured.marks(["a.py::f"], {"a.py::f": measured.VERY_LONG + 1}) == {"a.py::f": "slow"}


def test_what_is_measured_is_what_is_read(tmp_path):
    path = str(tmp_path / "seconds.txt")
    before = {"a.py::kept": 3.0, "a.py::faster[x y]": 7.0, "a.py::slower": 1.6, "a.py::failed": 9.0}
    measured.write(before | {"a.py::short": 0.54}, path)
    assert measured.read(path) == before
    recorder = measured.Recorder(path)
    for test, when, seconds, passed in (
        ("a.py::faster[x y]", "call", 0.5, True),
        ("a.py::slower", "setup", 2.0, True),
        ("a.py::slower", "call", 0.25, True),
        ("a.py::failed", "setup", 0.5, True),
        ("a.py::failed", "call", 0.5, False),
    ):
        report = SimpleNamespace(nodeid=test, when=when, duration=seconds, passed=passed)
        recorder.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    recorder.pytest_sessionfinish()
    assert measured.read(path) == {"a.py::kept": 3.0, "a.py::slower": 2.2, "a.py::failed": 9.0}
    assert [file.name for file in tmp_path.iterdir()] == ["seconds.txt"]


def test_each_line_is_of_a_test_that_is_there():
    """A test that was renamed runs until it is measured again."""
    for test, seconds in measured.read().items():
        path, *_, name = test.split("[")[0].split("::")
        text = (pathlib.Path(__file__).parents[1] / path).read_text()
        assert path.startswith("shardax/") or f"def {name}(" in text, test
        assert seconds > measured.LEAST, test
