"""How a value is laid out on the devices: `Sharding`, the axes of each dim, and `Layout`, with padding and
pending reductions.
"""

import itertools
import math
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from weakref import WeakValueDictionary

from jax.sharding import PartitionSpec

from shardax import _jax

Axes = tuple[str, ...]
AxisSizes = Mapping[str, int]  # mesh axis -> number of devices along it, in mesh order


def rows_apart(axes: Axes, size: int, sizes: AxisSizes) -> Axes:
    """The first axes that split a dim of this size into single rows, with nothing left; all of them where
    there are no such.

    >>> rows_apart(("x", "y"), 4, {"x": 4, "y": 2}), rows_apart(("x", "y"), 3, {"x": 4, "y": 2})
    (('x',), ('x', 'y'))
    """
    return next((axes[:i] for i in range(len(axes)) if shard_count(axes[:i], sizes) == size), axes)


def trivial_axes(sizes: AxisSizes) -> frozenset[str]:
    """The axes of one device, which split nothing.

    >>> sorted(trivial_axes({"x": 2, "y": 1, "z": 1}))
    ['y', 'z']
    """
    return frozenset([axis for axis, n in sizes.items() if n == 1])


def shard_count(axes: Axes, sizes: AxisSizes) -> int:
    """The number of pieces into which `axes` split a dim.

    >>> shard_count(("x", "y"), {"x": 4, "y": 2})
    8
    """
    return math.prod([sizes[a] for a in axes])


def in_mesh_order(
    axes: Axes, pairs: Iterable[tuple[int, int]], sizes: AxisSizes
) -> tuple[Axes, list[tuple[int, int]]]:
    """The same axes in mesh order, and pairs of devices, counted along `axes` as they stand, counted along
    these.

    >>> in_mesh_order(("y", "x"), [(0, 1)], {"x": 2, "y": 3})
    (('x', 'y'), [(0, 3)])
    """
    ordered = tuple(a for a in sizes if a in axes)
    coordinates = itertools.product(*(range(sizes[a]) for a in axes))
    number = {c: i for i, c in enumerate(itertools.product(*(range(sizes[a]) for a in ordered)))}
    numbers = [number[tuple(c[axes.index(a)] for a in ordered)] for c in coordinates]
    return ordered, [(numbers[s], numbers[r]) for s, r in pairs]


def minor_most(shape: Sequence[int]) -> int:
    """The dim along which elements lie side by side in memory: the last of size 2 or more, else the last.

    >>> minor_most((4, 256, 1)), minor_most((1, 1))
    (1, 1)
    """
    return next((dim for dim in reversed(range(len(shape))) if shape[dim] > 1), len(shape) - 1)


def round_up(size: int, count: int) -> int:
    """The least multiple of `count` that is not below `size`.

    >>> round_up(257, 8)
    264
    """
    return -(-size // count) * count


@dataclass(frozen=True, slots=True)
class Owing:
    """What a PartitionSpec says of reductions: the axes over which the value is `unreduced`, its `reduction`
    pending, and those over which it is `reduced`: it is what it is, and its gradient is unreduced.

    >>> Owing(("x",)).transposed.reduced
    ('x',)
    """

    unreduced: Axes = ()
    reduced: Axes = ()
    reduction: str = "sum"

    def __bool__(self):
        return bool(self.unreduced or self.reduced)

    @property
    def pending(self) -> tuple[tuple[str, str], ...]:
        """As a layout has it."""
        return tuple((axis, self.reduction) for axis in self.unreduced)

    @property
    def transposed(self) -> "Owing":
        """That of a cotangent."""
        return Owing(self.reduced, self.unreduced) if self else self


NOTHING_OWED = Owing()


@dataclass(frozen=True, slots=True)
class Sharding:
    """The mesh axes that split each dim, major to minor. No axis is used twice.

    Covers GSPMD's replicated (no axes), tiled (all axes) and partially tiled shardings (GSPMD, section 3.1).
    That of a value at rest, or of a type, may also be unreduced (`owing`); a layout has `pending` for that.

    >>> Sharding((("data",), (), ("x", "y")))
    P('data', None, ('x', 'y'))
    """

    dims: tuple[Axes, ...]
    owing: Owing = NOTHING_OWED

    def __post_init__(self):
        axes = (*self.axes, *self.owing.unreduced, *self.owing.reduced) if self.owing else self.axes
        if len(set(axes)) != len(axes):
            raise ValueError(
                f"a mesh axis is used twice in {self}: each axis splits at most one dim; drop one of its uses"
            )

    @property
    def axes(self) -> Axes:
        return tuple(itertools.chain.from_iterable(self.dims))

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def spec(self) -> PartitionSpec:
        entries = (None if not d else d[0] if len(d) == 1 else d for d in self.dims)
        if not self.owing:
            return PartitionSpec(*entries)
        return _jax.owing_spec(entries, self.owing.unreduced, self.owing.reduced, self.owing.reduction)

    @property
    def placed(self) -> "Sharding":
        """What says where the values are: without the axes over which it is reduced, as types have them."""
        return Sharding(self.dims, replace(self.owing, reduced=())) if self.owing.reduced else self

    @property
    def settled(self) -> "Sharding":
        """The same dims, with nothing owed."""
        return Sharding(self.dims) if self.owing else self

    def without(self, axes: Container[str]) -> "Sharding":
        """The sharding in which these axes split nothing."""
        return Sharding(tuple(tuple(a for a in dim if a not in axes) for dim in self.dims), self.owing)

    def __repr__(self):
        words = [repr(None if not d else d[0] if len(d) == 1 else d) for d in self.dims]
        words += owing_words(self.owing)
        return f"P({', '.join(words)})"

    __str__ = __repr__


def replicated(rank: int) -> Sharding:
    """The sharding that splits nothing.

    >>> replicated(2)
    P(None, None)
    """
    return Sharding(((),) * rank)


def entry_axes(entry) -> Axes:
    """The axes that one entry of a PartitionSpec names; `UNCONSTRAINED` names none.

    >>> entry_axes("x"), entry_axes(("x", "y")), entry_axes(None)
    (('x',), ('x', 'y'), ())
    """
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def owing_words(owing: Owing) -> list[str]:
    """What a spec with these axes has after its entries, as a person types it.

    >>> owing_words(Owing(("x", "y"), ("z",)))
    ["unreduced={'x', 'y'}", "reduced={'z'}"]
    """
    named = {"unreduced": owing.unreduced, "reduced": owing.reduced}
    words = [f"{name}={{{', '.join(map(repr, axes))}}}" for name, axes in named.items() if axes]
    return words + ([f"unreduced_kind={owing.reduction}"] if owing.reduction != "sum" else [])


def entries_of(spec: Iterable) -> tuple:
    """The entries of a PartitionSpec, one for each dim. (JAX iterates over none that owes something.)

    >>> entries_of(PartitionSpec("x", unreduced={"y"}))
    ('x',)
    """
    return spec.partitions if isinstance(spec, PartitionSpec) else tuple(spec)


def owing_of(spec: Iterable) -> Owing:
    """What a PartitionSpec says of reductions, its axes by name.

    >>> owing_of(PartitionSpec("x", unreduced={"z", "y"})).unreduced
    ('y', 'z')
    """
    if not isinstance(spec, PartitionSpec) or not (spec.unreduced or spec.reduced):
        return NOTHING_OWED
    return Owing(tuple(sorted(spec.unreduced)), tuple(sorted(spec.reduced)), _jax.reduction_of(spec))


def from_spec(spec: Iterable, rank: int) -> Sharding:
    """The Sharding that a PartitionSpec gives to a value of this rank; missing entries split nothing.

    >>> from_spec(PartitionSpec("x"), 2)
    P('x', None)
    """
    dims = tuple(map(entry_axes, entries_of(spec)))
    if len(dims) > rank:
        raise ValueError(
            f"{spec} has {len(dims)} entries, the value has rank {rank}: drop the entries past it"
        )
    return Sharding(dims + ((),) * (rank - len(dims)), owing_of(spec))


def at_rest(sharding: Sharding, shape: tuple[int, ...], sizes: AxisSizes) -> Sharding:
    """The nearest sharding under which every shard has the same size, as a `jax.Array` between calls must
    have.

    Each dim keeps the longest run of major axes that divides it. An axis that it cannot keep moves to the
    largest other dim that it divides, else it is dropped.

    >>> at_rest(Sharding((("x",), ())), (257, 64), {"x": 4})
    P(None, 'x')
    """
    dims = []
    for axes, n in zip(sharding.dims, shape, strict=True):
        ends = (end for end in range(len(axes), 0, -1) if n and n % shard_count(axes[:end], sizes) == 0)
        dims.append([*axes[: next(ends, 0)]])
    homeless = [a for kept, axes in zip(dims, sharding.dims, strict=True) for a in axes[len(kept) :]]
    for axis in homeless:
        for d in sorted(range(len(shape)), key=lambda d: -shape[d]):
            if shape[d] and shape[d] % shard_count((*dims[d], axis), sizes) == 0:
                dims[d].append(axis)
                break
    return Sharding(tuple(map(tuple, dims)), sharding.owing)


@dataclass(frozen=True, slots=True, init=False, eq=False, weakref_slot=True)
class Layout:
    """A Sharding, the padded size of each dim, and the reductions that are still owed.

    A dim that no axis splits is never padded. A split dim of true size n is stored as `count` equal blocks
    that together hold `padded >= n` positions; positions n and beyond hold garbage. `pending` maps mesh axes
    to the reduction ("sum", "max", "min") that is still owed over them: the value is the reduction of the
    devices' values along that axis.

    Equal layouts are one object: a search looks them up over and over, which by identity takes least.

    >>> Layout(Sharding((("x",),)), (8,)) is Layout(Sharding((("x",),)), (8,))
    True
    """

    sharding: Sharding
    padded: tuple[int, ...]
    pending: tuple[tuple[str, str], ...]

    def __new__(
        cls, sharding: Sharding, padded: tuple[int, ...], pending: tuple[tuple[str, str], ...] = ()
    ) -> "Layout":
        key = sharding.dims, sharding.owing or None, padded, pending
        known = _layouts.get(key)
        if known is None:
            new = object.__new__(cls)
            object.__setattr__(new, "sharding", sharding)
            object.__setattr__(new, "padded", padded)
            object.__setattr__(new, "pending", pending)
            with _making:  # another thread may plan, too
                known = _layouts.setdefault(key, new)
        return known

    def __reduce__(self):
        return Layout, (self.sharding, self.padded, self.pending)

    @property
    def dims(self) -> tuple[Axes, ...]:
        return self.sharding.dims

    @property
    def pending_axes(self) -> Axes:
        return tuple(axis for axis, _ in self.pending)

    def local_shape(self, sizes: AxisSizes) -> tuple[int, ...]:
        dims = zip(self.padded, self.sharding.dims, strict=True)
        return tuple([p // shard_count(axes, sizes) if axes else p for p, axes in dims])

    def settled(self) -> "Layout":
        return Layout(self.sharding, self.padded) if self.pending else self

    def __repr__(self):
        pending = "".join(f" pending {reduction} over {axis}" for axis, reduction in self.pending)
        return f"{self.sharding}@{list(self.padded)}{pending}"


_layouts: WeakValueDictionary[Hashable, Layout] = WeakValueDictionary()
_making = Lock()


@lru_cache(maxsize=1 << 16)
def layout_of(
    dims: tuple[Axes, ...], padded: tuple[int, ...], pending: tuple[tuple[str, str], ...] = ()
) -> Layout:
    """The layout of these parts, found quicker than by making its sharding first.

    >>> layout_of((("x",), ()), (8, 3))
    P('x', None)@[8, 3]
    """
    return Layout(Sharding(dims), padded, pending)


def layout_at_rest(sharding: Sharding, shape: tuple[int, ...]) -> Layout:
    """The layout of a value that rests so, its shards of one size.

    >>> layout_at_rest(Sharding((("x",),), Owing(("y",))), (8,))
    P('x')@[8] pending sum over y
    """
    return Layout(sharding.settled, tuple(shape), sharding.owing.pending)


def replicated_layout(shape: tuple[int, ...]) -> Layout:
    """The layout in which every device holds everything.

    >>> replicated_layout((3, 4))
    P(None, None)@[3, 4]
    """
    return layout_of(((),) * len(shape), tuple(shape))


@dataclass(frozen=True)
class Padding:
    """To what size each dim is padded: for the finest split that the program gives to dims of its size.

    Ceil-division does not nest (blocks of ceil(257/8) straddle blocks of ceil(257/4)), so a dim that is split
    over (x,) in one place and over (x, y) in another is padded for (x, y) in both: coarser shards are whole
    multiples of finer ones, and moving between them is an exact slice or all_gather.
    `splits` holds (dim size, axes) for every split that the program uses.
    """

    sizes: AxisSizes
    splits: frozenset[tuple[int, Axes]] = frozenset()

    def __post_init__(self):
        finest: dict[tuple[int, Axes], int] = {}
        for size, axes in self.splits:
            count = shard_count(axes, self.sizes)
            for end in range(1, len(axes) + 1):
                key = (size, axes[:end])
                finest[key] = math.lcm(finest.get(key, 1), count)
        object.__setattr__(self, "_finest", finest)

    def padded(self, size: int, axes: Axes) -> int:
        """The padded size of a dim of `size` that `axes` split."""
        if not axes:
            return size
        return round_up(size, self._finest.get((size, axes)) or shard_count(axes, self.sizes))  # type: ignore[attr-defined]

    def layout(
        self, sharding: Sharding, shape: tuple[int, ...], pending: tuple[tuple[str, str], ...] = ()
    ) -> Layout:
        """The layout of a value of this shape under `sharding`."""
        padded = tuple(map(self.padded, shape, sharding.dims))
        return (
            Layout(sharding, padded, pending) if sharding.owing else layout_of(sharding.dims, padded, pending)
        )
