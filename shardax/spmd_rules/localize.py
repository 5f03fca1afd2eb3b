"""From splits of factors to layouts of tensors, and from there to running a node on shards."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardax.cost import noted
from shardax.reshard.run import identity
from shardax.sharding import Axes, AxisSizes, Layout, layout_of, round_up, shard_count
from shardax.spmd_rules.claims import noting, require_promised
from shardax.spmd_rules.registry import Entry, Local, Split, at
from shardax.spmd_rules.rule import DimFactors, Factors, TensorFactors

Splits = Mapping[str, Split]  # only the factors that are split
Pending = tuple[tuple[str, str], ...]


def tensor_layout(dims: TensorFactors, factors: Factors, splits: Splits, pending: Pending = ()) -> Layout:
    """The layout that a tensor with these dims takes when its factors are split so.

    A compound dim (h w) whose h is split holds whole w's, so h's padding is padding at its end.

    >>> from shardax.spmd_rules.rule import bind, parse
    >>> factors = bind(parse("(h w) -> h w"), ((24,),), ((6, 4),))
    >>> tensor_layout(factors.operands[0], factors, {"h": Split(("x",), 8)})
    P('x')@[32]
    """
    sizes, axes, padded = factors.sizes, list[Axes](), list[int]()
    for dim in dims:
        if len(dim) == 1:
            split = splits.get(dim[0])
            axes.append(split.axes if split else ())
            padded.append(split.padded if split else sizes[dim[0]])
        else:
            axes.append(tuple([a for f in dim if f in splits for a in splits[f].axes]))
            padded.append(math.prod([splits[f].padded if f in splits else sizes[f] for f in dim]))
    return layout_of(tuple(axes), tuple(padded), pending)


def project(dim: DimFactors, axes: Axes, padded: int, factors: Factors, sizes: AxisSizes) -> dict[str, Split]:
    """The splits of factors that a dim has which is split over `axes` and padded so, or the nearest ones.

    >>> from shardax.spmd_rules.rule import bind, parse
    >>> factors = bind(parse("(h w) -> h w"), ((24,),), ((2, 12),))
    >>> project(("h", "w"), ("x", "y"), 24, factors, {"x": 2, "y": 3})
    {'h': Split(axes=('x',), padded=2), 'w': Split(axes=('y',), padded=12)}

    Where blocks do not end with whole w's, h comes nearest that is split unevenly.

    >>> project(("h", "w"), ("x",), 25, bind(parse("(h w) -> h w"), ((24,),), ((6, 4),)), {"x": 5})
    {'h': Split(axes=('x',), padded=10)}
    """
    if len(dim) == 1:
        return {dim[0]: Split(axes, padded)} if axes else {}
    splits: dict[str, Split] = {}
    for i, factor in enumerate(dim):
        size, rest = factors.sizes[factor], math.prod(factors.sizes[f] for f in dim[i + 1 :])
        if not axes or not size or not rest:
            break
        if size == 1 and rest > 1:
            continue
        if padded % rest == 0 and (padded // rest) % shard_count(axes, sizes) == 0:
            splits[factor] = Split(axes, padded // rest)
            break
        if size > shard_count(axes, sizes):
            splits[factor] = Split(axes, round_up(size, shard_count(axes, sizes)))
            break
        kept = next(axes[:n] for n in range(len(axes), -1, -1) if size % shard_count(axes[:n], sizes) == 0)
        if kept:
            splits[factor] = Split(kept, size)
        if shard_count(kept, sizes) != size:
            break
        axes, padded = axes[len(kept) :], rest if padded == size * rest else padded
    return splits


def fits(factors: Factors, splits: Splits, sizes: AxisSizes) -> bool:
    """Whether these splits can be laid out: in a compound dim, a factor may be split only if those before it
    have size one or leave exactly one position to each shard, and then evenly."""
    return all(
        _dim_fits(dim, factors, splits, sizes) for tensor in factors.tensors for dim in tensor if len(dim) > 1
    )


def _dim_fits(dim: DimFactors, factors: Factors, splits: Splits, sizes: AxisSizes) -> bool:
    majors: list[str] = []
    for factor in dim:
        if factor in splits and majors:
            one_each = all(
                f in splits and shard_count(splits[f].axes, sizes) == factors.sizes[f] for f in majors
            )
            if not one_each or splits[factor].padded != factors.sizes[factor]:
                return False
        if factors.sizes[factor] != 1:
            majors.append(factor)
    return True


def reduced_pending(factors: Factors, splits: Splits) -> Pending:
    """What the results owe when reduced factors are split: (axis, kind), in order of axes.

    >>> from shardax.spmd_rules.rule import bind, parse
    >>> reduced_pending(bind(parse("m k+ -> m"), ((2, 4),), ((2,),)), {"k": Split(("x",), 4)})
    (('x', 'sum'),)
    """
    owed = {(axis, factors.type_of(f)) for f in factors.reduced if f in splits for axis in splits[f].axes}
    return tuple(sorted(owed))


def run_local(entry: Entry, local: Local, factors: Factors, shards: Sequence[Any]) -> list[Any]:
    """Runs a node on its shards: masks the padding of what is reduced, then calls its lowering, or binds it
    as it is.

    Windowed dims their lowering masks itself, once it has the halo: others may want that halo of the same
    shard.
    """
    if (
        all(0 in shape for shape in local.node.out_shapes)
        and local.node.outputs
        and not local.node.eqn.effects
    ):
        avals = zip(local.results, local.node.outputs, strict=True)
        return [
            lax.empty(layout.local_shape(local.sizes), v.aval.dtype) for layout, v in avals
        ]  # no lowering need know
    if factors.reduced:
        shards = [_mask_reduced(local, factors, i, shard) for i, shard in enumerate(shards)]
    what = partial(_lowering, entry, local, shards)
    with noting(what):
        # the equations of a lowering need not show the FLOPs that they do, as a kernel does not
        flops = entry.flops_or_none(local) if entry.local else None
        with noted.scope(local.node.name, flops) if flops is not None else nullcontext():
            results = entry.local(local, *shards) if entry.local else local.bind(*shards)
    promised = [(local.out_shape(i), value.aval.dtype) for i, value in enumerate(local.node.outputs)]
    return require_promised(results, promised, what)


def _lowering(entry: Entry, local: Local, shards: Sequence[Any]) -> str:
    shapes = ", ".join(str(jnp.shape(x)) for x in shards)
    return (
        f"the lowering of {at(local.node)}, by the rule {str(entry.rule_of(local.node))!r}, on shards of "
        f"shapes {shapes}"
    )


def _mask_reduced(local: Local, factors: Factors, i: int, shard):
    for d, dim in enumerate(factors.operands[i]):
        reduction = next((factors.type_of(f) for f in dim if f in factors.reduced and "~" not in f), None)
        if reduction:
            shard = local.mask(i, shard, identity(reduction, shard.dtype), [d])
    return shard
