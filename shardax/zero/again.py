"""Again: parameters gathered for the backward pass of unrolled layers, one layer ahead.

    w1, w2, g  =  barrier(shards of w1 and w2, g)       the first layer's waits for its own operand
    gather w1; h = product(g, w1)
    w3, h  =  barrier(shard of w3, h)
    gather w2; product(h, w2)   |   gather w3           each next one for that of the layer before

and the results of the forward pass, as the loss, before the gradient that the first one reads is used.

The operand is read behind the barrier too: XLA drops from a barrier what nothing reads, and what is left
would wait for nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array, lax

from shardax import _jax
from shardax.differentiated import is_differentiated, is_transposed
from shardax.graph.equations import equations_like
from shardax.sharding import Sharding

Variables = Sequence[Any]

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


def results_first(eqns: Sequence[Any], first: int, results: Variables) -> tuple[list[Any], int, Variables]:
    """The equations, the place of the `first` that reads a parameter in the backward pass, and the program's
    results: scalars of the forward pass, as the loss, are there before that one's gradient is read.

        loss, g  =  barrier(loss, g)

    XLA would keep what the loss is made of, as logits in float32, until gradients are made and summed.
    """
    made = _makers(eqns)
    gradients = [v for v in _variables(eqns[first]) if v in made and is_transposed(_scope(eqns[made[v]]))]
    start = 1 + max((made[v] for v in gradients), default=-1)
    ends = [v for v in results if not _jax.is_literal(v)]
    others = (v for eqn in eqns if not is_differentiated(_scope(eqn)) for v in _variables(eqn))
    scalars = [v for v in dict.fromkeys((*ends, *others)) if _is_forward(v, made, eqns[:start])]
    if not scalars:
        return list(eqns), first, results
    operands = [*scalars, *gradients]
    barrier, there = equations_like(
        eqns[start - 1], lambda *values: lax.optimization_barrier(values), operands
    )
    instead = dict(zip(operands, there, strict=True))
    behind = [
        eqn.replace(invars=[v if _jax.is_literal(v) else instead.get(v, v) for v in eqn.invars])
        for eqn in eqns[start:]
    ]
    results = [v if _jax.is_literal(v) else instead.get(v, v) for v in results]
    return [*eqns[:start], *barrier, *behind], first + len(barrier), results


def _is_forward(v: Any, made: Mapping[Any, int], before: Sequence[Any]) -> bool:
    """Whether one of these equations makes it, a scalar, in the forward pass."""
    if v.aval.shape or made.get(v, len(before)) >= len(before):
        return False
    scope = _scope(before[made[v]])
    return is_differentiated(scope) and not is_transposed(scope)


def _makers(eqns: Sequence[Any]) -> dict[Any, int]:
    return {v: n for n, eqn in enumerate(eqns) for v in eqn.outvars}


def _scope(eqn: Any) -> Any:
    return eqn.source_info.name_stack


def _variables(eqn: Any) -> list[Any]:
    return list(dict.fromkeys(v for v in eqn.invars if not _jax.is_literal(v)))


def _barriers(
    eqns: Sequence[Any], reading: Mapping[int, Sequence[Sharding | None]]
) -> Mapping[int, Sequence[Copy]]:
    """What is copied at the barrier before each place: what the next one reads, where it is there already."""
    made = _makers(eqns)
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
