"""For users' own tests: a plan is compared with a file in their repository, so that a new collective fails their CI."""

import json
import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardax.explain.ledger import Collective, array_text, comm_bytes
from shardax.explain.plan import Plan
from shardax.explain.words import bytes_text, spec_text, times


def assert_plan(f: Any, args: Sequence[Any], file: str | os.PathLike, *, update: bool = False) -> None:
    """Asserts that what a function sends, and how its arguments and results rest, is as a file says.

    Where there is no file, or with `update`, it is written, and a warning says so: commit it. Lines of the user's code count by
    their file only, so that edits above them change nothing.

    Args:
      f: what `shard_jit` returned. It may be on an AbstractMesh: no devices are needed.
      args: of a call, a tuple; they may be `jax.ShapeDtypeStruct`s.
      file: JSON, such as "tests/plans/train_step.json".
      update: write the file anew.

    Raises:
      AssertionError: the plan is another; the text says what came and what went.
      ValueError: the file is no plan, or one of another program, mesh or types of arguments.
    """
    path, now = Path(file), _record(f, f.plan(*args))
    if update or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(now), indent=1) + "\n")
        warnings.warn(f"assert_plan wrote the plan of {now.program} to {path}: read it, and commit it", stacklevel=2)
        return
    before = _read(path)
    _check_same_program(before, now, path)
    changes = _changes(before, now)
    if changes:
        raise AssertionError(
            f"the plan of {now.program} is not that of {path}:\n"
            + "".join(f"  {line}\n" for line in changes)
            + "If that is meant, write the file anew: assert_plan(..., update=True)"
        )


def assert_no_collectives(f: Any, args: Sequence[Any], kinds: Collection[str] = ()) -> None:
    """Asserts that a function sends nothing, or nothing of these kinds ("all_gather", "all_reduce", ...).

    Raises:
      AssertionError: it does; the text has a line for each collective, with the user's line and the reason.
    """
    found = [c for c in f.plan(*args).collectives if not kinds or c.kind in kinds]
    if found:
        raise AssertionError(f"{_name(f)} sends, {bytes_text(comm_bytes(found))} per call and device:\n{_listed(found)}")


def assert_max_bytes(f: Any, args: Sequence[Any], nbytes: int) -> None:
    """Asserts that each device sends at most so many bytes per call (`Plan.comm_bytes`).

    Raises:
      AssertionError: it sends more; the text has a line for each collective, the dearest first.
    """
    plan = f.plan(*args)
    if plan.comm_bytes > nbytes:
        raise AssertionError(
            f"each device sends {plan.comm_bytes:,} bytes in a call of {_name(f)}, which is more than {nbytes:,}:\n"
            + _listed(plan.collectives)
        )


@dataclass(frozen=True)
class _Record:
    """What a file holds. The first three say which program it is."""

    program: str
    mesh: str
    types: dict[str, str]
    comm_bytes: int
    collectives: list[str]
    arguments: dict[str, str]
    results: dict[str, str]


def _record(f: Any, plan: Plan) -> _Record:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    arguments, results = list(plan.arguments()), list(plan.results())
    types = {place.named: array_text(place.aval) for place in arguments}
    return _Record(
        _name(f),
        mesh,
        types,
        plan.comm_bytes,
        _rows(plan.collectives),
        {place.named: spec_text(place.sharding) for place in arguments},
        {place.path: spec_text(place.sharding) for place in results},
    )


def _rows(collectives: Sequence[Collective]) -> list[str]:
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


def _read(path: Path) -> _Record:
    try:
        return _Record(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ValueError(f"{path} is no plan that assert_plan wrote: delete it, or give another file") from None


def _check_same_program(before: _Record, now: _Record, path: Path) -> None:
    for what in ("program", "mesh"):
        if getattr(before, what) != getattr(now, what):
            raise ValueError(
                f"{path} is the plan of another {what}: it was written for {before.program} on the mesh {before.mesh}, this is "
                f"{now.program} on {now.mesh}. Give each its own file, or write this one anew: assert_plan(..., update=True)"
            )
    if before.types != now.types:
        raise ValueError(
            f"{path} is the plan of {now.program} on other arguments:\n"
            + "".join(f"  {line}\n" for line in _moved(before.types, now.types))
            + "Give each its own file, or write this one anew: assert_plan(..., update=True)"
        )


def _changes(before: _Record, now: _Record) -> list[str]:
    """What is different, a line each."""
    old, new = Counter(before.collectives), Counter(now.collectives)
    lines = [f"- {row}" for row in old - new] + [f"+ {row}" for row in new - old]
    for side in ("arguments", "results"):
        lines += [f"{side[:-1]} {line}" for line in _moved(getattr(before, side), getattr(now, side))]
    if before.comm_bytes != now.comm_bytes:
        lines.insert(0, f"each device sends {now.comm_bytes:,} bytes per call, not {before.comm_bytes:,}")
    return lines


def _moved(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    names = dict.fromkeys((*before, *now))
    nothing = "nothing"
    changed = [(n, now.get(n, nothing), before.get(n, nothing)) for n in names if before.get(n) != now.get(n)]
    return [f"{name or '(the value)'}: {here}, not {there}" for name, here, there in changed]


def _listed(collectives: Sequence[Collective]) -> str:
    ordered = sorted(collectives, key=lambda c: -c.total)
    return "\n".join(f"  {bytes_text(c.total)}: {c}, at {c.line or 'an unknown line'}" for c in ordered)


def _name(f: Any) -> str:
    return getattr(f, "__name__", repr(f))
