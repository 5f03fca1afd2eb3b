"""Lines of the user's code: how they are shown, and the variable that one assigns."""

import linecache
import re


def line_text(line: str) -> str:
    """
    >>> line_text("/home/me/models/gpt2.py:12")
    'models/gpt2.py:12'
    """
    return "/".join(line.split("/")[-2:])


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
