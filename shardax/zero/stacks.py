"""Stacks: matrices that an update computes with alike are one stack, of which each device can have some.

    for each of 8 matrices  u = orthogonalized(m)      every device computes all 8, of gathered m
    U = orthogonalized(stack of the m)                 each computes one: an all_to_all there, and one back

An update of separate matrices has the same equations for each. Those are found by what they compute, from the
gradients on, and run under `jax.vmap` as one. The search then splits the stack, where that costs less.

Stacks that are made and used otherwise, as of matrices and of transposed ones, go through products of the
same sizes as one, where the device with the most matrices then has fewer: 12 and 12 on 8 devices are 2 + 2
there, and 24 are 3.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardax import _jax
from shardax.annotations.explicit import as_at
from shardax.differentiated import is_differentiated
from shardax.graph.evaluate import bound, without_calls
from shardax.zero.alike import Alike, key
from shardax.zero.branches import Members, buckets_in
from shardax.zero.by_cost import BY_COST, ByCost, Costs, Dealt, is_dealt_by_cost
from shardax.zero.matrices import has_matrices, of_update
from shardax.zero.packs import Pack
from shardax.zero.parted import parted


def stacked(
    jaxpr,
    state: Collection[int],
    devices: int = 1,
    kinds: Mapping[int, Hashable] | None = None,
    costs: Costs | None = None,
):
    """The program, of which equations that compute alike with matrices, each of another array, are one; the
    program itself, where there are none.

    Args:
      jaxpr: a closed one.
      state: the numbers of the arguments that are state. Only what depends on these or on gradients, and is
        not differentiated, is part of an update.
      devices: those that share the matrices. Of one, each stack is computed by itself.
      kinds: of those arguments something that must be alike too, as how they rest.
      costs: by which matrices of all sizes are dealt out together, if any, where a device then has less to
        do (`by_cost`); else each stack is by itself.
    """
    if _jax.ordered_effects(jaxpr.jaxpr) or not any(map(has_matrices, of_update(jaxpr.jaxpr.eqns))):
        return jaxpr
    plain = without_calls(jaxpr)
    new = _in_plain(plain, {i: (kinds or {}).get(i) for i in state}, devices, costs)
    return jaxpr if new is plain else new


def dealt_ways(jaxpr, state: Collection[int], costs: Costs, dealt: Dealt | None) -> dict[Dealt, Any]:
    """The programs in which matrices are dealt out: as is said, or in each way in which that differs. None
    where there are no such matrices.
    """
    ways: dict[Dealt, Any] = {}
    if dealt in (None, True):
        ways[True] = stacked(jaxpr, state, costs.devices)
    if dealt in (None, BY_COST):
        ways[BY_COST] = stacked(jaxpr, state, costs.devices, costs=costs)
    differs = dealt == BY_COST or BY_COST in ways and is_dealt_by_cost(ways[BY_COST])
    return {how: new for how, new in ways.items() if new is not jaxpr and (how != BY_COST or differs)}


def state_stacks(jaxpr, succeeded: Mapping[int, int]) -> list[list[int]]:
    """The arguments of an update, in groups, that are stacked before it computes with them alike, and whose
    new values are a stack too: they may as well rest in one. `succeeded` has the state, with the numbers of
    the results that succeed it.
    """
    jaxpr = without_calls(jaxpr)
    packs = _Stacks(_with_parts(jaxpr), dict.fromkeys(range(len(jaxpr.in_avals))), succeeded)
    numbers = {packs.closed.jaxpr.invars[i]: i for i in succeeded}
    groups = []
    for pack in packs.found:
        group = sorted(numbers.pop(v) for v in pack.members if v in numbers) if _is_of(pack, numbers) else []
        new = tuple(packs.closed.jaxpr.outvars[succeeded[i]] for i in group)
        if group and packs.known(new) is not None:
            groups.append(group)
    return groups


def _is_of(pack: Pack, numbers: Mapping[Any, int]) -> bool:
    return all(not _jax.is_literal(v) and v in numbers for v in pack.members)


def _with_parts(closed):
    return _jax.replaced_eqns(closed, [part for eqn in closed.jaxpr.eqns for part in _parts(eqn)])


def _in_plain(closed, kinds: Mapping[int, Hashable], devices: int, costs: Costs | None):
    """The same of a program without calls, and in the bodies of what it computes alone."""
    closed = _with_parts(closed)
    by_size = _Stacks(closed, kinds, devices=devices)
    eqns = [
        eqn if by_size.is_packed(eqn) else _with_stacks_inside(eqn, devices, costs)
        for eqn in closed.jaxpr.eqns
    ]
    inside = _jax.replaced_eqns(closed, eqns)
    if costs is not None:
        opened = [new for old, new in zip(closed.jaxpr.eqns, eqns, strict=True) if new is not old]
        by_cost = _Stacks(inside, kinds, devices=devices, costs=costs, opened=opened)
        program = by_cost.program()
        if by_cost.deals:
            return program
    by_size = by_size if inside is closed else _Stacks(inside, kinds, devices=devices)
    return by_size.program() if by_size.found else inside


def _with_stacks_inside(eqn, devices: int, costs: Costs | None):
    """The update of a step in a loop, or of a branch, is in a body, of which all arrays count as state. In an
    island each device has an update of its own.
    """
    if is_differentiated(eqn.source_info.name_stack) or not has_matrices(eqn):
        return eqn
    costs = None if eqn.primitive.name == "shard_map" else costs

    def change(body):
        plain = without_calls(body)
        new = _in_plain(plain, dict.fromkeys(range(len(plain.in_avals))), devices, costs)
        if hasattr(body, "consts"):
            return body if new is plain else new
        return body if new is plain or new.consts else new.jaxpr

    return _jax.with_bodies(eqn, change)


def _parts(eqn) -> list[Any]:
    is_of_update = not is_differentiated(eqn.source_info.name_stack) and has_matrices(eqn)
    return parted(eqn, has_matrices) if is_of_update else [eqn]


def _count(pack: Pack) -> int:
    return len(pack.members)


def _most(counts: Iterable[int], devices: int) -> int:
    """The matrices of stacks on the device that has most of each."""
    return sum(-(-count // devices) for count in counts)


class _Stacks(ByCost):
    """Members along the first dim of an array, and computed together under `jax.vmap`. `movable`: arguments,
    by their numbers, that may come in a stack. `devices`: those that share the matrices. `opened`: equations
    in whose bodies stacks are already, so that they are not computed as a matrix of its own.
    """

    def __init__(
        self,
        closed,
        kinds: Mapping[int, Hashable],
        movable: Collection[int] = (),
        devices: int = 1,
        costs: Costs | None = None,
        opened: Sequence[Any] = (),
    ):
        super().__init__(closed, costs)
        self._movable = {closed.jaxpr.invars[i] for i in movable}
        self._alike = Alike(closed.jaxpr, kinds)
        self.readers = defaultdict(list)
        for eqn in self.eqns:
            for v in dict.fromkeys(v for v in eqn.invars if not _jax.is_literal(v)):
                self.readers[v].append(eqn)
        buckets = buckets_in(self.eqns, stacks=True)
        self._cut: dict[Any, tuple[Pack, int]] = {}  # by each variable that is cut out of a stack
        for whole, members in buckets.cut.items():
            pack = self.add(Pack(members, whole=whole))
            self._cut.update((v, (pack, k)) for k, v in enumerate(members))
        products = self._products()
        for eqns in (eqns for eqns in products if len(eqns) > 1):
            self.pack(self._ordered(eqns))
        for whole, members in buckets.joined.items():
            self.joins[whole] = self.pack(members)
        for pack in self.found:  # grows
            self._read_alike(pack)
        self._as_one: dict[Pack, Sequence[Pack]] = {}
        for packs in self._of_same_products():
            if _most(map(_count, packs), devices) > _most([sum(map(_count, packs))], devices):
                self._as_one.update((its, packs) for pack in packs for its in self.siblings(pack))
        if costs is not None:
            self._pack_alone(eqns[0] for eqns in products if len(eqns) == 1 and eqns[0] not in opened)

    def _pack_alone(self, eqns: Iterable[Any]) -> None:
        """Packs of one, for matrices that have their size alone."""
        for eqn in eqns:
            self.pack((eqn.outvars[0],))

    def joined(self, pack: Pack, members: Sequence[Any]) -> Any:
        rows = [
            lax.expand_dims(jnp.asarray(x, v.aval.dtype), (0,))
            for x, v in zip(members, pack.members, strict=True)
        ]
        return lax.concatenate(rows, 0)

    def parts(self, pack: Pack, whole: Any) -> Sequence[Any]:
        return [lax.squeeze(lax.slice_in_dim(whole, k, k + 1), (0,)) for k in range(len(pack.members))]

    def made(self, pack: Pack, operands: Sequence[Any]) -> Sequence[Any]:
        axes = tuple(0 if isinstance(x, Pack) else None for x in pack.operands)
        return jax.vmap(lambda *xs: bound(pack.made[0], xs), axes)(*operands)

    def as_one(self, pack: Pack) -> Sequence[Pack]:
        others = (its for its in self._as_one.get(pack, ()) if its not in self.apart)
        return [its for its in others if its not in self.deals] or [pack]

    def made_as_one(
        self, packs: Sequence[Pack], operands: Sequence[Sequence[Any]]
    ) -> Sequence[Sequence[Any]]:
        if len(packs) == 1:
            return super().made_as_one(packs, operands)
        with as_at(packs[0].made[0]):
            columns = zip(packs[0].operands, zip(*operands, strict=True), strict=True)
            wholes = [lax.concatenate(xs, 0) if isinstance(x, Pack) else xs[0] for x, xs in columns]
        results = self.made(packs[0], wholes)
        with as_at(packs[0].made[0]):
            ends = itertools.accumulate(map(_count, packs))
            rows = [(end - _count(pack), end) for end, pack in zip(ends, packs, strict=True)]
            return [[lax.slice_in_dim(x, *of_pack) for x in results] for of_pack in rows]

    def value(self, atom: Any) -> Hashable:
        return self._alike.value(atom)

    def _of_same_products(self) -> list[list[Pack]]:
        """Packs that the same products make of packs of the same sizes, none of what another makes: as many
        products follow each other up to each.
        """
        levels, groups = self._levels(), defaultdict(list)
        for pack in self.found:
            if pack.made and pack.index == 0 and has_matrices(pack.made[0]):
                level = {levels[v] for v in pack.members}
                alike = groups[frozenset(level), key(pack.made[0])] if len(level) == 1 else []
                if not alike or self._read_as_one(alike[0], pack):
                    alike.append(pack)
        return [packs for packs in groups.values() if len(packs) > 1]

    def _levels(self) -> dict[Any, int]:
        """By variable, how many products of an update follow each other up to it."""
        levels: dict[Any, int] = {}
        for eqn in self.eqns:
            before = (levels.get(v, 0) for v in eqn.invars if not _jax.is_literal(v))
            own = self._alike.is_packable(eqn) and has_matrices(eqn)
            levels.update(dict.fromkeys(eqn.outvars, max(before, default=0) + own))
        return levels

    def _read_as_one(self, a: Pack, b: Pack) -> bool:
        """Whether all but packs that they read is the same."""
        pairs = list(zip(a.operands, b.operands, strict=True))
        if any(isinstance(x, Pack) != isinstance(y, Pack) for x, y in pairs):
            return False
        return all(isinstance(pair[0], Pack) or self._alike.is_one(pair) for pair in pairs)

    def _products(self) -> list[list[Any]]:
        """Products of matrices that are alike, in program order."""
        alike: dict[int, list[Any]] = {}
        for eqn in self.eqns:
            if self._alike.is_packable(eqn) and has_matrices(eqn):
                alike.setdefault(self._alike.number(eqn.outvars[0]), []).append(eqn)
        return list(alike.values())

    def _ordered(self, eqns: Sequence[Any]) -> Members:
        """Their first results, in the order of a pack that they read, if any."""
        for column in zip(*(eqn.invars for eqn in eqns), strict=True):
            pairs = zip(column, eqns, strict=True)
            places = [(self._place(v), eqn) for v, eqn in pairs if not _jax.is_literal(v) and self._place(v)]
            by_number = {place[1]: eqn for place, eqn in places if place}
            if len(by_number) == len(eqns) and len({place[0] for place, _ in places if place}) == 1:
                return tuple(by_number[k].outvars[0] for k in sorted(by_number))
        return tuple(eqn.outvars[0] for eqn in eqns)

    def _place(self, v) -> tuple[Pack, int] | None:
        return self.of.get(v) or self._cut.get(v)

    def pack(self, members: Members) -> Pack:
        if pack := self.known(members):
            return pack
        eqns = self._makers(members)
        if not eqns:
            return self.add(Pack(members))
        columns = list(zip(*(eqn.invars for eqn in eqns), strict=True))
        shared = list(map(self._alike.is_shared, columns))
        if all(shared) or eqns[0].primitive.name == "cond" and not shared[0]:
            return self.add(Pack(members))  # the same for all; or of a stack all branches would run
        operands = [
            column[0] if is_one else self.pack(column) for column, is_one in zip(columns, shared, strict=True)
        ]
        results = zip(*(eqn.outvars for eqn in eqns), strict=True)
        packs = [self.add(Pack(result, eqns, operands, index=j)) for j, result in enumerate(results)]
        return packs[eqns[0].outvars.index(members[0])]

    def _makers(self, members: Members) -> list[Any]:
        """The equations that make these, where they all do the same."""
        numbers = [None if _jax.is_literal(v) or v in self.of else self.maker.get(v) for v in members]
        if None in numbers or len(set(numbers)) < len(numbers):
            return []
        eqns = [self.eqns[n] for n in numbers if n is not None]
        places = {eqn.outvars.index(v) for eqn, v in zip(eqns, members, strict=True)}
        keys = {key(eqn) for eqn in eqns}
        return eqns if len(keys) == len(places) == 1 and all(map(self._alike.is_packable, eqns)) else []

    def _read_alike(self, pack: Pack) -> None:
        """Packs of what reads all members alike, and no other arrays than packs have."""
        if not pack.made and pack.whole is None:
            return
        for eqn in self.readers[pack.members[0]]:
            if self._alike.is_packable(eqn) and eqn.outvars[0] not in self.of:
                read = [self._reader(v, eqn) for v in pack.members[1:]]
                eqns = [eqn, *read]
                if None not in read and all(map(self._is_there, zip(*(e.invars for e in eqns), strict=True))):
                    self.pack(tuple(e.outvars[0] for e in eqns))

    def _reader(self, v, like) -> Any:
        wanted = self._alike.number(like.outvars[0])
        found = (eqn for eqn in self.readers[v] if self._alike.number(eqn.outvars[0]) == wanted)
        return next((eqn for eqn in found if eqn.outvars[0] not in self.of), None)

    def _is_there(self, column: Members) -> bool:
        is_known = self._alike.is_one(column) or self.known(column) is not None
        return is_known or not any(v.aval.shape for v in column) or self._comes(column)

    def _comes(self, column: Members) -> bool:
        """Whether these are arguments that may come in a stack, or made of such alone."""
        if any(_jax.is_literal(v) for v in column) or not self._movable:
            return False
        eqns = self._makers(column)
        inner = zip(*(eqn.invars for eqn in eqns), strict=True)
        return self._movable.issuperset(column) or bool(eqns) and all(map(self._is_there, inner))
