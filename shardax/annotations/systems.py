"""Annotations under the names that other systems gave them: GShard, GSPMD, PyTorch/XLA, DTensor. Each is an
`annotate`.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardax import _jax
from shardax.annotations.annotate import annotate, describe, require_explicit
from shardax.annotations.explicit import explicit_mesh
from shardax.sharding import Axes, Owing, Sharding, entry_axes
from shardax.validation import is_integer, require, require_array, require_mesh

AnyMesh = Mesh | AbstractMesh


@_jax.boundary
def split(x, dim: int, axis_or_count: str | Sequence[str] | int):
    """GShard's: splits dim `dim` of the array `x` over an axis, over several, or into so many shards; its
    other dims stay whole.

    A count means the run of neighbouring axes of the mesh in context that has so many devices. Raises
    ValueError where there is none, or more than one.

    >>> import jax
    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> with jax.set_mesh(mesh):
    ...     split(jax.numpy.zeros((8, 4)), -1, "x").sharding.spec == PartitionSpec(None, "x")
    True
    """
    require_array(x, "x of split")
    require(is_integer(dim), "dim of split", dim, "the number of a dim, such as 0")
    axes = axis_or_count if isinstance(axis_or_count, tuple | list) else (axis_or_count,)
    ok = is_integer(axis_or_count, 1) or all(isinstance(axis, str) for axis in axes)
    require(
        ok,
        "axis_or_count of split",
        axis_or_count,
        "an axis, such as 'x', a tuple of axes, or a number of shards",
    )
    axes = _axes_of_count(int(axis_or_count)) if is_integer(axis_or_count) else axes  # type: ignore[arg-type]
    before = _dim(dim, np.ndim(x), f"split(x, {dim}, {axis_or_count!r})")
    return annotate(x, PartitionSpec(*[None] * before, axes[0] if len(axes) == 1 else tuple(axes) or None))


@_jax.boundary
def shard(x, device_assignment):
    """GShard's: `device_assignment` has a dim for each dim of `x`, and in each place the device that holds
    that shard.

    A device is named by its position in the flat mesh in context, and each holds one shard. An assignment
    that the axes of the mesh cannot express becomes a mesh of its own over the same devices. Raises
    ValueError where it does not name every device once.
    """
    require_array(x, "x of shard")
    mesh, tiles = _context("shard"), _assignment(device_assignment)
    if tiles.ndim != np.ndim(x):
        raise ValueError(
            f"shard: a device_assignment of shape {tiles.shape} for an array of shape {np.shape(x)}: give "
            "it a dim for each dim, of size 1 where the array is not split"
        )
    for order in itertools.permutations(mesh.axis_names):
        dims = _cut(order, tiles.shape, mesh)
        if dims is not None and np.array_equal(_positions(mesh, order).reshape(tiles.shape), tiles):
            return annotate(x, PartitionSpec(*(dim or None for dim in dims)))
    if isinstance(mesh, Mesh) and sorted(tiles.ravel().tolist()) == list(range(mesh.size)):
        axes = [f"shard.{d}" for d in range(tiles.ndim)]
        own = Mesh(mesh.devices.ravel()[tiles], axes, axis_types=(AxisType.Auto,) * tiles.ndim)
        return annotate(x, NamedSharding(own, PartitionSpec(*axes)))
    raise ValueError(
        f"shard: the device_assignment {tiles.tolist()} is no tiling by the axes of the mesh "
        f"({describe(mesh)}), whose devices are {_positions(mesh, mesh.axis_names).tolist()}: give one that "
        "is, or one that names each device of a mesh once"
    )


@_jax.boundary
def mesh_split(x, mesh: AnyMesh, dims_mapping: Sequence[int]):
    """GSPMD's: `dims_mapping` gives for each dim of `x` the dim of the mesh that splits it, or -1.

    >>> import jax
    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> mesh_split(jax.numpy.zeros((8, 4)), mesh, [0, -1]).sharding.spec == PartitionSpec("x", None)
    True
    """
    _check_arguments(x, mesh, dims_mapping, "dims_mapping", "mesh_split", "such as [0, -1]")
    what = f"mesh_split(x, mesh, dims_mapping={list(dims_mapping)})"
    if len(dims_mapping) != np.ndim(x):
        raise ValueError(
            f"{what}: x has the shape {np.shape(x)}: give one entry for each dim, -1 where it is not split"
        )
    return _annotate_on(
        x, mesh, [None if is_integer(i) and i == -1 else _axis(i, mesh, what) for i in dims_mapping], what
    )


@_jax.boundary
def mark_sharding(x, mesh: AnyMesh, spec: Sequence[Any]):
    """PyTorch/XLA's: `spec` has for each dim of `x` a dim of the mesh, by number or by name, a tuple of them,
    or None.

    >>> import jax
    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> mark_sharding(jax.numpy.zeros((8, 4)), mesh, ("x", None)).sharding.spec == PartitionSpec("x", None)
    True
    """
    _check_arguments(x, mesh, spec, "spec", "mark_sharding", "such as (0, None)")
    what = f"mark_sharding(x, mesh, {tuple(spec)})"
    if len(spec) != np.ndim(x):
        raise ValueError(
            f"{what}: x has the shape {np.shape(x)}: give one entry for each dim, None where it is not split"
        )
    return _annotate_on(x, mesh, [_entry(entry, mesh, what) for entry in spec], what)


@dataclass(frozen=True)
class Shard:
    """DTensor's: this dim of the mesh splits dim `dim` of the array."""

    dim: int

    def __post_init__(self):
        require(is_integer(self.dim), "dim of Shard", self.dim, "the number of a dim, such as 0")


@dataclass(frozen=True)
class Replicate:
    """DTensor's: along this dim of the mesh each device holds the same."""


@dataclass(frozen=True)
class Partial:
    """DTensor's: a sum over this dim of the mesh is still owed."""

    reduce_op: str = "sum"


@_jax.boundary
def redistribute(x, mesh: AnyMesh, placements: Sequence[Any]):
    """DTensor's: `placements` says for each dim of the mesh what it does to `x`. A dim that is split twice is
    split left to right.

    >>> import jax
    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> redistribute(jax.numpy.zeros((8, 4)), mesh, [Shard(0)]).sharding.spec == PartitionSpec("x", None)
    True
    """
    _check_arguments(x, mesh, placements, "placements", "redistribute", "such as [Shard(0), Replicate()]")
    what = f"redistribute(x, mesh, {list(placements)})"
    axes = mesh.axis_names
    if len(placements) != len(axes):
        raise ValueError(
            f"{what}: the mesh is ({describe(mesh)}): give one placement for each of its {len(axes)} dims"
        )
    dims: list[Axes] = [()] * np.ndim(x)
    for axis, placement in zip(axes, placements, strict=True):
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            raise ValueError(f"{what}: an annotation can owe a sum alone, and no {placement.reduce_op!r}")
        if isinstance(placement, Shard):
            dims[_dim(placement.dim, len(dims), what)] += (axis,)
        elif not isinstance(placement, Replicate | Partial):
            raise ValueError(f"{what}: {placement!r} is no placement; give Shard(dim) or Replicate()")
    owing = Owing(tuple(a for a, p in zip(axes, placements, strict=True) if isinstance(p, Partial)))
    if not owing:
        return _annotate_on(x, mesh, [dim or None for dim in dims], what)
    if _jax.is_eager(x):
        require_explicit(owing, mesh, f"{what} asks for what owes a sum")
    return annotate(x, NamedSharding(explicit_mesh(mesh), Sharding(tuple(dims), owing).spec))


def _check_arguments(x, mesh: AnyMesh, entries, argument: str, function: str, example: str) -> None:
    require_array(x, f"x of {function}")
    require_mesh(mesh, function)
    ok = isinstance(entries, Sequence) and not isinstance(entries, str)
    require(ok, f"{argument} of {function}", entries, f"a sequence, {example}")


def _assignment(assignment) -> np.ndarray:
    try:
        tiles = np.asarray(assignment)
    except ValueError:
        tiles = np.asarray(None)  # rows of different lengths
    require(
        tiles.dtype.kind in "iu",
        "device_assignment of shard",
        assignment,
        "an array of the numbers of devices",
    )
    return tiles


def _annotate_on(x, mesh: AnyMesh, entries: Sequence[Any], what: str):
    uses = [(a, d) for d, entry in enumerate(entries) for a in entry_axes(entry)]
    for axis, _ in uses:
        if len(dims := [str(d) for a, d in uses if a == axis]) > 1:
            where = f"for dims {' and '.join(dims)}"
            raise ValueError(
                f"{what} uses {axis!r} of the mesh ({describe(mesh)}) twice, {where}: it splits at most one "
                "dim of x"
            )
    return annotate(x, NamedSharding(mesh, PartitionSpec(*entries)))


def _entry(entry, mesh: AnyMesh, what: str):
    if entry is None:
        return None
    if isinstance(entry, tuple | list):
        return tuple(_axis(part, mesh, what) for part in entry)
    return _axis(entry, mesh, what)


def _axis(dim, mesh: AnyMesh, what: str) -> str:
    """The name of a dim of the mesh."""
    if isinstance(dim, str) and dim in mesh.axis_names:
        return dim
    if not is_integer(dim) or not 0 <= dim < len(mesh.axis_names):
        raise ValueError(
            f"{what}: the mesh ({describe(mesh)}) has no dim {dim!r}: give the number or the name of one of "
            "its dims"
        )
    return mesh.axis_names[dim]


def _dim(dim: int, rank: int, what: str) -> int:
    if not -rank <= dim < rank:
        raise ValueError(
            f"{what}: x has {rank} dims, none of them is {dim}"
            + f": give a number from {-rank} to {rank - 1}" * (rank > 0)
        )
    return dim % rank


def _context(what: str) -> AnyMesh:
    mesh = _jax.context_mesh()
    if mesh is None:
        raise ValueError(
            f"{what}: there is no mesh in context to name the devices; enter one with jax.set_mesh"
        )
    return mesh


def _axes_of_count(count: int) -> Axes:
    mesh = _context("split")
    axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    runs = [axes[i:j] for i in range(len(axes)) for j in range(i + 1, len(axes) + 1)]
    fits = [()] if count == 1 else [run for run in runs if math.prod(mesh.shape[a] for a in run) == count]
    if len(fits) != 1:
        why = (
            f"{' and '.join(map(str, fits))} have so many devices"
            if fits
            else "none of its axes has so many devices"
        )
        raise ValueError(f"split in {count} on the mesh ({describe(mesh)}): {why}; name the axes instead")
    return fits[0]


def _cut(order: Axes, counts: tuple[int, ...], mesh: AnyMesh) -> list[Axes] | None:
    """Axes dealt out to dims, in this order, so that each dim is split as often as `counts` says."""
    left, dims = [a for a in order if mesh.shape[a] > 1], []
    for count in counts:
        taken: Axes = ()
        while left and math.prod(mesh.shape[a] for a in taken) < count:
            taken += (left.pop(0),)
        dims.append(taken)
    shard_counts = tuple(math.prod(mesh.shape[a] for a in dim) for dim in dims)
    return dims if shard_counts == counts and not left else None


def _positions(mesh: AnyMesh, order: Axes) -> np.ndarray:
    axes = mesh.axis_names
    return np.arange(mesh.size).reshape(tuple(mesh.shape.values())).transpose([axes.index(a) for a in order])
