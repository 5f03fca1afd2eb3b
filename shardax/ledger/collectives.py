"""Reads the collectives of a local program off its jaxpr, with bytes, trips, source lines and reasons."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from shardax import _jax
from shardax.cost import noted
from shardax.cost.network import Message, reaches_far
from shardax.ledger import causes
from shardax.sharding import Axes, AxisSizes, minor_most, shard_count


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a local program.

    `devices`: how many exchange with one another; of a ppermute, how many of the mesh send.
    `nbytes`: bytes that one device sends each time that it runs (ring algorithms; of a ppermute, a device
      that sends).
    `trips`: how often it runs in a call: the lengths of the scans around it, multiplied; in a branch of which
      it is known which devices take it when, as stages of a pipeline do, how often those do that send most.
    `open_loop`: it stands in a `while` that counts no constant number of times, and `trips` are those of one
      iteration.
    `other_branch`: it stands in a branch of a `cond` that is not the dearest, and does not count in `total`.
    `minor`, `far`: as a `cost.network.Message` has them.
    `reason`: why, in a few words; `Plan.because` tells the facts, which `cause` holds.
    """

    kind: str
    axes: Axes
    devices: int
    nbytes: int
    operands: tuple[jax.ShapeDtypeStruct, ...]
    trips: int = 1
    open_loop: bool = False
    other_branch: bool = False
    line: str = ""
    reason: str = ""
    cause: causes.Cause | None = field(default=None, compare=False, repr=False)
    minor: int | None = field(default=None, compare=False, repr=False)
    far: bool = field(default=False, compare=False, repr=False)

    @property
    def message(self) -> Message:
        """What a network prices."""
        return Message(self.kind, self.axes, self.nbytes, self.minor, self.far)

    @property
    def total(self) -> int:
        """Bytes that one device sends per call."""
        return 0 if self.other_branch else self.nbytes * self.trips

    @property
    def also(self) -> tuple[str, ...]:
        """The lines that it serves besides `line`: those of older contributions to the sum that it settles,
        the newest first.
        """
        return self.cause.also if self.cause else ()

    @property
    def parts(self) -> tuple["Collective", ...]:
        """Those that were combined into this one, each with its line, reason and part of the bytes; else this
        one itself.
        """
        if not isinstance(self.cause, causes.Combined):
            return (self,)
        parts = self.cause.parts
        ends = [0, *itertools.accumulate(sum(map(array_bytes, part.operands)) for part in parts)]
        sent = [end * self.nbytes // ends[-1] for end in ends]
        fields = [
            {"operands": p.operands, "line": p.line or self.line, "reason": p.reason, "cause": p.cause}
            for p in parts
        ]
        return tuple(
            replace(self, nbytes=j - i, **f)
            for f, (i, j) in zip(fields, itertools.pairwise(sent), strict=True)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the (first) operand on each device."""
        return self.operands[0].shape

    @property
    def dtype(self) -> Any:
        return self.operands[0].dtype

    def __str__(self):
        operands = ", ".join(map(array_text, self.operands))
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.kind} over {','.join(self.axes)} of {operands}{reason}"


def array_text(array) -> str:
    """An array's type as jaxprs print it.

    >>> array_text(jax.ShapeDtypeStruct((4, 128), "float32")), array_text(jax.ShapeDtypeStruct((), "bool"))
    ('f32[4,128]', 'bool[]')
    """
    name = re.sub(
        r"^(float|uint|int|complex)(?=\d)", lambda m: m[1][0] if m[1] != "float" else "f", str(array.dtype)
    )
    return f"{name.replace('bfloat', 'bf')}[{','.join(map(str, array.shape))}]"


def array_bytes(array) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


AS_WRITTEN = "as written"
"""The reason of what no reshard and no lowering of ours sends: the user's own, in a shard_map or in a
lowering of theirs.
"""


def collectives(
    jaxpr, axis_sizes: AxisSizes, folded: Callable[[Axes], Axes] = tuple, line: str = ""
) -> tuple[Collective, ...]:
    """The collectives of a local program in program order, those in bodies included; what sends nothing is
    left out.

    `folded`: the program's axes as a person names them. `line`: that of the function, for what reshards
    its arguments.
    """
    found = _walk(jaxpr, axis_sizes, line)
    return tuple(replace(c, axes=folded(c.axes), trips=math.ceil(c.trips)) for c in found)


def comm_bytes(ledger: Iterable[Collective]) -> int:
    """Bytes that one device sends per call; an open loop counted once, of a cond the dearest branch."""
    return sum(c.total for c in ledger)


def bytes_sent(kind: str, nbytes: int, devices: int) -> int:
    """Bytes that one device sends in one collective whose operands have `nbytes` on each device (ring
    algorithms, rounded up).

    >>> kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ppermute")
    >>> [bytes_sent(kind, 1024, 4) for kind in kinds]
    [3072, 768, 1536, 768, 1024]
    """
    return _SENT[kind](nbytes, devices)


def other_branches(branches: Iterable[Iterable]) -> Iterator:
    """All entries of the branches of a `cond`. Those outside of the dearest branch are marked as
    `other_branch`; among equals the first branch is the dearest.
    """
    per_branch = [list(branch) for branch in branches]
    dearest = max(range(len(per_branch)), key=lambda i: (comm_bytes(per_branch[i]), -i))
    for i, branch in enumerate(per_branch):
        yield from branch if i == dearest else (replace(c, other_branch=True) for c in branch)


def _walk(jaxpr, sizes: AxisSizes, line: str) -> Iterator[Collective]:
    """The collectives of a body. `line` is that of the innermost equation around the body that has one."""
    jaxpr = _jax.closed(jaxpr).jaxpr
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    tabled = dict(_by_tables(jaxpr.eqns, sizes, line))
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name.removesuffix("_start")
        if name in KINDS:
            yield from read(eqn, sizes, line)
        elif id(eqn) in tabled:
            yield from tabled[id(eqn)]
        elif bodies := list(jaxprs_in_params(eqn.params)):
            eqn_line = _jax.user_line(eqn.source_info) or line
            yield from _BODIES.get(name, _all_once)(
                eqn, makers, [_walk(body, sizes, eqn_line) for body in bodies]
            )


def read(eqn, sizes: AxisSizes, line: str = "") -> Iterator[Collective]:
    """What a collective sends. `line`: that of what is around it, where it has none."""
    kind = KINDS[eqn.primitive.name.removesuffix("_start")]
    line = _jax.user_line(eqn.source_info) or line
    axes = _axes(eqn.params)
    operands = operands_of(eqn)
    devices, far = _devices(kind, axes, eqn.params, sizes)
    nbytes = sum(bytes_sent(kind, array_bytes(x), devices) for x in operands)
    if nbytes:
        reason, cause = why(kind, eqn.source_info.name_stack)
        told = {"line": line, "reason": reason, "cause": cause}
        yield Collective(kind, axes, devices, nbytes, operands, **told, minor=_minor(kind, eqn), far=far)


def _minor(kind: str, eqn) -> int | None:
    """How many elements of the minor-most dim pieces have that are scattered, or gathered, along it."""
    if kind not in ("all_gather", "reduce_scatter") or not eqn.params["tiled"]:
        return None
    gathers = kind == "all_gather"
    dim = eqn.params["all_gather_dimension" if gathers else "scatter_dimension"]
    shape = (eqn.invars if gathers else eqn.outvars)[0].aval.shape
    return shape[dim] if dim == minor_most(shape) else None


def operands_of(eqn) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What a collective sends of, on each device."""
    return tuple(
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars if hasattr(v.aval, "shape")
    )


def why(kind: str, name_stack) -> tuple[str, causes.Cause | None]:
    """The reason of a collective, and its cause where it has one: those of the innermost scope that tells."""
    for name in reversed(_jax.scope_names(name_stack)):
        if isinstance(name, causes.Named):
            return name.reason, name.cause
        if reason := reason_of(kind, name):
            return reason, None
    return AS_WRITTEN, None


def _axes(params) -> Axes:
    axes = params["axes"] if "axes" in params else params["axis_name"]
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _devices(kind: str, axes: Axes, params, sizes: AxisSizes) -> tuple[int, bool]:
    """`devices` and `far` of a collective."""
    if kind == "ppermute":
        senders, far = _permuted(_Identical(params["perm"]), tuple([sizes[a] for a in axes]))
        return senders * math.prod(sizes.values()) // shard_count(axes, sizes), far
    groups = params.get("axis_index_groups")
    return len(groups[0]) if groups else shard_count(axes, sizes), False


class _Identical:
    """A tuple that only equals itself: that of thousands of pairs takes long to hash."""

    def __init__(self, value: tuple[tuple[int, int], ...]):
        self.value = value  # held, so that no other takes its id

    def __hash__(self):
        return id(self.value)

    def __eq__(self, other):
        return isinstance(other, _Identical) and self.value is other.value


@lru_cache(128)
def _permuted(pairs: _Identical, counts: tuple[int, ...]) -> tuple[int, bool]:
    """How many devices send to another, and whether to some other than a neighbour."""
    return sum(a != b for a, b in pairs.value), reaches_far(pairs.value, counts)


def reason_of(kind: str, name_stack) -> str:
    """What stands in brackets in the innermost scope of the form `kind[reason]`; `kind` is a regular
    expression.
    """
    stack = re.sub(
        rf"(?:^|/){kind}:[^:]*(?::\d+)?$", "", str(name_stack)
    )  # the user's line, of passes/scopes.py
    scope = re.search(rf".*(?:^|[/(]){kind}\[(.*)\]", stack)
    return scope[1] if scope else ""


def _all_once(eqn, makers, bodies) -> Iterator[Collective]:
    for body in bodies:
        yield from body


def _cond(eqn, makers, branches) -> Iterator[Collective]:
    return other_branches(branches)


def _by_tables(eqns: Sequence[Any], sizes: AxisSizes, line: str) -> Iterator[tuple[int, list[Collective]]]:
    """Of conds of which it is noted who takes which branch when, by their ids: the collectives of the group
    of devices that sends most, each as often as that takes its branch.
    """
    for conds in noted.parts(eqns):
        notes = [note for note in map(noted.branches_of, conds) if note is not None]
        lines = (_jax.user_line(cond.source_info) or line for cond in conds)
        found = [
            [list(_walk(body, sizes, own)) for body in jaxprs_in_params(cond.params)]
            for cond, own in zip(conds, lines, strict=True)
        ]
        parts = list(zip(notes, found, strict=True))
        sent = [
            sum(comm_bytes(branches[note.taken[n]]) for note, branches in parts)
            for n in range(len(notes[0].taken))
        ]
        group = notes[0].dearest_group(sent)
        for cond, (note, branches) in zip(conds, parts, strict=True):
            yield id(cond), list(_taken(note, group, branches))


def _taken(note: noted.Branches, group: int, branches: list[list[Collective]]) -> Iterator[Collective]:
    taken = note.taken[note.table[:, group]]
    for i, branch in enumerate(branches):
        part = Fraction(int((taken == i).sum()), len(note.table))
        for c in branch:
            yield replace(c, trips=c.trips * part) if part else replace(c, other_branch=True)


def _scan(eqn, makers, bodies) -> Iterator[Collective]:
    length = eqn.params["length"]
    return (replace(c, trips=c.trips * length) for c in _all_once(eqn, makers, bodies) if length)


def _while(eqn, makers, bodies) -> Iterator[Collective]:
    trip_count = _trip_count(eqn, makers)
    if trip_count is None:
        return (replace(c, open_loop=True) for c in _all_once(eqn, makers, bodies))
    return (replace(c, trips=c.trips * trip_count) for c in _all_once(eqn, makers, bodies) if trip_count)


def _trip_count(eqn, makers) -> int | None:
    """How often a `while` runs that counts from a constant by a constant up to one, as `fori_loop` does; else
    None.

    `makers`: the equations of the variables around it.
    """
    cond, body = (_jax.closed(eqn.params[name]).jaxpr for name in ("cond_jaxpr", "body_jaxpr"))
    skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if [e.primitive.name for e in cond.eqns] != ["lt"] or cond.outvars[0] is not cond.eqns[0].outvars[0]:
        return None
    counter, bound = cond.eqns[0].invars
    if _jax.is_literal(counter) or not _jax.is_literal(bound) or counter not in cond.invars[skip:]:
        return None
    at = cond.invars[skip:].index(counter)
    start, step = _constant(eqn.invars[skip + consts + at], makers), _step(body, consts + at, at)
    return None if start is None or step is None else max(0, -(-(int(bound.val) - start) // step))


def _constant(atom, makers) -> int | None:
    """A known integer, which at most was cast."""
    while (
        not _jax.is_literal(atom) and atom in makers and makers[atom].primitive.name == "convert_element_type"
    ):
        atom = makers[atom].invars[0]
    is_integer = _jax.is_literal(atom) and np.issubdtype(atom.aval.dtype, np.integer)
    return int(atom.val) if is_integer else None


def _step(body, number_in: int, number_out: int) -> int | None:
    """What the body of a loop adds to a carry, if that is a positive constant."""
    out = body.outvars[number_out]
    eqn = next((e for e in body.eqns if out in e.outvars and e.primitive.name == "add"), None)
    if eqn is None or eqn.invars[0] is not body.invars[number_in]:
        return None
    step = _constant(eqn.invars[1], {})
    return step if step is not None and step > 0 else None


_BODIES = {"cond": _cond, "scan": _scan, "while": _while}

KINDS = {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "all_to_all": "all_to_all",
    "pbroadcast": "broadcast",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "ppermute": "ppermute",
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "ragged_all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "unreduced_psum": "all_reduce",
    "unreduced_reduce_scatter": "reduce_scatter",
}
"""The kind of each collective of JAX's, of which there are no others."""

_EXTREMA = {"pmax": "max", "pmin": "min"}


def kind_of(eqn) -> str:
    """ "" of what is no collective."""
    return KINDS.get(eqn.primitive.name, "")


def is_collective(eqn) -> bool:
    return eqn.primitive.name in KINDS


def reduction_of(eqn) -> str:
    """Of an all_reduce "sum", "max" or "min"; else ""."""
    return _EXTREMA.get(eqn.primitive.name, "sum") if kind_of(eqn) == "all_reduce" else ""


def _part(nbytes: int, numerator: int, denominator: int) -> int:
    return -(-nbytes * numerator // denominator)


_SENT: dict[str, Callable[[int, int], int]] = {  # kind -> (bytes of the operand, devices) -> bytes sent
    "all_gather": lambda shard, n: shard * (n - 1),
    "all_reduce": lambda v, n: _part(v, 2 * (n - 1), n),
    "all_to_all": lambda v, n: _part(v, n - 1, n),
    "broadcast": lambda v, n: v * (n > 1),
    "ppermute": lambda shard, senders: shard * (senders > 0),
    "reduce_scatter": lambda v, n: _part(v, n - 1, n),
}
