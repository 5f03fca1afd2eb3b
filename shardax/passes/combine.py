"""Combines small reductions into one, where nothing large waits for them: the gradients of biases, losses,
statistics.

To start a collective takes longer than to copy a small array twice. So reductions of one kind, over the same
axes and of one dtype, become one reduction of their operands in a row. Each element is reduced as before, and
no byte more is sent.

    a = psum x[768]    b = psum y[192]    ->    s = psum concatenate(x, y)[960]    a = s[:768]    b = s[768:]

It stands where the last of the operands is made. What reads another result before that now comes after it, if
it is small too, as the update of a bias is. What is large stays before or after as it was, so no large array
lives longer.

What is small is a matter of prices: on real chips up to fifty kilobytes or so; on the nominal chip, where to
start a collective costs next to nothing, sixty-four bytes: scalars and the like.
"""

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from jax import lax

from shardax import _jax
from shardax.cost.network import Network, network_of
from shardax.graph.equations import equations_of, map_equations
from shardax.ledger import causes
from shardax.ledger.collectives import array_bytes, bytes_sent, operands_of, why
from shardax.rewrites.numbering import params_key
from shardax.sharding import Axes, AxisSizes, shard_count

REDUCTIONS = ("pmax", "pmin", "psum")
COPIES = 4  # to put an array in a row with others, and to cut it out again, is to read and write it twice
MOST = 64  # equations that wait for a reduction: long programs are planned in time; Adam's update has 32
SHOWN = 3  # reasons that a combined one tells


def combined(jaxpr, sizes: AxisSizes | None):
    """The same jaxpr, closed or open, its small reductions combined; so are its bodies.

    Args:
      jaxpr: a local program.
      sizes: those of the mesh's axes; a `Network` has the prices of a chip. None leaves everything as it is.
    """
    return jaxpr if sizes is None else _combined(jaxpr, network_of(sizes))


def _combined(jaxpr, network: Network):
    def change(eqns):
        groups = _Grouping(network).groups(eqns)
        return list(_Schedule(groups).eqns(eqns)) if groups else eqns

    return map_equations(jaxpr, change)


class _Grouping:
    """Finds what to combine: goes through a program, and gathers small reductions until something large reads
    one of them. Small equations that read one wait as it does, and may be reductions to gather when it is
    made.
    """

    def __init__(self, network: Network):
        self.network = network
        self.gathering: dict[Hashable, list[Any]] = {}
        self.waits: dict[Any, frozenset[Hashable]] = {}  # for which keys variables wait
        self.starts: dict[Hashable, float] = {}
        self.waiting: list[Any] = []
        self.held = 0.0  # the time to copy what those that wait read and make

    def groups(self, eqns: Iterable[Any]) -> list[list[Any]]:
        """The reductions to combine, two or more in a list. There is an order of the program in which each
        list is one.
        """
        gathered: list[list[Any]] = []
        todo = deque(eqns)
        while todo or self.gathering:
            eqn = todo.popleft() if todo else None
            keys = self.see(eqn) if eqn else self.gathering
            if keys:
                gathered.append(self.gathering.pop(next(key for key in self.gathering if key in keys)))
                todo.extendleft(reversed([*self.released(), *([eqn] if eqn else [])]))
        return [group for group in gathered if len(group) > 1]

    def see(self, eqn) -> Iterable[Hashable]:
        """Places an equation; where it may not wait, the keys of what must be made before."""
        keys = frozenset().union(*(self.waits.get(v, ()) for v in eqn.invars if not _jax.is_literal(v)))
        if keys and not self.may_wait(eqn, keys):
            return keys
        if keys:
            self.waiting.append(eqn)
            self.held += self.copied(eqn)
        elif key := self.key(eqn):
            self.gathering.setdefault(key, []).append(eqn)
            keys = frozenset({key})
        self.waits.update(dict.fromkeys(eqn.outvars, keys) if keys else ())
        return ()

    def released(self) -> list[Any]:
        """Those that wait, to be seen again."""
        again, self.waiting, self.held = self.waiting, [], 0.0
        self.waits = {
            v: frozenset({key}) for key, group in self.gathering.items() for eqn in group for v in eqn.outvars
        }
        return again

    def may_wait(self, eqn, keys: Iterable[Hashable]) -> bool:
        """Whether all that waits is so little, with this, that it is copied in less than the starts that may
        be saved.
        """
        counts = {key: len(self.gathering[key]) for key in keys}
        if _jax.has_effects(eqn) or _jax.has_bodies(eqn) or len(self.waiting) >= MOST * sum(counts.values()):
            return False
        return self.held + self.copied(eqn) < sum(n * self.starts[key] for key, n in counts.items())

    def copied(self, eqn) -> float:
        """The time to move the operands and results of an equation through memory."""
        return self.network.compute(0, sum(_nbytes(v) for v in (*eqn.invars, *eqn.outvars)))

    def key(self, eqn) -> Hashable | None:
        """What reductions that may be combined have in common; None where an equation is none of them, or too
        large.
        """
        if eqn.primitive.name not in REDUCTIONS or not all(
            isinstance(axis, str) for axis in eqn.params["axes"]
        ):
            return None
        axes, params, dtypes = (
            tuple(eqn.params["axes"]),
            params_key(eqn.params),
            {v.aval.dtype for v in eqn.invars},
        )
        if params is None or len(dtypes) != 1 or shard_count(axes, self.network) == 1:
            return None
        key, nbytes = (eqn.primitive, params, *dtypes), [_nbytes(v) for v in eqn.invars]
        self.starts[key] = self.network.collective("all_reduce", axes, 0)
        return key if all(nbytes) and self.is_small(sum(nbytes), axes, self.starts[key]) else None

    def is_small(self, nbytes: int, axes: Axes, start: float) -> bool:
        """Whether two are copied in less than a start takes, which is saved. To send them takes less, too:
        what takes longer had better go early, while others compute.
        """
        sent = bytes_sent("all_reduce", nbytes, shard_count(axes, self.network))
        copied = self.network.compute(0, COPIES * nbytes)
        return 2 * copied < start and self.network.collective("all_reduce", axes, sent) < 2 * start


class _Schedule:
    """Writes a program anew: reductions that are combined where the last of them stands, and then what has
    waited for them.
    """

    def __init__(self, groups: Sequence[Sequence[Any]]):
        self.group = {id(eqn): group for group in groups for eqn in group}
        self.placed: Counter[int] = Counter()  # how many of a group
        self.full: deque[Sequence[Any]] = deque()
        self.missing: set[Any] = set()  # variables that are not made yet
        self.waiting: list[Any] = []

    def eqns(self, eqns: Iterable[Any]) -> Iterator[Any]:
        for eqn in eqns:
            yield from self.place(eqn)
            while self.full:
                yield from self.make(self.full.popleft())
        assert not self.missing, "combined reductions wait for each other"

    def place(self, eqn) -> Iterator[Any]:
        group = self.group.get(id(eqn))
        waits = any(v in self.missing for v in eqn.invars if not _jax.is_literal(v))
        if not waits and group is None:
            yield eqn
            return
        self.missing.update(eqn.outvars)
        if waits:
            self.waiting.append(eqn)
        elif group is not None:
            self.placed[id(group)] += 1
            if self.placed[id(group)] == len(group):
                self.full.append(group)

    def make(self, group: Sequence[Any]) -> Iterator[Any]:
        """One reduction of all operands in a row, and its parts; then what waited for them."""
        operands = [v for eqn in group for v in eqn.invars]
        results = [v for eqn in group for v in eqn.outvars]
        like = group[0].replace(source_info=_source(group))
        in_a_row = lambda *xs: lax.concatenate([lax.reshape(x, (x.size,)) for x in xs], 0)  # noqa: E731
        *reshapes, row = equations_of(in_a_row, operands, None, like)
        total = like.replace(invars=row.outvars, outvars=[_jax.new_variable(row.outvars[0].aval)])
        yield from (*reshapes, row, total)
        cut = lambda x: _cut(x, [v.aval.shape for v in operands])  # noqa: E731
        yield from equations_of(cut, total.outvars, results, like)
        self.missing.difference_update(results)
        waiting, self.waiting = self.waiting, []
        for eqn in waiting:
            self.missing.difference_update(eqn.outvars)
            yield from self.place(eqn)


def _cut(row, shapes: Sequence[tuple[int, ...]]):
    ends = [0, *accumulate(map(math.prod, shapes))]
    return [
        lax.reshape(lax.slice(row, (i,), (j,)), shape)
        for (i, j), shape in zip(pairwise(ends), shapes, strict=True)
    ]


def _source(group: Sequence[Any]):
    """The line of the first, and a scope with the reasons of all."""
    parts = tuple(_part(eqn) for eqn in group)
    words = [*dict.fromkeys(part.reason for part in parts)]
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    name = causes.named(
        "all_reduce", f"{len(parts)} as one: {', '.join(words[:SHOWN])}{more}", causes.Combined(parts)
    )
    return group[0].source_info.replace(name_stack=_jax.EMPTY_NAME_STACK.extend(name))


def _part(eqn) -> causes.Part:
    source = eqn.source_info
    return causes.Part(operands_of(eqn), _jax.user_line(source), *why("all_reduce", source.name_stack))


def _nbytes(atom) -> int:
    return array_bytes(atom.aval) if hasattr(atom.aval, "shape") else 0
