"""reshape: dims are made of the factors that both shapes share. Where they share none, blocks are flat ranges
of elements.

(6, 4) -> (8, 3) over 2 devices: both shapes begin with the dim that is split, so each device has 12
consecutive elements, and needs 12. Where the blocks differ in size, the elements that a device lacks come
from its neighbours, as for any window.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jax import lax

from shardax.graph.graph import Node
from shardax.reshard.halo import HaloRequest
from shardax.spmd_rules.halo import halo_sends, request_of, take, window_of
from shardax.spmd_rules.registry import MOVES, Local, register_rule, replicated_rule
from shardax.spmd_rules.rule import Shape


@dataclass(frozen=True)
class _Group:
    """Dims of the old shape and of the new one, from first to last, with the same elements and no common
    factor.
    """

    old: tuple[int, int]
    new: tuple[int, int]


def reshape(node: Node) -> str:
    """ "f0 (f1 f2) -> f0 f1 f2", "g0~ w1! -> g0~ r1!"."""
    old, new = node.in_shapes[0], node.out_shapes[0]
    if 0 in old:
        return replicated_rule(node)
    order = node.params["dimensions"] or range(len(old))
    (before, after), groups = _shared_factors(tuple(old[d] for d in order), new)
    for i, group in enumerate(groups if node.params["dimensions"] is None else ()):
        before[group.old[0]] = after[group.new[0]] = [window_of(f"g{i}", node)]
    before = [before[list(order).index(d)] for d in range(len(old))]
    return " -> ".join(" ".join(map(_compound, side)) for side in (before, after))


def _compound(factors: Sequence[str]) -> str:
    return "1" if not factors else factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


_Sides = tuple[list[list[str]], list[list[str]]]


def _shared_factors(old: Shape, new: Shape) -> tuple[_Sides, list[_Group]]:
    """The factors of the dims of both shapes, and the groups of dims that share none. Nested as far as `bind`
    can solve it.
    """
    common_factors = _common_factors(old, new)
    return common_factors if _solvable(common_factors[0]) else _common_factors(old, new, nested=False)


def _common_factors(old: Shape, new: Shape, nested: bool = True) -> tuple[_Sides, list[_Group]]:
    """The factors of the dims of both shapes, major to minor, and the groups of dims that have no factors in
    common.

    >>> _common_factors((2, 12), (2, 3, 1, 4))[0]
    ([['f0'], ['f1', 'f2']], [['f0'], ['f1'], [], ['f2']])
    >>> _common_factors((2, 6, 4), (2, 8, 3))
    (([['f0'], ['w1!'], ['w2!']], [['f0'], ['r1!'], ['r2!']]), [_Group(old=(1, 2), new=(1, 2))])
    """
    sides, groups = ([[] for _ in old], [[] for _ in new]), []
    rest = [
        [[d, n] for d, n in enumerate(shape) if n != 1] for shape in (old, new)
    ]  # dims, and what is left of each
    count = 0
    while rest[0]:
        heads = [left[0] for left in rest]
        common = min(n for _, n in heads)
        if any(n % common or (n != common and not nested) for _, n in heads):
            begun = any(side[d] for side, (d, _) in zip(sides, heads, strict=True))
            group = _leave_unsplit(sides, rest)
            groups += [] if begun else [group]
            continue
        for side, head, left in zip(sides, heads, rest, strict=True):
            side[head[0]].append(f"f{count}")
            head[1] //= common
            if head[1] == 1:
                left.pop(0)
        count += 1
    return sides, groups


def _leave_unsplit(sides, rest) -> _Group:
    """Gives unsplit factors to the dims up to where both shapes have come equally far."""
    size, dims = [1, 1], ([], [])
    while size[0] != size[1] or size[0] == 1:
        i = size.index(min(size))
        d, n = rest[i].pop(0)
        sides[i][d].append(f"{'wr'[i]}{d}!")
        dims[i].append(d)
        size[i] *= n
    return _Group(*((side[0], side[-1]) for side in dims))


def _solvable(sides: Sequence[list[list[str]]]) -> bool:
    """Whether `bind` can find the sizes: dim by dim, no more than one factor may be unknown."""
    dims = [set(dim) for side in sides for dim in side]
    known = set().union(*(dim for dim in dims if len(dim) == 1))
    for dim in dims:
        if len(dim - known) > 1:
            return False
        known |= dim
    return True


def _flat_ranges(local: Local) -> Iterator[tuple[_Group, HaloRequest]]:
    """The elements that devices need of the groups that are split, from the last group to the first: those
    before keep their place."""
    if local.params["dimensions"] is not None or 0 in local.node.in_shapes[0]:
        return
    (old,), (new,) = local.node.in_shapes, local.node.out_shapes
    for group in reversed(_shared_factors(old, new)[1]):
        (first, last), (to, end) = group.old, group.new
        if local.results[0].dims[to]:
            unit, row = math.prod(old[first + 1 : last + 1]), math.prod(new[to + 1 : end + 1])
            span = lambda r, e, row=row: (r * row, e * row)  # noqa: E731
            request = request_of(local, 0, first, (0, to), span, local.out_shape()[to] * row)
            yield group, replace(request, size=request.size * unit, block=request.block * unit)


def _reshape_local(local: Local, shard):
    if local.params["dimensions"] is not None:
        shard = lax.transpose(shard, local.params["dimensions"])
    for group, request in _flat_ranges(local):
        first, last = group.old
        flat = math.prod(shard.shape[first : last + 1])
        shard = lax.reshape(shard, (*shard.shape[:first], flat, *shard.shape[last + 1 :]))
        shard = take(local, request, shard)
    return [lax.reshape(shard, local.out_shape())]


register_rule(
    "reshape",
    reshape,
    _reshape_local,
    passes=(MOVES(0),),
    sends=halo_sends(lambda local: (request for _, request in _flat_ranges(local))),
    fuses="all",
    reads="view",
)
