"""Offload: state that rests in the host's memory, brought to the device where a step reads it.

    an update, elementwise in the state    array by array; `passes/streamed.py` brings each block by block,
                                           and sends back what is made of it
    a loop over layers                     each iteration brings its own layer
    a branch                               what it reads itself
    anything else                          brought whole, just before

What rests padded is brought, and goes back, with its tail of zeros: where a loop over layers brings it, row
by row, and each row is cut to its true shape.

A value is in one of two memories, `jax.memory.Space.Device` and `.Host`, which its type says.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardax import _jax
from shardax.annotations.annotate import annotate_p, bind_annotation
from shardax.annotations.explicit import as_at, memory_of, shape_of
from shardax.graph.evaluate import bound, evaluate
from shardax.passes.segments import Segment, Shape, in_order, segments
from shardax.spmd_rules import equations
from shardax.zero.padded import Padded, is_cut, is_tail, unpad

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
KIND = "pinned_host"


def require_memory(mesh: Mesh | AbstractMesh, what: str) -> None:
    """Raises ValueError where the devices of a mesh have no such memory of the host's."""
    for device in mesh.local_devices[:1] if isinstance(mesh, Mesh) else ():
        kinds = [memory.kind for memory in device.addressable_memories()]
        if KIND not in kinds:
            raise ValueError(
                f"{what}, and the devices of the mesh ({device.device_kind}) have no memory of kind "
                f"{KIND!r}, only {', '.join(map(repr, kinds))}: leave out offload="
            )


def at_host(aval) -> jax.ShapeDtypeStruct:
    """The type of an array that rests in the host's memory."""
    mesh = jax.sharding.get_abstract_mesh()
    return shape_of(aval, NamedSharding(mesh, PartitionSpec(), memory_kind=KIND))


def on_device(type: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type of an array of which a program is told that it is on the device."""
    if memory_of(type) is DEVICE:
        return type
    sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(), memory_kind="device")
    return jax.ShapeDtypeStruct(type.shape, type.dtype, sharding=sharding, weak_type=type.weak_type)


@dataclass(frozen=True)
class Tailed:
    """What the host has of an array that rests padded: `value`, with a tail of zeros along any dim but the
    first, over which layers may be stacked.
    """

    value: Any
    shape: Shape


@dataclass(frozen=True)
class Offload:
    """How a program reads what rests at the host.

    on_host: whether the host itself updates what rests there; it is sent what it needs for that, and sends
      what else is made of it.
    """

    on_host: bool = False

    def program(self, closed, hosted: Collection[int], left: Collection[int]):
        """The jaxpr that takes arguments `hosted`, and gives results `left`, in the host's memory."""
        flat = jax.make_jaxpr(lambda *args: evaluate(closed, args))(*map(shape_of, closed.in_avals))
        return self._of_flat(_jax.dce(flat), hosted, left)

    def _of_flat(self, closed, hosted: Collection[int], left: Collection[int]):
        def run(*args):
            return _Run(self, closed, left).results(args)

        types = [at_host(a) if i in hosted else shape_of(a) for i, a in enumerate(closed.in_avals)]
        return jax.make_jaxpr(run)(*types)


@dataclass
class _Run:
    """One evaluation of a program: values by their variables, in the memory of the device and of the host;
    `rest`: the annotations of those at the host that are split.
    """

    how: Offload
    closed: Any
    left: Collection[int]
    device: dict[Any, Any] = field(default_factory=dict)
    host: dict[Any, Any] = field(default_factory=dict)
    rest: dict[Any, Any] = field(default_factory=dict)

    def results(self, args: Sequence[Any]) -> list[Any]:
        jaxpr = self.closed.jaxpr
        for v, x in zip((*jaxpr.constvars, *jaxpr.invars), (*self.closed.consts, *args), strict=True):
            (self.host if memory_of(jax.typeof(x)) is HOST else self.device)[v] = x
        found = segments(jaxpr.eqns, self._aliases(jaxpr.eqns), jaxpr.outvars)
        left = [jaxpr.outvars[r] for r in self.left] + self._tails(jaxpr.eqns, found)
        self.wanted = _wanted(jaxpr.eqns, left, self._stays)
        self.resting = _resting(jaxpr.eqns, self.wanted)
        kept = [v for r, v in enumerate(jaxpr.outvars) if r not in self.left]
        self.readers = _readers(jaxpr.eqns, kept, self.wanted, self._stays)
        for part in in_order(jaxpr.eqns, found):
            if isinstance(part, Segment):
                self._run_segment(part)
            else:
                with as_at(part):
                    self._run_other(part)
        return [self.at_host(v) if r in self.left else self.on_device(v) for r, v in enumerate(jaxpr.outvars)]

    def on_device(self, atom) -> Any:
        """The value, brought anew each time that it is read."""
        if _jax.is_literal(atom):
            return atom.val
        if atom in self.device:
            return self.device[atom]
        rests = atom in self.rest and isinstance(self.host[atom], Tailed)
        return self.as_it_rests(atom) if rests else _put(self.host[atom], DEVICE)

    def as_it_rests(self, v) -> Any:
        """The value, of which each device brings what the host has of its own, whatever is wanted of it then:
        no collective runs in the host's memory.
        """
        x, eqn = self.host[v], self.rest[v]
        value = _put(x.value if isinstance(x, Tailed) else x, DEVICE)
        value = bind_annotation(value, eqn.params["dims"], eqn.params["source"], "inside")
        return unpad(Padded(value, x.shape, ())) if isinstance(x, Tailed) else value

    def _see_rest(self, eqn) -> None:
        (v,), (out,) = eqn.invars, eqn.outvars
        if eqn.params["role"] == "argument" and any(eqn.params["dims"]):
            self.rest[out] = eqn
        elif v in self.rest:
            self.rest[out] = self.rest[v]

    def rests_by_rows(self, v) -> bool:
        """Whether the devices have other rows of an array, each."""
        return v in self.rest and bool(self.rest[v].params["dims"][0])

    def at_host(self, atom) -> Any:
        if _jax.is_literal(atom):
            return jax.device_put(atom.val, HOST)
        if atom not in self.host or isinstance(self.host[atom], Tailed):
            self.host[atom] = self._sent(atom, self.on_device(atom))
        return self.host[atom]

    def _sent(self, v, x) -> Any:
        """The value at the host, as it is to rest there."""
        eqn = self.resting.get(v)
        if eqn is not None and memory_of(jax.typeof(x)) is DEVICE:
            x = bind_annotation(x, eqn.params["dims"], eqn.params["source"], "inside")
        return _put(x, HOST)

    def _aliases(self, eqns: Sequence[Any]) -> set[Any]:
        """The variables that are what the host has, annotated or not."""
        found = set(self.host)
        for eqn in eqns:
            is_same = eqn.primitive is annotate_p or self._cuts_rows(eqn)
            if is_same and not found.isdisjoint(_variables(eqn.invars)):
                found.add(eqn.outvars[0])
        return found

    def _cuts_rows(self, eqn) -> bool:
        """Whether it takes an array out of a padded one, along other dims than the first."""
        return is_cut(eqn) and _same_rows(eqn.invars[0], eqn.outvars[0])

    def _adds_tail(self, eqn) -> bool:
        """Whether the host itself makes a padded array of one."""
        return self.how.on_host and is_tail(eqn.primitive.name, eqn.source_info.name_stack)

    def _tails(self, eqns: Sequence[Any], found: Sequence[Segment]) -> list[Any]:
        """What the host makes of arrays that it computes, by adding a tail."""
        made = {v for segment in found for v in segment.made}
        return [eqn.outvars[0] for eqn in eqns if self._adds_tail(eqn) and eqn.invars[0] in made]

    def _stays(self, eqn) -> bool:
        """Whether an equation, which annotates its operand or adds a tail, leaves it in the host's memory."""
        return eqn.primitive is annotate_p or self._adds_tail(eqn)

    def _of_padded(self, eqn) -> Any:
        """The result of an equation, where it cuts or annotates what the host has padded."""
        (v, *_), out = eqn.invars, eqn.outvars[0]
        x = None if _jax.is_literal(v) else self.host.get(v)
        if self._cuts_rows(eqn):
            return Tailed(x, out.aval.shape)
        is_same = isinstance(x, Tailed) and eqn.primitive is annotate_p and out not in self.wanted
        return x if is_same else None

    def _run_other(self, eqn) -> None:
        held = [k for k, v in enumerate(eqn.invars) if not _jax.is_literal(v) and v in self.host]
        name = eqn.primitive.name
        if held and (same := self._of_padded(eqn)) is not None:
            self.host[eqn.outvars[0]] = same
            if eqn.invars[0] in self.rest:
                self.rest[eqn.outvars[0]] = self.rest[eqn.invars[0]]
            return
        if eqn.primitive is annotate_p and (eqn.outvars[0] in self.wanted or held):
            self.host[eqn.outvars[0]] = bound(eqn, [self.at_host(eqn.invars[0])])[0]
            self._see_rest(eqn)
            made: Sequence[Any] = ()
        elif eqn.outvars[0] in self.wanted and self._adds_tail(eqn):
            made = bound(
                _jax.on_host(eqn), [self.at_host(eqn.invars[0]), *map(self.on_device, eqn.invars[1:])]
            )
        elif held and name in _BODIES:
            made = _BODIES[name](self, eqn, set(held))
        else:
            made = bound(eqn, list(map(self.on_device, eqn.invars)))
        for v, x in zip(eqn.outvars, made or (), strict=bool(made)):
            (self.host if memory_of(jax.typeof(x)) is HOST else self.device)[v] = x
            if v in self.wanted:
                self.at_host(v)

    def _run_segment(self, segment: Segment) -> None:
        """Each array that it reads is brought once, or computed with where it is."""
        memory, inner = HOST if self.how.on_host else DEVICE, {id(eqn) for eqn in segment.eqns}
        values = {v: _put(self._value(v), memory) for v in segment.reads()}
        for eqn in segment.eqns:
            args = [v.val if _jax.is_literal(v) else values[v] for v in eqn.invars]
            (values[eqn.outvars[0]],) = bound(_jax.on_host(eqn) if self.how.on_host else eqn, args)
        for v in segment.made:
            if v in self.wanted:
                self.host[v] = self._sent(v, values[v])
            if self.readers[v] - inner:
                self.device[v] = _put(values[v], DEVICE)

    def _value(self, v) -> Any:
        return self.host[v] if self.how.on_host and v not in self.device else self.on_device(v)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not _jax.is_literal(v)]


def _wanted(eqns: Sequence[Any], left: Sequence[Any], stays: Callable[[Any], bool]) -> set[Any]:
    """The variables whose values the host is to have: results, and those of which it is to have what an
    equation makes that `stays` there.
    """
    wanted = set(_variables(left))
    for eqn in reversed(eqns):
        if stays(eqn) and eqn.outvars[0] in wanted:
            wanted.update(_variables(eqn.invars[:1]))
    return wanted


def _resting(eqns: Sequence[Any], wanted: Collection[Any]) -> dict[Any, Any]:
    """By the variables that the host is to have the annotations of what they are then, split or whole."""
    found: dict[Any, Any] = {}
    for eqn in reversed(eqns):
        if eqn.primitive is annotate_p and eqn.outvars[0] in wanted:
            (v,), (out,) = eqn.invars, eqn.outvars
            last = found.get(out, None if None in eqn.params["dims"] else eqn)
            found |= {} if last is None or _jax.is_literal(v) else {v: last}
    return found


def _same_rows(a, b) -> bool:
    return len(a.aval.shape) > 1 and a.aval.shape[0] == b.aval.shape[0]


def _readers(
    eqns: Sequence[Any], kept: Sequence[Any], wanted: set[Any], stays: Callable[[Any], bool]
) -> Mapping[Any, set[int]]:
    """Which equations read a variable on the device, by their `id`; 0 where it is a result there. Those of
    what the host is to have that `stays` there are none.
    """
    readers = defaultdict(set)
    for v in kept:
        if not _jax.is_literal(v):
            readers[v].add(0)
    for eqn in eqns:
        if not (stays(eqn) and eqn.outvars[0] in wanted):
            for v in eqn.invars:
                if not _jax.is_literal(v):
                    readers[v].add(id(eqn))
    return readers


def _put(x, memory) -> Any:
    if isinstance(x, Tailed):
        return unpad(Padded(_put(x.value, memory), x.shape, ()))
    return x if memory_of(jax.typeof(x)) is memory else jax.device_put(x, memory)


def _scan(run: _Run, eqn, held: set[int]) -> list[Any]:
    """Of what a loop goes over, each iteration brings its row. What it reads in all of them is brought once,
    before, unless each reads it in parts, as one of several microbatches does, by a loop over layers. What
    rests on each device in other rows is brought before too: nothing is sent from host to host.
    """
    consts, carries = _jax.scan_counts(eqn.params)
    inside = {k for k in held if not consts <= k < consts + carries and eqn.invars[k] not in run.device}
    apart = {k for k in inside if run.rests_by_rows(eqn.invars[k])}
    rows = {k for k in inside - apart if k >= consts}
    parts = _read_in_parts(eqn, {k for k in inside - apart if k < consts})
    bring: Callable[[int, Any], Any] = lambda k, v: run.as_it_rests(v) if k in apart else run.on_device(v)  # noqa: E731
    operands = [run.host[v] if k in rows | parts else bring(k, v) for k, v in enumerate(eqn.invars)]
    cut = {k: x for k, x in enumerate(operands) if isinstance(x, Tailed)}
    operands = [x.value if isinstance(x, Tailed) else x for x in operands]

    def change(body):
        closed = _jax.closed(body)
        if parts:
            padded = {k: cut[k].value.shape for k in parts if k in cut}
            closed = run.how.program(_on_device(closed, padded, parts), parts, ())
        padded = {k: cut[k].value.shape[1:] for k in rows if k in cut}
        return _like(_on_device(closed, padded, rows, HOST), body)

    return bound(_jax.with_bodies(eqn, change), operands)


def _read_in_parts(eqn, consts: set[int]) -> set[int]:
    """Which constants of a loop each iteration reads in parts: loops go over them, or rows are looked up."""
    if not consts:
        return consts
    body = _jax.closed(eqn.params["jaxpr"])
    flat = jax.make_jaxpr(lambda *args: evaluate(body, args))(*map(shape_of, body.in_avals)).jaxpr
    return {k for k in consts if _is_read_in_parts(flat, flat.invars[k])}


def _is_read_in_parts(jaxpr, v, loops: bool = True) -> bool:
    readers = ((eqn, k) for eqn in jaxpr.eqns for k, x in enumerate(eqn.invars) if x is v)
    return all(x is not v for x in jaxpr.outvars) and all(_reads_parts(jaxpr, *r, loops) for r in readers)


def _reads_parts(jaxpr, eqn, k: int, loops: bool) -> bool:
    """Whether an equation reads parts of an operand, or all that read it as it is, cut or cast, do; `loops`:
    whether those count that go over it.
    """
    if eqn.primitive is lax.scan_p:
        return loops and (k >= sum(_jax.scan_counts(eqn.params)) or bool(_read_in_parts(eqn, {k})))
    if eqn.primitive is annotate_p or is_cut(eqn):
        return _is_read_in_parts(jaxpr, eqn.outvars[0], loops)
    if equations.casts(eqn):
        return _is_read_in_parts(jaxpr, eqn.outvars[0], loops=False)
    return eqn.primitive is lax.gather_p and k == 0


def _on_device(closed, padded: Mapping[int, Shape], brought: Collection[int], memory=DEVICE):
    """A body that takes the arguments `brought` in a memory, those that are `padded` with their tails, brings
    them and cuts them.
    """

    def run(*args):
        tailed = {i: Tailed(args[i], closed.in_avals[i].shape) for i in padded}
        return evaluate(
            closed, [_put(tailed.get(i, x), DEVICE) if i in brought else x for i, x in enumerate(args)]
        )

    def type_of(i, aval):
        is_hosted = memory_of(aval) is HOST or i in brought and memory is HOST
        return (at_host if is_hosted else shape_of)(aval.update(shape=padded.get(i, aval.shape)))

    return jax.make_jaxpr(run)(*(type_of(i, a) for i, a in enumerate(closed.in_avals)))


def _cond(run: _Run, eqn, held: set[int]) -> list[Any]:
    """Each branch brings what it reads."""
    hosted = {k - 1 for k in held if k and not isinstance(run.host[eqn.invars[k]], Tailed)}
    left = {r for r, v in enumerate(eqn.outvars) if v in run.wanted}
    operands = [run.host[v] if k - 1 in hosted else run.on_device(v) for k, v in enumerate(eqn.invars)]
    change: Callable[[Any], Any] = lambda body: _like(run.how.program(_jax.closed(body), hosted, left), body)  # noqa: E731
    return bound(_jax.with_bodies(eqn, change), operands)


def _like(closed, body):
    """A closed jaxpr, open where `body` is."""
    return closed if hasattr(body, "consts") else closed.jaxpr


_BODIES = {"cond": _cond, "scan": _scan}
