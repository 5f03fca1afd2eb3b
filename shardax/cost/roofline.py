"""Estimates the seconds of a local program by roofline, from its FLOPs, its memory traffic, and the bytes that it sends.

Each equation takes the longer of the times of its FLOPs and of its memory traffic (Williams et al. 2009). The time of what is
sent is added, at the prices by which programs are chosen (`shardax.cost.network`), as if nothing were overlapped. Only matrix
products and convolutions count FLOPs; all else is bound by memory.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jax.extend.core import jaxprs_in_params

from shardax import _jax
from shardax.cost.live import traffic
from shardax.cost.network import PICO, Network


@dataclass(frozen=True)
class Estimate:
    """A call on one chip, in seconds.

    `compute`: its products at the chip's peak. `memory`: what it reads and writes in HBM. `links`: what it sends.
    `seconds`: in all, each operation at the slower of compute and memory, nothing overlapped with the links.
    `flops`, `nbytes`: of the products, and moved in HBM, per device. `chip`: its name.
    """

    compute: float
    memory: float
    links: float
    seconds: float
    flops: int
    nbytes: int
    chip: str

    @property
    def bound(self) -> str:
        """What takes longest: "compute", "HBM" or "links"."""
        parts = {"compute": self.compute, "HBM": self.memory, "links": self.links}
        return max(parts, key=parts.__getitem__)

    def __str__(self):
        return (
            f"{self.seconds:.3g} s on {self.chip}, bound by {self.bound}: {self.compute:.3g} s compute "
            f"({self.flops:.3g} FLOPs), {self.memory:.3g} s HBM ({self.nbytes:.3g} bytes), {self.links:.3g} s links"
        )


@dataclass(frozen=True)
class Work:
    """What one equation does, `trips` times."""

    flops: int
    nbytes: int
    trips: int = 1


@dataclass(frozen=True)
class Sent:
    """One collective, `trips` times: see `Network.collective`."""

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    minor: int | None = None
    trips: int = 1


def estimate(found: list[Work], sent: Iterable[Sent], network: Network) -> Estimate:
    """The seconds of a program's `work`, and of what one device sends, on the chips of a network."""
    chip = network.chip
    flops, nbytes = sum(w.trips * w.flops for w in found), sum(w.trips * w.nbytes for w in found)
    slower = sum(w.trips * max(w.flops / chip.flops, w.nbytes / chip.memory_rate) for w in found)
    links = sum(s.trips * network.collective(s.kind, s.axes, s.nbytes, s.minor) for s in sent) / PICO
    return Estimate(flops / chip.flops, nbytes / chip.memory_rate, links, slower + links, flops, nbytes, chip.name)


def work(jaxpr, trips: int = 1) -> Iterator[Work]:
    """The work of a jaxpr; of a `while` that of one iteration, of a `cond` that of the dearest branch."""
    for eqn, nbytes in traffic(_jax.closed(jaxpr).jaxpr):
        flops = _FLOPS[eqn.primitive.name](eqn) if eqn.primitive.name in _FLOPS else 0
        if flops or nbytes:
            yield Work(flops, nbytes, trips)
        inner = trips * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        bodies = [list(work(body, inner)) for body in jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "cond":
            bodies = [max(bodies, key=lambda found: (sum(w.flops for w in found), sum(w.nbytes for w in found)))]
        for body in bodies:
            yield from body


def _size(var) -> int:
    return math.prod(var.aval.shape)


def _dot_flops(eqn) -> int:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    return 2 * _size(eqn.outvars[0]) * math.prod(eqn.invars[0].aval.shape[d] for d in contracting)


def _conv_flops(eqn) -> int:
    """FLOPs of a convolution: each output reads every input channel of its group at every place of the window."""
    out_channel_dim = eqn.params["dimension_numbers"].rhs_spec[0]
    kernel = eqn.invars[1]
    return 2 * _size(eqn.outvars[0]) * _size(kernel) // kernel.aval.shape[out_channel_dim]


_FLOPS = {"dot_general": _dot_flops, "conv_general_dilated": _conv_flops}
