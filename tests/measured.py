"""Which tests are long: `tests/seconds.txt` has the seconds of each that took more than `LEAST`, as `pytest -n 2 --measure`
wrote them on two cores.

A long test is `slow`, which `make test` leaves out, and one that is not short is `once`, which CI leaves out on its second
generation of JAX. The shortest cell of each test stays in `make test` though, unless it is very long.
"""

import collections
import os
from collections.abc import Iterable, Mapping

import pytest

FILE = os.path.join(os.path.dirname(__file__), "seconds.txt")
LEAST = 0.5
LONG = 1.0
VERY_LONG = 26.0


def read(path: str = FILE) -> dict[str, float]:
    """Seconds by test; lines are `<seconds> <test>`."""
    with open(path) as lines:
        return {test: float(seconds) for seconds, test in (line.rstrip("\n").split(" ", 1) for line in lines)}


def write(seconds: Mapping[str, float], path: str = FILE) -> None:
    """Beside the file first: a run that is ended leaves the old one whole."""
    with open(path + ".new", "w") as file:
        rounded = {test: round(seconds[test], 1) for test in sorted(seconds)}
        file.writelines(f"{s} {test}\n" for test, s in rounded.items() if s > LEAST)
    os.replace(path + ".new", path)


def marks(tests: Iterable[str], seconds: Mapping[str, float]) -> dict[str, str]:
    """The mark of each test that gets one.

    >>> took = {"a.py::f[0]": 20.0, "a.py::f[1]": 9.0, "a.py::g": 40.0, "a.py::h": 2.0}
    >>> marks([*took, "a.py::short"], took)
    {'a.py::f[0]': 'slow', 'a.py::f[1]': 'once', 'a.py::g': 'slow', 'a.py::h': 'once'}
    """
    cells = collections.defaultdict(list)
    for test in tests:
        cells[test.split("[")[0]].append(test)
    found = {}
    for of_one in cells.values():
        took = {test: seconds.get(test, 0.0) for test in of_one}
        shortest = min(took, key=lambda test: took[test])
        for test, s in took.items():
            if s > (VERY_LONG if test == shortest else LONG):
                found[test] = "slow"
            elif s > LEAST:
                found[test] = "once"
    return found


class Recorder:
    """The pytest plugin behind `--measure`: tests that did not run, or did not pass, keep the seconds that they had."""

    def __init__(self, path: str = FILE):
        self.path = path
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        write(read(self.path) | {test: self.seconds[test] for test in self.passed}, self.path)
