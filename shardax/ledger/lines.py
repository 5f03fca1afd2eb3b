"""Lines of the user's code: how they are shown, and the variable that one assigns."""

import linecache
import os
import re


def line_text(line: str) -> str:
    """Relative to the working directory where it is beneath that, else with the last folder.

    >>> line_text("/home/me/models/gpt2.py:12"), line_text(f"{os.getcwd()}/models/old/gpt2.py:12")
    ('models/gpt2.py:12', 'models/old/gpt2.py:12')
    """
    here = os.path.join(os.getcwd(), "")
    return line[len(here) :] if line.startswith(here) else "/".join(line.split("/")[-2:])


def line_beside(line: str, other: str) -> str:
    """A line as one is told who has just read another: of a file that is the same the name is enough.

    >>> line_beside("/home/me/models/gpt2.py:12", "/home/me/models/gpt2.py:9")
    'gpt2.py:12'
    >>> line_beside("/home/me/models/gpt2.py:12", "/home/me/train/gpt2.py:9")
    'models/gpt2.py:12'
    """
    same = line.rpartition(":")[0] == other.rpartition(":")[0]
    return line.rpartition("/")[2] if same else line_text(line)


def with_short_lines(text: str) -> str:
    """A text that says "at" which lines something is, with the lines as they are shown.

    >>> with_short_lines("with_sharding_constraint at /home/me/models/gpt2.py:12")
    'with_sharding_constraint at models/gpt2.py:12'
    """
    return re.sub(r"(?<= at )/[^:]*:\d+", lambda found: line_text(found[0]), text)


def code(line: str) -> str:
    """The code at "file.py:12", "" where it cannot be read."""
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdecimal() else ""


def assigned(line: str) -> str | None:
    """The one variable that the code at a line assigns."""
    match = re.match(r"([A-Za-z_]\w*)(?:: [^=]+)? [-+*/@]?= ", code(line))
    return match[1] if match else None


def is_at(line: str, place: str) -> bool:
    """Whether a line is the one that a user means by "gpt2.py:12".

    >>> is_at("/home/me/models/gpt2.py:12", "gpt2.py:12"), is_at("/home/me/my_gpt2.py:12", "gpt2.py:12")
    (True, False)
    """
    return bool(line) and f"/{line}".endswith(f"/{place}")
