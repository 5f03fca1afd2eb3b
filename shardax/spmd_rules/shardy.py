"""Shardy's rules, which `jax.experimental.custom_partitioning` takes, as ours.

Shardy (docs of custom_partitioning)               ours
"i j, j k -> i k", reduction_factors=("j",)        "i j, j k -> i k": the kernel reduces, nothing is owed
"... i -> ... i"  (the first dims, "...1" others)  one factor for each dim
need_replication_factors=("i",)                    "i!"
permutation_factors=("i",)                         "i"
a factor of several sizes                          "i~": over the same axes, each in blocks of its own
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardax.spmd_rules.rule import Rule, Shape, bind, parse

ELLIPSIS = "…"  # jax.experimental.custom_partitioning.BATCHING

Dim = tuple[str, ...]


def as_rule(sdy_rule: Any, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape]) -> Rule:
    """A `SdyShardingRule` as a rule of ours.

    Raises:
      ValueError: it does not fit the shapes; quotes it.

    >>> from jax.experimental.custom_partitioning import BATCHING, SdyShardingRule
    >>> print(as_rule(SdyShardingRule(((BATCHING, "i"),), ((BATCHING,),)), [(2, 3, 4)], [(2, 3)]))
    _0_0 _0_1 i -> _0_0 _0_1
    """
    sides = tuple(
        zip((sdy_rule.operand_mappings, sdy_rule.result_mappings), (in_shapes, out_shapes), strict=True)
    )
    for what, (mappings, shapes) in zip(("operands", "results"), sides, strict=True):
        if len(mappings) != len(shapes):
            raise ValueError(
                f"sharding_rule {spelled(sdy_rule)}: it has {len(mappings)} {what}, the function has "
                f"{len(shapes)}"
            )
    tensors = [
        [_expanded(sdy_rule, m, s) for m, s in zip(mappings, shapes, strict=True)]
        for mappings, shapes in sides
    ]
    marks = dict.fromkeys(sdy_rule.need_replication_factors, "!")
    marks |= dict.fromkeys(
        _of_several_sizes(zip(tensors[0] + tensors[1], (*in_shapes, *out_shapes), strict=True)), "~"
    )
    text = " -> ".join(
        ", ".join(" ".join(_dim_text(dim, marks) for dim in tensor) for tensor in side) for side in tensors
    )
    sizes = tuple((_name(f), n) for f, n in sdy_rule.factor_sizes.items())
    try:
        rule = replace(parse(text), sizes=sizes)
        bind(rule, tuple(in_shapes), tuple(out_shapes))
    except ValueError as error:
        raise ValueError(f"sharding_rule {spelled(sdy_rule)}: {str(error).partition(': ')[2]}") from None
    return rule


def spelled(sdy_rule: Any) -> str:
    """A `SdyShardingRule` as a person would have typed it.

    >>> from jax.experimental.custom_partitioning import SdyShardingRule
    >>> spelled(SdyShardingRule((("i", "j"), ("j", "k")), (("i", "k"),), reduction_factors=("j",)))
    "'i j, j k -> i k', reduction_factors=('j',)"
    """
    sides = (", ".join(map(_typed, side)) for side in (sdy_rule.operand_mappings, sdy_rule.result_mappings))
    fields = ("reduction_factors", "need_replication_factors", "permutation_factors")
    factor_lists = [f"{field}={getattr(sdy_rule, field)}" for field in fields if getattr(sdy_rule, field)]
    return ", ".join(
        [repr(" -> ".join(sides)), *factor_lists, *(f"{f}={n}" for f, n in sdy_rule.factor_sizes.items())]
    )


def _typed(mapping) -> str:
    words = (f"({' '.join(dim)})" if isinstance(dim, tuple) else dim for dim in mapping)
    return " ".join("..." + w[1:].removeprefix("0") if w[0] == ELLIPSIS else w for w in words)


def _expanded(sdy_rule, mapping, shape: Shape) -> list[Dim]:
    """The factors of each dim, those of an ellipsis each by a name of its own."""
    dims = [(dim,) if isinstance(dim, str) else tuple(dim) for dim in mapping]
    if dims and dims[0][0][0] == ELLIPSIS:
        group = dims[0][0][1:] or "0"
        dims = [(f"_{group}_{i}",) for i in range(len(shape) - len(dims) + 1)] + dims[1:]
    if len(dims) != len(shape):
        why = f"at '{_typed(mapping)}': it names {len(dims)} dims, the shape is {shape}"
        raise ValueError(f"sharding_rule {spelled(sdy_rule)}: {why}")
    return dims


def _of_several_sizes(tensors: Iterable[tuple[Sequence[Dim], Shape]]) -> Iterator[str]:
    sizes = defaultdict(set)
    for dims, shape in tensors:
        for dim, n in zip(dims, shape, strict=True):
            sizes[dim].add(n)
    return (
        dim[0]
        for dim, dim_sizes in sizes.items()
        if len(dim) == 1 and len(dim_sizes) > 1 and dim[0][0] != "_"
    )


def _dim_text(dim: Dim, marks) -> str:
    factors = [_name(f) + marks.get(f, "") for f in dim]
    return factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


def _name(factor: str) -> str:
    """Shardy takes letters of any alphabet."""
    return factor if re.fullmatch(r"\w+", factor, re.ASCII) else "_" + "_".join(str(ord(c)) for c in factor)
