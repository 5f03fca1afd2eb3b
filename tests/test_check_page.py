"""`docs/primitives.md` is what `python -m shardax.check --page` makes, and tells of every primitive that JAX
has.
"""

import re
import subprocess
import sys

import pytest

from shardax.check.page import FILE, page, primitives
from shardax.spmd_rules.registry import RULES

pytestmark = pytest.mark.quick

TEXT = FILE.read_text()


@pytest.mark.not_quick
@pytest.mark.once
def test_the_page_is_current():
    assert page(TEXT) == TEXT, "make it anew: python -m shardax.check --page"


def test_every_primitive_of_this_jax_is_there():
    told = set(re.findall(r"`([\w-]+)`", TEXT.partition("\n## ")[2]))
    assert told == primitives()
    ours = {"abstract_state", "annotate", "pack", "partition_as", "shard_jit", "unpack"}
    assert fresh_names() - told - ours == set()


def fresh_names() -> set[str]:
    """In a process of its own: modules of kernels, which other tests import, add what lives inside
    kernels.
    """
    code = "import shardax; from shardax import _jax; print(*_jax.primitive_names())"
    names = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "dot_general" in names
    return set(names)


@pytest.mark.parametrize(
    "name, cells",
    [
        ("dot_general", "| b0, m1, n2 | k0: sum owed |  |"),
        ("cumsum", "| _1 | _0: all_gather |  |"),
        ("transpose", "| k0, k1 |  |  |"),
        ("unstack", "| k0 |  | s: one result each |"),
    ],
)
def test_rows(name, cells):
    (row,) = re.findall(rf"^\| .*`{name}`.*$", TEXT, re.M)
    assert row.endswith(cells)


@pytest.mark.parametrize(
    "name, section",
    [
        ("add", "Elementwise"),
        ("all_gather", "Others"),
        ("pallas_call", "Without a rule"),
        ("scan", "With a program inside"),
    ],
)
def test_sections(name, section):
    assert [text.partition("\n")[0] for text in TEXT.split("\n## ")[1:] if f"`{name}`" in text] == [section]


def test_nothing_is_whole_without_a_reason():
    assert RULES and "mixed with one another" not in TEXT
