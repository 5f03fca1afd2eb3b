"""What sending and computing cost on a mesh of chips, in picoseconds: the one price by which alternatives are
compared.

A `Network` is the sizes of a mesh's axes together with the chip that its devices are, so whoever knows the
mesh knows prices. Prices are whole numbers of picoseconds, held by floats, so that sums are exact and ties
are ties in any order.

A collective is priced as its ring algorithm: the hops that its data makes, one after the other, and the bytes
that each device sends over its links (Austin et al., "How to Scale Your Model", part 3). These are the links
of the devices that take part, whatever axes they are along: several axes of a mesh cost what one axis of the
same devices costs, so that to cut an axis changes no price. Devices along several dims of a torus are one
ring after the other:

    start + hops · latency + bytes · detour / rate

    hops     of n devices: n/2 in a ring that sends both ways, n - 1 in a line or a one-way ring; no more than
             those of one axis after the other; of an all_reduce twice that; of a ppermute between neighbours
             one
    detour   1; of an all_to_all, and of a ppermute between any others than neighbours, max(1, n/4) on a
             torus, because what goes to another device passes n/4 links on average (so its time grows as the
             square root of the devices, as GShard measured)

An all_to_all also rearranges what it sends in memory, before and after. On TPUs that takes as long as
`copies` copies. There an all_gather along the minor-most dim, of pieces that do not fill the lanes, is made
transposed and then copied; and a convolution of few images takes `few` times as long as one of many.

That several dims of a torus could send at once is not assumed. A price never falls when there are more bytes
to send.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """How the devices along some axes of the mesh are joined.

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


class Way(NamedTuple):
    """How a `Message` is sent, whatever it is. `kind` may be "owe", too: no collective, but the writing of
    the shard, and the reading.
    """

    kind: str
    axes: tuple[str, ...]
    far: bool = False


class Places:
    """Where the devices of a mesh are. `coords`: on a torus, of the mesh's shape and (dims,); these are as
    long as `extents`, and close to rings from a length of `closes` on. `groups`: the host of each, or slice.
    """

    __slots__ = ("closes", "coords", "extents", "groups", "key")

    def __init__(self, coords: np.ndarray, groups: np.ndarray, extents: Sequence[int], closes: int):
        self.coords, self.groups, self.extents, self.closes = coords, groups, tuple(extents), closes
        self.key = (groups.shape, coords.tobytes(), groups.tobytes(), self.extents, closes)

    def along(self, dims: Sequence[int]) -> "Places":
        """Of the devices along some dims of the mesh, the first of all that are there."""
        these = tuple([slice(None) if d in dims else 0 for d in range(self.groups.ndim)])
        return Places(self.coords[these], self.groups[these], self.extents, self.closes)

    def line(self, chip: Chip) -> Line:
        """How all of them are joined."""
        count, groups = self.groups.size, len(np.unique(self.groups))
        if not chip.torus or groups > 1:
            return _switched(count, count // groups, chip)
        return _on_torus(self.coords.reshape(count, len(self.extents)), self.extents, self.closes, chip)


class Network(dict[str, int]):
    """Axis sizes in mesh order, never changed and so hashable, and the prices of a chip. `places`: where the
    devices are; unless given, as `assumed` says. `cut`: the axes that together are one axis of the mesh,
    which is cut in them. `alike`: for each axis that costs the same as others, these and itself. `tiles`:
    whether arrays of its devices lie in tiles, whatever the chip whose prices count.

    >>> network = Network({"x": 4})
    >>> network["x"], network.collective("all_gather", ("x",), 1000)
    (4, 22560.0)
    """

    __slots__ = ("alike", "chip", "cut", "places", "tiles", "_fastest", "_hash", "_key", "_lines", "_ways")

    def __init__(
        self,
        sizes: Mapping[str, int],
        chip: Chip = NOMINAL,
        places: Places | None = None,
        cut: Sequence[tuple[str, ...]] = (),
        tiles: bool | None = None,
    ):
        super().__init__(sizes)
        self.cut, self.chip = tuple(cut), chip
        self.tiles = chip.tiles if tiles is None else tiles
        self.places = places or assumed(sizes, chip, self.cut)
        self._key = (tuple(sizes.items()), chip, self.places.key, self.tiles)
        self._hash = hash(self._key)
        self._ways: dict[Way, tuple[float, float]] = {}
        self._lines: dict[tuple[str, ...], Line] = {}
        self._fastest: dict[tuple[str, ...], float] = {}
        self.alike = _alike(self)

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
        way = Way(kind, axes, far)
        start, byte = self._ways.get(way) or self.rates(way)
        if minor is not None and kind == "all_gather" and minor < self.chip.lanes:
            byte += self._narrow_byte
        return float(round(start + nbytes * byte))

    def collectives(
        self, ways: tuple[Way, ...], way: np.ndarray, nbytes: np.ndarray, minor: np.ndarray
    ) -> np.ndarray:
        """`collective` of many, each in one of some `ways`, by number; `minor`: -1 where it is None.

        >>> network, ways = Network({"x": 4}), (Way("all_gather", ("x",)),)
        >>> network.collectives(ways, np.array([0]), np.array([1000]), np.array([-1]))
        array([22560.])
        """
        rates, chip = _rates(self, ways), self.chip
        start, byte = rates.each[:, way]
        if chip.lanes and (minor >= 0).any():
            short = (minor >= 0) & (minor <= chip.lanes) & rates.scatters[way]
            start, byte = np.where(short, rates.reduced[:, way], (start, byte))
            nbytes = np.where(short, 2 * nbytes, nbytes)
            narrow = (minor >= 0) & (minor < chip.lanes) & rates.gathers[way]
            byte = np.where(narrow, byte + self._narrow_byte, byte)
        prices = np.rint(start + nbytes * byte)
        owes = np.flatnonzero(rates.owes[way])
        prices[owes] = [self.compute(0, 2 * n) for n in nbytes[owes].tolist()]
        return prices

    @property
    def _narrow_byte(self) -> float:
        """Picoseconds more for each byte of a gather of narrow rows."""
        return PICO * 2 * NARROW / self.chip.memory_rate

    def line(self, axes: Iterable[str]) -> Line:
        """How the devices along some axes are joined. Axes of other meshes, which crossings name, are any
        links."""
        key = tuple([a for a, n in self.items() if n > 1 and a in axes])
        if key not in self._lines:
            self._lines[key] = self._line(key)
        return self._lines[key]

    def _line(self, axes: tuple[str, ...]) -> Line:
        if not axes:
            return Line(self.chip.link_rate, 0.0)
        joined = self.places.along([d for d, a in enumerate(self) if a in axes]).line(self.chip)
        if len(axes) == 1:
            return joined
        return replace(joined, latency=min(joined.latency, sum(self.line([a]).latency for a in axes)))

    def rates(self, way: Way) -> tuple[float, float]:
        """Picoseconds to start a collective, and for each byte."""
        kind, axes, far = way
        line, rings = self.line(axes), 2 if kind == "all_reduce" else 1
        near = kind == "ppermute" and not far
        latency = self.chip.latency if near else rings * line.latency
        detour = line.detour if far or kind == "all_to_all" else 1
        copied = 2 * self.chip.copies / self.chip.memory_rate if kind == "all_to_all" else 0
        seconds = detour / line.rate + copied
        rates = self._ways[way] = PICO * (self.chip.start + latency), PICO * seconds
        return rates

    def least(self, axes: Sequence[str], nbytes: float) -> float:
        """Picoseconds that no collectives over some of these axes beat in which a device sends so many bytes
        in all.
        """
        key = tuple(axes)
        if key not in self._fastest:
            rates = (self.line(some).rate for some in _subsets(key) if some)
            self._fastest[key] = max(rates, default=self.chip.link_rate)
        fastest = self._fastest[key]
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


class _Rates(NamedTuple):
    """Of some ways, in rows, picoseconds to start and for each byte: their own, and those of an all_reduce in
    their place; and which are of what kind.
    """

    each: np.ndarray
    reduced: np.ndarray
    scatters: np.ndarray
    gathers: np.ndarray
    owes: np.ndarray


@lru_cache(maxsize=1 << 10)
def _rates(network: Network, ways: tuple[Way, ...]) -> _Rates:
    each = [network.rates(one) for one in ways]
    reduced = [network.rates(Way("all_reduce", one.axes, one.far)) for one in ways]
    kinds = np.array([one.kind for one in ways])
    is_kind = [kinds == kind for kind in ("reduce_scatter", "all_gather", "owe")]
    return _Rates(np.array(each).reshape(-1, 2).T, np.array(reduced).reshape(-1, 2).T, *is_kind)


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
    return Network(sizes, chip, _places(devices, chip), cut)


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


def _alike(network: Network) -> dict[str, tuple[str, ...]]:
    """The axes of as many devices that are joined in the same way, whichever others come with them, for each
    that is not the only one.

    >>> _alike(Network({"x": 2, "y": 4, "z": 2}))
    {'x': ('x', 'z'), 'z': ('x', 'z')}
    """

    def is_like(one: str, other: str) -> bool:
        others = [a for a in network if a not in (one, other)]
        return network[one] == network[other] and all(
            network.line((*some, one)) == network.line((*some, other)) for some in _subsets(others)
        )

    groups: list[list[str]] = []
    for axis in network:
        group = next((group for group in groups if is_like(group[0], axis)), None)
        group.append(axis) if group else groups.append([axis])
    return {axis: tuple(group) for axis in network for group in groups if axis in group and len(group) > 1}


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(
        itertools.combinations(axes, count) for count in range(len(axes) + 1)
    )


# How devices are joined


def assumed(sizes: Mapping[str, int], chip: Chip, cut: Sequence[tuple[str, ...]] = ()) -> Places:
    """What is taken for true where nobody knows the places of the devices: on a torus each axis of the mesh
    is a ring of its own, which may be `cut` in several; without one, devices of one host follow one another
    in mesh order.
    """
    whole = [(a,) for a in sizes if not any(a in axes for axes in cut)] + list(cut)
    rings = sorted(whole, key=lambda axes: list(sizes).index(axes[0]))
    extents = [math.prod(sizes[a] for a in axes) for axes in rings]
    shape, numbers = tuple(sizes.values()), np.arange(math.prod(sizes.values()))
    coords = np.indices(extents).reshape(len(rings), numbers.size).T.reshape(*shape, len(rings))
    hosts = numbers // chip.host if chip.host else 0 * numbers
    return Places(coords, hosts.reshape(shape), extents, closes=0)


def _places(devices: np.ndarray, chip: Chip) -> Places:
    """Devices are of one group in one slice of a torus, or on one host."""
    groups = [getattr(d, "slice_index", 0 if d.platform == "tpu" else d.process_index) for d in devices.flat]
    coords = np.array([device.coords if chip.torus else () for device in devices.flat], int)
    extents, shape = (np.ptp(coords, axis=0) + 1).tolist(), devices.shape
    return Places(coords.reshape(*shape, len(extents)), np.array(groups).reshape(shape), extents, chip.closes)


def _on_torus(places: np.ndarray, extents: Sequence[int], closes: int, chip: Chip) -> Line:
    """Along several dims: one ring after the other (`_in_turn`). Cores of one chip are one hop apart."""
    steps = [np.diff(np.unique(column)) for column in places.T]
    rings = [
        (
            len(step) + 1,
            _ring(
                len(step) + 1,
                int(step.min()),
                extent >= closes and (len(step) + 1) * step.min() == extent,
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
