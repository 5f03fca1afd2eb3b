"""Primitives that only place elements: reshape, transpose, broadcast, slice, pad, concatenate, iota and the like."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from shardax.graph import Node
from shardax.spmd_rules.indexing import owner_mark
from shardax.spmd_rules.registry import MOVES, Local, Passes, register_rule, whole_rule
from shardax.spmd_rules.rule import Shape


def bitcast_convert_type(node: Node) -> str:
    """Where the widths differ, the minor-most dim of one side holds the pieces of an element."""
    (old,), (new,) = node.in_shapes, node.out_shapes
    kept = " ".join(f"k{d}" for d in range(min(len(old), len(new))))
    return f"{kept}{' p!' * (len(old) > len(new))} -> {kept}{' p!' * (len(new) > len(old))}"


def broadcast_in_dim(node: Node) -> str:
    """ "k0 1 -> n0 k0 n2": dims that are new or stretched may be split freely."""
    (old, *_), (new,) = node.in_shapes, node.out_shapes
    result = [f"n{d}" for d in range(len(new))]
    operand = ["1"] * len(old)
    for d, at in enumerate(node.params["broadcast_dimensions"]):
        if old[d] == new[at]:
            operand[d] = result[at] = f"k{d}"
    return f"{' '.join(operand)} -> {' '.join(result)}"


def _broadcast_in_dim_local(local: Local, shard):
    return local.bind(shard, shape=local.out_shape(), sharding=None)


def concatenate(node: Node) -> str:
    """ "k0 c0!, k0 c1! -> k0 c!": the concatenated dim is whole."""
    dim = node.params["dimension"]
    operands = [" ".join(_kept(shape, {dim: f"c{i}!"})) for i, shape in enumerate(node.in_shapes)]
    return f"{', '.join(operands)} -> {' '.join(_kept(node.out_shapes[0], {dim: 'c!'}))}"


def _kept(shape: Shape, others: dict[int, str], letter: str = "k") -> list[str]:
    """A factor for each dim, `others` where they say so."""
    return [others.get(d, f"{letter}{d}") for d in range(len(shape))]


def empty(node: Node) -> str:
    return f" -> {' '.join(_kept(node.out_shapes[0], {}))}"


def _empty_local(local: Local):
    return local.bind(shape=local.out_shape(), out_sharding=None)


def iota(node: Node) -> str:
    """ " -> k0 k1": each shard counts from its own start."""
    return f" -> {' '.join(_kept(node.out_shapes[0], {}))}"


def _iota_local(local: Local):
    """Counted in integers: floats would be rounded twice."""
    dim, shape = local.params["dimension"], local.out_shape()
    if not local.results[0].dims[dim]:
        return local.bind(shape=shape, sharding=None)
    counted = lax.broadcasted_iota("int32", shape, dim) + local.start(local.results[0], dim)
    return [lax.convert_element_type(counted, local.params["dtype"])]


def optimization_barrier(node: Node) -> str:
    """Operand i is result i. Nothing may stay pending: `Passes` cannot say that each operand passes by itself."""
    values = ", ".join(" ".join(_kept(shape, {}, f"k{i}_")) for i, shape in enumerate(node.in_shapes))
    return f"{values} -> {values}"


def pad(node: Node) -> str:
    """ "k0 w1! 1, -> k0 r1! n2": unpadded dims are kept; what surrounds a single position may be split freely."""
    old, new, config = node.in_shapes[0], node.out_shapes[0], node.params["padding_config"]
    sides = [_pad_dim(*dim) for dim in zip(range(len(old)), old, new, config, strict=True)]
    return f"{' '.join(a for a, _ in sides)}, -> {' '.join(b for _, b in sides)}"


def _pad_dim(d: int, old: int, new: int, config: tuple[int, int, int]) -> tuple[str, str]:
    low, high, interior = config
    if low == high == 0 and (interior == 0 or old <= 1):
        return f"k{d}", f"k{d}"
    return ("1", f"n{d}") if old == 1 and low >= 0 and high >= 0 else (f"w{d}!", f"r{d}!")


def _pad_local(local: Local, shard, value):
    """In a dim that surrounds a single position, each shard puts it where the owner has it; the others take it out again."""
    config, layout, inside = list(local.params["padding_config"]), local.results[0], True
    for d, (low, _, _) in enumerate(config):
        if layout.dims[d] and config[d] != (0, 0, 0):
            owner, position = divmod(low, local.out_shape()[d])
            config[d] = (position, local.out_shape()[d] - 1 - position, 0)
            inside &= local.index(layout.dims[d]) == owner
    (padded,) = local.bind(shard, value, padding_config=tuple(config))
    return [padded if inside is True else lax.select(inside, padded, jnp.broadcast_to(value, padded.shape))]


def _pad_passes(node: Node) -> tuple[Passes, ...]:
    """A fixed padding value leaves maxima as they are, zero sums too."""
    value = node.inputs[1]
    zero = value.is_literal and not value.literal
    return (MOVES(0, 1), MOVES(0) if zero else Passes(("max", "min"), (0,)))


def reshape(node: Node) -> str:
    """ "f0 (f1 f2) -> f0 f1 f2": dims are made of the factors that both shapes share, and whole where they share none."""
    old, new = node.in_shapes[0], node.out_shapes[0]
    if 0 in old or node.params["dimensions"] is not None:
        return whole_rule(node)
    sides = _common_factors(old, new)
    return " -> ".join(" ".join(map(_compound, side)) for side in sides) if _solvable(sides) else whole_rule(node)


def _compound(factors: Sequence[str]) -> str:
    return "1" if not factors else factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


def _common_factors(old: Shape, new: Shape) -> tuple[list[list[str]], list[list[str]]]:
    """The factors of the dims of both shapes, major to minor.

    >>> _common_factors((2, 12), (2, 3, 1, 4))
    ([['f0'], ['f1', 'f2']], [['f0'], ['f1'], [], ['f2']])
    """
    sides = ([[] for _ in old], [[] for _ in new])
    rest = [[[d, n] for d, n in enumerate(shape) if n != 1] for shape in (old, new)]  # dims, and what is left of each
    count = 0
    while rest[0]:
        heads = [left[0] for left in rest]
        common = min(n for _, n in heads)
        if any(n % common for _, n in heads):
            _leave_whole(sides, rest)
            continue
        for side, head, left in zip(sides, heads, rest, strict=True):
            side[head[0]].append(f"f{count}")
            head[1] //= common
            if head[1] == 1:
                left.pop(0)
        count += 1
    return sides


def _leave_whole(sides, rest) -> None:
    """Gives whole factors to the dims up to where both shapes have come equally far."""
    size = [1, 1]
    while size[0] != size[1] or size[0] == 1:
        i = size.index(min(size))
        d, n = rest[i].pop(0)
        sides[i][d].append(f"{'wr'[i]}{d}!")
        size[i] *= n


def _solvable(sides: Sequence[list[list[str]]]) -> bool:
    """Whether `bind` can find the sizes: dim by dim, no more than one factor may be unknown."""
    dims = [set(dim) for side in sides for dim in side]
    known = set().union(*(dim for dim in dims if len(dim) == 1))
    for dim in dims:
        if len(dim - known) > 1:
            return False
        known |= dim
    return True


def _reshape_local(local: Local, shard):
    return local.bind(shard, new_sizes=local.out_shape(), sharding=None)


def rev(node: Node) -> str:
    """ "k0 r1! -> k0 r1!": reversed dims are whole."""
    dims = " ".join(_kept(node.in_shapes[0], {d: f"r{d}!" for d in node.params["dimensions"]}))
    return f"{dims} -> {dims}"


def slice_(node: Node) -> str:
    """ "k0 x1+ w2! -> k0 1 r2!": dims that are taken whole are kept, of a single position one shard is the owner."""
    (old,), (new,), mark = node.in_shapes, node.out_shapes, owner_mark(node.inputs[0].aval.dtype)
    sides = [_slice_dim(d, n, size, mark) for d, (n, size) in enumerate(zip(old, new, strict=True))]
    return f"{' '.join(a for a, _ in sides)} -> {' '.join(b for _, b in sides)}"


def _slice_dim(d: int, old: int, new: int, mark: str) -> tuple[str, str]:
    if old == new:
        return f"k{d}", f"k{d}"
    return (f"x{d}{mark}", "1") if new == 1 else (f"w{d}!", f"r{d}!")


def _slice_local(local: Local, shard):
    """Each shard takes the position that the owner of the wanted one takes; all but the owner then give zeros."""
    first, last = list(local.params["start_indices"]), list(local.params["limit_indices"])
    layout, inside = local.operands[0], True
    for d, (old, new) in enumerate(zip(local.node.in_shapes[0], local.node.out_shapes[0], strict=True)):
        if old == new:
            last[d] = shard.shape[d]
        elif layout.dims[d]:
            owner, first[d] = divmod(first[d], shard.shape[d])
            last[d] = first[d] + 1
            inside &= local.index(layout.dims[d]) == owner
    (part,) = local.bind(shard, start_indices=tuple(first), limit_indices=tuple(last))
    return [part if inside is True else lax.select(inside, part, lax.full_like(part, 0))]


def split(node: Node) -> str:
    """ "k0 c! -> k0 c0!, k0 c1!": the dim that is split is whole."""
    dim = node.params["axis"]
    results = [" ".join(_kept(shape, {dim: f"c{i}!"})) for i, shape in enumerate(node.out_shapes)]
    return f"{' '.join(_kept(node.in_shapes[0], {dim: 'c!'}))} -> {', '.join(results)}"


def squeeze(node: Node) -> str:
    """ "k0 1 -> k0"."""
    dims = _kept(node.in_shapes[0], {d: "1" for d in node.params["dimensions"]})
    return f"{' '.join(dims)} -> {' '.join(d for d in dims if d != '1')}"


def stack(node: Node) -> str:
    """ "k0 k1, k0 k1 -> k0 s! k1": the new dim is whole."""
    dims = [f"k{d}" for d in range(len(node.in_shapes[0]))]
    return f"{', '.join([' '.join(dims)] * len(node.inputs))} -> {' '.join(_inserted(dims, node.params['axis']))}"


def _inserted(dims: list[str], at: int) -> list[str]:
    return [*dims[:at], "s!", *dims[at:]]


def tile(node: Node) -> str:
    """ "k0 k1 -> k0 (n1 k1)": repetitions may be split freely."""
    reps = node.params["reps"]
    result = [f"k{d}" if n == 1 else f"(n{d} k{d})" for d, n in enumerate(reps)]
    return whole_rule(node) if 0 in node.out_shapes[0] else f"{' '.join(_kept(reps, {}))} -> {' '.join(result)}"


def _tile_local(local: Local, shard):
    return local.bind(shard, reps=tuple(new // old for new, old in zip(local.out_shape(), shard.shape, strict=True)))


def transpose(node: Node) -> str:
    """ "k0 k1 -> k1 k0"."""
    dims = _kept(node.in_shapes[0], {})
    return f"{' '.join(dims)} -> {' '.join(dims[d] for d in node.params['permutation'])}"


def unstack(node: Node) -> str:
    """ "k0 s! k1 -> k0 k1, k0 k1": the dim that goes is whole."""
    dims = [f"k{d}" for d in range(len(node.out_shapes[0]))]
    return f"{' '.join(_inserted(dims, node.params['axis']))} -> {', '.join([' '.join(dims)] * len(node.outputs))}"


def _moves_all(node: Node) -> tuple[Passes, ...]:
    return (MOVES(*range(len(node.inputs))),)


register_rule("bitcast_convert_type", bitcast_convert_type)
register_rule("broadcast_in_dim", broadcast_in_dim, _broadcast_in_dim_local, passes=(MOVES(0),))
register_rule("concatenate", concatenate, passes=_moves_all)
register_rule("empty", empty, _empty_local)
register_rule("empty2", " -> ")
register_rule("iota", iota, _iota_local)
register_rule("optimization_barrier", optimization_barrier)
register_rule("pad", pad, _pad_local, passes=_pad_passes)
register_rule("reshape", reshape, _reshape_local, passes=(MOVES(0),))
register_rule("rev", rev, passes=(MOVES(0),))
register_rule("slice", slice_, _slice_local, passes=(MOVES(0),))
register_rule("split", split, passes=(MOVES(0),))
register_rule("squeeze", squeeze, passes=(MOVES(0),))
register_rule("stack", stack, passes=_moves_all)
register_rule("tile", tile, _tile_local, passes=(MOVES(0),))
register_rule("transpose", transpose, passes=(MOVES(0),))
register_rule("unstack", unstack, passes=(MOVES(0),))
