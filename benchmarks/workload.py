"""What a workload of `python -m benchmarks.tpu` is: a train step, ways to run it, and a paper's figures."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardax.cost.chips import CHIPS, Chip

TOPOLOGIES = {
    8: "v3:2x2",
    16: "v3:2x4",
    64: "v3:4x8",
    128: "v3:8x8",
    256: "v3:8x16",
    512: "v3:16x16",
    2048: "v3:32x32",
}
"""Of so many v3 cores, two of which are a chip."""


@dataclass(frozen=True)
class Step:
    """A train step (params, optimizer state, text) for a mesh, shapes of its arguments, and PartitionSpecs
    for them.

    Where the optimizer's state is None among the specs, it follows by completion.
    """

    run: Callable[..., Any]
    args: tuple[Any, Any, Any]
    specs: tuple[Any, Any, P]


@dataclass(frozen=True)
class Published:
    """Figures of a paper: seconds of a step, its share of the peak FLOP/s, peak HBM in GiB, and the share of
    time that stages wait.
    """

    seconds: float
    utilization: float | None = None
    memory: float | None = None
    bubbles: float | None = None


@dataclass(frozen=True)
class Way:
    """A way to run a workload's step.

    Attributes:
      partitioner: "jax.jit" or "shard_jit".
      scheduled: of a pipelined program, what makes its `table`.
      bubbles: of another one, the share of its ticks in which stages compute what nobody wants.
      transforms: of the step, by shard_jit.
    """

    partitioner: str
    step: Callable[[Mesh], Step]
    scheduled: Callable[[], np.ndarray] | None = None
    bubbles: float | None = None
    transforms: tuple[Any, ...] = ()

    @cached_property
    def table(self) -> np.ndarray | None:
        """Of a pipelined program, which branch each stage takes in each tick, [ticks, stages]."""
        return self.scheduled and self.scheduled()


@dataclass(frozen=True)
class Workload:
    """A train step on a TPU topology.

    `topology`: as in "v3:8x8". `flops`: model FLOPs of the whole step, nothing recomputed. `compared`: the
    ways to compare where they are not the same program by both partitioners.
    """

    name: str
    what: str
    topology: str
    axes: Mapping[str, int]
    step: Callable[[Mesh], Step]
    flops: int
    published: Published | None = None
    compared: Mapping[str, Way] | None = None

    @property
    def ways(self) -> Mapping[str, Way]:
        """By name: the same step by both partitioners, where nothing else is to be compared."""
        return self.compared or {name: Way(name, self.step) for name in ("jax.jit", "shard_jit")}

    @property
    def chip(self) -> Chip:
        return CHIPS[self.topology.split(":")[0]]

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    def utilization(self, seconds: float) -> float:
        """The share of the devices' peak FLOP/s that a step of so many seconds uses."""
        return self.flops / (seconds * self.devices * self.chip.flops)
