"""Every example of the pages in `docs/` is run, and gives what the page says."""

import doctest
from pathlib import Path

import pytest

PAGES = sorted(Path(__file__).parent.parent.glob("docs/*.md"))


def cases():
    """optax mixes dtypes."""
    return [pytest.param(p, id=p.stem, marks=[pytest.mark.mixed_dtypes] if p.stem in ("flax",) else []) for p in PAGES]


@pytest.mark.parametrize("page", cases())
def test_page(page):
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert not failed


def test_most_pages_have_examples():
    assert sum(">>> " in page.read_text() for page in PAGES) >= 5
