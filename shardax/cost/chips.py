"""The chips that plans are estimated for: public figures, per device as JAX counts them (of v3, one of two
cores; the two of later chips are one device).

Sources: the product pages of Cloud TPU (memory, links, network); "How to Scale Your Model" (Austin et al.
2025), parts 2 and 3 (about a microsecond per hop; which dims of a slice close to rings; 16 GB/s of PCIe per
chip, 32 of v6e); NVIDIA's DGX H100 and H200 (NVLink, one 400 Gb/s card per GPU, PCIe 5 with 16 lanes).
Host links of TPUs are assumptions, not measured: the 16 GB/s for every one before v6e, of which v3's two
cores have half each. That of H100 is what copies of whole blocks reached there, of the 64 GB/s
that PCIe 5 has one way (`python -m benchmarks.offload`); H200 has the same link.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Chip:
    """One device, and how it is joined to the others.

    `flops`: bfloat16 FLOP/s. `memory`: bytes. `memory_rate`: bytes/s.
    `link_rate`: bytes/s that a device sends in a ring, along one dim of the torus both ways.
    `host_rate`: bytes/s between the memory of a device and that of its host, each way.
    `torus`: dims of the torus, 0 where there is none.
    `latency`: seconds per hop. `start`: seconds that any collective takes, however near its devices are. (Of
      TPUs nobody publishes it: a tenth of a hop, so that of ways with as many hops the fewest collectives
      are taken.)
    `least`: seconds that an operation takes, however little it reads and writes.
    `closes`: a dim of the torus is a ring where it is as long as this; a shorter one is a line, and sends one
      way only.
    `host`: devices that links join, where there is no torus; 0 is all of them.
    `network_rate`: bytes/s that a device sends to other hosts, or slices of a torus; 0 where there are none.
    `lanes`: where a reduce_scatter leaves no more than so many elements of the minor-most dim, the compiler
      makes it an all_reduce (measured for v3: 8192 over 64 devices, the same along a dim that is not
      minor-most stays what it is).
    `copies`: how many copies in memory take as long as to rearrange what an all_to_all sends. (From the
      cycles that the TPU compiler estimates: two to seven in most cases, up to 21 in one, see
      `passes/tpu.py`. Gathers and reduce_scatters need none.)
    `placing`: seconds for each index of a scatter, whose rows are put one after the other. (Measured where a
      minimum was scattered by 13 million indices: 0.29 s on v2, 30 % less on v3; a tenth of these, 0.026 s:
      https://github.com/pytorch/xla/issues/8720. Of later chips nobody says; and nobody of lookups.)
    `tiles`: whether arrays lie in tiles of their last dims, as on TPUs, or else row by row: what of an array
      at the host can be copied, and fast (`passes/blocks.py`).
    `batch`: so many images a convolution computes at once; others are padding. `few`: of fewer images the
      compiler makes more by cutting them (space to batch), and copies them for it between any two operations:
      how many times as long that takes. (Cycles that the TPU compiler estimates for convolutions of several
      kinds with what is elementwise around them, forward and backward, for v4, v5e, v5p: 2.5 to 7.7 times,
      most of them 3 to 4.5, of 12 images 1.2 to 1.3 times; of v3, which only pads, 1.2 to 1.6.)
    """

    name: str
    flops: float
    memory: float
    memory_rate: float
    link_rate: float
    torus: int = 0
    latency: float = 1e-6
    start: float = 0.0
    least: float = 1e-6
    closes: int = 0
    host: int = 0
    network_rate: float = 0.0
    lanes: int = 0
    copies: float = 0.0
    batch: int = 0
    few: float = 1.0
    placing: float = 0.0
    host_rate: float = 16e9
    tiles: bool = False


_TPU = {"start": 1e-7, "lanes": 128, "copies": 5, "batch": 8, "few": 3.5, "placing": 2e-8, "tiles": True}
_V3 = {"closes": 32, "network_rate": 1.5625e9, "host_rate": 8e9, **_TPU, "few": 1.5}
_V4 = {"closes": 4, "network_rate": 6.25e9, **_TPU}
V3 = Chip("v3", 61.5e12, 16e9, 450e9, 164e9, 2, **_V3)
V4 = Chip("v4", 275e12, 32e9, 1200e9, 90e9, 3, **_V4)
V5E = Chip("v5e", 197e12, 16e9, 819e9, 100e9, 2, closes=16, network_rate=3.125e9, **_TPU)
V5P = Chip("v5p", 459e12, 95e9, 2765e9, 180e9, 3, closes=4, network_rate=6.25e9, **_TPU)
_V6E = {"closes": 16, "network_rate": 12.5e9, "host_rate": 32e9, **_TPU}
V6E = Chip("v6e", 918e12, 32e9, 1640e9, 180e9, 2, **_V6E)
_DGX = {"host": 8, "network_rate": 50e9, "host_rate": 57e9}
H100 = Chip("H100", 989e12, 80e9, 3350e9, 450e9, **_DGX)
H200 = Chip("H200", 989e12, 141e9, 4800e9, 450e9, **_DGX)

_EASY = {"latency": 0.0, "start": 128 / 50e9, "tiles": True}
NOMINAL = Chip("nominal", 200e12, 32e9, 1e12, 50e9, least=64e-9, copies=1, **_EASY)
"""What programs are chosen for unless `Options(chip=...)` says otherwise: the ratios of v4 to v6e, all
devices equally near. To start a collective costs next to nothing, 128 bytes, so that a small program is
partitioned as a large one would be, and what is tried on a laptop shows what a pod will do. An all_to_all
takes one copy, which no chip does without: the blocks for each device have to lie together on one side."""

GPU = replace(NOMINAL, name="GPU", tiles=False)
"""GPUs that nobody knows here."""

SLOW = Chip("slow", 1e9, 32e9, 1e8, 50e9, least=0.0, **_EASY)
"""A chip that computes and copies so slowly that everything is split that can be, however small: rules are
tested so.
"""

CHIPS = {chip.name: chip for chip in (V3, V4, V5E, V5P, V6E, H100, H200)}

KINDS = {
    "TPU v3": V3,
    "TPU v4": V4,
    "TPU v5 lite": V5E,
    "TPU v5e": V5E,
    "TPU v5": V5P,
    "TPU v5p": V5P,
    "TPU v6 lite": V6E,
    "TPU v6e": V6E,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA H200": H200,
}
"""The chips by what JAX calls the kind of a device."""


def chip_of(device: Any) -> Chip:
    """That of a device; the nominal one of CPUs, and of chips that nobody knows."""
    return KINDS.get(device.device_kind, GPU if device.platform in ("gpu", "cuda", "rocm") else NOMINAL)
