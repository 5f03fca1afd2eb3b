"""Rest: along which dim an axis splits an array that is otherwise replicated over it."""

from collections.abc import Collection

from shardax.sharding import Axes, AxisSizes, Sharding, shard_count

STACKED = 1 / 8  # of an array: so much padding more is taken rather than to split layers
MIXED = 1 / 2  # rather than to split what an update needs whole, which moves in each step


def split_further(
    sharding: Sharding,
    shape: tuple[int, ...],
    axes: Axes,
    sizes: AxisSizes,
    last: Collection[int] = (),
    mixed: Collection[int] = (),
) -> Sharding:
    """The sharding with `axes` added to the largest dim that they divide: one that nothing splits yet, if
    there is any; the minor-most, those in `mixed`, along which an update needs it whole, and those in `last`,
    over which layers are scanned, only where no other can. The same, where none can.

    Parts of the minor-most dim are no contiguous memory, and the TPU compiler makes some reduce_scatters
    along it all_reduces (of bfloat16[4096, 14336] over 16 devices), which send twice as much.

    >>> split_further(Sharding(((), ("model",))), (64, 256), ("data",), {"data": 4, "model": 2})
    P('data', 'model')
    >>> split_further(Sharding(((), ())), (64, 256), ("data",), {"data": 4})
    P('data', None)
    """
    if set(axes) & set(sharding.axes):
        return sharding

    def divides(dim: int) -> bool:
        return shape[dim] > 0 and shape[dim] % shard_count((*sharding.dims[dim], *axes), sizes) == 0

    def preference(dim: int):
        is_minor = 0 < dim == len(shape) - 1
        return dim in last, dim in mixed, bool(sharding.dims[dim]), is_minor, -shape[dim]

    dim = min(filter(divides, range(len(shape))), key=preference, default=None)
    if dim is None:
        return sharding
    return Sharding(tuple((*split, *axes) if d == dim else split for d, split in enumerate(sharding.dims)))


def padded_shape(
    sharding: Sharding,
    shape: tuple[int, ...],
    axes: Axes,
    sizes: AxisSizes,
    mixed: Collection[int] = (),
) -> tuple[int, ...] | None:
    """The shape with one dim made longer, so that `axes` divide it: of the dims that nothing splits the one
    for which the fewest numbers are added. The first of three and more, over which layers may be stacked,
    counts as if it took an eighth of the array more, and those in `mixed` as if they took half of it, also
    where it needs no padding: what a loop goes over is gathered whole, where it is split. None where another
    dim needs none, or where no device would have less than all.

    >>> padded_shape(Sharding(((), ())), (13, 7), ("data",), {"data": 4})
    (13, 8)
    >>> padded_shape(Sharding(((), ())), (13, 8), ("data",), {"data": 4})
    >>> [padded_shape(Sharding(((),) * 3), x, ("data",), {"data": 8}) for x in ((12, 101, 509), (127, 3, 5))]
    [(12, 101, 512), (128, 3, 5)]
    >>> [padded_shape(Sharding(((),) * 3), x, ("data",), {"data": 8}) for x in ((24, 101, 509), (128, 3, 5))]
    [(24, 101, 512), None]
    >>> padded_shape(Sharding(((),) * 3), (12, 101, 509), ("data",), {"data": 8}, mixed=(1, 2))
    (16, 101, 509)
    """
    further = split_further(sharding, shape, axes, sizes, (0,))
    by_layers = len(shape) > 2 and further.dims[0] != sharding.dims[0]
    if set(axes) & set(sharding.axes) or further != sharding and not by_layers:
        return None

    def longer(dim: int) -> int:
        parts = shard_count((*sharding.dims[dim], *axes), sizes)
        return -(-shape[dim] // parts) * parts

    def shortens(dim: int) -> bool:
        return longer(dim) // shard_count(axes, sizes) < shape[dim]

    def preference(dim: int):
        stacked = dim == 0 and len(shape) > 2
        more = STACKED * stacked + MIXED * (dim in mixed)
        return bool(sharding.dims[dim]), longer(dim) / shape[dim] + more

    dim = min(filter(shortens, range(len(shape))), key=preference, default=None)
    padded = shape if dim is None else tuple(longer(d) if d == dim else size for d, size in enumerate(shape))
    return None if padded == shape else padded


def split_padded(
    sharding: Sharding, padded: tuple[int, ...], shape: tuple[int, ...], axes: Axes, sizes: AxisSizes
) -> Sharding:
    """The sharding of an array of true shape `shape`, with `axes` added to the dim along which it is padded.
    What that dim was split over besides goes, where it does not divide with these.

    >>> split_padded(Sharding((("model",),)), (8,), (7,), ("data",), {"data": 8, "model": 2})
    P('data')
    """
    dims, dim = list(sharding.without(axes).dims), padded_dim(padded, shape)
    with_others = (*dims[dim], *axes)
    dims[dim] = axes if padded[dim] % shard_count(with_others, sizes) else with_others
    return Sharding(tuple(dims))


def padded_dim(padded: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The dim along which an array is padded; the one of a bucket that needs no padding."""
    return next((dim for dim, size in enumerate(shape) if padded[dim] != size), 0)
