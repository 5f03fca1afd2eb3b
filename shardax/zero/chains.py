"""Chains: what an update computes of each matrix by itself, from its first product to its last.

u = f(m), v = g(u, s)   of 3 large ones       one chain, of the stacks m and s
w = f(n)                of 3 small ones       another, which does not depend on it
t = h(v, norm(v, w))    of 3 large ones       a third, behind both: what is between them leaves the chains
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardax import _jax
from shardax.zero.alike import key
from shardax.zero.matrices import has_matrices
from shardax.zero.packs import Pack, Packs


@dataclass(frozen=True, eq=False)
class Chain:
    """Packs of as many members, each made of the members of its number alone, in their order. `stacks`: the
    packs of others of which they are made, some by way of `before`; `common`: what all members read;
    `results`: those that others read.
    """

    packs: Sequence[Pack]
    before: Sequence[Pack]
    stacks: Sequence[Pack]
    common: Sequence[Any]
    results: Sequence[Pack]

    @property
    def count(self) -> int:
        return len(self.packs[0].members)


class Chains(Packs):
    """Packs, of which those with matrices, and what is between these, are chains."""

    def value(self, atom: Any) -> Hashable:
        """The same for atoms that have one value."""
        raise NotImplementedError

    def chains(self, order: Sequence[int]) -> list[list[Chain]]:
        """Those that do not depend on each other side by side, after those on which they depend."""
        spine, readers = self._spine(), self._readers(order)
        depths, levels = self._depths(order, spine), defaultdict(list)
        for pack in (pack for pack in self.found if pack in spine):
            levels[depths[pack]].append(pack)
        return [
            [self._chain(own, readers) for own in self._connected(levels[depth])] for depth in sorted(levels)
        ]

    def chain_key(self, chain: Chain) -> Hashable:
        """What a chain does, of which operands."""
        own = *chain.before, *chain.packs
        number = {x: k for k, x in enumerate((*chain.stacks, *own))}

        def named(x: Any) -> Hashable:
            return ("pack", number[x]) if isinstance(x, Pack) else self.value(x)

        made = tuple((key(x.made[0]), x.index, *map(named, x.operands)) for x in own)
        return made, tuple(number[x] for x in chain.results)

    def computed(self, chain: Chain, operands: Sequence[Any]) -> list[Any]:
        """The results of a chain, of its stacks with any number of members, and of what these share."""
        env = dict(zip((*chain.stacks, *chain.common), operands, strict=True))
        for pack in (*chain.before, *chain.packs):
            if pack not in env:
                made = self.made(pack, [x.val if _jax.is_literal(x) else env[x] for x in pack.operands])
                env.update((its, made[its.index]) for its in self.siblings(pack))
        return [env[pack] for pack in chain.results]

    def _is_made(self, pack: Pack) -> bool:
        return bool(pack.made) and pack not in self.apart

    def _spine(self) -> set[Pack]:
        """Packs with matrices, and those that are made of them and of which such are made."""
        made = list(filter(self._is_made, self.found))
        products = {pack for pack in made if has_matrices(pack.made[0])}
        behind, before = set(products), set(products)
        for pack in made:
            if not behind.isdisjoint(_packs_of(pack)):
                behind.update(self.siblings(pack))
        for pack in reversed(made):
            if not before.isdisjoint(self.siblings(pack)):
                before.update(filter(self._is_made, _packs_of(pack)))
        return {its for pack in behind & before for its in self.siblings(pack)}

    def _depths(self, order: Sequence[int], spine: Collection[Pack]) -> Mapping[Any, int]:
        """By what is made, how often a way to it leaves the spine. What is as deep is independent, but for
        packs that are operands of each other.
        """
        depths: dict[Any, int] = {}
        for n in order:
            reads, makes = self._own_reads(n)
            direct = self._direct(makes[0]) if makes and makes[0] in spine else ()
            ways = (depths.get(x, 0) + (x in spine and x not in direct) for x in reads)
            depths.update(dict.fromkeys(makes, max(ways, default=0)))
        return depths

    def _direct(self, pack: Pack) -> set[Pack]:
        """The packs of which it reads all members, each of its members one, and not one that all read."""
        common = {self._read(v) for v in pack.operands if not _jax.is_literal(v) and not isinstance(v, Pack)}
        return {*_packs_of(pack)} - common

    def _own_reads(self, number: int) -> tuple[list[Any], list[Any]]:
        """What an equation, or a pack by itself, reads, and what it makes."""
        if number < len(self.eqns):
            return self._task(number)[1:]
        pack = self.all[number - len(self.eqns)]
        if not self._is_made(pack):
            return self._task_of(pack)[1:]
        return [self._read(v) for v in pack.operands if not _jax.is_literal(v)], [pack]

    def _readers(self, order: Sequence[int]) -> Mapping[Any, set[Any]]:
        """By what is read the packs that read it; None among these for anything else that does."""
        readers: dict[Any, set[Any]] = defaultdict(set)
        for n in order:
            reads, makes = self._own_reads(n)
            for x in reads:
                readers[x].update(makes if n >= len(self.eqns) else (None,))
        for v in self.closed.jaxpr.outvars:
            if not _jax.is_literal(v):
                readers[self._read(v)].add(None)
        return readers

    def _connected(self, packs: Sequence[Pack]) -> list[list[Pack]]:
        """These in groups, in their order: what is an operand of another, or made by the same equations, is
        of its group.
        """
        group_of: dict[Pack, list[Pack]] = {pack: [pack] for pack in packs}
        for pack in packs:
            for other in (*self.siblings(pack), *self._direct(pack)):
                if other in group_of and group_of[other] is not group_of[pack]:
                    joined = group_of[other] + group_of[pack]
                    group_of.update(dict.fromkeys(joined, joined))
        ordered: dict[int, list[Pack]] = defaultdict(list)
        for pack in packs:
            ordered[id(group_of[pack])].append(pack)
        return list(ordered.values())

    def _chain(self, packs: Sequence[Pack], readers: Mapping[Any, set[Any]]) -> Chain:
        results = [pack for pack in packs if readers[pack].difference(packs)]
        before: set[Pack] = set()
        while more := self._made_of_these([*before, *packs]):
            before.update(more)
        operands = _operands_of([*before, *packs])
        stacks = [x for x in operands if isinstance(x, Pack)]
        common = [x for x in operands if not isinstance(x, Pack)]
        return Chain(packs, [x for x in self.found if x in before], stacks, common, results)

    def _made_of_these(self, packs: Sequence[Pack]) -> list[Pack]:
        """Of what these read, packs that can be made of the others, as the transpose of a stack: what is read
        twice is sent once then.
        """
        operands = _operands_of(packs)
        for x in operands:
            own = _packs_of(x) if isinstance(x, Pack) and self._is_made(x) else []
            if own and {*own} <= {*operands}:
                return self.siblings(x)
        return []


def _packs_of(pack: Pack) -> list[Pack]:
    return [x for x in pack.operands if isinstance(x, Pack)]


def _operands_of(packs: Sequence[Pack]) -> list[Any]:
    """What these read of others."""
    operands = dict.fromkeys(x for pack in packs for x in pack.operands if not _jax.is_literal(x))
    return [x for x in operands if x not in packs]
