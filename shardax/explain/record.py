"""The parts of a plan that are compared with another plan, or with a file: what is sent, and how arguments
and results rest.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardax.explain.facts import Facts
from shardax.ledger.collectives import Collective, array_text
from shardax.ledger.words import bytes_text, times


@dataclass(frozen=True)
class Record:
    """A plan as a file of a user's repository holds it: no line numbers, so that edits elsewhere change
    nothing.

    `types`: of the arguments. Collectives that are alike are one text. `place`: the file of the function.
    """

    program: str
    mesh: str
    types: dict[str, str]
    comm_bytes: int
    collectives: list[str]
    arguments: dict[str, str]
    results: dict[str, str]
    place: str = ""

    @property
    def named(self) -> str:
        """ "train_step (steps.py)"."""
        return self.program + f" ({self.place})" * bool(self.place)


def record(plan: Facts) -> Record:
    """The record of a plan."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    arguments, results = list(plan.arguments()), list(plan.results())
    types = {place.named: array_text(place.aval) for place in arguments}
    name, _, place = plan.program.partition(" at ")
    return Record(
        name,
        mesh,
        types,
        plan.comm_bytes,
        rows(plan.collectives),
        {place.named: place.text for place in arguments},
        {place.path: place.text for place in results},
        place.rpartition(":")[0].rpartition("/")[2],
    )


def read(path: Path) -> Record:
    """The record in a file that `shardax.testing.assert_plan` or `Plan.to_json` wrote.

    Raises:
      ValueError: the file is none of them.
    """
    try:
        data = json.loads(path.read_text())
        return Record(**data.get("record", data))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = (
            error.strerror if isinstance(error, OSError) else "neither assert_plan nor Plan.to_json wrote it"
        )
        raise ValueError(f"{path} is no plan: {why}. Delete it, or give another file") from None


def check_same_program(before: Record, now: Record, where: str, way_out: str) -> None:
    """Whether a plan that was read at `where` is of the program at hand: its name, and the types of its
    arguments.

    Raises:
      ValueError: it is another's; the text names both places.
    """
    if (before.program, before.place or now.place) != (now.program, now.place or before.place):
        words = (
            f"it was written for {before.named} on the mesh {before.mesh}, this is {now.named} on {now.mesh}"
        )
        raise ValueError(f"{where} is the plan of another program: {words}. {way_out}")
    if before.types != now.types:
        differ = "".join(f"  {line}\n" for line in changed_entries(before.types, now.types))
        raise ValueError(f"{where} is the plan of {now.named} on other arguments:\n{differ}{way_out}")


def rows(collectives: Sequence[Collective]) -> list[str]:
    """One text for all collectives that differ only in the lines of the user's code."""
    alike = defaultdict(list)
    for c in collectives:
        alike[_row(c)].append(c)
    return [times(len(group)) + text for text, group in alike.items()]


def _row(c: Collective) -> str:
    where = re.sub(r":\d+$", "", c.line).rsplit("/", 1)[-1]
    reason = re.sub(r"[^\s\\/]*[\\/]|(?<=\.py):\d+", "", c.reason)
    notes = (
        [f"{c.trips} trips"] * (c.trips > 1)
        + ["while"] * c.open_loop
        + ["not the dearest branch"] * c.other_branch
    )
    operands = ", ".join(map(array_text, c.operands))
    what = ", ".join(
        [f"{c.kind} over {','.join(c.axes)} of {operands}", f"{bytes_text(c.nbytes)} each", *notes]
    )
    return f"{what} ({': '.join(filter(None, (where, reason))) or 'an unknown line'})"


def changes(before: Record, now: Record) -> list[str]:
    """The differences, a line each: - is of the first record, + of the second."""
    old, new = Counter(before.collectives), Counter(now.collectives)
    lines = [f"- {row}" for row in old - new] + [f"+ {row}" for row in new - old]
    for side in ("arguments", "results"):
        lines += [
            f"{side[:-1]} {line}" for line in changed_entries(getattr(before, side), getattr(now, side))
        ]
    if before.mesh != now.mesh:
        lines.insert(0, f"the mesh is {now.mesh}, not {before.mesh}")
    if before.comm_bytes != now.comm_bytes:
        lines.insert(0, f"each device sends {now.comm_bytes:,} bytes per call, not {before.comm_bytes:,}")
    return lines


def changed_entries(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The entries that are different, a line each."""
    keys = dict.fromkeys((*before, *now))
    nothing = "nothing"
    changed = [(n, now.get(n, nothing), before.get(n, nothing)) for n in keys if before.get(n) != now.get(n)]
    return [
        f"{name or '(the value)'}: {now_text}, not {before_text}" for name, now_text, before_text in changed
    ]
