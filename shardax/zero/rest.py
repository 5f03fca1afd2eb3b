"""Rest: along which dim an axis splits an array that is otherwise replicated over it."""

from collections.abc import Collection

from shardax.sharding import Axes, AxisSizes, Sharding, shard_count


def split_further(
    sharding: Sharding, shape: tuple[int, ...], axes: Axes, sizes: AxisSizes, last: Collection[int] = ()
) -> Sharding:
    """The sharding with `axes` added to the largest dim that they divide: one that nothing splits yet, if
    there is any; those in `last`, over which layers are scanned, only where no other can. The same, where
    none can.

    >>> split_further(Sharding(((), ("model",))), (64, 256), ("data",), {"data": 4, "model": 2})
    P('data', 'model')
    """
    if set(axes) & set(sharding.axes):
        return sharding

    def divides(dim: int) -> bool:
        return shape[dim] > 0 and shape[dim] % shard_count((*sharding.dims[dim], *axes), sizes) == 0

    def preference(dim: int):
        return dim in last, bool(sharding.dims[dim]), -shape[dim]

    dim = min(filter(divides, range(len(shape))), key=preference, default=None)
    if dim is None:
        return sharding
    return Sharding(tuple((*split, *axes) if d == dim else split for d, split in enumerate(sharding.dims)))
