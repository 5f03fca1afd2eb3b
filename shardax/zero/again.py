"""Again: parameters gathered for the backward pass of unrolled layers, one layer ahead.

    w1, w2, g  =  barrier(shards of w1 and w2, g)       the first layer's waits for its own operand
    gather w1; h = product(g, w1)
    w3, h  =  barrier(shard of w3, h)
    gather w2; product(h, w2)   |   gather w3           each next one for that of the layer before

The operand is read behind the barrier too: XLA drops from a barrier what nothing reads, and what is left
would wait for nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array, lax

from shardax import _jax
from shardax.graph.equations import equations_like
from shardax.sharding import Sharding

Copy = tuple[int, Any, Sharding]
"""The place of the equation that reads a parameter, the variable, and how the copy rests until then."""


def gathered_again(
    eqns: Sequence[Any],
    reading: Mapping[int, Sequence[Sharding | None]],
    annotation: Callable[[Array, Sharding], Array],
) -> list[Any]:
    """The equations, of which those at the places of `reading`, in order, read copies of the parameters among
    their operands, each annotated as there.
    """
    barriers, instead, new = _barriers(eqns, reading), {}, []
    for n, eqn in enumerate(eqns):
        if n in reading:
            operands = zip(eqn.invars, reading[n], strict=True)
            others = [v for v, s in operands if s is None and not _jax.is_literal(v)]
            before, made = equations_like(
                eqn, _behind(barriers[n], annotation), [*(v for _, v, _ in barriers[n]), *others]
            )
            new += before
            readers = [*((reader, v) for reader, v, _ in barriers[n]), *((n, v) for v in others)]
            instead.update(zip(readers, made, strict=True))
        new.append(
            eqn.replace(invars=[v if _jax.is_literal(v) else instead.get((n, v), v) for v in eqn.invars])
        )
    return new


def _barriers(
    eqns: Sequence[Any], reading: Mapping[int, Sequence[Sharding | None]]
) -> Mapping[int, Sequence[Copy]]:
    """What is copied at the barrier before each place: what the next one reads, where it is there already."""
    made = {v: n for n, eqn in enumerate(eqns) for v in eqn.outvars}
    barriers: dict[int, list[Copy]] = {n: [] for n in reading}
    places = list(reading)
    for before, n in zip([*places[:1], *places[:-1]], places, strict=True):
        copies = [(n, v, s) for v, s in zip(eqns[n].invars, reading[n], strict=True) if s is not None]
        known = all(made.get(v, -1) < before for _, v, _ in copies)
        barriers[before if known else n] += copies
    return barriers


def _behind(copies: Sequence[Copy], annotation: Callable[[Array, Sharding], Array]):
    def behind(*operands):
        made = lax.optimization_barrier(operands)
        annotated = [annotation(x, s) for x, (_, _, s) in zip(made, copies, strict=False)]
        return [*annotated, *made[len(copies) :]]

    return behind
