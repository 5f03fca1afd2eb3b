"""What a plan sends, by the line of the user's code that it serves."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from shardax.explain.facts import Facts
from shardax.explain.tables import Group, Row, Table
from shardax.ledger.collectives import Collective, comm_bytes
from shardax.ledger.lines import code, line_text
from shardax.ledger.words import bytes_text, percent


def sent_by_line(plan: Facts) -> dict[str, list[Collective]]:
    """The collectives of each line, the dearest line first; one that was combined counts for each of its
    lines, with its part of the bytes.
    """
    sent = defaultdict(list)
    for part in (part for c in plan.collectives for part in c.parts):
        sent[part.line].append(part)
    return dict(sorted(sent.items(), key=lambda item: -comm_bytes(item[1])))


def dearest_lines(plan: Facts, most: int) -> Iterator[Table]:
    """The `most` dearest lines, and the others in one row; nothing where nothing is sent."""
    sent = list(sent_by_line(plan).items())
    if not sent:
        return
    rows = [
        Row(line_text(line) or "(unknown line)", _cells(plan, group), code(line))
        for line, group in sent[:most]
    ]
    others = [c for _, group in sent[most:] for c in group]
    if others:
        rows.append(Row(f"{len(sent) - most} other line{'s' * (len(sent) - most > 1)}", _cells(plan, others)))
    title = f"The {most} dearest lines" if others else "The lines that send something"
    yield Table(title, (Group("", tuple(rows)),), ("collectives", "per call", "share"))


def run_count(collectives: Iterable[Collective]) -> int:
    """How many run in a call; a `while` counts one iteration, a `cond` its dearest branch."""
    return sum(c.trips for c in collectives if not c.other_branch)


def _cells(plan: Facts, group: list[Collective]) -> tuple[str, ...]:
    sent = comm_bytes(group)
    return f"{run_count(group):,}", bytes_text(sent), percent(sent, plan.comm_bytes)
