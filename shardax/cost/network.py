"""What sending and computing cost on a mesh of chips, in picoseconds: the one price by which alternatives are
compared.

A `Network` is the sizes of a mesh's axes together with the chip that its devices are, so whoever knows the
mesh knows prices. Prices are whole numbers of picoseconds, held by floats, so that sums are exact and ties
are ties in any order.

A collective is priced as its ring algorithm: the hops that its data makes, one after the other, and the bytes
that each device sends over the links of the slowest of its axes (Austin et al., "How to Scale Your Model",
part 3). An axis along several dims of a torus is one ring after the other:

    start + hops · latency + bytes · detour / rate

    hops     of n devices: n/2 in a ring that sends both ways, n - 1 in a line or a one-way ring; over several
             axes their sum; of an all_reduce twice that; of a ppermute between neighbours one
    detour   1; of an all_to_all, and of a ppermute between any others than neighbours, max(1, n/4) on a
             torus, because what goes to another device passes n/4 links on average (so its time grows as the
             square root of the devices, as GShard measured)

An all_to_all also rearranges what it sends in memory, before and after. On TPUs that takes as long as
`copies` copies. There an all_gather along the minor-most dim, of pieces that do not fill the lanes, is made
transposed and then copied; and a convolution of few images takes `few` times as long as one of many.

That several dims of a torus could send at once is not assumed. So a price never falls when there are more
bytes to send, or more axes to send along.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardax.cost.chips import NOMINAL, Chip, chip_of

PICO = 1e12
FAR = 4  # in a ring of fewer devices all are neighbours
NARROW = (
    2.4  # copies, by the cycles that the TPU compiler estimates for pieces of 4 to 64 that are read by row
)


@dataclass(frozen=True, slots=True)
class Line:
    """How the devices along an axis of the mesh are joined.

    `rate`: bytes/s that each sends when all do, in a ring or along a line. `latency`: seconds until all have
    heard of each. `detour`: how often a byte that goes to any other of them is sent.
    """

    rate: float
    latency: float
    detour: float = 1.0


class Message(NamedTuple):
    """What a device sends in one collective over `axes`: `nbytes`.

    `minor`: of a reduce_scatter along the minor-most dim, how many of its elements each device is left with;
    of an all_gather along it, how many each has before.
    `far`: of a ppermute, whether some device sends to another than a neighbour.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: float
    minor: int | None = None
    far: bool = False


class Network(dict[str, int]):
    """Axis sizes in mesh order, never changed and so hashable, and the prices of a chip. `lines`: how the
    devices along each axis are joined; unless given, as `assumed` says. `cut`: those that together are one
    axis of the mesh, which is cut in them. `alike`: for each axis that costs the same as others, these and
    itself. `tiles`: whether arrays of its devices lie in tiles, whatever the
    chip whose prices count.

    >>> network = Network({"x": 4})
    >>> network["x"], network.collective("all_gather", ("x",), 1000)
    (4, 22560.0)
    """

    __slots__ = ("chip", "lines", "cut", "alike", "tiles", "_key", "_hash", "_ways")

    def __init__(
        self,
        sizes: Mapping[str, int],
        chip: Chip = NOMINAL,
        lines: Mapping[str, Line] | None = None,
        cut: Sequence[tuple[str, ...]] = (),
        tiles: bool | None = None,
    ):
        super().__init__(sizes)
        self.cut = tuple(cut)
        self.tiles = chip.tiles if tiles is None else tiles
        self.chip, self.lines = chip, dict(lines or assumed(sizes, chip))
        self.alike = _alike(sizes, self.lines)
        self._key = (tuple(sizes.items()), chip, tuple(self.lines.items()), self.tiles)
        self._hash = hash(self._key)
        self._ways: dict[tuple[str, tuple[str, ...], bool], tuple[float, float]] = {}

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other) -> bool:
        return self is other or (
            self._key == other._key if isinstance(other, Network) else super().__eq__(other)
        )

    def __ne__(self, other) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return f"Network({dict(self)}, {self.chip.name})"

    def collective(
        self,
        kind: str,
        axes: tuple[str, ...],
        nbytes: float,
        minor: int | None = None,
        far: bool = False,
    ) -> float:
        """Picoseconds of one collective over these axes in which each device sends so many bytes: of a
        `Message`.
        """
        if minor is not None and kind == "reduce_scatter" and minor <= self.chip.lanes:
            kind, nbytes = "all_reduce", 2 * nbytes
        start, byte = self._ways.get((kind, axes, far)) or self._way(kind, axes, far)
        if minor is not None and kind == "all_gather" and minor < self.chip.lanes:
            byte += PICO * 2 * NARROW / self.chip.memory_rate
        return float(round(start + nbytes * byte))

    def _way(self, kind: str, axes: tuple[str, ...], far: bool) -> tuple[float, float]:
        """Picoseconds to start a collective, and for each byte. Axes of other meshes, which crossings name,
        are any links.
        """
        lines = [self.lines[a] for a in axes if self.get(a, 1) > 1]
        rings = 2 if kind == "all_reduce" else 1
        near = kind == "ppermute" and not far
        latency = self.chip.latency if near else rings * sum(line.latency for line in lines)
        detour = max((line.detour for line in lines), default=1) if far or kind == "all_to_all" else 1
        rate = min((line.rate for line in lines), default=self.chip.link_rate)
        copied = 2 * self.chip.copies / self.chip.memory_rate if kind == "all_to_all" else 0
        seconds = detour / rate + copied
        way = self._ways[kind, axes, far] = PICO * (self.chip.start + latency), PICO * seconds
        return way

    def least(self, axes: Sequence[str], nbytes: float) -> float:
        """Picoseconds that no collectives over some of these axes beat in which a device sends so many bytes
        in all.
        """
        fastest = max((self.lines[a].rate for a in axes), default=self.chip.link_rate)
        return float(math.floor(PICO * (self.chip.start + self.chip.latency) + nbytes * (PICO / fastest)))

    def compute(self, flops: float, nbytes: float) -> float:
        """Picoseconds of an operation on one device: the longer of its products and its memory traffic."""
        return float(
            math.ceil(max(flops * (PICO / self.chip.flops), nbytes * (PICO / self.chip.memory_rate)))
        )

    def batched(self, price: float, items: int | None) -> float:
        """The price of an operation on a batch of so many items, of which the compiler takes several at once;
        None is any number.
        """
        several = self.chip.batch
        if not items or not several:
            return price
        more = self.chip.few if items < several else several * math.ceil(items / several) / items
        return float(math.ceil(price * more))


def reaches_far(pairs: Sequence[tuple[int, int]], counts: Sequence[int]) -> bool:
    """Whether some of these (sender, receiver) are no neighbours: more than one step apart along some axis,
    where devices are numbered along axes of so many, each a ring.

    >>> reaches_far([(0, 1), (3, 0)], [4]), reaches_far([(0, 5)], [4, 4]), reaches_far([(0, 4)], [8])
    (False, False, True)
    """
    if not len(pairs) or max(counts, default=1) < FAR:
        return False
    ends = np.array(np.unravel_index(np.array(pairs).T, tuple(counts)))
    distance = np.abs(ends[:, 0] - ends[:, 1])
    return bool(np.minimum(distance, np.array(counts)[:, None] - distance).max() > 1)


def network_of(sizes: Mapping[str, int]) -> Network:
    """The sizes of a mesh with their prices: those of the nominal chip, where they have none."""
    return sizes if isinstance(sizes, Network) else _nominal(tuple(sizes.items()))


@lru_cache
def _nominal(sizes: tuple[tuple[str, int], ...]) -> Network:
    return Network(dict(sizes))


def network_of_mesh(
    mesh: Mesh | AbstractMesh | None, chip: Chip | None = None, sizes: Mapping[str, int] | None = None
) -> Network:
    """The prices on a mesh, of its axes or of those of `sizes`, into which the same devices in the same order
    are put.

    Args:
      mesh: where its devices are this chip, their places say how they are joined; else it is assumed.
      chip: by default that of the devices; the nominal one of CPUs, of an abstract mesh, and of chips that
        nobody knows.
      sizes: axes and their sizes, major to minor.
    """
    sizes = dict(mesh.shape if mesh is not None and sizes is None else sizes or {})
    cut = [] if mesh is None else _cut(mesh.shape.values(), sizes)
    devices = mesh.devices.reshape(tuple(sizes.values())) if isinstance(mesh, Mesh) else None
    own = NOMINAL if devices is None else chip_of(devices.flat[0])
    chip = chip or own
    if devices is None or chip != own or chip == NOMINAL:
        return Network(sizes, chip, cut=cut, tiles=None if devices is None else own.tiles)
    return Network(sizes, chip, {axis: _line(devices, d, chip) for d, axis in enumerate(sizes)}, cut)


def _cut(counts: Iterable[int], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The axes that together have so many devices, where they are several.

    >>> _cut([16, 8], {"x.0": 4, "x.1": 4, "y": 8})
    [('x.0', 'x.1')]
    """
    left, found = iter(sizes), []
    for count in counts:
        own: list[str] = []
        while math.prod(sizes[a] for a in own) < count:
            own.append(next(left))
        found += [tuple(own)] if len(own) > 1 else []
    return found


def _alike(sizes: Mapping[str, int], lines: Mapping[str, Line]) -> dict[str, tuple[str, ...]]:
    """The axes of as many devices joined in the same way, for each that is not the only one.

    >>> line = Line(1e9, 0.0)
    >>> _alike({"x": 2, "y": 4, "z": 2}, {"x": line, "y": line, "z": line})
    {'x': ('x', 'z'), 'z': ('x', 'z')}
    """
    kinds = {axis: (n, lines.get(axis)) for axis, n in sizes.items()}
    groups = [tuple([a for a in kinds if kinds[a] == kind]) for kind in dict.fromkeys(kinds.values())]
    each = {axis: axes for axes in groups for axis in axes if len(axes) > 1}
    return {axis: each[axis] for axis in sizes if axis in each}


# How devices are joined


def assumed(sizes: Mapping[str, int], chip: Chip) -> dict[str, Line]:
    """What is taken for true where nobody knows the places of the devices: on a torus each axis is a ring of
    its own; without one, devices of one host follow one another in mesh order.
    """
    if chip.torus:
        return {axis: _ring(n, 1, True, chip) for axis, n in sizes.items()}
    lines, stride = {}, 1
    for axis, n in reversed(list(sizes.items())):
        own = min(n, max(1, chip.host // stride)) if chip.host else n
        lines[axis] = _switched(n, own, chip)
        stride *= n
    return {axis: lines[axis] for axis in sizes}


def _line(devices: np.ndarray, dim: int, chip: Chip) -> Line:
    """How the devices along a dim of the mesh are joined, which the first of them show."""
    along = [devices[(0,) * dim + (i,) + (0,) * (devices.ndim - dim - 1)] for i in range(devices.shape[dim])]
    # Devices are of one group in one slice of a torus, or on one host.
    groups = len({getattr(d, "slice_index", 0 if d.platform == "tpu" else d.process_index) for d in along})
    if not chip.torus or groups > 1:
        return _switched(len(along), len(along) // groups, chip)
    places = np.array([device.coords for device in along])
    extents = np.ptp([device.coords for device in devices.flat], axis=0) + 1
    return _on_torus(places, extents.tolist(), chip)


def _on_torus(places: np.ndarray, extents: Sequence[int], chip: Chip) -> Line:
    """Of an axis that runs along several dims: one ring after the other (`_in_turn`). Cores of one chip are
    one hop apart.
    """
    steps = [np.diff(np.unique(column)) for column in places.T]
    rings = [
        (
            len(step) + 1,
            _ring(
                len(step) + 1,
                int(step.min()),
                extent >= chip.closes and (len(step) + 1) * step.min() == extent,
                chip,
            ),
        )
        for step, extent in zip(steps, extents, strict=True)
        if len(step)
    ]
    return _in_turn(rings) if rings else Line(chip.link_rate, chip.latency)


def _in_turn(rings: Sequence[tuple[int, Line]]) -> Line:
    """So many devices joined by each of several rings: gathered is along the slowest first, while the pieces
    are smallest, and scattered along it last. Each byte of an all_to_all goes along all of them, at once.

    >>> _in_turn([(2, Line(10e9, 0.0)), (16, Line(80e9, 0.0))]).rate / 1e9
    65.26315789473684
    """
    if len(rings) == 1:
        return rings[0][1]
    rings = sorted(rings, key=lambda ring: ring[1].rate)
    slowest, held, sent = rings[0][1].rate, 1, 0.0
    for count, ring in rings:
        sent += held * (count - 1) * (slowest / ring.rate)
        held *= count
    rate = slowest * ((held - 1) / sent)
    latency = sum(ring.latency for _, ring in rings)
    return Line(rate, latency, max(ring.detour * (rate / ring.rate) for _, ring in rings))


def _ring(count: int, step: int, closed: bool, chip: Chip) -> Line:
    """`count` devices along a dim of the torus, `step` links apart, so that as many such rings share the
    links.
    """
    hops = count // 2 if closed else count - 1
    return Line(
        chip.link_rate / (step * (1 if closed else 2)), step * hops * chip.latency, max(1.0, count / 4)
    )


def _switched(count: int, own: int, chip: Chip) -> Line:
    """A ring of `count` devices that any two of a host's are joined in, `own` of them on each host, each with
    its card.
    """
    across = own < count and chip.network_rate > 0
    rate = min(chip.link_rate, own * chip.network_rate) if across else chip.link_rate
    return Line(rate, (count - 1) * chip.latency)
