"""gather, scatter, dynamic_slice: what an index points to in a split dim is answered by the shard that holds its place.

    gather     each shard subtracts the start of its block from the indices, and gives zeros where they then lie outside it:
               the pending sum is the result. A lookup in a split vocabulary costs one reduction of what was looked up.
    scatter    likewise: updates that then lie outside are dropped; nothing is owed.

Indices may be out of range, and `mode` says what happens then. It must happen once, not once per shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.graph import Node
from shardax.sharding import Axes
from shardax.spmd_rules.registry import LINEAR, MOVES, Local, Passes, register_rule

_CLIP, _DROP = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP


@dataclass(frozen=True)
class _Windows:
    """Windows of `sizes` in an operand of `shape`, placed by indices: the dimension numbers of gather and scatter alike.

    `slices` are what is gathered, or scattered. Their `slice_dims` are the operand's dims, without the `collapsed` and the
    `batch` ones; their others are those of the indices, in order. The last dim of the indices goes over the `indexed` dims.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    slice_dims: Sequence[int]
    indexed: Sequence[int]
    collapsed: Sequence[int] = ()
    batch: Sequence[int] = ()
    index_batch: Sequence[int] = ()

    def operand(self, mark: str) -> list[str]:
        """The factors of the operand's dims; those that may be split although they are indexed have `mark`."""
        return [self._operand_dim(d, mark) for d in range(len(self.shape))]

    def _operand_dim(self, d: int, mark: str) -> str:
        if d in self.batch:
            return f"b{self.index_batch[list(self.batch).index(d)]}"
        if d not in self.collapsed and self.sizes[d] == self.shape[d]:
            return f"o{d}"
        return f"x{d}{mark}" if d in self.indexed and self.sizes[d] == 1 else f"w{d}!"

    def indices(self, rank: int, mark: str) -> list[str]:
        """The factors of the dims of the indices; `mark` is for those that no dim of the operand follows."""
        return [f"b{d}" if d in self.index_batch else f"u{d}{mark}" for d in range(rank - 1)] + ["v!"]

    def slices(self, indices: Sequence[str]) -> list[str]:
        """The factors of the dims of what is gathered or scattered."""
        shown = iter(d for d in range(len(self.shape)) if d not in self.collapsed and d not in self.batch)
        others = iter(indices[:-1])
        rank = len(self.slice_dims) + len(indices) - 1
        return [self._slice_dim(next(shown)) if d in self.slice_dims else next(others) for d in range(rank)]

    def _slice_dim(self, d: int) -> str:
        if self.sizes[d] == self.shape[d]:
            return f"o{d}"
        return "1" if self.sizes[d] == 1 else f"s{d}!"

    def pointed(self, local: Local) -> list[int]:
        """The dims of the operand that are split and indexed."""
        return [d for d in self.indexed if self.sizes[d] == 1 and local.operands[0].dims[d]]

    def local_sizes(self, local: Local) -> tuple[int, ...]:
        """The windows in this device's shard: those that cover a dim cover the shard's."""
        sizes = zip(self.sizes, self.shape, local.in_shape(), strict=True)
        return tuple(block if size == n else size for size, n, block in sizes)

    def last(self, dtype) -> np.ndarray:
        """The greatest index into each indexed dim that is in range."""
        last = np.array([self.shape[d] - self.sizes[d] for d in self.indexed], np.int64)
        return np.minimum(last, np.iinfo(dtype).max).astype(dtype)


def owner_mark(dtype) -> str:
    """The mark of a factor where one shard has the result and the others give zeros: booleans do not add, keys neither."""
    if dtype == np.bool_:
        return ":max"
    return "+" if jnp.issubdtype(dtype, np.number) else "!"


def _clip(indices, last):
    return jnp.minimum(jnp.maximum(indices, np.zeros((), indices.dtype)), last)


def _widen(indices):
    """Indices in which the start of any shard can be subtracted."""
    return indices if indices.dtype.itemsize >= 4 else indices.astype("int32")


def _localize(local: Local, windows: _Windows, indices):
    """The indices as positions in this device's shard: those that other shards answer come to lie outside of it."""
    pointed, layout = windows.pointed(local), local.operands[0]
    starts = [local.start(layout, d) if d in pointed else 0 for d in windows.indexed]
    indices = _widen(indices)
    return indices - jnp.stack([jnp.asarray(start, indices.dtype) for start in starts])


def gather(node: Node) -> str:
    """ "x0+ o1, b s v! -> b s o1" for an embedding, "b0 x1+, b0 u1 v! -> b0 u1" for the picking of labels."""
    windows = _gather_windows(node)
    indices = windows.indices(len(node.inputs[1].shape), "")
    operand = windows.operand(owner_mark(node.inputs[0].aval.dtype))
    return f"{' '.join(operand)}, {' '.join(indices)} -> {' '.join(windows.slices(indices))}"


def _gather_windows(node: Node) -> _Windows:
    numbers = node.params["dimension_numbers"]
    batch, index_batch = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    dims = (numbers.offset_dims, numbers.start_index_map, numbers.collapsed_slice_dims, batch, index_batch)
    return _Windows(node.inputs[0].shape, tuple(node.params["slice_sizes"]), *dims)


def _gather_local(local: Local, operand, indices):
    """Whatever the mode, indices outside the shard give zeros; the fill value is put in by the first shard alone."""
    windows = _gather_windows(local.node)
    sizes, pointed = windows.local_sizes(local), windows.pointed(local)
    if not pointed:
        return local.bind(operand, indices, slice_sizes=sizes)
    fills, last = local.params["mode"] == _DROP, windows.last(indices.dtype)
    positions = _localize(local, windows, indices if fills else _clip(indices, last))
    (slices,) = local.bind(operand, positions, slice_sizes=sizes, mode=_DROP, fill_value=0)
    if not fills or not np.any(local.params["fill_value"]):
        return [slices]
    outside = jnp.any((indices < 0) | (indices > last), axis=-1)
    others = [d for d in range(slices.ndim) if d not in windows.slice_dims]
    filled = lax.broadcast_in_dim(outside & _is_first(local, pointed), slices.shape, others)
    return [lax.select(filled, lax.full_like(slices, local.params["fill_value"]), slices)]


def _is_first(local: Local, dims: Sequence[int]):
    return local.index(tuple(a for d in dims for a in local.operands[0].dims[d])) == 0


def _gather_passes(node: Node) -> tuple[Passes, ...]:
    """The fill value would be added once for each device; and not all backends keep NaN in a maximum over devices."""
    fill = node.params["fill_value"] if node.params["mode"] == _DROP else 0
    if fill == 0:
        return (MOVES(0),)
    return (LINEAR(0) if np.isnan(fill) else Passes(("max", "min"), (0,)),)


def _scatter(mark: str) -> Callable[[Node], str]:
    """The rule of a scatter whose updates may be split with this mark: "x0 o1, u0+ v!, u0+ o1 -> x0 o1"."""

    def rule(node: Node) -> str:
        windows = _scatter_windows(node)
        indices = windows.indices(len(node.inputs[1].shape), mark)
        operand = " ".join(windows.operand(""))
        return f"{operand}, {' '.join(indices)}, {' '.join(windows.slices(indices))} -> {operand}"

    return rule


def _scatter_windows(node: Node) -> _Windows:
    numbers, shape = node.params["dimension_numbers"], node.inputs[0].shape
    batch, index_batch = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    collapsed, slice_dims = numbers.inserted_window_dims, numbers.update_window_dims
    shown = iter(node.inputs[2].shape[d] for d in slice_dims)
    sizes = tuple(1 if d in collapsed or d in batch else next(shown) for d in range(len(shape)))
    return _Windows(shape, sizes, slice_dims, numbers.scatter_dims_to_operand_dims, collapsed, batch, index_batch)


def _scatter_local(local: Local, operand, indices, updates):
    """Positions are not clipped into the shard, so that unique indices stay unique and sorted ones sorted."""
    windows = _scatter_windows(local.node)
    if not windows.pointed(local):
        return local.bind(operand, indices, updates)
    if local.params["mode"] == _CLIP:
        indices = _clip(indices, windows.last(indices.dtype))
    return local.bind(operand, _localize(local, windows, indices), updates, mode=_DROP)


def _scatter_add_local(local: Local, operand, indices, updates):
    """Where updates are split the operand counts once."""
    axes: Axes = tuple(a for factor, split in local.splits.items() if factor[0] == "u" for a in split.axes)
    if axes:
        operand = lax.select(local.index(axes) == 0, operand, lax.full_like(operand, 0))
    return _scatter_local(local, operand, indices, updates)


def _scatter_passes(node: Node) -> tuple[Passes, ...]:
    """Only if nothing is computed, as `x.at[i].apply(f)` does, and no two updates compete: each device might choose another."""
    moves = node.params["update_jaxpr"] is None and node.params["unique_indices"]
    return (MOVES(0, 2),) if moves else ()


def _extremum_passes(kind: str) -> tuple[Passes, ...]:
    return tuple(Passes((kind,), operands) for operands in ((0,), (2,), (0, 2)))


def dynamic_slice(node: Node) -> str:
    """ "o0 x1+, , -> o0 1": a single position may lie in a split dim."""
    windows = _dynamic_windows(node.inputs[0].shape, tuple(node.params["slice_sizes"]))
    operand = " ".join(windows.operand(owner_mark(node.inputs[0].aval.dtype)))
    return f"{operand}{', ' * len(windows.shape)} -> {' '.join(windows.slices(['v!']))}"


def _dynamic_windows(shape: tuple[int, ...], sizes: tuple[int, ...]) -> _Windows:
    return _Windows(shape, sizes, range(len(shape)), range(len(shape)))


def _own(local: Local, windows: _Windows, starts):
    """The starts as positions in this device's shard, and whether they lie in it."""
    starts, inside = [_widen(start) for start in starts], True
    for d in windows.pointed(local):
        first = jnp.asarray(local.start(local.operands[0], d), starts[d].dtype)
        position = _clip(starts[d], windows.last(starts[d].dtype)[d]) - first
        starts[d] = _clip(position, np.asarray(local.in_shape()[d] - 1, position.dtype))
        inside &= position == starts[d]
    return starts, inside


def _dynamic_slice_local(local: Local, operand, *starts):
    windows = _dynamic_windows(local.node.inputs[0].shape, tuple(local.params["slice_sizes"]))
    starts, inside = _own(local, windows, starts)
    (part,) = local.bind(operand, *starts, slice_sizes=windows.local_sizes(local))
    return [part if inside is True else lax.select(inside, part, lax.full_like(part, 0))]


def dynamic_update_slice(node: Node) -> str:
    """ "o0 x1, o0 1, , -> o0 x1": a single position may be written into a split dim, as when a cache is appended to."""
    windows = _dynamic_windows(*node.in_shapes[:2])
    operand = " ".join(windows.operand(""))
    return f"{operand}, {' '.join(windows.slices(['v!']))}{', ' * len(windows.shape)} -> {operand}"


def _dynamic_update_slice_local(local: Local, operand, update, *starts):
    """Shards without the position write back what they have there: the operand is still updated in place."""
    windows = _dynamic_windows(*local.node.in_shapes[:2])
    starts, inside = _own(local, windows, starts)
    if inside is not True:
        update = lax.select(inside, update, lax.dynamic_slice(operand, starts, update.shape, allow_negative_indices=False))
    return local.bind(operand, update, *starts)


register_rule("dynamic_slice", dynamic_slice, _dynamic_slice_local, passes=(MOVES(0),))
register_rule("dynamic_update_slice", dynamic_update_slice, _dynamic_update_slice_local, passes=(MOVES(0, 1),))
register_rule("gather", gather, _gather_local, passes=_gather_passes)
register_rule("scatter", _scatter("!"), _scatter_local, passes=_scatter_passes)
register_rule("scatter-add", _scatter("+"), _scatter_add_local, passes=(LINEAR(0, 2),))
register_rule("scatter-max", _scatter(":max"), _scatter_local, passes=_extremum_passes("max"))
register_rule("scatter-min", _scatter(":min"), _scatter_local, passes=_extremum_passes("min"))
register_rule("scatter-mul", _scatter("!"), _scatter_local, passes=(LINEAR(0),))
register_rule("scatter-sub", _scatter("+"), _scatter_add_local, passes=(LINEAR(0, 2),))
