"""Every example of the pages in `docs/` is run, and gives what the page says."""

import doctest
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("docs/*.md"))


def run(text: str, name: str) -> int:
    """Runs a page in its order, in one namespace: blocks that begin with "```python exec" as they stand, examples with what
    they print. Gives the number of examples that failed.
    """
    names: dict = {"__name__": name}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    line = 0
    for part in re.split(r"(?sm)(^```python exec\n.*?^```$)", text):
        if part.startswith("```python exec"):
            exec(compile("\n" * (line + 1) + part.split("\n", 1)[1].removesuffix("```"), name, "exec"), names)
        else:
            test = doctest.DocTestParser().get_doctest(part, {}, name, name, line)
            test.globs = names
            runner.run(test, clear_globs=False)
        line += part.count("\n")
    return runner.summarize(verbose=False).failed


def cases():
    """optax mixes dtypes."""
    return [
        pytest.param(p, id=p.stem, marks=[pytest.mark.mixed_dtypes] if p.stem in ("flax", "zero") else [])
        for p in PAGES
    ]


@pytest.mark.not_quick
@pytest.mark.parametrize("page", cases())
def test_page(page):
    assert not run(page.read_text(), page.name)


def test_pages_without_examples():
    """Tables that commands write, and pages of which the examples would want several processes or the
    insides.
    """
    without = {"design", "multihost", "primitives", "third_party", "transformations"}
    assert {page.stem for page in PAGES if ">>> " not in page.read_text()} == without


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem
)
def test_files_that_a_page_names_are_there(page):
    text = page.read_text()
    prose = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", text)
    links = re.findall(r"\]\((?!https:)([^)#]+)\)", prose)
    assert [link for link in links if not (page.parent / link).exists()] == []
    files = re.findall(
        r"(?<![\w/])(?:benchmarks|docs|examples|models|shardax|tests)/[\w/]+\.(?:py|md|js)\b", text
    )
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_layout_names_every_file():
    layout = (ROOT / "docs" / "design.md").read_text().split("## 8. Layout")[1].split("\n## ")[0]
    files = re.findall(r"`(\w+\.py)`", layout)
    assert sorted(files) == sorted(path.name for path in (ROOT / "shardax").glob("*.py"))


def test_what_a_page_says_is_checked():
    page = "```python exec\nx = 3\n```\n\n```pycon\n>>> x + 1\n{}\n\n```\n"
    assert [run(page.format(n), "a page") for n in (4, 5)] == [0, 1]
