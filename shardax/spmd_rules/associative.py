"""Associative scans: along a split dim each device scans its block, and combines that with what the blocks
before it come to.

block 0   block 1   block 2      scan each block      the lasts, gathered, scanned    combined with them
a b c     d e f     g h i    ->  a ab abc | d de ...  abc | abcdef | ...          ->  a ab abc | abcd ...
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from shardax.cost.network import Message
from shardax.graph.graph import Node
from shardax.spmd_rules.registry import Local, register_rule
from shardax.spmd_rules.sends import all_gather, reduce_scatter

associative_scan_p = Primitive("associative_scan")
associative_scan_p.multiple_results = True
"""associative_scan *elements: as `jax.lax.associative_scan`, along `dim`, with the Combine `combine`."""

associative_scan_vjp_p = Primitive("associative_scan_vjp")
associative_scan_vjp_p.multiple_results = True
"""associative_scan_vjp *elements *cotangents: the cotangents of the elements at `argnums`, given those of the
results `seeds`.
"""


@dataclass(frozen=True, slots=True)
class Constant:
    """A number in a Combine, as bytes: NaN would not equal itself."""

    dtype: Any
    word: bytes

    @property
    def value(self):
        return np.frombuffer(self.word, self.dtype)[0]


@dataclass(frozen=True, slots=True)
class Size:
    """In a shape in a Combine: the size of dim `dim` of element `element`."""

    element: int
    dim: int


Operand = int | Constant  # the number of a value, or a constant


@dataclass(frozen=True, slots=True)
class Combine:
    """A function of two lists of arrays, row by row, as steps (primitive, parameters, operands).

    Values are numbered: those on the left, those on the right, then what the steps make, one each. `results`
    are some of them. `words` are the dims of each element as a rule's factors.
    """

    steps: tuple[tuple[Any, tuple[tuple[str, Any], ...], tuple[Operand, ...]], ...]
    results: tuple[int, ...]
    words: tuple[str, ...]

    def __call__(self, left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        values = [*left, *right]

        def sized(param):
            if not isinstance(param, tuple):
                return param
            return tuple(left[p.element].shape[p.dim] if isinstance(p, Size) else p for p in param)

        for primitive, params, operands in self.steps:
            read = [values[x] if isinstance(x, int) else x.value for x in operands]
            values.append(primitive.bind(*read, **{name: sized(p) for name, p in params}))
        return [values[i] for i in self.results]

    def scan(self, elements: Sequence[Any], dim: int, reverse: bool) -> list[Any]:
        return lax.associative_scan(self, list(elements), reverse=reverse, axis=dim)


def associative_scan(node: Node) -> str:
    """ "k0 k1, k0 k1 -> k0 k1, k0 k1"; the lowering sends along the dim that is scanned."""
    words = ", ".join(node.params["combine"].words)
    return f"{words} -> {words}"


def associative_scan_vjp(node: Node) -> str:
    words, (seeds, argnums) = (
        node.params["combine"].words,
        (node.params[name] for name in ("seeds", "argnums")),
    )
    return f"{', '.join([*words, *(words[i] for i in seeds)])} -> {', '.join(words[i] for i in argnums)}"


def _associative_scan_local(local: Local, *shards):
    return _scanned(local, _all_gathered, shards)


def _scanned(local: Local, gathered: Callable[..., Any], shards: Sequence[Any]) -> list[Any]:
    combine, dim, reverse = (local.params[name] for name in ("combine", "dim", "reverse"))
    axes = local.operands[0].dims[dim]
    if not axes:
        return combine.scan(shards, dim, reverse)
    size, block = local.node.in_shapes[0][dim], local.in_shape()[dim]
    uneven = reverse and size % block
    scanned = _scan_valid(local, combine, shards) if uneven else combine.scan(shards, dim, reverse)
    last = (size - 1) // block  # the last block that holds more than padding
    totals = [gathered(_end(x, dim, reverse), local, dim) for x in scanned]
    sums = combine.scan([lax.slice_in_dim(x, 0, last + 1, axis=dim) for x in totals], dim, reverse)
    device = local.index(axes)
    before = lax.clamp(np.int32(0), device + (1 if reverse else -1), np.int32(last))
    prefix = [lax.dynamic_slice_in_dim(x, before, 1, axis=dim) for x in sums]
    if last + 1 < local.count(axes):  # where there is but padding, no gradient comes from
        prefix = [
            lax.select(device <= last, p, lax.slice_in_dim(x, 0, 1, axis=dim))
            for p, x in zip(prefix, scanned, strict=True)
        ]
    joined = combine(
        [lax.broadcast_in_dim(p, x.shape, range(x.ndim)) for p, x in zip(prefix, scanned, strict=True)],
        scanned,
    )
    first = device == (last if reverse else 0)
    return [lax.select(first, alone, after) for alone, after in zip(scanned, joined, strict=True)]


def _all_gathered(x, local: Local, dim: int):
    return all_gather(local, "totals", x, local.operands[0].dims[dim], dim)


_gathered: Callable[..., Any] = jax.custom_vjp(_all_gathered, nondiff_argnums=(1, 2))
"""The same; what its gradient sends has a reason too."""


def _gathered_forward(x, local: Local, dim: int):
    return _all_gathered(x, local, dim), None


def _gathered_backward(local: Local, dim: int, _, ct):
    return (reduce_scatter(local, "totals", ct, local.operands[0].dims[dim], dim),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def _end(x, dim: int, reverse: bool):
    """What a scan reaches last."""
    at = 0 if reverse else x.shape[dim] - 1
    return lax.slice_in_dim(x, at, at + 1, axis=dim)


def _scan_valid(local: Local, combine: Combine, shards: Sequence[Any]) -> list[Any]:
    """A scan backwards, which would begin with padding: what is padding leaves all else as it is."""
    dim = local.params["dim"]
    rows = (*[1] * dim, shards[0].shape[dim])
    valid = (
        lax.broadcasted_iota("int32", rows, dim) + local.start(local.operands[0], dim)
        < local.node.in_shapes[0][dim]
    )
    _, *scanned = lax.associative_scan(
        functools.partial(_valid, combine), [valid, *shards], reverse=True, axis=dim
    )
    return scanned


def _valid(combine: Combine, left, right):
    (earlier, *ls), (later, *rs) = left, right

    def where(valid, x, y):
        return lax.select(lax.broadcast_in_dim(valid, x.shape, range(valid.ndim)), x, y)

    both = combine(ls, rs)
    return [
        earlier | later,
        *(where(earlier, where(later, x, a), b) for x, a, b in zip(both, ls, rs, strict=True)),
    ]


def _associative_scan_vjp_local(local: Local, *shards):
    count = len(local.params["combine"].words)
    elements, cts = [_safe(local, i, x) for i, x in enumerate(shards[:count])], shards[count:]
    if local.operands[0].dims[local.params["dim"]]:
        cts = [local.mask(count + i, ct, 0, [local.params["dim"]]) for i, ct in enumerate(cts)]
    return _pulled_back(functools.partial(_scanned, local, _gathered), local.params, elements, cts)


def _pulled_back(
    scan: Callable[..., list[Any]], params, elements: Sequence[Any], cts: Sequence[Any]
) -> list[Any]:
    """The cotangents of the elements at `argnums` of a scan."""
    seeds, argnums = params["seeds"], params["argnums"]

    def run(*moving):
        replaced = dict(zip(argnums, moving, strict=True))
        results = scan([replaced.get(i, x) for i, x in enumerate(elements)])
        return [results[i] for i in seeds]

    _, back = jax.vjp(run, *(elements[i] for i in argnums))
    return list(back(list(cts)))


def _safe(local: Local, i: int, x):
    """An element whose padding repeats its first row: its gradient is zero, but garbage times zero may be
    NaN.
    """
    dim = local.params["dim"]
    if local.operands[i].padded[dim] == local.node.in_shapes[i][dim]:
        return x
    inside = lax.broadcasted_iota("int32", x.shape, dim) < local.node.in_shapes[i][dim] - local.start(
        local.operands[i], dim
    )
    return lax.select(
        inside, x, lax.broadcast_in_dim(lax.slice_in_dim(x, 0, 1, axis=dim), x.shape, range(x.ndim))
    )


def _sends(local: Local) -> Iterator[Message]:
    dim = local.params["dim"]
    axes = local.operands[0].dims[dim]
    others = local.count(axes) - 1
    for i, v in enumerate(local.node.inputs):
        row = math.prod(local.in_shape(i)) // max(local.in_shape(i)[dim], 1)
        yield from [Message("all_gather", axes, others * row * v.itemsize)] * bool(others)


def _impl(*elements, combine: Combine, dim: int, reverse: bool):
    return combine.scan(elements, dim, reverse)


def _vjp_impl(*arrays, combine: Combine, dim: int, reverse: bool, **params):
    scan, count = functools.partial(combine.scan, dim=dim, reverse=reverse), len(combine.words)
    return _pulled_back(scan, params, arrays[:count], arrays[count:])


_STATIC = ("combine", "dim", "reverse")
associative_scan_p.def_impl(jax.jit(_impl, static_argnames=_STATIC))
associative_scan_vjp_p.def_impl(jax.jit(_vjp_impl, static_argnames=(*_STATIC, "seeds", "argnums")))
register_rule("associative_scan", associative_scan, _associative_scan_local, sends=_sends)
register_rule("associative_scan_vjp", associative_scan_vjp, _associative_scan_vjp_local, sends=_sends)
