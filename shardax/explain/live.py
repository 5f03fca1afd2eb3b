"""Which arrays of a local program are stored, when they live, and what moves to and from memory: for peaks
and estimates.

An array lives from the equation that makes it to the last one that reads it. Results, and inputs that are
kept, live to the end. A value that is computed elementwise and used once, by an elementwise equation or a
reduction, counts as fused into that: it is never stored, and its operands live longer instead. So does a
product that one equation reads, and only transposes: compilers make it in that order. XLA may reorder and
fuse more, and it pads. What is fused, updated in place, or read in part, the registered rules say
(`register_rule`, its arguments `fuses`, `in_place`, `reads`).
"""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from shardax import _jax
from shardax.annotations.explicit import memory_of
from shardax.ledger.collectives import reason_of
from shardax.spmd_rules.equations import node_of
from shardax.spmd_rules.registry import RULES, Entry

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


class Life:
    """Birth and death of each stored variable of a jaxpr; time 0 is before the first equation, and i after
    the i-th.

    Args:
      jaxpr: a program, or the body of a loop.
      kept: inputs that live to the end.
      stored: inputs that count; those of a body that are the arrays outside do not.
      memory: that whose bytes count.
    """

    def __init__(self, jaxpr, kept: Iterable[Any] = (), stored: Sequence[Any] = (), memory: Any = DEVICE):
        self.eqns = jaxpr.eqns
        self.memory = memory
        end = len(self.eqns) + 1
        self.death: dict[Any, int] = {v: end for v in (*kept, *jaxpr.outvars) if not _jax.is_literal(v)}
        self.birth: dict[Any, int] = dict.fromkeys(stored, 0)
        self.makers: dict[Any, Any] = {}
        self.fused: dict[Any, Any] = {}
        self.roots: dict[Any, Any] = {}  # the variable whose memory another one has
        users: dict[Any, list[Any]] = {v: [None] for v in jaxpr.outvars if not _jax.is_literal(v)}
        for eqn in self.eqns:
            for v in eqn.invars:
                if not _jax.is_literal(v):
                    users.setdefault(v, []).append(eqn)
        for i in range(len(self.eqns), 0, -1):
            self._see(i, self.eqns[i - 1], users)
        for i, eqn in enumerate(self.eqns, 1):
            for old, new in _in_place(eqn):
                # where the equation is the last to read an array, its result takes the memory of that array
                if not _jax.is_literal(old) and self._last(old) == i and eqn.invars.count(old) == 1:
                    self._share(i, old, new)
            for old, new in self.views(eqn):
                self._share(i, old, new)

    def _last(self, v) -> int:
        """When the memory of a variable is read last, as far as is known."""
        return self.death[self.roots.get(v, v)]

    def _share(self, i: int, old, new) -> None:
        """The i-th equation makes `new` in the memory of `old`."""
        root = self.roots[new] = self.roots.get(old, old)
        self.death[root] = max(self.death[root], self.death.get(new, i))
        self.birth.pop(new, None)

    def views(self, eqn) -> Iterator[tuple[Any, Any]]:
        """The stored operands of an equation of which its stored results are views, as a barrier's are."""
        entry = _entry(eqn)
        stays = _stays(eqn)
        if (stays or entry.reads in ("none", "view")) and len(eqn.invars) == len(eqn.outvars):
            for old, new in zip(eqn.invars, eqn.outvars, strict=True):
                stored = not _jax.is_literal(old) and old not in self.fused and new not in self.fused
                if stored and (stays or entry.is_view(_shape(old), _shape(new))):
                    yield old, new

    def _see(self, i: int, eqn, users) -> None:
        fused = _is_fused(eqn, users)
        when = max((self.death.get(v, 0) for v in eqn.outvars), default=0) if fused else i
        for v in eqn.invars:
            if not _jax.is_literal(v):
                self.death[v] = max(self.death.get(v, 0), when)
        (self.fused if fused else self.makers).update(dict.fromkeys(eqn.outvars, eqn))
        if not fused:
            self.birth |= dict.fromkeys(eqn.outvars, i)

    def totals(self) -> list[int]:
        """Bytes alive at each time."""
        changes = [0] * (len(self.eqns) + 3)
        for v, birth in self.birth.items():
            changes[birth] += nbytes(v, self.memory)
            changes[max(self.death.get(v, 0), birth) + 1] -= nbytes(v, self.memory)
        totals, now = [], 0
        for change in changes[: len(self.eqns) + 1]:
            now += change
            totals.append(now)
        return totals

    def alive(self, at: int) -> list[tuple[Any, str]]:
        """The variables that live at a time, each with its line."""
        alive = [
            v
            for v, birth in self.birth.items()
            if birth <= at <= max(self.death.get(v, 0), birth) and _memory(v) is self.memory
        ]
        return [(v, self.line(v)) for v in alive]

    def line(self, v) -> str:
        """Where a variable is made, or else why; of what comes from outside, such as a constant or what an
        iteration is given, where it is read first.
        """
        if v in self.makers:
            source = self.makers[v].source_info
            return _jax.user_line(source) or reason_of(r"\w+", source.name_stack)
        lines = (_jax.user_line(eqn.source_info) for eqn in self.eqns if v in eqn.invars)
        return next(filter(None, lines), "")

    def reads(self, eqn) -> set[Any]:
        """The stored variables that an equation reads, itself or through what is fused into it."""
        read, todo = set(), [v for v in eqn.invars if not _jax.is_literal(v)]
        while todo:
            v = todo.pop()
            if v in self.fused:
                todo += [w for w in self.fused[v].invars if not _jax.is_literal(w)]
            else:
                read.add(v)
        return read


def _in_place(eqn) -> Iterator[tuple[Any, Any]]:
    """The pairs (operand, result) that share memory: of updates, and of what a loop carries."""
    name, entry = eqn.primitive.name, _entry(eqn)
    if entry.in_place is not None and not entry.looks_up:
        yield eqn.invars[entry.in_place[0]], eqn.outvars[0]
    elif name == "scan":
        consts, carries = _jax.scan_counts(eqn.params)
        yield from zip(eqn.invars[consts:][:carries], eqn.outvars[:carries], strict=True)
    elif name == "while":
        yield from zip(eqn.invars[-len(eqn.outvars) :], eqn.outvars, strict=True)


def nbytes(v, memory: Any = None) -> int:
    """Bytes of a variable, in one memory or in any. What has no size, such as a token, has none."""
    counts = hasattr(v.aval, "shape") and (memory is None or _memory(v) is memory)
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize if counts else 0


def _shape(v) -> tuple[int, ...]:
    """Of a token: none."""
    return getattr(v.aval, "shape", ())


def _memory(v) -> Any:
    return memory_of(v.aval)


class Live(NamedTuple):
    """The most bytes that live at once, the line where that is, and the variables that live then, each with
    its line.

    `curve`: the bytes alive before the first equation, and after each, with it and those it is in, outermost
    first, in program order. For an equation with bodies stands one iteration of the dearest.
    """

    peak: int
    line: str
    alive: list[tuple[Any, str]]
    curve: list[tuple[int, tuple[Any, ...]]]


def live(jaxpr, kept: Iterable[Any] = (), stored: Sequence[Any] = (), memory: Any = DEVICE) -> Live:
    """What lives when in a program, in one memory; `kept` and `stored` as in `Life`."""
    life = Life(jaxpr, kept, stored, memory)
    inner = {
        i: _dearest(eqn, memory) for i, eqn in enumerate(jaxpr.eqns, 1) if any(True for _ in bodies(eqn))
    }
    peaks, curve = [], []
    for i, total in enumerate(life.totals()):
        body, around = inner.get(i, _NO_BODY), tuple(jaxpr.eqns[i - 1 : i] if i else ())
        peaks.append(total + body.peak)
        curve += [(total + n, (*around, *eqns)) for n, eqns in body.curve]
    at = max(range(len(peaks)), key=peaks.__getitem__)
    body = inner.get(at, _NO_BODY)
    line = body.line or (_jax.user_line(jaxpr.eqns[at - 1].source_info) if at else "")
    return Live(peaks[at], line, [*life.alive(at), *body.alive], curve)


_NO_BODY = Live(0, "", [], [(0, ())])


def _dearest(eqn, memory) -> Live:
    """The dearest body of an equation, beyond the arrays that it is given. The slices that a scan takes on
    the device are new arrays; those at the host are copied from where they are.
    """
    found = []
    for body in bodies(eqn):
        jaxpr = _jax.closed(body).jaxpr
        start = sum(_jax.scan_counts(eqn.params)) if eqn.primitive.name == "scan" else len(jaxpr.invars)
        found.append(live(jaxpr, (), jaxpr.invars[start:] if memory is DEVICE else (), memory))
    return max(found, key=lambda each: each.peak)


def traffic(jaxpr) -> Iterator[tuple[Any, int]]:
    """(equation, bytes that it reads and writes in memory) of each equation that stores something; bodies are
    left out. What a transpose stores of a product, the product does, beside its FLOPs.
    """
    life = Life(jaxpr)
    for eqn in jaxpr.eqns:
        if not all(v in life.fused for v in eqn.outvars) or not eqn.outvars:
            makers = (life.fused.get(v) for v in eqn.invars if not _jax.is_literal(v))
            product = next((maker for maker in makers if maker and _entry(maker).fuses == "transposes"), eqn)
            yield product, _touched(eqn, life)


def _touched(eqn, life: Life) -> int:
    entry = _entry(eqn)
    if entry.in_place is not None:
        return 2 * _on_device([(*eqn.invars, *eqn.outvars)[entry.in_place[1]]])
    if entry.reads == "part":
        return 2 * _on_device(eqn.outvars)
    if entry.reads == "none" or any(True for _ in bodies(eqn)) or any(True for _ in life.views(eqn)):
        return 0
    return _on_device(life.reads(eqn)) + _on_device(eqn.outvars)


def _on_device(variables: Iterable[Any]) -> int:
    return sum(nbytes(v, DEVICE) for v in variables)


def between_memories(eqn) -> int:
    """Bytes that an equation copies from one memory to the other."""
    pairs = zip(eqn.invars, eqn.outvars, strict=True) if eqn.primitive.name == "device_put" else ()
    return sum(nbytes(new) for old, new in pairs if _memory(old) is not _memory(new))


def _stays(eqn) -> bool:
    """Whether an equation puts arrays where they are."""
    memories = map(_memory, eqn.invars), map(_memory, eqn.outvars)
    return eqn.primitive.name == "device_put" and all(map(operator.is_, *memories))


def bodies(eqn) -> Iterator[Any]:
    """The jaxprs in an equation's parameters whose arrays are in memory; what a kernel does with Refs is
    not.
    """
    for body in jaxprs_in_params(eqn.params):
        if not any(map(_jax.is_ref_aval, _jax.closed(body).jaxpr.invars)):
            yield body


def _is_fused(eqn, users) -> bool:
    reading = users.get(eqn.outvars[0], []) if len(eqn.outvars) == 1 else []
    reader = reading[0] if len(reading) == 1 else None
    return reader is not None and _entry(eqn).is_fused(_entry(reader), lambda: node_of(reader))


def _entry(eqn) -> Entry:
    """What the registry says of an equation's primitive; what has no rule reads and writes all, by itself."""
    return RULES.get(eqn.primitive.name, _UNKNOWN)


_UNKNOWN = Entry("", "")
