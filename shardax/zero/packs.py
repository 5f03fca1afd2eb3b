"""Packs: values that a program computes alike, computed as one array, and the program that does so.

A pack's members are variables of the program. It has them in one array: cut out of one that was there,
computed as one, or joined of members that were computed one by one. Which packs there are, and how several
values are one array, says each kind of `Packs`: flat (`together`), or stacked (`stacks`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardax import _jax
from shardax.annotations.explicit import as_at, shape_of
from shardax.graph.evaluate import bound
from shardax.passes.segments import topological_order
from shardax.zero.branches import Members


@dataclass(frozen=True, eq=False)
class Pack:
    """Arrays in one: `made` by an equation each, alike, of the `operands`, each a pack or an atom that all
    have in common, as the result number `index` of it; else what there is is joined. `whole`: the variable
    that has it already. `sizes`: of members that are scalars how often each is there, in a flat one.
    """

    members: Members
    made: Sequence[Any] = ()
    operands: Sequence[Any] = ()
    whole: Any = None
    sizes: Sequence[int] = ()
    index: int = 0

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [v.aval.shape for v in self.members]


class Packs:
    """The packs of a jaxpr: `found`, and by each variable that one makes, `of`, which, and which member."""

    def __init__(self, closed):
        self.closed, self.eqns = closed, closed.jaxpr.eqns
        self.maker = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.found: list[Pack] = []
        self.of: dict[Any, tuple[Pack, int]] = {}
        self.apart: set[Pack] = set()  # whose members are computed one by one, and joined
        self.joins: dict[Any, Pack] = {}  # by the variable of the array that is made
        self._known: dict[tuple[Any, ...], Pack] = {}

    def joined(self, pack: Pack, members: Sequence[Any]) -> Any:
        """One array of those of the members."""
        raise NotImplementedError

    def parts(self, pack: Pack, whole: Any) -> Sequence[Any]:
        """The members of one array."""
        raise NotImplementedError

    def made(self, pack: Pack, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of the equation that makes the members, of packs."""
        raise NotImplementedError

    @property
    def all(self) -> list[Pack]:
        return self.found

    def as_one(self, pack: Pack) -> Sequence[Pack]:
        """The packs that are computed together with one, itself among them."""
        return [pack]

    def made_as_one(
        self, packs: Sequence[Pack], operands: Sequence[Sequence[Any]]
    ) -> Sequence[Sequence[Any]]:
        """The results of each of these."""
        return [self.made(pack, values) for pack, values in zip(packs, operands, strict=True)]

    def reduced(self, eqn) -> Pack | None:
        """The pack of which an equation reads a member, and can read the whole instead."""
        return None

    def of_whole(self, eqn, whole: Any) -> list[Any]:
        """The results of such an equation."""
        raise NotImplementedError

    def known(self, members: Members) -> Pack | None:
        """The pack of just these, if there is one."""
        return self._known.get(_hashable(members))

    def add(self, pack: Pack) -> Pack:
        self._known[_hashable(pack.members)] = pack
        self.found.append(pack)
        if pack.made:
            self.of.update((v, (pack, k)) for k, v in enumerate(pack.members))
        return pack

    def program(self) -> Any:
        """The program, packs computed as one."""
        order, types = self._order(), map(shape_of, self.closed.in_avals)
        return _jax.dce(jax.make_jaxpr(lambda *args: self._run(order, args))(*types))

    def _order(self) -> list[int]:
        """The numbers of equations, then of packs, each after what it reads. While packs depend on each other
        one more of them is set apart.
        """
        while True:
            tasks = [*map(self._task, range(len(self.eqns))), *map(self._task_of, self.all)]
            order = topological_order(tasks)
            if len(order) == len(tasks):
                return order
            left = {*range(len(self.eqns), len(tasks))}.difference(order)
            stuck = (self.all[n - len(self.eqns)] for n in sorted(left))
            self._set_apart(next(pack for pack in stuck if pack.made and pack not in self.apart))

    def _set_apart(self, pack: Pack) -> None:
        for its in self.found:
            if its.made and its.made[0] is pack.made[0]:  # all results of these equations
                self.apart.add(its)
                for v in its.members:
                    self.of.pop(v, None)

    def _task(self, number: int) -> tuple[int, list[Any], list[Any]]:
        """An equation, as `topological_order` takes it: its place, what it reads, and what it makes."""
        eqn = self.eqns[number]
        if self.is_packed(eqn):
            return number, [], []
        if eqn.outvars and eqn.outvars[0] in self.joins:
            return number, [self.joins[eqn.outvars[0]]], list(eqn.outvars)
        if pack := self.reduced(eqn):
            return number, [pack], list(eqn.outvars)
        return number, [self._read(v) for v in eqn.invars if not _jax.is_literal(v)], list(eqn.outvars)

    def _task_of(self, pack: Pack) -> tuple[int, list[Any], list[Any]]:
        place = max((self.maker.get(v, 0) for v in pack.members if not _jax.is_literal(v)), default=0)
        is_made = pack.made and pack not in self.apart
        operands = [x for its in self.as_one(pack) for x in its.operands] if is_made else []
        reads = operands if is_made else [pack.whole] if pack.whole is not None else pack.members
        return place, [self._read(v) for v in reads if not _jax.is_literal(v)], [pack]

    def is_packed(self, eqn) -> bool:
        return bool(eqn.outvars) and all(v in self.of for v in eqn.outvars)

    def _read(self, v) -> Any:
        return self.of[v][0] if not isinstance(v, Pack) and v in self.of else v

    def _run(self, order: Sequence[int], args: Sequence[Any]) -> list[Any]:
        jaxpr = self.closed.jaxpr
        inputs, values = (*jaxpr.constvars, *jaxpr.invars), (*self.closed.consts, *args)
        env: dict[Any, Any] = dict(zip(inputs, values, strict=True))

        def read(atom):
            if isinstance(atom, Pack):
                return env[atom]
            if _jax.is_literal(atom):
                return atom.val
            if atom not in env:
                pack, _ = self.of[atom]
                with as_at(pack.made[0]):
                    env.update(zip(pack.members, self.parts(pack, env[pack]), strict=True))
            return env[atom]

        for n in order:
            if n >= len(self.eqns):
                self._make(self.all[n - len(self.eqns)], env, read)
            elif not self.is_packed(self.eqns[n]):
                eqn = self.eqns[n]
                env.update(zip(eqn.outvars, self._results(eqn, env, read), strict=True))
        return list(map(read, jaxpr.outvars))

    def _results(self, eqn, env: Mapping[Any, Any], read: Callable[[Any], Any]) -> list[Any]:
        join = self.joins.get(eqn.outvars[0]) if eqn.outvars else None
        if join is not None:
            return [env[join]]
        if pack := self.reduced(eqn):
            return self.of_whole(eqn, env[pack])
        return bound(eqn, list(map(read, eqn.invars)))

    def _make(self, pack: Pack, env: dict[Any, Any], read: Callable[[Any], Any]) -> None:
        if pack in env:
            return  # with another result of its equations
        if pack.whole is not None:
            env[pack] = read(pack.whole)
        elif pack in self.apart or not pack.made:
            env[pack] = self.joined(pack, list(map(read, pack.members)))
        else:
            packs = self.as_one(pack)
            results = self.made_as_one(packs, [list(map(read, its.operands)) for its in packs])
            for its, values in zip(packs, results, strict=True):
                env.update((sibling, values[sibling.index]) for sibling in self.siblings(its))

    def siblings(self, pack: Pack) -> list[Pack]:
        """The packs of the results of its equations."""
        return [self.of[v][0] for v in pack.made[0].outvars]


def _hashable(members: Members) -> tuple[Any, ...]:
    return tuple(id(v) if _jax.is_literal(v) else v for v in members)
