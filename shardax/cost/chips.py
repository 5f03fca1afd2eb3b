"""The chips that plans are estimated for: public figures, per device as JAX counts them (of v3 and v4, one of two cores)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One device.

    `flops`: bfloat16 FLOP/s. `memory`: bytes. `memory_rate`: bytes/s.
    `link_rate`: bytes/s that a device sends in a ring along one axis of the mesh; on a torus, both ways.
    `torus`: dims of the torus, 0 where there is none. `latency`: seconds that a collective takes to start.
    """

    name: str
    flops: float
    memory: float
    memory_rate: float
    link_rate: float
    torus: int
    latency: float = 1e-6


V3 = Chip("v3", 61.5e12, 16e9, 450e9, 164e9, 2)
V4 = Chip("v4", 137.5e12, 16e9, 600e9, 90e9, 3)
V5E = Chip("v5e", 197e12, 16e9, 819e9, 100e9, 2)
V5P = Chip("v5p", 459e12, 95e9, 2765e9, 180e9, 3)
V6E = Chip("v6e", 918e12, 32e9, 1640e9, 180e9, 2)
H200 = Chip("H200", 989e12, 141e9, 4800e9, 450e9, 0)

NOMINAL = Chip("nominal", 200e12, 32e9, 1e12, 50e9, 2, 128 / 50e9)
"""What programs are chosen for where no chip is known: the ratios of v4 to v6e. To start a collective costs next to nothing, so
that a small program is partitioned as a large one would be, and what is tried on a laptop shows what a pod will do."""

CHIPS = {chip.name: chip for chip in (V3, V4, V5E, V5P, V6E, H200)}
