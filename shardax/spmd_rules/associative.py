"""Associative scans: along a split dim each device scans its block, and combines that with what the blocks before it come to.

block 0   block 1   block 2      scan each block       the last of each, gathered, scanned      combined with what is before
a b c     d e f     g h i    ->  a ab abc | d de ...   abc | abcdef | ...                  ->   a ab abc | abcd abcde ... | ...
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from shardax.graph import Node
from shardax.spmd_rules.registry import Local, register_rule

associative_scan_p = Primitive("associative_scan")
associative_scan_p.multiple_results = True
"""associative_scan *elements: as `jax.lax.associative_scan`, arrays of one shape, along `dim`, with the Combine `combine`."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A number in a Combine, as bytes: NaN would not equal itself."""

    dtype: Any
    word: bytes

    @property
    def value(self):
        return np.frombuffer(self.word, self.dtype)[0]


Operand = int | Constant  # the number of a value, or a constant


@dataclass(frozen=True, slots=True)
class Combine:
    """An elementwise function of two lists of arrays, as steps (primitive, parameters, operands).

    Values are numbered: those on the left, those on the right, then what the steps make, one each. `results` are some of them.
    """

    steps: tuple[tuple[Any, tuple[tuple[str, Any], ...], tuple[Operand, ...]], ...]
    results: tuple[int, ...]

    def __call__(self, left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        values, shape = [*left, *right], left[0].shape
        for primitive, params, operands in self.steps:
            given = {**dict(params), **({"shape": shape} if primitive is lax.broadcast_in_dim_p else {})}
            read = [values[x] if isinstance(x, int) else x.value for x in operands]
            values.append(primitive.bind(*read, **given))
        return [values[i] for i in self.results]

    def scan(self, elements: Sequence[Any], dim: int, reverse: bool) -> list[Any]:
        return lax.associative_scan(self, list(elements), reverse=reverse, axis=dim)


def associative_scan(node: Node) -> str:
    """ "..., ... -> ..., ..."; the lowering sends along the dim that is scanned."""
    return f"{', '.join(['...'] * len(node.inputs))} -> {', '.join(['...'] * len(node.outputs))}"


def _associative_scan_local(local: Local, *shards):
    combine, dim, reverse = (local.params[name] for name in ("combine", "dim", "reverse"))
    axes = local.operands[0].dims[dim]
    if not axes:
        return combine.scan(shards, dim, reverse)
    size, block = local.node.in_shapes[0][dim], local.in_shape()[dim]
    uneven = reverse and size % block
    scanned = _scan_valid(local, combine, shards) if uneven else combine.scan(shards, dim, reverse)
    last = (size - 1) // block  # the last block that holds more than padding
    with jax.named_scope("all_gather[totals of associative_scan]"):
        totals = [lax.all_gather(_end(x, dim, reverse), axes, axis=dim, tiled=True) for x in scanned]
    sums = combine.scan([lax.slice_in_dim(x, 0, last + 1, axis=dim) for x in totals], dim, reverse)
    device = local.index(axes)
    before = lax.clamp(0, device + (1 if reverse else -1), last)
    prefix = [lax.dynamic_slice_in_dim(x, before, 1, axis=dim) for x in sums]
    joined = combine([lax.broadcast_in_dim(p, x.shape, range(x.ndim)) for p, x in zip(prefix, scanned, strict=True)], scanned)
    first = device == (last if reverse else 0)
    return [lax.select(first, alone, after) for alone, after in zip(scanned, joined, strict=True)]


def _end(x, dim: int, reverse: bool):
    """What a scan reaches last."""
    at = 0 if reverse else x.shape[dim] - 1
    return lax.slice_in_dim(x, at, at + 1, axis=dim)


def _scan_valid(local: Local, combine: Combine, shards: Sequence[Any]) -> list[Any]:
    """A scan backwards, which would begin with padding: what is padding leaves all else as it is."""
    dim = local.params["dim"]
    row = lax.broadcasted_iota("int32", shards[0].shape, dim) + local.start(local.operands[0], dim)
    valid = row < local.node.in_shapes[0][dim]
    _, *scanned = lax.associative_scan(functools.partial(_valid, combine), [valid, *shards], reverse=True, axis=dim)
    return scanned


def _valid(combine: Combine, left, right):
    (here, *ls), (there, *rs) = left, right
    both = combine(ls, rs)
    chosen = [lax.select(here, lax.select(there, x, a), b) for x, a, b in zip(both, ls, rs, strict=True)]
    return [here | there, *chosen]


def _sends(local: Local) -> Iterator[float]:
    dim = local.params["dim"]
    others = local.count(local.operands[0].dims[dim]) - 1
    row = math.prod(local.in_shape()) // max(local.in_shape()[dim], 1)
    yield from (others * row * v.itemsize for v in local.node.inputs if others)


def _impl(*elements, combine: Combine, dim: int, reverse: bool):
    return combine.scan(elements, dim, reverse)


associative_scan_p.def_impl(jax.jit(_impl, static_argnames=("combine", "dim", "reverse")))
register_rule("associative_scan", associative_scan, _associative_scan_local, sends=_sends)
