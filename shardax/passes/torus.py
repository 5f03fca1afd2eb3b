"""Collectives over a whole torus, done as two, one after the other.

XLA's TPU compiler makes a reduce_scatter over all devices that it compiles for an all_reduce, which sends
twice as much, and so an all_gather over more than 32 of them, where these lie along all dims of the torus.
Over fewer devices, or along fewer dims, both stay what they are. (Measured for v3, v4, v5e, v5p and v6e; on
two dims, one of two devices does not count.)

So of n = a b devices along x, y and z, a along x and y, b along z, each scatters first over the a, then over
the b, and gathers the other way round. Of V bytes as many are sent:

    V (a - 1) / a  +  (V / a) (b - 1) / b  =  V (n - 1) / n

Only where the places of the devices are known, and for arrays that take longer to send than a collective to
start.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardax import _jax
from shardax.cost.chips import KINDS
from shardax.ledger.collectives import array_bytes

SMALL = 128 << 10  # bytes that are sent in a few starts' time
GATHERED = 32  # devices over which an all_gather stays one
DIMS = {"reduce_scatter": "scatter_dimension", "all_gather": "all_gather_dimension"}


def in_two(eqn, mesh: Mesh | AbstractMesh | None) -> Iterator[Any]:
    """The equation; a large reduce_scatter or all_gather over a whole torus as two.

    Args:
      eqn: of a local program.
      mesh: whose axes the program names. Where the devices of an abstract one are nobody knows.
    """
    parts = _parts(eqn, mesh) if isinstance(mesh, Mesh) else None
    yield from [eqn] if parts is None else in_parts(eqn, *parts)


def in_parts(eqn, major: int, minor: int) -> Iterator[Any]:
    """A reduce_scatter or all_gather over `major * minor` devices, that many by that many."""
    count, scatters = major * minor, eqn.primitive.name == "reduce_scatter"
    outer = tuple(tuple(range(j, count, minor)) for j in range(minor))
    inner = tuple(tuple(range(i, i + minor)) for i in range(0, count, minor))
    first, last = (outer, inner) if scatters else (inner, outer)
    shape, dim = list(eqn.invars[0].aval.shape), eqn.params[DIMS[eqn.primitive.name]]
    shape[dim] = shape[dim] // major if scatters else shape[dim] * minor
    between = _jax.new_variable(eqn.outvars[0].aval.update(shape=tuple(shape)))
    yield eqn.replace(outvars=[between], params=_over(first, eqn))
    yield eqn.replace(invars=[between], params=_over(last, eqn))


def _over(groups: tuple[tuple[int, ...], ...], eqn) -> dict[str, Any]:
    return {**eqn.params, "axis_index_groups": groups, "axis_size": len(groups[0])}


def _parts(eqn, mesh: Mesh) -> tuple[int, int] | None:
    """By how many devices an equation is done, and by how many then; None where it stays one."""
    if eqn.primitive.name not in DIMS or not eqn.params["tiled"] or eqn.params["axis_index_groups"]:
        return None
    names = eqn.params["axis_name"]
    names = names if isinstance(names, tuple) else (names,)
    if max(array_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars)) < SMALL:
        return None
    if not set(names) <= set(mesh.axis_names):
        return None
    count, everyone = math.prod(mesh.shape[name] for name in names), math.prod(mesh.shape.values())
    if count < everyone or eqn.primitive.name == "all_gather" and count <= GATHERED:
        return None
    return _along(mesh, names)


@lru_cache
def _along(mesh: Mesh, names: tuple[str, ...]) -> tuple[int, int] | None:
    """Of the devices along these axes, as the first of them show."""
    chip = KINDS.get(mesh.devices.flat[0].device_kind)
    others = [name for name in mesh.axis_names if name not in names]
    devices = mesh.devices.transpose([mesh.axis_names.index(name) for name in (*names, *others)])
    along = devices.reshape(math.prod(mesh.shape[name] for name in names), -1)[:, 0]
    if chip is None or not chip.torus or len({getattr(d, "slice_index", 0) for d in along}) > 1:
        return None
    return divided(np.array([device.coords for device in along]), chip.torus)


def divided(places: np.ndarray, dims: int) -> tuple[int, int] | None:
    """(a, b) such that of devices at these places on a torus of so many dims, major to minor, neither each
    b-th nor the first b lie along all dims; None where not even all do, or where there are none.

    >>> cube = np.indices((2, 2, 2)).reshape(3, -1).T
    >>> divided(cube, 3), divided(cube[:4], 3)
    ((4, 2), None)
    """
    longest = 1 if dims == 2 else 0  # that does not count, in steps

    def fit(some: np.ndarray) -> bool:
        return int(np.sum(np.ptp(some, axis=0) > longest)) < dims

    if fit(places):
        return None
    counts = (b for b in range(2, len(places)) if len(places) % b == 0)
    return next(((len(places) // b, b) for b in counts if fit(places[:b]) and fit(places[::b])), None)
