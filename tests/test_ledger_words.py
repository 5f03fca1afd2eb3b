"""The small texts of plans: bytes and seconds round to the unit that reads best, many names read as one."""

import pytest

from shardax.ledger.words import as_one, bytes_text, form, seconds_text, spec_text, times
from shardax.sharding import Sharding

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "nbytes, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 40, "1.0 TiB"),
        (5000 << 40, "5,000.0 TiB"),
        ((1 << 20) - 1, "1.0 MiB"),
    ],
)
def test_bytes(nbytes, text):
    assert bytes_text(nbytes) == text


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0 s"), (1, "1 s"), (0.999, "999 ms"), (1e-6, "1 µs"), (2e-9, "2 ns"), (1e-12, "0.001 ns")],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    "dims, text",
    [
        ((), "replicated"),
        (((), ()), "replicated"),
        (((), ("x",), ()), "P(None, 'x')"),
        ((("x", "y"),), "P(('x', 'y'))"),
    ],
)
def test_shardings(dims, text):
    assert spec_text(Sharding(dims)) == text


@pytest.mark.parametrize(
    "texts, exact, one",
    [
        (["w"], False, "w"),
        (["a1", "a1"], False, "a1"),
        (["a3", "a1", "a2"], False, "a{1..3}"),
        (["a1", "a9"], False, "a{1..9}"),
        (["a1", "a9"], True, "a{1,9}"),
        (["a1", "a2", "a3"], True, "a{1..3}"),
        (["a1", "a3", "a5", "a9"], True, "a{1..9}"),
        (["l1/w2", "l2/w2"], False, "l{1..2}/w2"),
        (["10", "9"], False, "{9..10}"),
    ],
)
def test_many_names_as_one(texts, exact, one):
    assert as_one(texts, exact) == one
    assert len(set(map(form, texts))) == 1


def test_how_often():
    assert [times(n) for n in (1, 2)] == ["", "2 x "]
