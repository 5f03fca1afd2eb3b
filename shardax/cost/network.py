"""What sending and computing cost on a mesh of chips, in picoseconds: the one price by which alternatives are compared.

A `Network` is the sizes of a mesh's axes together with the chip that its devices are, so whoever knows the mesh knows prices.
Prices are whole numbers of picoseconds, held by floats, so that sums are exact and ties are ties in any order.
"""

import math
from collections.abc import Iterator, Mapping

from shardax.cost.chips import NOMINAL, Chip

PICO = 1e12


class Network(Mapping[str, int]):
    """Axis sizes in mesh order, hashable, and the prices of a chip.

    >>> network = Network({"x": 4})
    >>> network["x"], network.collective("all_gather", ("x",), 1000)
    (4, 22560.0)
    """

    __slots__ = ("sizes", "chip", "_hash")

    def __init__(self, sizes: Mapping[str, int], chip: Chip = NOMINAL):
        self.sizes, self.chip = dict(sizes), chip
        self._hash = hash((tuple(self.sizes.items()), chip))

    def __getitem__(self, axis: str) -> int:
        return self.sizes[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other) -> bool:
        return isinstance(other, Network) and (*self.sizes.items(), self.chip) == (*other.sizes.items(), other.chip)

    def collective(self, kind: str, axes: tuple[str, ...], nbytes: float) -> float:
        """Picoseconds of one collective over these axes in which each device sends so many bytes."""
        return float(round(PICO * (self.chip.latency + nbytes / self.chip.link_rate)))

    def compute(self, flops: float, nbytes: float) -> float:
        """Picoseconds of an operation on one device: the longer of its products and its memory traffic."""
        return float(math.ceil(PICO * max(flops / self.chip.flops, nbytes / self.chip.memory_rate)))


def network_of(sizes: Mapping[str, int]) -> Network:
    """The sizes of a mesh with their prices: those of the nominal chip, where none were given."""
    return sizes if isinstance(sizes, Network) else Network(sizes)
