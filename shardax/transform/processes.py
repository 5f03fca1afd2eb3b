"""Checks that several processes compile the same program, so that a mistake is an error and not a hang.

Every process that has devices of the mesh posts what it is about to compile in the key-value store of
`jax.distributed`, where all can read it. The first process compares, and posts a verdict for which all wait.
This happens when a program is lowered, not when it is called again. So all processes have to lower together,
in the same order; each may plan alone.
"""

import itertools
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from shardax import _jax
from shardax.program import Program

PATIENCE = 300  # seconds that a process waits for the others to come to the same program

# The programs of the same processes are compared in the order in which each lowers them.
_turns: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


def check_agreement(program: Program, mesh: Mesh) -> None:
    """Raises ValueError, on all processes that have devices of the mesh, where their programs differ."""
    members = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    store = _jax.key_value_store()
    if len(members) == 1 or store is None:
        return
    me, turn = jax.process_index(), f"shardax/{zlib.crc32(str(members).encode())}/{next(_turns[members])}"
    # the jaxpr without what differs between processes: addresses, and the order of sets
    text = re.sub(r"\b0x[0-9a-f]+", "0x", str(program.jaxpr))
    text = re.sub(r"frozenset\(\{([^{}]*)\}\)", lambda m: f"frozenset({sorted(m[1].split(', '))})", text)
    lines = [_place(program), _arguments(program), _devices(mesh), *text.splitlines()]
    store.key_value_set(
        f"{turn}/{me}",
        json.dumps({"heading": lines[:2], "lines": [zlib.crc32(line.encode()) for line in lines]}),
    )
    if me == members[0]:
        store.key_value_set(f"{turn}/verdict", json.dumps(_verdict(store, turn, members, lines)))
    verdict = json.loads(_read(store, f"{turn}/verdict", members[0], lines[0]))
    if verdict:
        raise ValueError(_words(verdict, lines, me, members[0]))


def _verdict(store, turn: str, members: Sequence[int], lines: Sequence[str]) -> dict[str, Any]:
    """Empty where all agree; else which process differs, from which line on, and what the first one has
    there.
    """
    own = [zlib.crc32(line.encode()) for line in lines]
    for other in members[1:]:
        record = json.loads(_read(store, f"{turn}/{other}", other, lines[0]))
        if record["lines"] != own:
            pairs = zip(own, record["lines"], strict=False)
            line = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(record["lines"])))
            return {"process": other, "heading": record["heading"], "line": line, "first": _line(lines, line)}
    return {}


def _read(store, key: str, process: int, place: str) -> str:
    try:
        return store.blocking_key_value_get(key, PATIENCE * 1000)
    except Exception as error:
        raise ValueError(
            f"process {process} did not come to {place} within {PATIENCE} s: it has ended, or does "
            "something else; every process must lower and call the same functions in the same order"
        ) from error


def _words(verdict: dict[str, Any], lines: Sequence[str], me: int, first: int) -> str:
    other, line = verdict["process"], verdict["line"]
    heading = [*lines[:2]] if me == other else verdict["heading"]
    words = f"processes disagree on the program: process {other} has {heading[0]}, of {heading[1]}"
    if line > 2:
        mine = f", process {me} has {_line(lines, line)!r}" if me != first else ""
        words += f"; its line {line - 2} differs: process {first} has {verdict['first']!r}{mine}"
    else:
        words += f"; process {first} has {verdict['first']}"
    return words + ". Every process must call the same functions on the same shapes, in the same order"


def _line(lines: Sequence[str], index: int) -> str:
    return lines[index].strip() if index < len(lines) else "nothing more"


def _place(program: Program) -> str:
    """The user's first line in it."""
    places = (node.line for node in program.graph.walk())
    return f"the program at {next(filter(None, places), '(no line known)')}"


def _arguments(program: Program) -> str:
    pairs = zip(program.jaxpr.in_avals, program.in_shardings, strict=True)
    return (
        ", ".join(f"{aval.str_short(short_dtypes=True)} in {sharding}" for aval, sharding in pairs)
        or "no arguments"
    )


def _devices(mesh: Mesh) -> str:
    shape = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"devices {[device.id for device in mesh.devices.flat]} as {shape}"
