"""Streamed: an update of arrays at the host goes block by block, each in the place of the old one.

    m = bring(m_host)                            for each block i:
    m' = f(m, g)                     ->              m_i = bring(m_host[i])
    m'_host = send(m')                               m_host[i] = send(f(m_i, g[i]))

The device then holds a few blocks of what it held whole, and an array at the host is there once. It is a loop
because XLA's schedule is free to bring whole arrays long before they are read (on TPUs it brings all of them
before the first layer), and cannot bring what is inside of a loop before that begins. Two arrays share a
loop: what is sent of one overlaps with what is brought of the other.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardax import _jax
from shardax.annotations.explicit import memory_of
from shardax.graph.equations import equations_of
from shardax.graph.evaluate import bound
from shardax.passes.blocks import Block, Blocks, Part, blocks, put
from shardax.passes.moves import DEVICE, WHOLE, brings, is_at_host, moves, nbytes, variables
from shardax.passes.on_host import is_on_host
from shardax.passes.parts import Cut, cut_of
from shardax.passes.segments import Segment, in_order, is_elementwise, is_fill, is_made, segments
from shardax.spmd_rules import equations

BLOCK = 1000  # of all that moves: two arrays, each with two moments, have sixteen blocks in flight


def streamed(jaxpr, tiles: bool = True):
    """The same jaxpr, closed or open, and its bodies, such updates in blocks; `tiles` is whether the chip's
    arrays lie so.
    """
    opened = _jax.closed(jaxpr).jaxpr
    eqns = [_jax.with_bodies(eqn, partial(streamed, tiles=tiles)) for eqn in opened.eqns]
    if not any(is_at_host(v) for eqn in eqns for v in eqn.invars):
        return _jax.replaced_eqns(jaxpr, eqns)
    eqns, results = _without_noops(eqns, opened.outvars)
    eqns = _widened_late(eqns, _updates(eqns, results))
    updates = _updates(eqns, results)
    order = _Order(opened.invars, results)
    parts = in_order(eqns, _pairs(updates, tiles))
    last = {v: n for n, part in enumerate(parts) for v in _reads(part)}
    last |= {v: len(parts) for v in results if not _jax.is_literal(v)}
    new = []
    for n, part in enumerate(parts):
        free = {v for v in _reads(part) if last[v] == n}
        new += part.in_blocks(free, order) if isinstance(part, _Together) else [part]
    return _jax.with_eqns_and_results(jaxpr, new, results)


def _reads(part) -> list[Any]:
    return part.reads() if isinstance(part, _Together) else variables(part.invars)


def _without_noops(eqns: Sequence[Any], results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Without slices of all there is, and paddings by nothing: what rests padded is cut and padded so."""
    same: dict[Any, Any] = {}

    def read(atom):
        return atom if _jax.is_literal(atom) else same.get(atom, atom)

    kept = []
    for eqn in eqns:
        if _is_noop(eqn):
            same[eqn.outvars[0]] = read(eqn.invars[0])
        else:
            kept.append(_reading(eqn, same))
    return kept, list(map(read, results))


def _is_noop(eqn) -> bool:
    """Whether an equation slices all of an array, or pads it by nothing. (A padding by what it cuts off at
    the other end is as long, and a shift.)
    """
    if eqn.primitive is lax.pad_p:
        return all(padding == (0, 0, 0) for padding in eqn.params["padding_config"])
    return eqn.primitive is lax.slice_p and eqn.outvars[0].aval.shape == eqn.invars[0].aval.shape


def _widened_late(eqns: Sequence[Any], updates: "Sequence[_Update]") -> list[Any]:
    """The equations, of which those of updates read casts to wider types that are made for them alone: in
    blocks. So gradients stay as narrow as they come, also where their norm reads them before.
    """
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    own: dict[int, dict[Any, Any]] = {}
    for update in updates:
        wide = [v for v in update.segment.reads() if _widens(makers.get(v))]
        casts = {v: makers[v].replace(outvars=[_jax.new_variable(v.aval)]) for v in wide}
        own |= {id(eqn): casts for eqn in update.segment.eqns}
    new, done = [], set()
    for eqn in eqns:
        casts = {v: own.get(id(eqn), {}).get(v) for v in variables(eqn.invars)}
        casts = {v: cast for v, cast in casts.items() if cast is not None}
        new += [cast for cast in casts.values() if id(cast) not in done]
        done |= set(map(id, casts.values()))
        new.append(_reading(eqn, {v: cast.outvars[0] for v, cast in casts.items()}))
    return new


def _widens(eqn) -> bool:
    """Whether an equation, if it is one, casts an array to a wider type."""
    return eqn is not None and equations.casts(eqn) and nbytes(eqn.outvars[0]) > nbytes(eqn.invars[0])


def _reading(eqn, instead: Mapping[Any, Any]) -> Any:
    """The equation, reading other variables instead of its own."""
    if instead.keys().isdisjoint(variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=[v if _jax.is_literal(v) else instead.get(v, v) for v in eqn.invars])


class _Order:
    """Places of arguments and results of a program: old state is one, new state the other, in one order."""

    def __init__(self, arguments: Sequence[Any], results: Sequence[Any]):
        self._arguments = {v: n for n, v in enumerate(arguments)}
        self._results = {v: n for n, v in enumerate(results) if not _jax.is_literal(v)}

    def is_argument(self, v) -> bool:
        return v in self._arguments

    def old(self, v) -> int:
        return self._arguments.get(v, len(self._arguments))

    def new(self, v) -> int:
        return self._results.get(v, len(self._results))


@dataclass(frozen=True, eq=False)
class _Update:
    """A segment with what makes its operands and what sends its results.

    makers: of variables that only it reads the equations that copy them from the other memory, or cut them
      out of another array.
    cuts: of variables that are copies of a part of an array at the host how that is cut out.
    sent: by copies of results in the other memory what they are copies of.
    kept: results that something else reads.
    """

    segment: Segment
    makers: Mapping[Any, Any]
    cuts: Mapping[Any, Cut]
    sent: Mapping[Any, Any]
    kept: Sequence[Any]
    own: Sequence[Any]

    @property
    def made(self) -> list[Any]:
        return [*self.sent, *self.kept]

    def reads(self) -> list[Any]:
        return list(dict.fromkeys(v for each in self.segment.reads() for v in self._reads(each)))

    def _reads(self, v) -> list[Any]:
        if v in self.cuts:
            return self.cuts[v].reads
        return variables(self.makers[v].invars) if v in self.makers else [v]

    def source(self, v) -> Any:
        """What a variable that the segment reads is a copy of, or of a part of; or itself."""
        if v in self.cuts:
            return self.cuts[v].source
        eqn = self.makers.get(v)
        return eqn.invars[0] if eqn is not None and moves(eqn) else v

    @property
    def eqns(self) -> list[Any]:
        return [*(eqn for cut in self.cuts.values() for eqn in cut.eqns), *self.own]

    def uncut(self) -> "_Update":
        """The same, of parts that the host cuts out."""
        return replace(self, cuts={})

    @property
    def hosted(self) -> list[Any]:
        """The variables that it reads of arrays that are at the host."""
        return [v for v in self.segment.reads() if v.aval.shape and is_at_host(self.source(v))]

    def blocks(self, most: int, tiles: bool) -> Blocks | None:
        """Of at most so many bytes in each array, if there are such. A part of an array is cut along its dim,
        or where less is brought at once then along others, as one is that is to be padded.
        """
        widths = [v.aval.dtype.itemsize for v in self.hosted]
        dims, shape = {cut.dim for cut in self.cuts.values()}, self.segment.shape
        if len(dims) > 1:
            return None
        dim, is_padded = next(iter(dims), None), any(cut.fill is not None for cut in self.cuts.values())
        along = None if is_padded else blocks(shape, widths, most, along=dim, tiles=tiles)
        across = blocks(shape, widths, most, whole=dim, tiles=tiles)
        if along is None or across is None:
            return along or across
        rows = max((cut.source.aval.shape[dim] for cut in self.cuts.values()), default=0)
        return along if dim is None or along.elements <= across.elements * rows // shape[dim] else across

    @property
    def moved(self) -> int:
        return sum(map(nbytes, self.hosted)) if any(map(is_at_host, self.made)) else 0


def _updates(eqns: Sequence[Any], results: Sequence[Any]) -> list[_Update]:
    """Those of what is brought from the host and goes back, but for the smallest. (What the host
    updates stays there.)
    """
    roots = {eqn.outvars[0] for eqn in eqns if brings(eqn)}
    elementwise = {eqn.outvars[0] for eqn in eqns if is_elementwise(eqn)}
    roots |= {
        v for eqn in eqns for v in eqn.invars if is_at_host(v) and v.aval.shape and v not in elementwise
    }
    readers: dict[Any, set[int]] = defaultdict(set)
    for eqn in eqns:
        for v in variables(eqn.invars):
            readers[v].add(id(eqn))
    for v in variables(results):
        readers[v].add(0)
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    sends = list(filter(moves, eqns))
    made = (_update(each, makers, sends, readers) for each in segments(eqns, roots, results))
    found = [each for each in made if each.moved and not is_on_host(each.segment.eqns[-1])]
    left = sum(update.moved for update in found) / WHOLE
    small = set()
    for update in sorted(found, key=lambda update: update.moved):
        left -= update.moved
        small |= {update} if left >= 0 else set()
    return [update for update in found if update not in small]


def _update(
    segment: Segment, makers: Mapping[Any, Any], sends: Sequence[Any], readers: Mapping[Any, set[int]]
) -> _Update:
    inner = {id(eqn) for eqn in segment.eqns}
    own = {v: makers[v] for v in segment.reads() if readers[v] <= inner and _is_late(makers.get(v))}
    cuts = {v: cut for v, eqn in own.items() if (cut := cut_of(eqn, makers, readers)) is not None}
    made = set(segment.made)
    its = [eqn for eqn in sends if eqn.invars[0] in made]
    inner |= {id(eqn) for eqn in its}
    sent = {eqn.outvars[0]: eqn.invars[0] for eqn in its}
    kept = [v for v in segment.made if readers[v] - inner]
    return _Update(segment, own, cuts, sent, kept, [*own.values(), *segment.eqns, *its])


def _is_late(eqn) -> bool:
    """Whether an equation, if it is one, copies an array or cuts a part out of it, which may be done late."""
    return eqn is not None and (moves(eqn) or eqn.primitive is lax.dynamic_slice_p)


def _pairs(updates: Sequence[_Update], tiles: bool) -> "list[_Together]":
    """Updates of which none depends on another, two by two, those of alike many blocks."""
    most = sum(update.moved for update in updates) // BLOCK
    by_depth: dict[int, list[_Streaming]] = defaultdict(list)
    for update in updates:
        for each in (update, update.uncut()):
            if (cut := each.blocks(most, tiles)) is not None:
                by_depth[update.segment.depth].append(_Streaming(each, cut))
                break
    found = []
    for each in by_depth.values():
        each.sort(key=lambda one: one.blocks.count)
        found += [_Together(each[n : n + 2]) for n in range(0, len(each), 2)]
    return found


@dataclass(frozen=True, eq=False)
class _Streaming:
    """An update in blocks, as functions of what it reads; its results so far are in the order of `made`."""

    update: _Update
    blocks: Blocks

    def places(self, free: Collection[Any], order: _Order) -> list[Any]:
        """What each result takes the place of, None for nothing: an array at the host of one that it brings,
        an array on the device of an argument that nothing reads later. (In the place of a gradient, XLA packs
        what is alive then with gaps.)
        """
        update, found = self.update, dict[Any, Any]()
        source = {v: update.source(v) for v in update.segment.reads()}
        own = [v for v, x in source.items() if is_at_host(x) or x in free and order.is_argument(x)]
        old = sorted(own, key=lambda v: order.old(source[v]))
        for new in sorted(update.made, key=order.new):
            alike = (v for v in old if v not in found.values() and _alike(source[v].aval, new.aval))
            found[new] = next(alike, None)
        return [found[new] for new in update.made]

    def values(self, env: Mapping[Any, Any]) -> dict[Any, Any]:
        """Of what the segment reads, where it is; what is cut out of an array is so late."""
        update, values = self.update, dict[Any, Any]()
        for v in update.segment.reads():
            eqn = update.makers.get(v)
            is_cut = eqn is not None and not moves(eqn)
            values[v] = self._cut_late(eqn, env) if is_cut else env[update.source(v)]
        return {v: x.reshape(self.blocks.viewed(x.shape)) if x.shape else x for v, x in values.items()}

    def parts(self, env: Mapping[Any, Any]) -> dict[Any, Part]:
        """Of what is read of a part of an array, which."""
        return {v: cut.part(env) for v, cut in self.update.cuts.items()}

    def _cut_late(self, eqn, env: Mapping[Any, Any]) -> Any:
        late = _nothing_of(env[v] for v in self.update.segment.reads() if v not in self.update.makers)
        x, *starts = (a.val if _jax.is_literal(a) else env[a] for a in eqn.invars)
        (part,) = bound(eqn, [x, *(start + late.astype(start.dtype) for start in starts)])
        return part

    def begun(self, values: Mapping[Any, Any], places: Sequence[Any]) -> list[Any]:
        pairs = zip(self.update.made, places, strict=True)
        return [jnp.zeros(self.blocks.view, v.aval.dtype) if old is None else values[old] for v, old in pairs]

    def step(
        self,
        values: Mapping[Any, Any],
        parts: Mapping[Any, Part],
        done: Sequence[Any],
        places: Sequence[Any],
        block: Block,
    ):
        """The results with one more block, of the values that the segment reads, some in `parts` of them."""
        now = {**values, **dict(zip(places, done, strict=True))}
        env = {}
        for v in values:
            x = block.read(now[v], parts.get(v)) if now[v].shape else now[v]
            env[v] = put(x, memory_of(v.aval))
        for eqn in self.update.segment.eqns:
            env[eqn.outvars[0]] = _of_block(eqn, env, block)
        sent = self.update.sent
        return [block.write(x, env[sent.get(v, v)]) for v, x in zip(self.update.made, done, strict=True)]


def _nothing_of(arrays: Iterable[Any]) -> Any:
    """A 0 that XLA does not see, made of the first array of floats: what it is added to waits for that."""
    for x in arrays:
        if x.shape and jnp.issubdtype(x.dtype, jnp.floating):
            first = lax.slice(x, [0] * x.ndim, [1] * x.ndim).reshape(())
            return (first * 0 > 1).astype("int32")  # not a number is not greater either
    return jnp.int32(0)


def _alike(x, y) -> bool:
    return (x.shape, x.dtype, memory_of(x)) == (y.shape, y.dtype, memory_of(y))


def _of_block(eqn, values: Mapping[Any, Any], block: Block) -> Any:
    """What an equation makes of a block."""
    if is_made(eqn) and not is_fill(eqn):
        return block.places(eqn.params["dimension"], eqn.params["dtype"])
    args = [v.val if _jax.is_literal(v) else values[v] for v in eqn.invars]
    (made,) = bound(eqn, args, **({"shape": block.sizes} if is_fill(eqn) else {}))
    return made


@dataclass(frozen=True, eq=False)
class _Together:
    """Updates that share a loop, those with few blocks first."""

    streams: Sequence[_Streaming]

    @property
    def eqns(self) -> list[Any]:
        return [eqn for each in self.streams for eqn in each.update.eqns]

    @property
    def made(self) -> list[Any]:
        return [v for each in self.streams for v in each.update.made]

    def reads(self) -> list[Any]:
        return list(dict.fromkeys(v for each in self.streams for v in each.update.reads()))

    def in_blocks(self, free: Collection[Any], order: _Order) -> list[Any]:
        """Its equations."""
        reads = Counter(v for each in self.streams for v in each.update.reads())
        free = {v for v in free if reads[v] == 1 and memory_of(v.aval) is DEVICE}
        operands, places = self.reads(), [each.places(free, order) for each in self.streams]

        def run(*values):
            env = dict(zip(operands, values, strict=True))
            read = [each.values(env) for each in self.streams]
            triples = list(zip(self.streams, read, places, strict=True))
            steps = [partial(each.step, own, each.parts(env), places=place) for each, own, place in triples]
            state = self._run(steps, [each.begun(own, place) for each, own, place in triples])
            made = zip(self.made, (x for done in state for x in done), strict=True)
            return [put(x.reshape(v.aval.shape), memory_of(v.aval)) for v, x in made]

        like = self.streams[-1].update.segment.eqns[-1]
        like = like.replace(source_info=like.source_info.replace(name_stack=_jax.EMPTY_NAME_STACK))
        return equations_of(run, operands, self.made, like)

    def _run(self, steps: Sequence[Any], state: list[Any]) -> list[Any]:
        first = 0
        for n, each in enumerate(self.streams):
            ways = [(step, one.blocks.number) for step, one in zip(steps[n:], self.streams[n:], strict=True)]
            state[n:] = _loop(first, each.blocks.count, ways, state[n:])
            first = each.blocks.count
        for n, each in enumerate(self.streams):
            if each.blocks.has_last:
                state[n : n + 1] = _loop(0, 1, [(steps[n], each.blocks.last)], state[n : n + 1])
        return state


def _loop(first: int, end: int, ways: Sequence[Any], state: list[Any]) -> list[Any]:
    def trip(i, state):
        return [step(done=done, block=block(i)) for (step, block), done in zip(ways, state, strict=True)]

    return lax.fori_loop(first, end, trip, state) if end > first else state
