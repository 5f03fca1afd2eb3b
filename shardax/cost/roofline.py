"""Seconds of a local program by roofline: matrix products and convolutions, and what is sent; all else is taken to be free."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jax.extend.core import jaxprs_in_params

from shardax.cost.chips import Chip


@dataclass(frozen=True)
class Estimate:
    """Seconds of a call, nothing overlapped. `compute`: each product at the slower of its FLOPs and its memory traffic."""

    compute: float
    links: float
    flops: int

    @property
    def seconds(self) -> float:
        return self.compute + self.links

    def __str__(self):
        return f"{self.seconds:.3g} s: {self.compute:.3g} s compute ({self.flops:.3g} FLOPs), {self.links:.3g} s links"


@dataclass(frozen=True)
class Product:
    """A matrix product or convolution, `trips` times."""

    flops: int
    nbytes: int
    trips: int = 1


def estimate(jaxpr, comm_bytes: int, chip: Chip) -> Estimate:
    """The seconds of a local program on a chip of a given kind; `comm_bytes`: bytes that one device sends."""
    found = list(products(jaxpr))
    compute = sum(p.trips * max(p.flops / chip.flops, p.nbytes / chip.memory_rate) for p in found)
    return Estimate(compute, comm_bytes / chip.link_rate, sum(p.trips * p.flops for p in found))


def products(jaxpr, trips: int = 1) -> Iterator[Product]:
    """The products of a jaxpr; those of a `while` for one iteration, of a `cond` those of the branch with most FLOPs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _FLOPS:
            nbytes = sum(_size(v) * v.aval.dtype.itemsize for v in (*eqn.invars, *eqn.outvars))
            yield Product(_FLOPS[eqn.primitive.name](eqn), nbytes, trips)
        inner = trips * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        bodies = [list(products(body, inner)) for body in jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "cond":
            bodies = [max(bodies, key=lambda found: sum(p.trips * p.flops for p in found))]
        for body in bodies:
            yield from body


def _size(var) -> int:
    return math.prod(var.aval.shape)


def _dot_flops(eqn) -> int:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    return 2 * _size(eqn.outvars[0]) * math.prod(eqn.invars[0].aval.shape[d] for d in contracting)


def _conv_flops(eqn) -> int:
    """Each output takes every input channel of its group at every place of the window."""
    out_channel_dim = eqn.params["dimension_numbers"].rhs_spec[0]
    kernel = eqn.invars[1]
    return 2 * _size(eqn.outvars[0]) * _size(kernel) // kernel.aval.shape[out_channel_dim]


_FLOPS = {"dot_general": _dot_flops, "conv_general_dilated": _conv_flops}
