"""Every test asserts something. One that passes by not being refused says so in its name or docstring."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent
ASSERTING = re.compile(r"assert_\w+|raises|warns|fail|check_rule")  # of NumPy, pytest and shardax itself
SAYS_SO = re.compile(r"accepted|allowed|not refused|nothing is raised|raises nothing")
Names = frozenset[str]


def without_assertion(modules: dict[str, str]) -> Iterator[str]:
    """The tests that neither assert, nor mention what does (helpers of theirs, in their own file or from
    another), nor say that they need not. `modules`: name and source of each.
    """
    trees = {name: ast.parse(source) for name, source in modules.items()}
    asserting = {name: _asserting(tree) for name, tree in trees.items()}
    for name, tree in trees.items():
        known = asserting[name] | _imported(tree, asserting)
        for test in _functions(tree):
            words = f"{test.name.replace('_', ' ')} {ast.get_docstring(test) or ''}"
            if test.name.startswith("test_") and not _asserts(test, known) and not SAYS_SO.search(words):
                yield f"{name}.py:{test.lineno} {test.name}"


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _asserting(tree: ast.Module) -> Names:
    """The functions of a module that assert, by themselves or by others, and variables that hold such."""
    makers: list[tuple[str, ast.AST]] = [(function.name, function) for function in _functions(tree)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            makers.append((node.targets[0].id, node.value))
    known: Names = frozenset()
    while more := {name for name, node in makers if name not in known and _asserts(node, known)}:
        known |= more
    return known


def _asserts(node: ast.AST, known: Names) -> bool:
    return any(
        isinstance(inner, ast.Assert)
        or isinstance(inner, ast.Name | ast.Attribute)
        and (_word(inner) in known or ASSERTING.fullmatch(_word(inner)) is not None)
        for inner in ast.walk(node)
    )


def _word(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _imported(tree: ast.Module, asserting: dict[str, Names]) -> Names:
    """What asserts, of other modules of the tests."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tests":
            names = {alias.name for alias in node.names}
            module = asserting.get((node.module or "").rpartition(".")[-1], frozenset())
            found |= names & module
            found |= {inner for name in names for inner in asserting.get(name, ())}
    return frozenset(found)


def test_every_test_asserts_or_says_that_it_need_not():
    modules = {path.stem: path.read_text() for path in ROOT.glob("*.py")}
    assert len(modules) > 80
    assert list(without_assertion(modules)) == []


@pytest.mark.parametrize(
    "source, found",
    [
        ("def test_it(): f()", 1),
        ("def test_it(): assert f()", 0),
        ("def test_it_is_accepted(): f()", 0),
        ("def test_it():\n    '''Nothing here is not refused.'''\n    f()", 0),
        ("def test_it():\n    with pytest.raises(ValueError): f()", 0),
        ("def test_it(): np.testing.assert_allclose(f(), 1)", 0),
        ("close = partial(np.testing.assert_allclose, rtol=1)\ndef test_it(): tree.map(close, 1, 1)", 0),
        ("def f(): g()\ndef g(): assert True\ndef test_it(): f()", 0),
        ("def f(): g()\ndef g(): return 3\ndef test_it(): f()", 1),
        ("class TestIt:\n    def test_it(self): f()", 1),
        ("from tests.helpers import same\ndef test_it(): same(1, 2)", 0),
        ("from tests.helpers import other\ndef test_it(): other(1, 2)", 1),
        ("from tests import helpers\ndef test_it(): helpers.same(1, 2)", 0),
        ("from elsewhere import same\ndef test_it(): same(1, 2)", 1),
    ],
)
def test_what_is_found(source, found):
    helpers = "def same(a, b): assert a == b\ndef other(a, b): return a == b"
    assert len(list(without_assertion({"test_sample": source, "helpers": helpers}))) == found
