"""The small texts of which plans are made: bytes, shardings, and many names as one."""

import re
from collections.abc import Sequence

from shardax.sharding import Sharding


def bytes_text(nbytes: float) -> str:
    """
    >>> bytes_text(12), bytes_text(1536), bytes_text(3 << 20), bytes_text(1023.99 * 1024)
    ('12 B', '1.5 KiB', '3.0 MiB', '1.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(nbytes, 1) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"


def percent(part: float, total: float) -> str:
    """
    >>> percent(1, 3), percent(1, 0)
    ('33.3 %', '')
    """
    return f"{100 * part / total:.1f} %" if total else ""


def natural(text: str) -> list[tuple[int, str]]:
    """The key that sorts texts as a person counts.

    >>> sorted(["layer_10/w", "layer_2/w", "layer_2", "embed"], key=natural)
    ['embed', 'layer_2', 'layer_2/w', 'layer_10/w']
    """
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"([0-9]+|/)", text)]


def seconds_text(seconds: float) -> str:
    """
    >>> [seconds_text(s) for s in (0.00000312, 0.0125, 1.5, 312.0, 0)]
    ['3.12 µs', '12.5 ms', '1.5 s', '312 s', '0 s']
    """
    unit, factor = next(
        ((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if seconds * f >= 1), ("ns", 1e9)
    )
    return f"{seconds * factor:.3g} {unit}" if seconds else "0 s"


def spec_text(sharding: Sharding) -> str:
    """
    >>> spec_text(Sharding((("x",), ()))), spec_text(Sharding(((), ())))
    ("P('x')", 'replicated')
    >>> from shardax.sharding import Owing
    >>> spec_text(Sharding(((),), Owing(("x",))))
    "P(unreduced={'x'})"
    """
    dims, owing = sharding.dims, sharding.owing
    while dims and not dims[-1]:
        dims = dims[:-1]
    return str(Sharding(dims, owing)) if dims or owing else "replicated"


def times(count: int) -> str:
    return f"{count} x " if count > 1 else ""


def form(text: str) -> str:
    """A text with its numbers replaced by a mark: equal for texts that differ only in their numbers.

    >>> form("layer_3/w") == form("layer_12/w")
    True
    """
    return re.sub(r"\d+", "0", text)


def as_one(texts: Sequence[str], exact: bool = False) -> str:
    """Texts of one form, as one. `exact`: what few numbers there are is listed; else they may stand for those
    between.

    >>> as_one(["0/layer_0/w", "0/layer_1/w", "0/layer_2/w"])
    '0/layer_{0..2}/w'
    >>> as_one(["gpt2.py:55", "gpt2.py:80"], exact=True)
    'gpt2.py:{55,80}'
    """
    words = re.split(r"\d+", texts[0])
    columns = zip(*(map(int, re.findall(r"\d+", text)) for text in texts), strict=True)
    return "".join(
        word + number
        for word, number in zip(words, [*(_numbers(c, exact) for c in columns), ""], strict=True)
    )


def _numbers(column: Sequence[int], exact: bool) -> str:
    numbers = sorted(set(column))
    if len(numbers) == 1:
        return f"{numbers[0]}"
    few = exact and len(numbers) <= 3 and numbers[-1] - numbers[0] >= len(numbers)
    return f"{{{','.join(map(str, numbers))}}}" if few else f"{{{numbers[0]}..{numbers[-1]}}}"
