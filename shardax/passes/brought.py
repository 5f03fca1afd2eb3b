"""Brought: what unrolled code reads of arrays at the host comes shortly before, anew in the backward pass.

    w1 = bring(w1_host)                      w1 = bring(w1_host)
    h = product(x, w1)               ->      x, w2_host = barrier(x, w2_host)
    w2 = bring(w2_host)                      w2 = bring(w2_host);  h = product(x, w1)
    y = product(h, w2)                       y = product(h, w2)

XLA starts all copies at once, and keeps what the forward pass brought for the backward pass: on TPUs that is
as much as if nothing rested at the host. Here a copy waits for an operand of what is computed with the one
before, and so comes while that is computed. What is made of the array alone, such as its cast, is made with
it.

Loops need none of this: what a body brings comes in its iteration. And what XLA slices of an array at the
host it copies there, at the host, where a barrier is behind.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax

from shardax import _jax
from shardax.annotations.explicit import memory_of
from shardax.differentiated import is_transposed
from shardax.graph.equations import equations_like
from shardax.ledger.collectives import KINDS
from shardax.passes.lookups import is_looked_up
from shardax.passes.moves import DEVICE, HOST, brings, large, nbytes, variables
from shardax.passes.on_host import is_on_host
from shardax.spmd_rules.registry import RULES

FAR = 8  # of all that is brought: an array that is read again after so much of it is brought again
_LOOPS = (lax.scan_p, lax.while_p)


def brought(jaxpr):
    """The same jaxpr, closed or open, and its bodies but those of loops, with copies in that order."""
    opened = _jax.closed(jaxpr).jaxpr
    eqns = [eqn if eqn.primitive in _LOOPS else _jax.with_bodies(eqn, brought) for eqn in opened.eqns]
    sources = _sources(eqns)
    if not sources:
        return _jax.replaced_eqns(jaxpr, eqns)
    code = _code(_casts_first(eqns, opened.outvars, sources), opened.outvars, sources)
    return _jax.with_eqns_and_results(jaxpr, *_emitted(code, _begun(code, _brought(code))))


def _sources(eqns: Sequence[Any]) -> set[Any]:
    """The arrays at the host that equations bring, but for the smallest ones, and what the host computes."""
    computed = {eqn.outvars[0] for eqn in eqns if is_on_host(eqn) or is_looked_up(eqn)}
    return large(v for eqn in filter(brings, eqns) if (v := eqn.invars[0]) not in computed)


def _goes_along(eqn, copies: Collection[Any]) -> bool:
    """Whether an equation makes of one of these values alone another one, no larger, without products."""
    entry, read = RULES.get(eqn.primitive.name), variables(eqn.invars)
    if entry is None or entry.flops or entry.anew or entry.once or len(read) != 1 or len(eqn.outvars) != 1:
        return False
    if eqn.primitive.name in KINDS or eqn.primitive is lax.optimization_barrier_p or _jax.has_bodies(eqn):
        return False
    (v,), (made,) = read, eqn.outvars
    return v in copies and memory_of(made.aval) is DEVICE and nbytes(made) <= nbytes(v)


def _casts_first(eqns: Sequence[Any], results: Sequence[Any], sources: Collection[Any]) -> list[Any]:
    """The equations; where an array is brought, stands at a barrier, and is cast, it is cast before that. (So
    the layers of `jax.checkpoint` read parameters.)
    """
    readers: dict[Any, list[Any]] = defaultdict(list)
    for eqn in eqns:
        for v in variables(eqn.invars):
            readers[v].append(eqn)
    for v in variables(results):
        readers[v].append(None)
    copies, new, gone = set(), [], set()

    def cast_of(v, out) -> Any:
        """What alone reads a result of a barrier, if it only casts a copy."""
        only = readers[out][0] if v in copies and len(readers[out]) == 1 else None
        return only if only is not None and _goes_along(only, {out}) else None

    for eqn in eqns:
        if eqn.primitive is lax.optimization_barrier_p:
            pairs = list(zip(eqn.invars, eqn.outvars, strict=True))
            casts = {out: cast for v, out in pairs if not _jax.is_literal(v) and (cast := cast_of(v, out))}
            before = [_of(casts[out], v) if out in casts else None for v, out in pairs]
            gone |= set(map(id, casts.values()))
            new += filter(None, before)
            ins = [cast.outvars[0] if cast else v for (v, _), cast in zip(pairs, before, strict=True)]
            outs = [casts[out].outvars[0] if out in casts else out for _, out in pairs]
            new.append(eqn.replace(invars=ins, outvars=outs))
        elif id(eqn) not in gone:
            if brings(eqn) and eqn.invars[0] in sources or _goes_along(eqn, copies):
                copies.add(eqn.outvars[0])
            new.append(eqn)
    return new


class _Copy(NamedTuple):
    """A value that is made of an array at the host alone: by the equations `eqns`, which bring it first."""

    source: Any
    eqns: tuple[Any, ...]


class _Code(NamedTuple):
    """Equations without those that make copies.

    copies: by the variables of these what they are.
    reads: where copies are read, in order: (place of the equation, variable); results are read behind all.
    """

    eqns: Sequence[Any]
    results: Sequence[Any]
    copies: Mapping[Any, _Copy]
    reads: Sequence[tuple[int, Any]]

    def reads_at(self, n: int) -> list[Any]:
        return list(dict.fromkeys(variables(self.eqns[n].invars if n < len(self.eqns) else self.results)))


def _code(eqns: Sequence[Any], results: Sequence[Any], sources: Collection[Any]) -> _Code:
    copies: dict[Any, _Copy] = {}
    kept = []
    for eqn in eqns:
        if brings(eqn) and eqn.invars[0] in sources:
            copies[eqn.outvars[0]] = _Copy(eqn.invars[0], (eqn,))
        elif _goes_along(eqn, copies):
            (v,) = variables(eqn.invars)
            copies[eqn.outvars[0]] = _Copy(copies[v].source, (*copies[v].eqns, eqn))
        else:
            kept.append(eqn)
    code = _Code(kept, results, copies, [])
    return code._replace(
        reads=[(n, v) for n in range(len(kept) + 1) for v in code.reads_at(n) if v in copies]
    )


@dataclass(frozen=True, eq=False)
class _Bring:
    """One copy of an array at the host: `reads` has the places and variables for which it is made. It begins
    before the equation at place `begin`, as soon as there is `after`, which that one reads.
    """

    source: Any
    reads: list[tuple[int, Any]]
    begin: int
    after: Any = None

    @property
    def first(self) -> int:
        return self.reads[0][0]


def _brought(code: _Code) -> list[_Bring]:
    """The copies, by the order of first reads: of each array one for the forward pass and one for the
    backward pass, more where reads are far apart.
    """
    total = sum(map(nbytes, {code.copies[v].source for _, v in code.reads}))
    last: dict[Any, tuple[int, _Bring]] = {}
    found, so_far = [], 0
    for n, v in code.reads:
        key = code.copies[v].source, n == len(code.eqns) or is_transposed(code.eqns[n].source_info.name_stack)
        then, bring = last.get(key, (0, None))
        if found and found[-1].source is key[0]:
            bring = found[-1]
        elif bring is None or FAR * (so_far - then) > total:
            so_far += nbytes(key[0])
            bring = _Bring(key[0], [], n)
            found.append(bring)
        last[key] = so_far, bring
        bring.reads.append((n, v))
    return found


def _begun(code: _Code, found: Sequence[_Bring]) -> list[_Bring]:
    """The copies, each to begin at the last place before its first read at which something is computed with
    an earlier one, or else where it is read: after what it is computed with.
    """
    made = {v: n for n, eqn in enumerate(code.eqns) for v in eqn.outvars}
    readers: dict[Any, list[int]] = defaultdict(list)
    for n, eqn in enumerate(code.eqns):
        for v in variables(eqn.invars):
            readers[v].append(n)
    begun, places = [], {}
    for bring in found:
        earlier = [n for n in places if made.get(bring.source, -1) < n < bring.first]
        place, used = max(earlier, default=bring.first), _used(code, bring, made, readers)
        after = places[place] if earlier else next(iter(used.values()), None)
        is_there = after is not None and made[after] < place
        begun.append(_Bring(bring.source, bring.reads, place, after if is_there else None))
        places |= used
    return begun


def _used(
    code: _Code, bring: _Bring, made: Mapping[Any, int], readers: Mapping[Any, Sequence[int]]
) -> dict[int, Any]:
    """The first place at which something else is read together with a copy, or with what is made of it
    alone; and which variable of this was made last, None where all are arguments.
    """
    own = {v for _, v in bring.reads}
    todo = sorted({n for n, _ in bring.reads if n < len(code.eqns)})
    while todo:
        n = heapq.heappop(todo)
        others = [v for v in code.reads_at(n) if v not in own and v not in code.copies and _can_wait(v)]
        if others:
            last = max(others, key=lambda v: made.get(v, -1))
            return {n: last if last in made else None}
        for v in code.eqns[n].outvars:
            own.add(v)
            for reader in {*readers[v]} - {*todo}:
                heapq.heappush(todo, reader)
    return {}


def _can_wait(v) -> bool:
    """Whether a barrier takes a variable: an array of numbers on the device."""
    is_array = hasattr(v.aval, "dtype") and not _jax.is_ref_aval(v)
    is_number = is_array and not jax.numpy.issubdtype(v.aval.dtype, jax.dtypes.extended)
    return is_number and memory_of(v.aval) is DEVICE


def _emitted(code: _Code, found: Sequence[_Bring]) -> tuple[list[Any], list[Any]]:
    """The equations with the copies, and the results."""
    emitter = _Emitter(code)
    begin, reads = defaultdict(list), defaultdict(list)
    for bring in found:
        begin[bring.begin].append(bring)
        for n, v in bring.reads:
            reads[n].append((bring, v))
    for n in range(len(code.eqns) + 1):
        for bring in begin[n]:
            emitter.begin(bring)
        for bring, v in reads[n]:
            emitter.env[v] = emitter.copied(bring, v)
        if n < len(code.eqns):
            eqn = code.eqns[n]
            emitter.new.append(eqn.replace(invars=list(map(emitter.now, eqn.invars))))
    return emitter.new, list(map(emitter.now, code.results))


class _Emitter:
    """Equations so far. `env`: what stands for variables now; `made`: what each copy is on the device, and
    what equations have made of it.
    """

    def __init__(self, code: _Code):
        self.code = code
        self.new: list[Any] = []
        self.env: dict[Any, Any] = {}
        self.made: dict[Any, Any] = {}
        self.last: list[Any] = []

    def now(self, atom) -> Any:
        return atom if _jax.is_literal(atom) else self.env.get(atom, atom)

    def begin(self, bring: _Bring) -> None:
        """Makes the copy, and what is read first of what is made of it."""
        source, first = bring.source, bring.reads[0][1]
        if bring.after is not None:
            wait = lambda *operands: _waiting(*operands)  # noqa: E731  (traced anew, so of new variables)
            pair, like = [self.now(bring.after), source, *self.last], self.code.eqns[bring.begin]
            eqns, (self.env[bring.after], source) = equations_like(like, wait, pair)
            self.new += eqns
        self.made[bring] = self._made_of(self.code.copies[first].eqns[0], source)
        self.last = [self.copied(bring, first)]

    def copied(self, bring: _Bring, v) -> Any:
        x = self.made[bring]
        for eqn in self.code.copies[v].eqns[1:]:
            key = bring, id(eqn)
            if key not in self.made:
                self.made[key] = self._made_of(eqn, x)
            x = self.made[key]
        return x

    def _made_of(self, eqn, x) -> Any:
        """What an equation makes of a value."""
        self.new.append(_of(eqn, x))
        return self.new[-1].outvars[0]


def _of(eqn, x) -> Any:
    """An equation of one variable, as one of another."""
    atoms = [a if _jax.is_literal(a) else x for a in eqn.invars]
    return eqn.replace(invars=atoms, outvars=[_jax.new_variable(eqn.outvars[0].aval)])


def _waiting(x, at_host, *last):
    """Both, the array at the host as soon as there is `x`. XLA forgets behind a barrier where an array is,
    and has to be told.
    """
    x, at_host, *_ = lax.optimization_barrier((x, at_host, *last))
    return x, jax.device_put(at_host, HOST)
