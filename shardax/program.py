"""build: the middle of the way, from a global jaxpr with annotations in it to the program that every device runs."""

from dataclasses import dataclass
from typing import Any

from shardax.sharding import Sharding


@dataclass(frozen=True)
class Program:
    """What `build` makes.

    `jaxpr` is a ClosedJaxpr with the global program's inputs and outputs: one `shard_map` equation over `mesh`. `in_shardings` and
    `out_shardings` say how each argument and result lies between calls; every shard has the same size there.
    """

    jaxpr: Any
    mesh: Any
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
