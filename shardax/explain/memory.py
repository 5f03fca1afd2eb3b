"""The memory of a plan, in bytes on each device: arguments by kind, the most that lives at once, what is replicated.

The live set is read off the local jaxpr in program order. An array lives from the equation that makes it to the last that reads
it; arguments that are not donated, and results, to the end. What is computed elementwise and used once, by an elementwise
equation or a reduction, is taken to be fused into that: it is never stored, and its operands live on instead. XLA may reorder
and fuse more, and pads; the compiled program's `memory_analysis()` is what it really takes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax.extend.core import jaxprs_in_params

from shardax import _jax
from shardax.explain.ledger import array_bytes, array_text
from shardax.explain.lines import code, line_text
from shardax.explain.values import intermediates
from shardax.explain.words import as_one, bytes_text, form, times
from shardax.sharding import shard_count

if TYPE_CHECKING:
    from shardax.explain.plan import Plan

TOP = 12  # rows that the text shows


@dataclass(frozen=True)
class Tensor:
    """An array on one device: its type, its bytes, and the user's line, or the argument, that it comes from."""

    array: str
    nbytes: int
    origin: str


@dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    `arguments`: by the first two keys of their paths. `peak`: of the live set, at the user's `line`; `tensors` live then, the
    largest first. `replicated`: arrays that no axis splits, the largest first.
    """

    arguments: dict[str, int]
    results: int
    peak: int
    line: str
    tensors: tuple[Tensor, ...]
    replicated: tuple[Tensor, ...]

    def __str__(self):
        at = f" at {line_text(self.line)}  {code(self.line)}".rstrip() if self.line else ""
        lines = [f"Memory on each device: {bytes_text(self.peak)} at most{at}"[:110], "", "Arguments"]
        lines += [_row(path, "", nbytes) for path, nbytes in self.arguments.items()]
        lines += ["", "Alive at the peak", *_alike(self.tensors)]
        if self.replicated:
            lines += ["", "Replicated", *_alike(self.replicated)]
        return "\n".join(lines)


def memory(plan: "Plan", threshold: int) -> Memory:
    """The memory of a plan; what is replicated counts from `threshold` bytes on."""
    (eqn,) = (e for e in plan.local_jaxpr.jaxpr.eqns if e.primitive.name == "shard_map")
    jaxpr = _jax.closed(eqn.params["jaxpr"]).jaxpr
    names = [place.named for place in plan.arguments()]
    parameters = dict(zip(eqn.invars, jaxpr.invars, strict=True))
    inputs = [parameters[v] for v in plan.local_jaxpr.jaxpr.invars]
    origins = {v: f"argument {name}" for v, name in zip(inputs, names, strict=False)}
    kept = [v for i, v in enumerate(inputs) if i not in plan.donated]
    peak, line, alive = live_peak(jaxpr, kept, jaxpr.invars)
    tensors = [Tensor(array_text(v.aval), array_bytes(v.aval), origins.get(v, where)) for v, where in alive]
    return Memory(
        _by_kind(zip(names, (array_bytes(v.aval) for v in inputs), strict=False)),
        sum(array_bytes(v.aval) for v in jaxpr.outvars),
        peak,
        line,
        tuple(sorted(tensors, key=lambda t: -t.nbytes)),
        tuple(_replicated(plan, threshold)),
    )


def _by_kind(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes by the argument and the key in it, as in "state/params"."""
    kinds: Counter = Counter()
    for path, nbytes in sizes:
        kinds["/".join(path.split("/")[:2])] += nbytes
    return dict(kinds)


def live_peak(jaxpr, kept: Iterable[Any] = (), stored: Sequence[Any] = ()) -> tuple[int, str, list[tuple[Any, str]]]:
    """The most bytes that live at once, the line there, and the variables, each with its line.

    Args:
      jaxpr: a program, or the body of a loop.
      kept: inputs that live to the end.
      stored: inputs that count; those of a body that are the arrays outside do not.
    """
    life = _Life(jaxpr, kept, stored)
    inner = {i: _bodies(eqn) for i, eqn in enumerate(jaxpr.eqns) if any(True for _ in jaxprs_in_params(eqn.params))}
    totals = life.totals()
    for i, (extra, _, _) in inner.items():
        totals[i + 1] += extra
    at = max(range(len(totals)), key=totals.__getitem__)
    extra = inner.get(at - 1, (0, "", []))
    line = extra[1] or (_jax.user_line(jaxpr.eqns[at - 1].source_info) if at else "")
    return totals[at], line, [*life.alive(at), *extra[2]]


def _bodies(eqn) -> tuple[int, str, list[tuple[Any, str]]]:
    """The dearest body of an equation, beyond what it is given: the slices that a scan takes are new."""
    found = []
    for body in jaxprs_in_params(eqn.params):
        jaxpr = _jax.closed(body).jaxpr
        start = sum(_jax.scan_counts(eqn.params)) if eqn.primitive.name == "scan" else len(jaxpr.invars)
        found.append(live_peak(jaxpr, (), jaxpr.invars[start:]))
    return max(found, key=lambda peak: peak[0])


class _Life:
    """Birth and death of each stored variable; time 0 is before the first equation."""

    def __init__(self, jaxpr, kept: Iterable[Any], stored: Sequence[Any]):
        self.eqns = jaxpr.eqns
        end = len(self.eqns) + 1
        self.death: dict[Any, int] = {v: end for v in (*kept, *jaxpr.outvars) if not _jax.is_literal(v)}
        self.birth: dict[Any, int] = dict.fromkeys(stored, 0)
        self.makers: dict[Any, Any] = {}
        users = self._users(jaxpr)
        for i in range(len(self.eqns), 0, -1):
            eqn = self.eqns[i - 1]
            fused = _is_fused(eqn, users)
            when = max((self.death.get(v, 0) for v in eqn.outvars), default=0) if fused else i
            for v in eqn.invars:
                if not _jax.is_literal(v):
                    self.death[v] = max(self.death.get(v, 0), when)
            if not fused:
                self.birth |= dict.fromkeys(eqn.outvars, i)
                self.makers |= dict.fromkeys(eqn.outvars, eqn)

    def _users(self, jaxpr) -> dict[Any, list[Any]]:
        users: dict[Any, list[Any]] = {v: [None] for v in jaxpr.outvars if not _jax.is_literal(v)}
        for eqn in self.eqns:
            for v in eqn.invars:
                if not _jax.is_literal(v):
                    users.setdefault(v, []).append(eqn)
        return users

    def totals(self) -> list[int]:
        """Bytes alive at each time."""
        changes = [0] * (len(self.eqns) + 3)
        for v, birth in self.birth.items():
            changes[birth] += array_bytes(v.aval)
            changes[max(self.death.get(v, 0), birth) + 1] -= array_bytes(v.aval)
        totals, now = [], 0
        for change in changes[: len(self.eqns) + 1]:
            now += change
            totals.append(now)
        return totals

    def alive(self, at: int) -> list[tuple[Any, str]]:
        alive = [v for v, birth in self.birth.items() if birth <= at <= max(self.death.get(v, 0), birth)]
        return [(v, _jax.user_line(self.makers[v].source_info) if v in self.makers else "") for v in alive]


def _is_fused(eqn, users) -> bool:
    if len(eqn.outvars) != 1 or eqn.primitive.name not in _ELEMENTWISE:
        return False
    reading = users.get(eqn.outvars[0], [])
    return len(reading) == 1 and reading[0] is not None and _takes_fused(reading[0])


def _takes_fused(eqn) -> bool:
    name = eqn.primitive.name
    return name in _ELEMENTWISE or (name.startswith("reduce_") and name != "reduce_scatter")


def _replicated(plan: "Plan", threshold: int) -> list[Tensor]:
    """Arguments and intermediates that no axis of more than one device splits, the largest first."""
    sizes = plan.mesh.shape
    arguments = [(array_text(p.aval), array_bytes(p.aval), f"argument {p.named}", p.sharding) for p in plan.arguments()]
    made = [(x.array, x.nbytes, x.line, x.sharding) for x in (intermediates(plan) if plan.graph else ())]
    found = [
        Tensor(array, nbytes, origin)
        for array, nbytes, origin, sharding in [*arguments, *made]
        if nbytes >= threshold and plan.mesh.size > 1 and shard_count(sharding.axes, sizes) == 1
    ]
    return sorted(found, key=lambda x: -x.nbytes)


def _alike(rows: Sequence[Tensor]) -> list[str]:
    """A line for all that are of one type and of one line, or of arguments whose paths differ in numbers only."""
    groups: dict[tuple[str, str], list] = {}
    for row in rows:
        groups.setdefault((row.array, form(row.origin) if row.origin.startswith("argument") else row.origin), []).append(row)
    totals = sorted(groups.values(), key=lambda group: -sum(x.nbytes for x in group))
    lines = [_row(_origin(group), times(len(group)) + group[0].array, sum(x.nbytes for x in group)) for group in totals[:TOP]]
    rest = [x.nbytes for group in totals[TOP:] for x in group]
    return [*lines, _row("other", f"{len(rest)} arrays", sum(rest))] if rest else lines


def _origin(group: Sequence[Tensor]) -> str:
    origin = group[0].origin
    if origin.startswith("argument"):
        return as_one([x.origin for x in group])
    return f"{line_text(origin)}  {code(origin)}" if origin else "(unknown line)"


def _row(name: str, what: str, nbytes: int) -> str:
    return f"  {name:<66.66} {what:<28} {bytes_text(nbytes):>11}"


_ELEMENTWISE = {
    "abs", "add", "add_any", "and", "atan2", "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "cos", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "not",
    "or", "pow", "rem", "reshape", "reshard", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tan", "tanh", "transpose",
    "xor",
}  # fmt: skip
