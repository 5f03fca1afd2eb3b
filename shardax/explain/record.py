"""What of a plan is compared with another one, or with a file: what is sent, and how arguments and results rest."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardax.explain.ledger import Collective, array_text
from shardax.explain.words import bytes_text, spec_text, times

if TYPE_CHECKING:
    from shardax.explain.plan import Plan


@dataclass(frozen=True)
class Record:
    """A plan as a file of a user's repository holds it: no line numbers, so that edits elsewhere change nothing.

    `types`: of the arguments. Collectives that are alike are one text.
    """

    program: str
    mesh: str
    types: dict[str, str]
    comm_bytes: int
    collectives: list[str]
    arguments: dict[str, str]
    results: dict[str, str]


def record(plan: "Plan", program: str = "") -> Record:
    """The record of a plan of the program of this name."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    arguments, results = list(plan.arguments()), list(plan.results())
    types = {place.named: array_text(place.aval) for place in arguments}
    return Record(
        program,
        mesh,
        types,
        plan.comm_bytes,
        rows(plan.collectives),
        {place.named: spec_text(place.sharding) for place in arguments},
        {place.path: spec_text(place.sharding) for place in results},
    )


def rows(collectives: Sequence[Collective]) -> list[str]:
    """A text for all collectives that are alike but for the lines of the user's code."""
    alike = defaultdict(list)
    for c in collectives:
        alike[_row(c)].append(c)
    return [times(len(group)) + text for text, group in alike.items()]


def _row(c: Collective) -> str:
    where = re.sub(r":\d+$", "", c.line).rsplit("/", 1)[-1]
    reason = re.sub(r"[^\s\\/]*[\\/]|(?<=\.py):\d+", "", c.reason)
    notes = [f"{c.trips} trips"] * (c.trips > 1) + ["while"] * c.open_loop + ["not the dearest branch"] * c.other_branch
    operands = ", ".join(map(array_text, c.operands))
    what = ", ".join([f"{c.kind} over {','.join(c.axes)} of {operands}", f"{bytes_text(c.nbytes)} each", *notes])
    return f"{what} ({': '.join(filter(None, (where, reason))) or 'an unknown line'})"


def changes(before: Record, now: Record) -> list[str]:
    """What is different, a line each; + came, - went."""
    old, new = Counter(before.collectives), Counter(now.collectives)
    lines = [f"- {row}" for row in old - new] + [f"+ {row}" for row in new - old]
    for side in ("arguments", "results"):
        lines += [f"{side[:-1]} {line}" for line in moved(getattr(before, side), getattr(now, side))]
    if before.comm_bytes != now.comm_bytes:
        lines.insert(0, f"each device sends {now.comm_bytes:,} bytes per call, not {before.comm_bytes:,}")
    return lines


def moved(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The entries that are different, a line each."""
    names = dict.fromkeys((*before, *now))
    nothing = "nothing"
    changed = [(n, now.get(n, nothing), before.get(n, nothing)) for n in names if before.get(n) != now.get(n)]
    return [f"{name or '(the value)'}: {here}, not {there}" for name, here, there in changed]
