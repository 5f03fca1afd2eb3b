"""Every example of the pages in `docs/` is run, and gives what the page says."""

import doctest
from pathlib import Path

import pytest

PAGES = sorted(Path(__file__).parent.parent.glob("docs/*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page):
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert not failed


def test_most_pages_have_examples():
    assert sum(">>> " in page.read_text() for page in PAGES) >= 5
