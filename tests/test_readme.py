"""The README's program prints what the README says, and more where it has an ellipsis."""

import runpy
from pathlib import Path


def test_first_screen(tmp_path, capsys):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    program = readme.split("```python\n")[1].split("```")[0]
    printed = readme.split("```\n8 devices")[1].split("...\n```")[0]
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "step.py").write_text(program)
    runpy.run_path(str(tmp_path / "train" / "step.py"))
    assert capsys.readouterr().out.startswith("8 devices" + printed)
