"""Arguments and results as they rest, each with its path in the pytree."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from shardax.annotations.annotate import describe
from shardax.annotations.explicit import memory_of
from shardax.ledger.words import spec_text
from shardax.sharding import Sharding, from_spec, shard_count


@dataclass(frozen=True)
class Placed:
    """An argument or result with its path in the pytree.

    `named`: the path with the argument's name for its number; `shards`: how many pieces it has; `on`: its
    mesh, "(x=4, y=2)", where that is not the program's; `mesh`: that mesh itself.
    """

    path: str
    aval: Any
    sharding: Sharding
    shards: int = 1
    on: str = ""
    named: str = ""
    mesh: Any = None

    @property
    def at_host(self) -> bool:
        """Whether it rests in the memory of each device's host."""
        return memory_of(self.aval) is jax.memory.Space.Host

    @property
    def text(self) -> str:
        on = f" on {self.on}" if self.on and self.sharding.axes else ""
        return spec_text(self.sharding) + on + " in the host's memory" * self.at_host


def placed(shardings, avals: Iterable, first: int = 0) -> Iterator[Placed]:
    """The leaves of a pytree of NamedSharding, with the avals of the same leaves; paths leave out their
    `first` keys.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(shardings)
    meshes = {sharding.mesh for _, sharding in leaves}
    known = {mesh: (mesh.shape, f"({describe(mesh)})") for mesh in meshes}
    for (path, sharding), aval in zip(leaves, avals, strict=True):
        spec, mesh = from_spec(sharding.spec, len(aval.shape)), sharding.mesh
        sizes, on = known[mesh]
        yield Placed(path_text(path[first:]), aval, spec, shard_count(spec.axes, sizes), on, "", mesh)


def path_text(path) -> str:
    """
    >>> path_text(jax.tree_util.tree_flatten_with_path([{"w": 0}])[0][0][0])
    '0/w'
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


@dataclass(frozen=True)
class AtRest:
    """An argument or result that is stored in another sharding than was requested, because the requested one
    does not divide it.

    `path` begins with "argument" or "result", as in "argument state/params/embed". `came` is the bytes that
    one device sends per call to bring an argument to the requested sharding; `left`, to bring a result, or
    the successor of a donated argument, to rest.
    """

    path: str
    shape: tuple[int, ...]
    requested: Sharding
    stored: Sharding
    came: int = 0
    left: int = 0

    @staticmethod
    def of(side: str, place: Placed, requested: Sharding, came: int = 0, left: int = 0) -> "AtRest":
        """A place, of `side` "argument" or "result", that is not stored as requested."""
        path = f"{side} {place.named or place.path}".rstrip()
        return AtRest(path, tuple(place.aval.shape), requested, place.sharding, came, left)
