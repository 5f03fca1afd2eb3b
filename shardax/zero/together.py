"""Together: what a program computes alike of all arrays of a bucket, it computes of the bucket.

    a, b = bucket[:13], bucket[13:]            a, b as they are
    a' = 2 a + g_a                             bucket' = 2 bucket + [g_a, g_b]
    b' = 2 b + g_b
    new = [a', b']                             new = bucket'

So the parts of a bucket that is split stay where they are, gradients are added up into the bucket by one
collective, and what is computed of it, as new parameters, leaves it by one. This is how a compiler packs
scalars into vectors (superword-level parallelism, Larsen and Amarasinghe 2000): from the packs that the
program makes back along equal elementwise operations, and from each pack on to what reads all its members
alike. What differs from member to member is joined before, or cut after.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from shardax import _jax
from shardax.annotations.explicit import as_at
from shardax.graph.evaluate import bound, evaluate, without_calls
from shardax.passes.segments import is_elementwise, is_fill
from shardax.zero.branches import Members, buckets_in, is_of_bucket, with_whole_buckets
from shardax.zero.bucket import joined, parts_of
from shardax.zero.packs import Pack, Packs


def together(jaxpr):
    """The program, which has buckets in the argument and result of `joined` and `parts_of`; the same, where
    there are none. Of packs that depend on each other some are computed apart.
    """
    if not any(map(is_of_bucket, jaxpr.jaxpr.eqns)) or _jax.ordered_effects(jaxpr.jaxpr):
        return jaxpr
    return _Flat(with_whole_buckets(without_calls(jaxpr), together)).program()


def around_buckets(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of which a part of the program is made, as `together` has it."""

    def run(*args):
        leaves, tree = jax.tree.flatten(args)
        jaxpr, out = jax.make_jaxpr(lambda *xs: function(*tree.unflatten(xs)), return_shape=True)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(out), evaluate(together(jaxpr), leaves))

    return run


class _Flat(Packs):
    """Members one after the other in an array of one dim, and computed together element by element."""

    def __init__(self, closed):
        super().__init__(closed)
        self.readers = defaultdict(list)  # by variable, numbers of equations with the number of the operand
        for i, eqn in enumerate(self.eqns):
            for place, v in enumerate(eqn.invars):
                if not _jax.is_literal(v):
                    self.readers[v].append((i, place))
        self.spread: list[Pack] = []  # scalars
        self._cut: dict[Any, tuple[Pack, int]] = {}  # by each variable that is cut out of a bucket
        self._same = _scalars(self.eqns)
        buckets = buckets_in(self.eqns, stacks=False)
        for whole, members in buckets.cut.items():
            pack = self.add(Pack(members, whole=whole))
            self._cut.update((v, (pack, k)) for k, v in enumerate(members))
        for whole, members in buckets.joined.items():
            self.joins[whole] = self.pack(members)
        for pack in self.found:  # grows
            self._read_alike(pack)

    @property
    def all(self) -> list[Pack]:
        return [*self.found, *self.spread]

    def joined(self, pack: Pack, members: Sequence[Any]) -> Any:
        pairs = zip(pack.members, members, pack.sizes, strict=False)
        filled = [lax.full((n,), x, v.aval.dtype) for v, x, n in pairs]
        return joined(filled or members)

    def parts(self, pack: Pack, whole: Any) -> Sequence[Any]:
        return parts_of(whole, pack.shapes)

    def made(self, pack: Pack, operands: Sequence[Any]) -> Sequence[Any]:
        eqn = pack.made[0]
        if not is_fill(eqn):
            return bound(eqn, operands)
        with as_at(eqn):
            return [lax.broadcast(operands[0], (sum(map(math.prod, pack.shapes)),))]

    def pack(self, members: Members) -> Pack:
        if pack := self.known(members):
            return pack
        eqns = self._alike(members)
        if not eqns:
            return self.add(Pack(members))
        if is_fill(eqns[0]):
            return self.add(Pack(members, eqns, [eqns[0].invars[0]]))
        columns = list(zip(*(eqn.invars for eqn in eqns), strict=True))
        sizes = [v.aval.size for v in members]
        return self.add(Pack(members, eqns, [self._operand(column, sizes) for column in columns]))

    def _operand(self, atoms: Members, sizes: Sequence[int]) -> Any:
        if atoms[0].aval.shape:
            return self.pack(atoms)
        if all(self._is_same(x, atoms[0]) for x in atoms):
            return atoms[0]
        self.spread.append(Pack(atoms, sizes=sizes))
        return self.spread[-1]

    def _alike(self, members: Members) -> list[Any]:
        """The equations that make these, where they all do the same to arrays, and to common scalars."""
        numbers = [None if _jax.is_literal(v) or v in self.of else self.maker.get(v) for v in members]
        if None in numbers or len(set(numbers)) < len(numbers):
            return []
        eqns = [self.eqns[n] for n in numbers if n is not None]
        return eqns if all(self._is_like(eqn, eqns[0]) for eqn in eqns) else []

    def _is_like(self, eqn, first) -> bool:
        if eqn.primitive is not first.primitive:
            return False
        if is_fill(first):
            return is_fill(eqn) and self._is_same(eqn.invars[0], first.invars[0])
        if not (is_elementwise(eqn) and is_elementwise(first)) or eqn.params != first.params:
            return False
        pairs = zip(eqn.invars, first.invars, strict=True)
        return all(
            bool(a.aval.shape) == bool(b.aval.shape) and a.aval.dtype == b.aval.dtype for a, b in pairs
        )

    def _is_same(self, a, b) -> bool:
        """Whether two atoms are one scalar."""
        if a.aval.shape or b.aval.shape or a.aval.dtype != b.aval.dtype:
            return False
        if _jax.is_literal(a) or _jax.is_literal(b):
            return _jax.is_literal(a) and _jax.is_literal(b) and bool(a.val == b.val)
        return self._same.get(a, a) is self._same.get(b, b)

    def _read_alike(self, pack: Pack) -> None:
        """Packs of what reads all members alike."""
        first, *others = pack.members
        for number, place in self.readers[first]:
            eqn = self.eqns[number]
            if is_elementwise(eqn) and eqn.outvars[0] not in self.of:
                read = [self._reader(v, place, eqn) for v in others]
                if None not in read:
                    self.pack((eqn.outvars[0], *read))

    def _reader(self, v, place: int, like) -> Any:
        for number, at in self.readers[v]:
            eqn = self.eqns[number]
            if at == place and eqn.outvars[0] not in self.of and self._is_like(eqn, like):
                return eqn.outvars[0]
        return None

    def reduced(self, eqn) -> Pack | None:
        """Of a reduction to one number each device reduces what it has of a bucket."""
        found = self._member(eqn)
        return found and found[0]

    def _member(self, eqn) -> tuple[Pack, int] | None:
        """The pack of which an equation reduces a member to one number, and which member."""
        v = eqn.invars[0] if _is_reduction(eqn) else None
        return self.of.get(v) or self._cut.get(v)

    def of_whole(self, eqn, whole: Any) -> list[Any]:
        found = self._member(eqn)
        assert found is not None
        return _reduced_member(eqn, whole, found[0].shapes, found[1])


_NEUTRAL = {
    "reduce_and": True,
    "reduce_max": -math.inf,
    "reduce_min": math.inf,
    "reduce_or": False,
    "reduce_sum": 0,
}


def _is_reduction(eqn) -> bool:
    """Whether an equation reduces an array to one number."""
    if eqn.primitive.name not in _NEUTRAL or eqn.outvars[0].aval.shape:
        return False
    return _NEUTRAL[eqn.primitive.name] not in (-math.inf, math.inf) or eqn.invars[0].aval.dtype.kind in "fV"


def _reduced_member(eqn, flat, shapes: Sequence[tuple[int, ...]], k: int) -> list[Any]:
    """The reduction of one member, of which each device reduces what it has."""
    start = sum(map(math.prod, shapes[:k]))
    with as_at(eqn):
        place = lax.iota("int32", flat.size)
        is_its = (place >= start) & (place < start + math.prod(shapes[k]))
        masked = lax.select(is_its, flat, lax.full_like(flat, _NEUTRAL[eqn.primitive.name]))
    return bound(eqn, [masked], axes=(0,))


def _scalars(eqns: Sequence[Any]) -> dict[Any, Any]:
    """For each scalar that is computed of scalars the first one that is computed alike."""
    first: dict[Any, Any] = {}
    same: dict[Any, Any] = {}
    for eqn in eqns:
        if not any(v.aval.shape for v in (*eqn.invars, *eqn.outvars)) and not _jax.has_bodies(eqn):
            reads = tuple(
                (str(v), v.aval.dtype) if _jax.is_literal(v) else same.get(v, v) for v in eqn.invars
            )
            for k, v in enumerate(eqn.outvars):
                same[v] = first.setdefault((eqn.primitive, str(eqn.params), reads, k), v)
    return same
