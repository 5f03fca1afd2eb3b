"""Strict mode: refuses, warns of or allows what nobody asked for. It is read off the collectives of the final
local program.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from shardax.graph import annotations
from shardax.ledger.collectives import Collective, array_bytes, array_text, comm_bytes
from shardax.ledger.words import bytes_text
from shardax.meshes.crossing import Crossed
from shardax.options import Options, Refused
from shardax.partition.reasons import Resharded
from shardax.sharding import Sharding

SHOWN = 8  # findings in one message


@dataclass(frozen=True)
class Unrequested:
    """The collectives by which one primitive, at one line, has operands resharded to what it `needs`."""

    primitive: str
    line: str
    needs: str
    collectives: tuple[Collective, ...]

    def __str__(self):
        sent = f"each device sends {bytes_text(comm_bytes(self.collectives))} per call"
        return (
            f"{self.primitive} at {self.line or 'an unknown line'} needs an operand in {self.needs}, which "
            f"no annotation asks for: {_listed(self.collectives)} ({sent}). Annotate the operand, as in "
            f"shardax.annotate(x, {self.needs}), split it otherwise, or allow it: "
            f"Options(allow=({self.primitive!r},))"
        )


@dataclass(frozen=True)
class TooLarge:
    """A gather that makes an array larger than `limit`."""

    collective: Collective
    limit: int

    def __str__(self):
        c = self.collective
        reason = f", because of {c.reason}" if c.reason else ""
        operand = ", ".join(map(array_text, c.operands))
        return (
            f"{c.kind} over {','.join(c.axes)} of {operand} at {c.line or 'an unknown line'} makes an array "
            f"of {gathered_bytes(c):,} bytes on each device{reason}; max_gather_bytes={self.limit:,}. Split "
            f"it otherwise, raise the limit, or allow it: Options(allow=({_place(c)!r},))"
        )


@dataclass(frozen=True)
class Entered:
    """An argument that comes in on a mesh which does not fit the program's."""

    collective: Collective

    def __str__(self):
        return (
            f"{self.collective.reason}, which does not fit the program's mesh: each device sends "
            f"{bytes_text(self.collective.total)} per call to bring it there, which nobody asked for. Place "
            "it on the program's mesh once (jax.device_put), name its mesh in in_shardings, or allow it: "
            "Options(allow=('ppermute',))"
        )


@dataclass(frozen=True)
class Conflict:
    """Two annotations of one value that ask for different shardings: (words, line, sharding) of each."""

    first: tuple[str, str, str]
    second: tuple[str, str, str]

    def __str__(self):
        (one, line, first), (other, _, second) = self.first, self.second
        return (
            f"{one} asks for {first}, and {other} for {second}, of one value: nothing is computed between "
            "them, so that the first only moves it. Drop one of them, or allow it: "
            f"Options(allow=({'*/' + line.rsplit('/', 1)[-1]!r},))"
        )


Shown = Callable[[Sharding], object]
"""A sharding as a person reads it."""


def check(
    collectives: Sequence[Collective],
    options: Options,
    shown: Shown = str,
    conflicts: Iterable[Conflict] = (),
) -> None:
    """Refuses or warns of what the options do not allow.

    Raises:
      Refused: something is refused, a ValueError.
    """
    violations: list[Any] = list(findings(collectives, options, shown))
    if options.strict:
        violations += [c for c in conflicts if not allowed(options.allow, c.first[1], c.second[1])]
    if violations and options.strict != "warn":
        more = f"\n  and {len(violations) - SHOWN} more" if len(violations) > SHOWN else ""
        raise Refused(f"{options} refuses:" + "".join(f"\n  {x}" for x in violations[:SHOWN]) + more)
    for violation in violations:
        warnings.warn(str(violation), stacklevel=2)


def findings(
    collectives: Iterable[Collective], options: Options, shown: Shown = str
) -> Iterator[Unrequested | TooLarge | Entered]:
    """What these options do not allow, the dearest first."""
    limit = math.inf if options.max_gather_bytes is None else options.max_gather_bytes
    not_allowed = [c for c in collectives if not allowed(options.allow, c.kind, c.line, _reader(c))]
    large = {c: None for c in not_allowed if c.kind == "all_gather" and gathered_bytes(c) > limit}
    yield from (TooLarge(c, int(limit)) for c in sorted(large, key=lambda c: -gathered_bytes(c)))
    if options.strict:
        yield from (
            Entered(c) for c in sorted(not_allowed, key=lambda c: -c.total) if isinstance(c.cause, Crossed)
        )
        rest = unrequested((c for c in not_allowed if c not in large), shown)
        yield from sorted(rest, key=lambda group: -comm_bytes(group.collectives))


def unrequested(collectives: Iterable[Collective], shown: Shown = str) -> list[Unrequested]:
    """The collectives that the operands of primitives need, grouped by primitive, line and sharding."""
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for c in collectives:
        if isinstance(c.cause, Resharded) and (reader := c.cause.reader) and not annotations.of_node(reader):
            groups.setdefault((reader.name, c.line, str(shown(c.cause.target.sharding))), []).append(c)
    return [Unrequested(*key, tuple(group)) for key, group in groups.items()]


def allowed(patterns: Iterable[str], *labels: str) -> bool:
    """
    >>> allowed(("sort", "*/gpt2.py:*"), "all_gather", "/home/me/gpt2.py:12")
    True
    """
    return any(fnmatchcase(label, pattern) for pattern in patterns for label in labels if label)


def gathered_bytes(c: Collective) -> int:
    """Bytes of what a gather makes on each device."""
    return sum(map(array_bytes, c.operands)) * c.devices


def _reader(c: Collective) -> str:
    """The primitive that an operand was resharded for, "" where a result was."""
    return c.cause.reader.name if isinstance(c.cause, Resharded) and c.cause.reader else ""


def _listed(collectives: Sequence[Collective]) -> str:
    entries = dict.fromkeys(f"{c.kind} over {','.join(c.axes)}" for c in collectives)
    return ", ".join(entries)


def _place(c: Collective) -> str:
    return f"*/{c.line.rsplit('/', 1)[-1]}" if c.line else c.kind
