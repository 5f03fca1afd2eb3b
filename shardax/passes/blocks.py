"""Blocks: how an array at the host is cut, so that XLA can copy its parts, and fast.

On TPUs it copies no part that is cut along two dims, none that is cut along the columns of its tiles, and
writes none that is not of whole tiles. Which dims these are depends on the shape: TPUs tile those two of
which an array takes the least memory. GPUs have rows one after the other, and copy what lies together at the
full rate of their link; for anything else a kernel reads and writes at the host, number by number.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from shardax.annotations.explicit import memory_of

DEVICE = jax.memory.Space.Device
TILE = 32  # bytes of a column of a tile
Shape = tuple[int, ...]


def blocks(
    shape: Shape,
    widths: list[int],
    most: int,
    along: int | None = None,
    whole: int | None = None,
    tiles: bool = True,
) -> "Blocks | None":
    """The largest ones of at most so many bytes in each array, or else the smallest there are; None where it
    cannot be cut.

    widths: the bytes of an element in each.
    along: the dim along which alone they are cut, if they can be.
    whole: a dim along which they are not cut.
    tiles: whether the array lies in tiles, or row by row.

    >>> blocks((24, 256, 8192), [4, 4], 2**20).sizes, blocks((4096,), [4], 2**10)
    ((32, 8192), None)
    >>> blocks((48, 6400, 1600), [4], 2**24).sizes, blocks((48, 6400, 1600), [4], 2**24, tiles=False).sizes
    ((48, 6400, 8), (2560, 1600))
    """
    cuts = _cuts(shape, TILE // min(widths), along, whole) if tiles else _cuts_in_order(shape, along, whole)
    ways = [_rows(shape, *cut, most // max(widths)) for cut in cuts]
    fits = [way for way in ways if way.elements * max(widths) <= most]
    return max(fits, key=_elements) if fits else min(ways, key=_elements, default=None)


def _elements(of: "Blocks") -> int:
    return of.elements


@dataclass(frozen=True)
class Blocks:
    """Blocks of an array of some shape, each of `size` rows of its dims from `first` to before `end` as one:
    so many, one after the other, and where rows are left one more, which ends with them.
    """

    shape: Shape
    first: int
    end: int
    size: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[self.first : self.end])

    @property
    def view(self) -> Shape:
        return self.viewed(self.shape)

    def viewed(self, shape: Shape) -> Shape:
        """The shape in which these dims are one."""
        return *shape[: self.first], math.prod(shape[self.first : self.end]), *shape[self.end :]

    @property
    def sizes(self) -> Shape:
        return *self.shape[: self.first], self.size, *self.shape[self.end :]

    @property
    def count(self) -> int:
        return self.rows // self.size

    @property
    def has_last(self) -> bool:
        return self.rows % self.size > 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape) // self.rows * self.size

    def number(self, n) -> "Block":
        return Block(self, n * self.size)

    def last(self, _) -> "Block":
        return Block(self, self.rows - self.size, self.count * self.size)


@dataclass(frozen=True)
class Block:
    """One of the blocks, from row `start` on; rows before `done` are done."""

    of: Blocks
    start: Any
    done: int = 0

    @property
    def sizes(self) -> Shape:
        return self.of.sizes

    @property
    def starts(self) -> list[Any]:
        return [self.start if dim == self.of.first else 0 for dim in range(len(self.sizes))]

    @property
    def _rows(self) -> Any:
        """Of each element the row in which it lies."""
        return self.start + lax.broadcasted_iota("int32", self.sizes, self.of.first)

    def read(self, x, part: "Part | None" = None) -> Any:
        """It of an array, or of a part of that."""
        starts, sizes = self.starts, list(self.sizes)
        if part is None:
            return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
        if part.dim == self.of.first:
            starts[part.dim] += part.begin
            return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
        dim = part.dim if part.dim < self.of.first else part.dim - (self.of.end - self.of.first - 1)
        sizes[dim] = x.shape[dim]
        rows = put(lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False), DEVICE)
        if part.fill is not None:
            tail = part.size - x.shape[dim]
            rows = lax.pad(rows, part.fill, [(0, tail * (d == dim), 0) for d in range(rows.ndim)])
        return lax.dynamic_slice_in_dim(rows, part.begin, self.sizes[dim], dim, allow_negative_indices=False)

    def write(self, whole, x) -> Any:
        """The whole, in whatever memory, with the block `x`, but for the rows that are done."""
        if self.done:
            x = lax.select(self._rows < self.done, put(self.read(whole), DEVICE), put(x, DEVICE))
        x = put(x, memory_of(jax.typeof(whole)))
        return lax.dynamic_update_slice(whole, x, self.starts, allow_negative_indices=False)

    def places(self, dim: int, dtype) -> Any:
        """Of each element where it lies along a dim of the array."""
        first, end, shape = self.of.first, self.of.end, self.of.shape
        if not first <= dim < end:
            return lax.broadcasted_iota(dtype, self.sizes, dim if dim < first else dim - end + first + 1)
        place = lax.rem(lax.div(self._rows, math.prod(shape[dim + 1 : end])), shape[dim])
        return lax.convert_element_type(place, dtype)


@dataclass(frozen=True)
class Part:
    """A part of an array: rows of `dim` from `begin` on, after this is padded to `size` with `fill`, if that
    is not None.
    """

    dim: int
    begin: Any
    size: int
    fill: Any = None


def put(x, to: Any) -> Any:
    """The value in that memory."""
    return x if memory_of(jax.typeof(x)) is to else jax.device_put(x, to)


def _cuts(shape: Shape, tile: int, along: int | None, whole: int | None) -> Iterator[tuple[int, int, int]]:
    """From which dim to before which an array may be cut, as one, and into multiples of how many rows. Dims
    are one where they are in order, and there are whole tiles of rows of the last but one.
    """
    rank, (rows, lanes) = len(shape), tiled_dims(shape)
    in_order = (rows, lanes) == (rank - 2, rank - 1)
    for dim in range(rank) if along in (None, lanes) else (along,):
        are_one = dim == rows != along and in_order and shape[rows] % tile == 0
        first = 0 if are_one and (whole is None or whole > dim) else dim
        unit = tile if dim == rows else 1
        if dim not in (lanes, whole) and math.prod(shape[first : dim + 1]) > unit:
            yield first, dim + 1, unit


def _cuts_in_order(shape: Shape, along: int | None, whole: int | None) -> list[tuple[int, int, int]]:
    """Likewise of an array that lies row by row: into parts that lie together, and where there are none into
    parts whose rows do.
    """
    if along is not None:
        return [(along, along + 1, 1)] if shape[along] > 1 else []
    last = max(len(shape) - 1, 1)  # rows are not cut, but that of an array of one dim
    before = last if whole is None else min(whole, last)
    together = [(0, dim + 1, 1) for dim in range(before) if math.prod(shape[: dim + 1]) > 1]
    return together or [(dim, dim + 1, 1) for dim in range(before + 1, len(shape)) if shape[dim] > 1]


def tiled_dims(shape: Shape) -> tuple[int, int]:
    """The dims of whose rows and columns TPUs make tiles, 8 by 128: those for which an array takes the least
    memory, which may not be the last ones; among equals the last. An array of one dim has no rows.

    >>> tiled_dims((24, 2048, 8192)), tiled_dims((50257, 96)), tiled_dims((512,))
    ((1, 2), (1, 0), (-1, 0))
    """

    def padded(rows: int, lanes: int) -> int:
        height = next(n for n in (1, 2, 4, 8) if n == 8 or shape[rows] <= n)
        return -(-shape[rows] // height) * height * -(-shape[lanes] // 128) * 128

    def preference(pair: tuple[int, int]):
        rows, lanes = pair
        return padded(rows, lanes) / (shape[rows] * shape[lanes]), -lanes, -rows

    pairs = itertools.permutations(range(len(shape)), 2)
    return min(pairs, key=preference, default=(-1, len(shape) - 1))


def _rows(shape: Shape, first: int, end: int, unit: int, most: int) -> Blocks:
    """Blocks of at most so many elements, if there are such: of so many units that they divide all, where
    they are not much smaller then.
    """
    rows = math.prod(shape[first:end])
    fit = min(most * rows // math.prod(shape) // unit, rows // 2 // unit)
    whole = (n for n in range(fit, fit // 2, -1) if rows % (n * unit) == 0)
    return Blocks(shape, first, end, max(next(whole, fit), 1) * unit)
