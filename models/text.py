"""The text: the Python standard library's source files as tokens, bytes and one end-of-file, split by file.

Shape suffixes: B batch, S sequence.
"""

import platform
import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

END = 256
VOCAB = 257
SKIPPED = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


@dataclass(frozen=True)
class Text:
    """Two streams of tokens, uint16, each file followed by `END`. `name`: what they are of; `first`: the file
    with which `held_out` begins.
    """

    train: np.ndarray
    held_out: np.ndarray
    name: str = "a text"
    first: str = "it"


def standard_library() -> Text:
    """The running interpreter's own library: the same text on every run."""
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out = split(files(root), root)
    if not train or not held_out:
        raise ValueError(f"no Python source files to train on in {root}")
    library = f"the Python {platform.python_version()} standard library in {root}"
    name = f"{library}, {len(train):,} files to train on and {len(held_out):,} held out"
    return Text(tokens(train), tokens(held_out), name, held_out[0].relative_to(root).as_posix())


def files(root: Path) -> list[Path]:
    paths = (path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def split(paths: Iterable[Path], root: Path) -> tuple[list[Path], list[Path]]:
    """(training, held-out): one file in twenty is held out, by its name alone, so that no other file moves
    it.
    """
    train, held_out = [], []
    for path in paths:
        (train if zlib.crc32(path.relative_to(root).as_posix().encode()) % 20 else held_out).append(path)
    return train, held_out


def tokens(paths: Iterable[Path]) -> np.ndarray:
    return np.concatenate(
        [np.append(np.fromfile(path, np.uint8).astype(np.uint16), np.uint16(END)) for path in paths]
    )


def batch(
    stream: np.ndarray, step: int, seed: int, size: int, seq: int, rows: slice = slice(None)
) -> np.ndarray:
    """The int32[B, S + 1] windows of a step, or `rows` of them: a function of `step` and `seed` alone."""
    starts_B = np.random.default_rng((seed, step)).integers(0, len(stream) - seq, size)
    return windows(stream, starts_B[rows], seq)


def even_batches(stream: np.ndarray, count: int, size: int, seq: int) -> list[np.ndarray]:
    """`count` batches of windows spread evenly over the stream."""
    starts = np.linspace(0, len(stream) - seq - 1, count * size).astype(int)
    return [windows(stream, starts_B, seq) for starts_B in np.split(starts, count)]


def windows(stream: np.ndarray, starts_B: np.ndarray, seq: int) -> np.ndarray:
    return stream[starts_B[:, None] + np.arange(seq + 1)].astype(np.int32)


def to_text(tokens_S: Iterable[int]) -> str:
    """What a person reads: bytes decoded, a file's end shown as a line."""
    words = (bytes([token]) if token < END else b"\n<end of file>\n" for token in tokens_S)
    return b"".join(words).decode("utf-8", errors="replace")
