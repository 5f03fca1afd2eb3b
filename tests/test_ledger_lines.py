"""Lines of the user's code: which are meant, and which variable one assigns."""

import pytest

from shardax.ledger.lines import assigned, code, is_at, line_text

pytestmark = pytest.mark.quick

CODE = {
    "x = f(y)": "x",
    "x: int = f(y)": "x",
    "x += f(y)": "x",
    "x @= f(y)": "x",
    "x, y = f(z)": None,
    "x.y = f(z)": None,
    "x[0] = f(z)": None,
    "f(x=3)": None,
    "x == y": None,
    "return x": None,
}


@pytest.mark.parametrize("text", CODE)
def test_the_variable_that_a_line_assigns(tmp_path, text):
    file = tmp_path / "model.py"
    file.write_text(f"# a model\n    {text}\n")
    assert code(f"{file}:2") == text
    assert assigned(f"{file}:2") == CODE[text]


@pytest.mark.parametrize("line", ["", "missing.py:3", "missing.py", "model.py:x"])
def test_lines_that_cannot_be_read(line):
    assert (code(line), assigned(line)) == ("", None)


def test_short_and_meant():
    assert line_text("/home/me/models/gpt2.py:12") == "models/gpt2.py:12"
    assert line_text("gpt2.py:12") == "gpt2.py:12"
    line = "/home/me/models/gpt2.py:12"
    meant = ["gpt2.py:12", "models/gpt2.py:12", line, "gpt2.py:1", "2.py:12", "gpt2.py"]
    assert [is_at(line, place) for place in meant] == [True, True, True, False, False, False]
    assert not is_at("", "")
