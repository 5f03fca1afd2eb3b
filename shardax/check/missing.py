"""Finds missing claims: dims that a rule declares unsplit although they could be split. No rule is read for
that.

A slice of an operand is exchanged for another one, to see which parts of the results depend on it. A dim is

    kept      if slice j of the operand changes slice j of each result that it changes at all: results are
              concatenated
    windowed  if it changes slices near j: a halo would do
    sum, ...  if the results of its two parts, the rest filled with what changes nothing, add up to the result
              (max, min alike)
    made      if it is a result's and the operands are scalars: each device could make its part
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardax.check.evaluate import evaluate_node
from shardax.check.shards import alike, is_key, words
from shardax.graph.graph import Node
from shardax.reshard.run import identity
from shardax.spmd_rules.registry import Entry
from shardax.spmd_rules.rule import REDUCTIONS, UNSPLIT, Factors

MOST = 4096  # elements of an operand that is looked at
PLACES = 9  # slices of a dim that are exchanged
_PUT_TOGETHER = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Missing:
    """A claim that a rule could make: `claim` is "kept", "windowed", "sum", "max", "min" or "made". `place`
    is the number of an operand or result, and its dim. `passes` says that the rule already lets such a
    reduction pass through the operand.
    """

    primitive: str
    claim: str
    place: tuple[int, int]
    factor: str
    shapes: str
    passes: bool = False

    @property
    def what(self) -> str:
        side = "result" if self.claim == "made" else "operand"
        return f"dim {self.place[1]} of {side} {self.place[0]}"

    def __str__(self):
        return (
            f"{self.primitive} {self.shapes}: {self.what} (factor {self.factor}) is unsplit and could be "
            f"{self.claim}"
        )


def missing(node: Node, entry: Entry, inputs: Sequence[Any], outputs: Sequence[Any]) -> Iterator[Missing]:
    """The dims of one equation that could be split and are declared unsplit, given its operands and
    results.
    """
    factors = entry.factors(node)
    if any(0 in shape for shape in node.in_shapes + node.out_shapes):
        return
    shapes = f"{node.in_shapes} -> {node.out_shapes}"
    for i, d, factor in _unsplit_dims(factors, factors.operands):
        if np.size(words(inputs[i])) <= MOST and (
            claim := _claim_of(_Equation(node, factors, inputs, outputs), i, d)
        ):
            passes = any(i in p.operands and claim in p.reductions for p in entry.passes_of(node))
            yield Missing(node.name, claim, (i, d), factor, shapes, passes)
    if not any(math.prod(shape) > 1 for shape in node.in_shapes):
        for i, d, factor in _unsplit_dims(factors, factors.results):
            yield Missing(node.name, "made", (i, d), factor, shapes)


def _unsplit_dims(factors: Factors, tensors) -> Iterator[tuple[int, int, str]]:
    """The dims that cannot be split: their first factor of more than one position is unsplit."""
    for i, tensor in enumerate(tensors):
        for d, dim in enumerate(tensor):
            first = next((f for f in dim if factors.sizes[f] > 1), None)
            if first and factors.type_of(first) == UNSPLIT:
                yield i, d, first


@dataclass(frozen=True, eq=False)
class _Equation:
    node: Node
    factors: Factors
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def with_operands(self, operands: dict[int, Any]) -> list[Any]:
        return evaluate_node(self.node, [operands.get(i, x) for i, x in enumerate(self.inputs)])


def _claim_of(eqn: _Equation, i: int, d: int) -> str:
    reaches = list(_reaches(eqn, i, d))
    if reaches and all(reach == 0 for reach in reaches):
        return "kept"
    if reaches and all(reach is not None for reach in reaches):
        return "windowed"
    return next((claim for claim in REDUCTIONS if _adds_up(eqn, i, d, claim)), "")


def _reaches(eqn: _Equation, i: int, d: int) -> Iterator[int | None]:
    """For each result that depends on the operand, how far the changes are from the exchanged slice along d;
    only if that is near.
    """
    n = eqn.inputs[i].shape[d]
    changes: list[list[tuple[int, np.ndarray]]] = [[] for _ in eqn.outputs]
    for j in range(n) if n <= PLACES else np.linspace(0, n - 1, PLACES, dtype=int):
        for k in {(j + 1) % n, (j + n // 2) % n} - {j}:
            results = eqn.with_operands({i: _exchanged(eqn.inputs[i], d, int(j), int(k))})
            for pairs, result, expected in zip(changes, results, eqn.outputs, strict=True):
                pairs.append((int(j), np.argwhere(_changed(result, expected))))
    for pairs, shape in zip(changes, eqn.node.out_shapes, strict=True):
        if any(len(where) for _, where in pairs):
            reaches = [
                _reach(n, shape[e], [(j, where[:, e]) for j, where in pairs]) for e in range(len(shape))
            ]
            yield min((r for r in reaches if r is not None), default=None)


def _reach(n: int, m: int, changes: Sequence[tuple[int, np.ndarray]]) -> int | None:
    """How far along a result's dim of size m the changes are from slice j of n; None where that is not
    near.
    """
    reach = max(int(np.max(np.abs(where - j), initial=0)) for j, where in changes)
    if n == m and reach == 0:
        return 0
    return max(reach, 1) if n >= 6 and reach <= n // 3 else None


def _exchanged(x, d: int, j: int, k: int):
    """The operand with slice k in place of slice j along d."""
    places = np.arange(x.shape[d])
    places[j] = k
    return jnp.take(x, places, axis=d) if is_key(x) else jnp.asarray(np.take(np.asarray(x), places, axis=d))


def _changed(result, expected) -> np.ndarray:
    """Where two results differ by more than rounding."""
    one, other = (np.asarray(words(x)) for x in (result, expected))
    if not jnp.issubdtype(one.dtype, jnp.inexact):
        return one != other
    with np.errstate(invalid="ignore"):
        return ~np.isclose(
            one.astype("complex128"), other.astype("complex128"), rtol=1e-3, atol=1e-6, equal_nan=True
        )


def _adds_up(eqn: _Equation, i: int, d: int, reduction: str) -> bool:
    """Whether the results of two parts make up the whole result. All operands that have the factor are
    parted, at several places.
    """
    (factor,), n = (
        [f for f in eqn.factors.operands[i][d] if eqn.factors.sizes[f] > 1][:1],
        eqn.inputs[i].shape[d],
    )
    has = {i: dims.index((factor,)) for i, dims in enumerate(eqn.factors.operands) if (factor,) in dims}
    values = [*(eqn.inputs[i] for i in has), *eqn.outputs]
    ordered = not any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in values)
    if (
        not has
        or not all(jnp.issubdtype(x.dtype, jnp.number) for x in values)
        or not (reduction == "sum" or ordered)
    ):
        return False
    return all(_made_up(eqn, has, reduction, at) for at in {1, n // 2, n - 1})


def _made_up(eqn: _Equation, has: dict[int, int], reduction: str, at: int) -> bool:
    halves = [
        {i: _half(np.asarray(eqn.inputs[i]), d, at, reduction, first) for i, d in has.items()}
        for first in (True, False)
    ]
    parts = zip(*map(eqn.with_operands, halves), strict=True)
    together = [_PUT_TOGETHER[reduction](*map(np.asarray, pair)) for pair in parts]
    return all(alike(got, np.asarray(expected)) for got, expected in zip(together, eqn.outputs, strict=True))


def _half(x: np.ndarray, d: int, at: int, reduction: str, first: bool):
    inside = np.arange(x.shape[d]).reshape([-1 if e == d else 1 for e in range(x.ndim)]) < at
    return jnp.asarray(np.where(inside == first, x, np.full_like(x, _neutral(reduction, x.dtype))))


def _neutral(reduction: str, dtype):
    """What leaves a reduction of the samples unchanged. It is finite, because LAPACK may never end on
    infinities.
    """
    if reduction == "sum" or not jnp.issubdtype(dtype, jnp.floating):
        return identity(reduction, dtype)
    info = jnp.finfo(dtype)
    return np.asarray((info.min if reduction == "max" else info.max) / 1024).astype(dtype)
