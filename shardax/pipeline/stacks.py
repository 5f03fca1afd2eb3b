"""Where pieces of the parameters lie, so that each stage has its own.

Alike pieces of several stages, rows of one stack of layers or separate arrays of one shape, are one operand
with a dim of stages, split over the stage axis: each device holds its own. What one stage alone has, or
several share (tied embeddings), is an operand that all have. What rests so already is an operand as it is.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardax.pipeline.cut import Cut, Piece
from shardax.pipeline.table import Schedule

Type = jax.ShapeDtypeStruct


class Held(NamedTuple):
    """A piece of a value of the form [stages, ...], of which each stage reads its own: the first `count` rows
    of that, None: all.
    """

    value: int
    count: int | None = None


class Source(NamedTuple):
    """Which operand a piece is, and how many of its rows, None: all of it."""

    operand: int
    rows: int | None = None


@dataclass(frozen=True)
class Stacks:
    """`parts[i]`: the pieces of which operand i is made, one for each stage where it is stacked (None:
    zeros), else one; of a value that rests so, its `Held` alone. `sources[k]`: where the pieces of virtual
    stage k are.
    """

    cut: Cut
    schedule: Schedule
    types: tuple[Type, ...]
    parts: tuple[tuple[Any, ...], ...]
    is_stacked: tuple[bool, ...]
    sources: tuple[tuple[Source, ...], ...]

    @staticmethod
    def of(cut: Cut, schedule: Schedule, values: Sequence[Any]) -> "Stacks":
        parts: dict[tuple[Any, ...], bool] = {}
        sources = [[Source(-1)] * len(stage.pieces) for stage in cut.stages]
        for members, stacked in _groups(cut, schedule, values):
            pieces = {d: cut.stages[k].pieces[n] for d, k, n in members}
            first = next(iter(pieces.values()))
            if isinstance(first, Held):
                some = (first._replace(count=None),)
            else:
                some = tuple(map(pieces.get, range(schedule.stages))) if stacked else (first,)
            operand = list(parts).index(some) if some in parts else len(parts)
            parts[some] = stacked
            for d, k, n in members:
                sources[k][n] = Source(operand, _count(pieces[d]))
        types = [_type(some, stacked, values) for some, stacked in parts.items()]
        return Stacks(
            cut, schedule, tuple(types), tuple(parts), tuple(parts.values()), tuple(map(tuple, sources))
        )

    def piece_types(self, k: int) -> list[Type]:
        """Of the pieces of a virtual stage."""
        types = []
        for source in self.sources[k]:
            type = self.types[source.operand]
            shape = type.shape if source.rows is None else (source.rows, *type.shape[1:])
            types.append(Type(shape, type.dtype))
        return types

    def operands(self, values: Sequence[Array]) -> list[Array]:
        """What the program takes: [stages, ...] where it is stacked."""
        return [
            self._stack(i, values) if stacked and not isinstance(some[0], Held) else values[some[0].value]
            for i, (some, stacked) in enumerate(zip(self.parts, self.is_stacked, strict=True))
        ]

    def _stack(self, i: int, values: Sequence[Array]) -> Array:
        some, type = self.parts[i], self.types[i]
        whole = values[some[0].value] if some[0] else None
        if whole is not None and _are_all_rows(some, whole):
            return whole.reshape(len(some), *type.shape)
        if whole is not None and _are_all_rows(some[::-1], whole):
            return lax.rev(whole.reshape(len(some), *type.shape), (0,))
        rows = []
        for piece in some:
            if piece is None:
                rows.append(jnp.zeros(type.shape, type.dtype))
            elif piece.rows is None:
                rows.append(values[piece.value])
            else:
                own = values[piece.value][slice(*piece.rows)]
                missing = type.shape[0] - own.shape[0]
                rows.append(jnp.pad(own, [(0, missing)] + [(0, 0)] * (own.ndim - 1)) if missing else own)
        return jnp.stack(rows)

    def pieces(self, k: int, own: Sequence[Array]) -> list[Array]:
        """Those of a virtual stage, of the operands as its stage has them."""
        return [own[s.operand] if s.rows is None else own[s.operand][: s.rows] for s in self.sources[k]]


Member = tuple[int, int, int]  # of which stage, in which virtual stage, which of its pieces


def _groups(cut: Cut, schedule: Schedule, values: Sequence[Any]) -> Iterator[tuple[list[Member], bool]]:
    """The pieces that are one operand, and whether it is stacked: the nth of a kind on each stage, chunk by
    chunk. What several virtual stages read whole, or one stage alone, is no stack.
    """
    pieces = [piece for stage in cut.stages for piece in stage.pieces if isinstance(piece, Piece)]
    uses = Counter(piece.value for piece in pieces if piece.rows is None)
    for row in schedule.placement:
        alike: dict[Any, list[Member]] = defaultdict(list)
        for d, k in enumerate(row):
            seen: Counter[Any] = Counter()
            for n, piece in enumerate(cut.stages[k].pieces):
                if isinstance(piece, Held):
                    yield [(d, k, n)], True
                    continue
                if piece.rows is None and uses[piece.value] > 1:
                    yield [(d, k, n)], False
                    continue
                kind = _kind(piece, values[piece.value])
                alike[kind, seen[kind]].append((d, k, n))
                seen[kind] += 1
        for members in alike.values():
            _, k, n = members[0]
            rows = cut.stages[k].pieces[n].rows
            yield members, len(members) > 1 or schedule.stages == 1 or rows is not None


def _kind(piece: Piece, value) -> Any:
    if piece.rows is None:
        return None, tuple(value.shape), value.dtype
    return "rows", tuple(value.shape[1:]), value.dtype


def _count(piece: Piece | Held) -> int | None:
    if isinstance(piece, Held):
        return piece.count
    return None if piece.rows is None else piece.rows[1] - piece.rows[0]


def _type(some: Sequence[Piece | None], stacked: bool, values: Sequence[Any]) -> Type:
    """Of one stage's part of an operand."""
    pieces = [piece for piece in some if piece is not None]
    value = values[pieces[0].value]
    if isinstance(pieces[0], Held):
        return Type(value.shape[1:], value.dtype)
    if not stacked or pieces[0].rows is None:
        return Type(value.shape, value.dtype)
    return Type((max(_count(piece) or 0 for piece in pieces), *value.shape[1:]), value.dtype)


def _are_all_rows(some: Sequence[Piece | None], value) -> bool:
    """Whether the parts of an operand are a whole stack of layers, in its order and in equal shares."""
    pieces = [piece for piece in some if piece and piece.rows]
    if len(pieces) < len(some) or len({piece.value for piece in pieces}) > 1:
        return False
    share = value.shape[0] // len(some)
    return [piece.rows for piece in pieces] == [(d * share, (d + 1) * share) for d in range(len(some))] and (
        share * len(some) == value.shape[0]
    )
