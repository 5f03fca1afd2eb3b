"""What the stages of a cut loss read of the parameters: each hoisted value that is one leaf of them, cast,
scaled, reshaped or transposed, can be made of the array in which that leaf rests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.extend.core import Literal

from shardax.annotations.explicit import shape_of
from shardax.pipeline.cut import Cut, bound
from shardax.pipeline.table import Schedule
from shardax.spmd_rules.equations import (
    is_elementwise,
    is_sum,
    is_transposition,
    keeps_order,
    linear_in,
    operand_of,
)

Type = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Origin:
    """A hoisted value that is `chain`, equations of one operand, of leaf `leaf`."""

    leaf: int
    chain: tuple[Any, ...]
    shape: tuple[int, ...]

    @property
    def source(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return tuple(operand_of(self.chain[0]).aval.shape) if self.chain else self.shape

    @property
    def is_elementwise(self) -> bool:
        return not self.moves

    @property
    def keeps_order(self) -> bool:
        """Whether the elements lie in the order in which they lie in the leaf."""
        return not any(map(is_transposition, self.chain))

    @property
    def elementwise(self) -> tuple[Any, ...]:
        return tuple(eqn for eqn in self.chain if is_elementwise(eqn))

    @property
    def moves(self) -> tuple[Any, ...]:
        return tuple(eqn for eqn in self.chain if not is_elementwise(eqn))


class Read(NamedTuple):
    """A piece of a virtual stage, its `number`th; on which stage; of what the value is made."""

    stage: int
    virtual: int
    number: int
    rows: tuple[int, int] | None
    origin: Origin | None


@dataclass(frozen=True)
class Reads:
    """All that the stages of a cut read. `others`: the leaves of which other values are made."""

    by_virtual: tuple[tuple[Read, ...], ...]
    others: frozenset[int]

    @staticmethod
    def of(cut: Cut, schedule: Schedule, types: Sequence[Type], rest: Sequence[Any]) -> "Reads":
        """`types`: of the leaves."""
        rest = [shape_of(jax.typeof(x)) for x in rest]
        jaxpr = jax.make_jaxpr(cut.hoist)(list(types), rest).jaxpr
        makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        leaves = {v: i for i, v in enumerate(jaxpr.invars[: len(types)])}
        origins = [origin_of(v, makers, leaves) for v in jaxpr.outvars]
        others = [v for v, origin in zip(jaxpr.outvars, origins, strict=True) if origin is None]
        found = [
            tuple(
                Read(schedule.homes[k][0], k, n, piece.rows, origins[piece.value])
                for n, piece in enumerate(stage.pieces)
            )
            for k, stage in enumerate(cut.stages)
        ]
        return Reads(tuple(found), frozenset(_leaves_of(others, makers, leaves)))

    @cached_property
    def all(self) -> tuple[Read, ...]:
        return tuple(read for some in self.by_virtual for read in some)


def origin_of(atom, makers, leaves) -> Origin | None:
    """Of which of `leaves`, numbers by variables, a value is made alone; None: of no one of them. `makers`:
    equations by what they make."""
    found = origins_of(atom, makers, leaves)
    return found[0] if len(found) == 1 else None


def origins_of(atom, makers, leaves) -> list[Origin]:
    """Of which of them it is the sum, each cast, scaled, reshaped or transposed; empty where it is none."""
    if isinstance(atom, Literal):
        return []
    chain, v = [], atom
    while v not in leaves:
        eqn = makers.get(v)
        if eqn is not None and is_sum(eqn):
            return _of_summands(eqn, chain[::-1], makers, leaves)
        if eqn is None or not _is_linear(eqn):
            return []
        chain.append(eqn)
        v = operand_of(eqn)
    return [Origin(leaves[v], tuple(reversed(chain)), tuple(atom.aval.shape))]


def _of_summands(eqn, chain: Sequence[Any], makers, leaves) -> list[Origin]:
    each = [origins_of(x, makers, leaves) for x in eqn.invars]
    if not all(each):
        return []
    shape = tuple(chain[-1].outvars[0].aval.shape) if chain else tuple(eqn.outvars[0].aval.shape)
    return [Origin(x.leaf, (*x.chain, *chain), shape) for some in each for x in some]


def _is_linear(eqn) -> bool:
    """Of zeros it makes zeros, so that nothing comes of what stages lack; in its one operand, whose elements
    it has, each once."""
    x = operand_of(eqn)
    if x is None or frozenset({eqn.invars.index(x)}) not in linear_in(eqn):
        return False
    if any(isinstance(v, Literal) and np.shape(v.val) for v in eqn.invars):
        return False
    keeps = is_elementwise(eqn) or keeps_order(eqn) or is_transposition(eqn)
    return keeps and eqn.outvars[0].aval.size == x.aval.size


def _leaves_of(atoms, makers, leaves) -> Iterator[int]:
    seen, waiting = set(), [v for v in atoms if not isinstance(v, Literal)]
    while waiting:
        v = waiting.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in leaves:
            yield leaves[v]
        waiting += [x for x in makers[v].invars if not isinstance(x, Literal)] if v in makers else []


def run(chain: Sequence[Any], x: Array) -> Array:
    """Does to an array what the chain does to a leaf."""
    for eqn in chain:
        (x,) = bound(eqn, [v.val if isinstance(v, Literal) else x for v in eqn.invars])
    return x


def settled(chain: Sequence[Any], x: Array, dtype: Any) -> Array:
    """Does to a sum what the chain does; it comes in the dtype in which it was added up, and stays in that,
    if nothing is computed that wants another."""
    if any(len(eqn.invars) > 1 for eqn in chain):
        x = x.astype(operand_of(chain[0]).aval.dtype)
    return run(chain, x).astype(dtype)


def text(chain: Sequence[Any]) -> str:
    """Equal for chains that are the same."""
    return "; ".join(
        f"{eqn.primitive.name} {sorted((k, str(x)) for k, x in eqn.params.items())} "
        f"{[str(v.val) if isinstance(v, Literal) else '_' for v in eqn.invars]}"
        for eqn in chain
    )
