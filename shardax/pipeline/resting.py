"""The weights of a cut loss, packed or not, as its stages read them.

Where a hoisted value is a leaf that rests in a packed array, cast, scaled, reshaped or transposed, the same
is done to that array, and each stage reads its part. Any other value is made of leaves, which are taken out
of the arrays first.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array

from shardax.annotations.explicit import shape_of
from shardax.pipeline.cut import Cut, Piece, Stage
from shardax.pipeline.gathered import Accumulator, Summand
from shardax.pipeline.origins import Origin, Reads, run, text
from shardax.pipeline.packed import FLAT, STACKED, WHOLE, Packed, PackedArray, Packing, Part
from shardax.pipeline.repacking import array_of, leaves_of, packed
from shardax.pipeline.stacks import Held
from shardax.pipeline.table import Schedule

Type = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Weights:
    """The parameters that a function is called with, packed or not.

    Attributes:
      arguments: as they are at rest.
      arrays, tree: their leaves and structure.
      types, plain_tree: those of the arguments that the function itself takes.
    """

    arguments: tuple[Any, ...]
    arrays: list[Any]
    tree: Any
    types: list[Type]
    plain_tree: Any

    @staticmethod
    def of(arguments: Sequence[Any], stages: int, axis: str) -> "Weights":
        arguments = tuple(arguments)
        for each in _packed(arguments):
            each.packing.check_stages(stages, axis)
        plain = [_types(x) for x in arguments]
        types, plain_tree = jax.tree.flatten(plain)
        return Weights(arguments, *jax.tree.flatten(arguments), types, plain_tree)

    def plain(self, arrays: Sequence[Any], unpacked: Callable[[Packed], list[Any]] = leaves_of) -> list[Any]:
        """The leaves that the function takes, of those at rest."""
        arguments = jax.tree.unflatten(self.tree, arrays)
        return [
            leaf for x in arguments for leaf in (unpacked(x) if isinstance(x, Packed) else jax.tree.leaves(x))
        ]

    def at_rest(self, leaves: Sequence[Any]) -> list[Any]:
        """Arrays as the arguments rest, gradients say, of those of the leaves."""
        found, left = [], iter(leaves)
        for x in self.arguments:
            own = [next(left) for _ in jax.tree.leaves(_types(x))]
            found += packed(own, x.packing) if isinstance(x, Packed) else own
        return found

    def placed(self, cut: Cut, schedule: Schedule, rest: Sequence[Any]) -> Cut:
        """The cut whose stages read what rests where they are as it rests; its `hoist` takes the arrays."""
        if not _packed(self.arguments):
            return cut
        places = self._places()
        operands: dict[Any, tuple[int, tuple[Any, ...]]] = {}
        held: dict[tuple[int, int], tuple[Any, Part, Origin]] = {}
        for read in Reads.of(cut, schedule, self.types, rest).all:
            if (origin := read.origin) is None:
                continue
            number, each, part = places.get((origin.leaf, read.rows, read.stage), (0, None, None))
            if each and part and _may_be_read(origin, each.kind, read.rows):
                chain = origin.elementwise if each.kind == FLAT else origin.chain
                operands.setdefault((number, text(chain)), (number, chain))
                held[read.virtual, read.number] = (number, text(chain)), part, origin
        return _with_held(self, cut, operands, held, places)

    def _places(self) -> dict[tuple[int, Any, int], tuple[int, PackedArray, Part]]:
        """By leaf, rows and stage: which array at rest has them."""
        found, leaf, array = {}, 0, 0
        for x in self.arguments:
            for number, each in enumerate(x.packing.arrays if isinstance(x, Packed) else ()):
                for d, parts in enumerate(each.parts if each.kind != WHOLE else ()):
                    for part in parts:
                        found[leaf + part.leaf, part.rows, d] = array + number, each, part
            leaf += len(jax.tree.leaves(_types(x)))
            array += len(jax.tree.leaves(x))
        return found


# Gradients


def accumulators(
    packing: Packing, origins: Sequence[Sequence[Origin]]
) -> dict[int, tuple[Accumulator, tuple[Any, ...]]]:
    """Of arrays at rest, by their numbers, in which shape each stage may add up its part of the gradient, and
    what is done to it then. `origins`: of which sums the gradient of each leaf is made, none: of no sums
    alone."""
    made = ((number, _accumulator(each, origins)) for number, each in enumerate(packing.arrays))
    return {number: found for number, found in made if found is not None}


def gathered(packing: Packing, leaves: Sequence[Any], made: Mapping[int, Array]) -> list[Array]:
    """Gradients as `packing` says, of those of the leaves; `made`: of which arrays they are there."""
    return [made[n] if n in made else array_of(each, leaves) for n, each in enumerate(packing.arrays)]


def _accumulator(
    each: PackedArray, origins: Sequence[Sequence[Origin]]
) -> tuple[Accumulator, tuple[Any, ...]] | None:
    """Where all its parts are of sums, to which the same is done. What moves elements is done before they are
    added up where leaves are of several sums, or rest flat; else once, after."""
    of_leaves = {part.leaf: origins[part.leaf] for parts in each.parts for part in parts}
    rows = next(part.rows for parts in each.parts for part in parts)
    own = [origin for some in of_leaves.values() for origin in some]
    if each.kind == WHOLE or not all(of_leaves.values()):
        return None
    if rows and not all(origin.is_elementwise for origin in own):
        return None
    before = each.kind == FLAT or len(own) > len(of_leaves)
    chains = [origin.elementwise if before else origin.chain for origin in own]
    if len(set(map(text, chains))) > 1:
        return None
    shape = each.shape if before or rows else own[0].source
    parts = tuple(
        tuple(
            Summand(origin.leaf, part.rows, part.start, origin.moves if before else ())
            for part in some
            for origin in of_leaves[part.leaf]
        )
        for some in each.parts
    )
    return Accumulator(parts, shape, each.kind == FLAT), chains[0]


def _packed(arguments: Sequence[Any]) -> list[Packed]:
    return [x for x in arguments if isinstance(x, Packed)]


def _types(argument: Any) -> Any:
    """Of what the function itself takes."""
    if isinstance(argument, Packed):
        argument = jax.eval_shape(
            lambda x: jax.tree.unflatten(x.packing.tree, leaves_of(x)),
            jax.tree.map(lambda x: shape_of(jax.typeof(x)), argument),
        )
    return jax.tree.map(lambda x: shape_of(jax.typeof(x)), argument)


def _with_held(weights: Weights, cut: Cut, operands, held, places) -> Cut:
    """`operands`: which arrays are read, and what is done to them. `held`: by virtual stage and piece, its
    operand, and where in it."""
    needed = list(
        dict.fromkeys(
            piece.value
            for k, stage in enumerate(cut.stages)
            for n, piece in enumerate(stage.pieces)
            if (k, n) not in held
        )
    )
    number = {v: i for i, v in enumerate(needed)}
    of_operand = {key: len(needed) + i for i, key in enumerate(operands)}
    kinds = {array: each.kind for array, each, _ in places.values()}

    def stage(k: int, old: Stage) -> Stage:
        """Its pieces are arrays at rest, each once, out of which it takes what it had."""
        pieces, views = {}, []
        for n, piece in enumerate(old.pieces):
            start, shape = None, ()
            if (k, n) not in held:
                new = Piece(number[piece.value], piece.rows)
            else:
                key, part, origin = held[k, n]
                new = Held(of_operand[key], part.rows and part.rows[1] - part.rows[0])
                if kinds[key[0]] == FLAT:
                    start, shape = part.start, origin.shape
            views.append(_View(pieces.setdefault(new, len(pieces)), start, shape))
        return Stage(tuple(pieces), partial(_taken, tuple(views), old.taken))

    stages = tuple(stage(k, old) for k, old in enumerate(cut.stages))

    def hoist(arrays, rest) -> list[Any]:
        values = cut.hoist(weights.plain(arrays), rest) if needed else []
        return [values[v] for v in needed] + [
            jax.vmap(lambda x, chain=chain: run(chain, x))(arrays[array])
            for array, chain in operands.values()
        ]

    return replace(cut, hoist=hoist, stages=stages)


class _View(NamedTuple):
    """A piece as the program has it: piece `number`, or of a flat one the array from number `start` on."""

    number: int
    start: int | None
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return (self.start or 0) + math.prod(self.shape)


def _taken(views: Sequence[_View], taken: Callable[..., list[Any]], pieces: Sequence[Array]) -> list[Array]:
    """The pieces of a stage, of those that hold others."""
    own = [pieces[view.number] for view in views]
    flat = [
        x if view.start is None else x[view.start : view.stop].reshape(view.shape)
        for view, x in zip(views, own, strict=True)
    ]
    return taken(flat)


def _may_be_read(origin: Origin, kind: str, rows: Any) -> bool:
    """Whether what is made of a leaf can be made of the array at rest that has it."""
    if rows is not None:
        return origin.is_elementwise
    return kind == STACKED or origin.keeps_order
