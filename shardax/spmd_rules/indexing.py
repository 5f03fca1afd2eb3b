"""gather, scatter, dynamic_slice: where an index points into a split dim, the shard that holds the place
answers.

    gather     each shard subtracts the start of its block from the indices, and gives zeros where they then
               are outside it: the pending sum is the result. A lookup in a split vocabulary costs one
               reduction of what was looked up.
    scatter    likewise: updates that are then outside are dropped; nothing is owed.

Indices may be out of range, and `mode` decides what happens then. It must happen once, not once per shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.graph.graph import Node
from shardax.sharding import Axes
from shardax.spmd_rules.registry import LINEAR, MOVES, Local, Passes, register_rule

_FAR = -(2**30)  # outside of every shard, wherever it starts
_CLIP, _DROP = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP


@dataclass(frozen=True)
class _Windows:
    """Windows of `sizes` in an operand of `shape`, placed by indices: the dimension numbers of gather and
    scatter alike.

    `slices` are what is gathered, or scattered. Their `slice_dims` are the operand's dims, without the
    `collapsed` and the `batch` ones; their others are those of the indices, in order. The last dim of the
    indices goes over the `indexed` dims.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    slice_dims: Sequence[int]
    collapsed: Sequence[int]
    indexed: Sequence[int]
    batch: Sequence[int] = ()
    index_batch: Sequence[int] = ()

    def operand(self, mark: str) -> list[str]:
        """The factors of the operand's dims; those that may be split although they are indexed have
        `mark`.
        """
        return [self._operand_dim(d, mark) for d in range(len(self.shape))]

    def _operand_dim(self, d: int, mark: str) -> str:
        if d in self.batch:
            return f"b{self.index_batch[list(self.batch).index(d)]}"
        if self._covers(d):
            return f"o{d}"
        return f"x{d}{mark}" if d in self.indexed else f"w{d}!"

    def _covers(self, d: int) -> bool:
        return d not in self.collapsed and self.sizes[d] == self.shape[d]

    def indices(self, rank: int, mark: str) -> list[str]:
        """The factors of the dims of the indices; `mark` is for those that no dim of the operand follows."""
        return [f"b{d}" if d in self.index_batch else f"u{d}{mark}" for d in range(rank - 1)] + ["v!"]

    def slices(self, indices: Sequence[str]) -> list[str]:
        """The factors of the dims of what is gathered or scattered."""
        shown, others = iter(self.shown), iter(indices[:-1])
        rank = len(self.slice_dims) + len(indices) - 1
        return [self._slice_dim(next(shown)) if d in self.slice_dims else next(others) for d in range(rank)]

    def _slice_dim(self, d: int) -> str:
        if self._covers(d):
            return f"o{d}"
        return "1" if self.sizes[d] == 1 else f"s{d}!"

    @property
    def shown(self) -> list[int]:
        """The operand's dims that slices have."""
        return [d for d in range(len(self.shape)) if d not in self.collapsed and d not in self.batch]

    @property
    def numbers(self) -> tuple[Sequence[int], ...]:
        """The arguments of GatherDimensionNumbers, and of ScatterDimensionNumbers."""
        return self.slice_dims, self.collapsed, self.indexed, self.batch, self.index_batch

    def pointed(self, local: Local) -> list[int]:
        """The dims of the operand that are split and indexed."""
        return [d for d in self.indexed if not self._covers(d) and local.operands[0].dims[d]]

    def local_sizes(self, local: Local) -> tuple[int, ...]:
        """The windows in this device's shard: those that cover a dim cover the shard's."""
        sizes = zip(self.sizes, self.shape, local.in_shape(), strict=True)
        return tuple(block if size == n else size for size, n, block in sizes)

    def last(self, dtype) -> np.ndarray:
        """The greatest index into each indexed dim that is in range."""
        last = np.array([self.shape[d] - self.sizes[d] for d in self.indexed], np.int64)
        return np.minimum(last, np.iinfo(dtype).max).astype(dtype)


def owner_mark(dtype) -> str:
    """The mark of a factor where one shard has the result and the others give zeros. Booleans and random keys
    cannot be added.
    """
    if dtype == np.bool_:
        return ":max"
    return "+" if jnp.issubdtype(dtype, np.number) else "!"


def at_places(x, places, dim: int):
    """x at `places` along `dim`: of the rank of x, several places for each position of the other dims; of one
    less, one.
    """
    others = tuple(d for d in range(x.ndim) if d != dim)
    batch = others if places.ndim == x.ndim else tuple(range(places.ndim))
    numbers = lax.GatherDimensionNumbers((), (dim,), (dim,), others, batch)
    return lax.gather(
        x, lax.expand_dims(places, [places.ndim]), numbers, (1,) * x.ndim, mode="promise_in_bounds"
    )


def _clip(indices, last):
    return jnp.minimum(jnp.maximum(indices, np.zeros((), indices.dtype)), last)


def _for_each(indices, row):
    """A row of one number for each indexed dim, in the rank of the indices: no rank need be promoted."""
    return row.reshape((1,) * (indices.ndim - 1) + row.shape)


def _outside(windows: _Windows, indices):
    """Which windows are not wholly in the operand."""
    last = _for_each(indices, windows.last(indices.dtype))
    return jnp.any((indices < 0) | (indices > last), axis=-1)


def _signed(indices):
    """Indices from which the start of any shard can be subtracted."""
    return indices.astype("int64" if indices.dtype.itemsize == 8 else "int32")


def _localize(local: Local, windows: _Windows, indices, clips: bool):
    """The windows in this device's shard, with indices relative to it; what other shards answer has indices
    outside of it.
    """
    pointed, layout = windows.pointed(local), local.operands[0]
    longer = [d for d in pointed if windows.sizes[d] > 1]
    outside = _outside(windows, indices)
    last = _for_each(indices, windows.last(indices.dtype))
    indices = _signed(_clip(indices, last) if clips else indices)
    if longer and not clips:  # a window that is only partly out of range is so as a whole
        indices = jnp.where(outside[..., None], indices.dtype.type(_FAR), indices)
    for d in longer:
        windows, indices = _take_apart(windows, indices, d)
    starts = [local.start(layout, d) if d in pointed else 0 for d in windows.indexed]
    row = jnp.stack([jnp.asarray(start, indices.dtype) for start in starts])
    return windows, indices - _for_each(indices, row)


def _take_apart(windows: _Windows, indices, d: int):
    """Windows of several positions in dim d as so many windows of one position: the indices have a dim
    more.
    """
    in_slices = windows.slice_dims[windows.shown.index(d)]
    at = in_slices - sum(e < in_slices for e in windows.slice_dims)
    shape = (*indices.shape[:at], windows.sizes[d], *indices.shape[at:])
    steps = lax.broadcasted_iota(indices.dtype, shape, at)
    steps *= _for_each(steps, np.array([e == d for e in windows.indexed], indices.dtype))
    apart = replace(
        windows,
        sizes=tuple(1 if e == d else size for e, size in enumerate(windows.sizes)),
        slice_dims=tuple(e for e in windows.slice_dims if e != in_slices),
        collapsed=tuple(sorted((*windows.collapsed, d))),
        index_batch=tuple(e + (e >= at) for e in windows.index_batch),
    )
    return apart, jnp.expand_dims(indices, at) + steps


def gather(node: Node) -> str:
    """ "x0+ o1, b s v! -> b s o1" for an embedding, "b0 x1+, b0 u1 v! -> b0 u1" for the picking of labels."""
    windows = _gather_windows(node)
    indices = windows.indices(len(node.inputs[1].shape), "")
    operand = windows.operand(owner_mark(node.inputs[0].aval.dtype))
    return f"{' '.join(operand)}, {' '.join(indices)} -> {' '.join(windows.slices(indices))}"


def _gather_windows(node: Node) -> _Windows:
    numbers = node.params["dimension_numbers"]
    batch, index_batch = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    dims = (numbers.offset_dims, numbers.collapsed_slice_dims, numbers.start_index_map, batch, index_batch)
    return _Windows(node.inputs[0].shape, tuple(node.params["slice_sizes"]), *dims)


def _gather_local(local: Local, operand, indices):
    """Whatever the mode, indices outside the shard give zeros; the fill value is put in by the first shard
    alone.
    """
    windows = _gather_windows(local.node)
    pointed, fills = windows.pointed(local), local.params["mode"] == _DROP
    if not pointed:
        return local.bind(operand, indices, slice_sizes=windows.local_sizes(local))
    slices = _gather_owned(local, windows, operand, indices, clips=not fills)
    if not fills or not np.any(local.params["fill_value"]):
        return [slices]
    others = [d for d in range(slices.ndim) if d not in windows.slice_dims]
    first_shard = local.index(tuple(a for d in pointed for a in local.operands[0].dims[d])) == 0
    outside = _outside(windows, indices) & first_shard
    filled = lax.broadcast_in_dim(outside, slices.shape, others)
    return [lax.select(filled, lax.full_like(slices, local.params["fill_value"]), slices)]


def _gather_owned(local: Local, windows: _Windows, operand, indices, clips: bool):
    """The positions that this shard has, zeros for the others."""
    apart, positions = _localize(local, windows, indices, clips)
    numbers = lax.GatherDimensionNumbers(*map(tuple, apart.numbers))
    return lax.gather(operand, positions, numbers, apart.local_sizes(local), mode=_DROP, fill_value=0)


def _gather_passes(node: Node) -> tuple[Passes, ...]:
    """A fill value would be added once for each device, so sums may wait only where it is 0 or NaN. Maxima
    may not wait where it is NaN, because not all backends keep NaN in a maximum over devices.
    """
    fill = node.params["fill_value"] if node.params["mode"] == _DROP else 0
    if fill == 0:
        return (MOVES(0),)
    return (LINEAR(0) if np.isnan(fill) else Passes(("max", "min"), (0,)),)


def _scatter(mark: str) -> Callable[[Node], str]:
    """The rule of a scatter whose updates may be split with this mark: "x0 o1, u0+ v!, u0+ o1 -> x0 o1".

    No collective adds booleans or orders complex numbers, or does either with keys.
    """
    kept_unsplit = (np.bool_ if mark == "+" else np.complexfloating, jax.dtypes.extended)

    def rule(node: Node) -> str:
        windows = _scatter_windows(node)
        reducible = not any(jnp.issubdtype(node.inputs[0].aval.dtype, dtype) for dtype in kept_unsplit)
        indices = windows.indices(len(node.inputs[1].shape), mark if reducible else "!")
        operand = " ".join(windows.operand(""))
        return f"{operand}, {' '.join(indices)}, {' '.join(windows.slices(indices))} -> {operand}"

    return rule


def _scatter_windows(node: Node) -> _Windows:
    numbers, shape = node.params["dimension_numbers"], node.inputs[0].shape
    batch, index_batch = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    collapsed, slice_dims = numbers.inserted_window_dims, numbers.update_window_dims
    shown = iter(node.inputs[2].shape[d] for d in slice_dims)
    sizes = tuple(1 if d in collapsed or d in batch else next(shown) for d in range(len(shape)))
    return _Windows(
        shape, sizes, slice_dims, collapsed, numbers.scatter_dims_to_operand_dims, batch, index_batch
    )


def _scatter_local(local: Local, operand, indices, updates):
    """Positions outside of the shard are not clipped, so that unique indices stay unique, and sorted ones
    sorted.
    """
    windows = _scatter_windows(local.node)
    if not windows.pointed(local):
        return local.bind(operand, indices, updates)
    apart, positions = _localize(local, windows, indices, clips=local.params["mode"] == _CLIP)
    numbers = lax.ScatterDimensionNumbers(*apart.numbers)
    if (
        positions.size == positions.shape[-1]
    ):  # jaxlib 0.10 reads a place outside through the slice that made the shard
        operand = lax.optimization_barrier(operand)
    return local.bind(operand, positions, updates, dimension_numbers=numbers, mode=_DROP)


def _scatter_add_local(local: Local, operand, indices, updates):
    """Where updates are split over devices, the operand must count only once."""
    axes: Axes = tuple(a for factor, split in local.splits.items() if factor[0] == "u" for a in split.axes)
    if axes:
        operand = lax.select(local.index(axes) == 0, operand, lax.full_like(operand, 0))
    return _scatter_local(local, operand, indices, updates)


def _scatter_passes(node: Node) -> tuple[Passes, ...]:
    """Reductions may wait only if nothing is computed (as `x.at[i].apply(f)` does) and no two updates
    compete, for then each device might choose another.
    """
    assigns = node.params["update_jaxpr"] is None and node.params["unique_indices"]
    return (MOVES(0, 2),) if assigns else ()


def _extremum_passes(reduction: str) -> tuple[Passes, ...]:
    return tuple(Passes((reduction,), operands) for operands in ((0,), (2,), (0, 2)))


def dynamic_slice(node: Node) -> str:
    """ "o0 x1+, , -> o0 s1!": the shards that have a part of the window give it."""
    windows = _dynamic_windows(node.inputs[0].shape, node.params["slice_sizes"])
    operand = " ".join(windows.operand(owner_mark(node.inputs[0].aval.dtype)))
    return f"{operand}{', ' * len(windows.shape)} -> {' '.join(windows.slices(['v!']))}"


def _dynamic_windows(shape: Sequence[int], sizes: Sequence[int]) -> _Windows:
    every = tuple(range(len(shape)))
    return _Windows(tuple(shape), tuple(sizes), every, (), every)


def _dynamic_slice_local(local: Local, operand, *starts):
    windows = _dynamic_windows(local.node.inputs[0].shape, local.params["slice_sizes"])
    if any(windows.sizes[d] > 1 for d in windows.pointed(local)):
        return [_gather_owned(local, windows, operand, jnp.stack(starts), clips=True)]
    starts, inside = _own(local, windows, starts)
    sizes = windows.local_sizes(local)
    (part,) = local.bind(operand, *_within(local.in_shape(), sizes, starts), slice_sizes=sizes)
    return [part if inside is True else lax.select(inside, part, lax.full_like(part, 0))]


def _within(shape: Sequence[int], sizes: Sequence[int], starts):
    """Starts clamped into range. jaxlib 0.10 forgets to clamp them where the window is then cut, as by a
    reshard.
    """
    lasts = (
        min(n - size, np.iinfo(start.dtype).max) for n, size, start in zip(shape, sizes, starts, strict=True)
    )
    return [_clip(start, np.asarray(last, start.dtype)) for start, last in zip(starts, lasts, strict=True)]


def _own(local: Local, windows: _Windows, starts):
    """The starts of windows of one position relative to this device's shard, and whether the shard has
    them.
    """
    starts, inside = list(starts), True
    for d in windows.pointed(local):
        position = _signed(_clip(starts[d], windows.last(starts[d].dtype)[d]))
        position -= jnp.asarray(local.start(local.operands[0], d), position.dtype)
        starts[d] = _clip(position, np.asarray(local.in_shape()[d] - 1, position.dtype))
        inside &= position == starts[d]
    return starts if inside is True else list(map(_signed, starts)), inside


def dynamic_update_slice(node: Node) -> str:
    """ "o0 x1, o0 1, , -> o0 x1": written into a split dim, as when a cache is appended to."""
    windows = _dynamic_windows(*node.in_shapes[:2])
    operand = " ".join(windows.operand(""))
    return f"{operand}, {' '.join(windows.slices(['v!']))}{', ' * len(windows.shape)} -> {operand}"


def _dynamic_update_slice_local(local: Local, operand, update, *starts):
    """Shards without the position write back what they have there: the operand is still updated in place."""
    windows = _dynamic_windows(*local.node.in_shapes[:2])
    if any(windows.sizes[d] > 1 for d in windows.pointed(local)):
        apart, positions = _localize(local, windows, jnp.stack(starts), clips=True)
        numbers = lax.ScatterDimensionNumbers(*apart.numbers)
        return [lax.scatter(operand, positions, update, numbers, unique_indices=True, mode=_DROP)]
    starts, inside = _own(local, windows, starts)
    if inside is not True:
        update = lax.select(
            inside, update, lax.dynamic_slice(operand, starts, update.shape, allow_negative_indices=False)
        )
    return local.bind(operand, update, *starts)


register_rule("dynamic_slice", dynamic_slice, _dynamic_slice_local, passes=(MOVES(0),), in_place=(0, -1))
register_rule(
    "dynamic_update_slice",
    dynamic_update_slice,
    _dynamic_update_slice_local,
    passes=(MOVES(0, 1),),
    in_place=(0, 1),
)
register_rule("gather", gather, _gather_local, passes=_gather_passes, in_place=(0, -1))
register_rule("scatter", _scatter("!"), _scatter_local, passes=_scatter_passes, in_place=(0, 2))
register_rule("scatter-add", _scatter("+"), _scatter_add_local, passes=(LINEAR(0, 2),), in_place=(0, 2))
register_rule(
    "scatter-max", _scatter(":max"), _scatter_local, passes=_extremum_passes("max"), in_place=(0, 2)
)
register_rule(
    "scatter-min", _scatter(":min"), _scatter_local, passes=_extremum_passes("min"), in_place=(0, 2)
)
register_rule("scatter-mul", _scatter("!"), _scatter_local, passes=(LINEAR(0),), in_place=(0, 2))
register_rule("scatter-sub", _scatter("+"), _scatter_add_local, passes=(LINEAR(0, 2),), in_place=(0, 2))
