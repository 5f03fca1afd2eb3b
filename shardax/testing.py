"""Assertions for users' own tests: a plan is compared with a file of theirs, so that a new collective fails
their CI.
"""

import json
import os
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardax import _jax
from shardax.explain.record import changes, check_same_program, read, record
from shardax.ledger.collectives import KINDS, Collective, comm_bytes
from shardax.ledger.words import bytes_text
from shardax.validation import is_number, require


@_jax.boundary
def assert_plan(f: Any, args: Sequence[Any], file: str | os.PathLike, *, update: bool = False) -> None:
    """Asserts that what a function sends, and how its arguments and results rest, is as a file says.

    Where there is no file, or with `update`, the file is written, and a warning says so: commit it. Lines of
    the user's code count by their file only, so that edits above them change nothing.

    Args:
      f: what `shard_jit` returned. It may be on an AbstractMesh: no devices are needed.
      args: the tuple of the arguments of a call; they may be `jax.ShapeDtypeStruct`s.
      file: JSON, such as "tests/plans/train_step.json".
      update: write the file anew.

    Raises:
      AssertionError: the plan is another; the text has a line for each difference.
      ValueError: the file is not a plan, or is one of another program, mesh or types of arguments.

    >>> import tempfile, jax, shardax as sx
    >>> mesh = jax.sharding.AbstractMesh((4,), ("x",))
    >>> f = sx.shard_jit(lambda x: 2 * x, mesh=mesh, in_shardings=jax.P("x"))
    >>> file = Path(tempfile.mkdtemp(), "plan.json")
    >>> with warnings.catch_warnings(action="ignore"):
    ...     assert_plan(f, (jax.ShapeDtypeStruct((8,), "float32"),), file)
    >>> assert_plan(f, (jax.ShapeDtypeStruct((8,), "float32"),), file)
    """
    require(
        isinstance(file, str | os.PathLike),
        "file of assert_plan",
        file,
        "a path, such as 'tests/plans/train_step.json'",
    )
    path, now = Path(file), record(_plan(f, args))
    if update or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(now), indent=1) + "\n")
        warnings.warn(
            f"assert_plan wrote the plan of {now.program} to {path}: read it, and commit it", stacklevel=2
        )
        return
    before, anew = read(path), "Give each its own file, or write this one anew: assert_plan(..., update=True)"
    check_same_program(before, now, str(path), anew)
    if before.mesh != now.mesh:
        raise ValueError(
            f"{path} is the plan of {before.named} on another mesh, {before.mesh}; this is on {now.mesh}. "
            f"{anew}"
        )
    different = changes(before, now)
    if different:
        raise AssertionError(
            f"the plan of {now.program} is not that of {path}:\n"
            + "".join(f"  {line}\n" for line in different)
            + "If that is meant, write the file anew: assert_plan(..., update=True)"
        )


@_jax.boundary
def assert_no_collectives(f: Any, args: Sequence[Any], kinds: str | Collection[str] = ()) -> None:
    """Asserts that a function sends nothing, or nothing of these kinds ("all_gather", "all_reduce", ...).

    Raises:
      AssertionError: it sends some; the text has a line for each collective, with the user's line and the
        reason.
      ValueError: there is no such kind.

    >>> import jax, shardax as sx
    >>> f = sx.shard_jit(jax.numpy.sum, mesh=jax.sharding.AbstractMesh((4,), ("x",)), in_shardings=jax.P("x"))
    >>> assert_no_collectives(f, (jax.ShapeDtypeStruct((8,), "float32"),), kinds="all_gather")
    """
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    ok = isinstance(kinds, Collection) and all(isinstance(kind, str) for kind in kinds)
    require(
        ok,
        "kinds of assert_no_collectives",
        kinds,
        "a kind of collective, such as 'all_gather', or a tuple of them",
    )
    for kind in kinds:
        if kind not in KINDS.values():
            raise ValueError(
                f"kinds={kinds!r}: there is no {kind!r}; give some of "
                f"{', '.join(sorted(set(KINDS.values())))}"
            )
    sent = [c for c in _plan(f, args).collectives if not kinds or c.kind in kinds]
    if sent:
        raise AssertionError(
            f"{_name(f)} sends, {bytes_text(comm_bytes(sent))} per call and device:\n{_listed(sent)}"
        )


@_jax.boundary
def assert_max_bytes(f: Any, args: Sequence[Any], nbytes: int) -> None:
    """Asserts that each device sends at most `nbytes` bytes per call (`Plan.comm_bytes`).

    Raises:
      AssertionError: it sends more; the text has a line for each collective, the dearest first.

    >>> import jax, shardax as sx
    >>> f = sx.shard_jit(jax.numpy.sum, mesh=jax.sharding.AbstractMesh((4,), ("x",)), in_shardings=jax.P("x"))
    >>> assert_max_bytes(f, (jax.ShapeDtypeStruct((8,), "float32"),), 6)
    """
    require(is_number(nbytes, 0), "nbytes of assert_max_bytes", nbytes, "a number of bytes")
    plan = _plan(f, args)
    if plan.comm_bytes > nbytes:
        raise AssertionError(
            f"each device sends {plan.comm_bytes:,} bytes in a call of {_name(f)}, which is more than "
            f"{nbytes:,}:\n" + _listed(plan.collectives)
        )


def _plan(f: Any, args: Sequence[Any]) -> Any:
    if not hasattr(f, "plan"):
        raise ValueError(f"{_name(f)} has no plan: give what shardax.shard_jit made of it")
    if not isinstance(args, tuple | list):
        raise ValueError(
            f"args of {_name(f)} is of type {type(args).__name__}: give the tuple of the arguments of a call"
        )
    return f.plan(*args)


def _listed(collectives: Sequence[Collective]) -> str:
    ordered = sorted(collectives, key=lambda c: -c.total)
    return "\n".join(f"  {bytes_text(c.total)}: {c}, at {c.line or 'an unknown line'}" for c in ordered)


def _name(f: Any) -> str:
    return getattr(f, "__name__", repr(f))
