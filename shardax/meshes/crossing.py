"""Crossings: what moves an argument or result between the program's mesh and one that does not fit it.

Such a mesh has the same blocks on other devices, so one ppermute brings each where it belongs; a device that
has its block keeps it, as 0 and 5 do here:

    device                              0 1 2 3 4 5
    at rest, x of (x=3, y=2) splits it  0 0 1 1 2 2      block
    in the program, y of (x=2, y=3)     0 1 2 0 1 2      block; 2 sends to 1, 4 to 2, 1 to 3, 3 to 4

Between the two it is an array of the same shards, one after the other in the first dim: that is laid out
alike on every mesh of these devices. An argument whose devices stand in the program's order crosses in the
compiled program. `jax.jit` takes one order only: from another, arrays cross before the call. Results cross
after it: a `jax.jit` around names them all on one mesh.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardax.annotations.user_mesh import UserMesh
from shardax.ledger import causes
from shardax.ledger.collectives import Collective, collectives
from shardax.ledger.words import spec_text
from shardax.meshes import sites
from shardax.meshes.refinement import Placement, Refinement, refinement
from shardax.sharding import AxisSizes, Sharding, shard_count

AnyMesh = Mesh | AbstractMesh


@dataclass(frozen=True, slots=True, eq=False)
class Crossed(causes.Cause):
    """It moves an argument or result between the program's mesh and a mesh that does not fit it."""

    crossing: "Crossing"


@dataclass(frozen=True)
class Crossing:
    """Argument or result `number` of the program, which rests as `resting`; the program has it in `sharding`,
    in refined axes.

    `side` is "argument" or "result". `shape` and `dtype` are those of the array; of random keys, those of
    their words.
    """

    side: str
    number: int
    shape: tuple[int, ...]
    dtype: Any
    resting: Placement
    sharding: Sharding
    refinement: Refinement

    @property
    def outside(self) -> bool:
        """Whether it crosses outside the compiled program: a result, or an argument whose devices are in
        another order.
        """
        return self.side == "result" or self.resting.mesh.places is not None

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(from, to) for every device of the program, by their numbers."""
        at_rest = _blocks(self.resting.sharding, self.resting.mesh.sizes)
        numbers = self.resting.mesh.places or range(len(at_rest))  # of the devices, in the program's mesh
        have = [block for _, block in sorted(zip(numbers, at_rest, strict=True))]
        need = _blocks(self.sharding, self.refinement.sizes)
        pairs = _matched(have, need) if self.side == "argument" else _matched(need, have)
        return tuple(sorted(pairs))

    @property
    def sends(self) -> bool:
        return math.prod(self.shape) > 0 and any(a != b for a, b in self.pairs)

    @property
    def shard(self) -> tuple[int, ...]:
        dims = zip(self.shape, self.sharding.dims, strict=True)
        return tuple(n // shard_count(axes, self.refinement.sizes) for n, axes in dims)

    def reason(self, name: str | None = None) -> str:
        """ "argument state/w from P('x') on (x=3, y=2)"; "#0" where no name is known."""
        what = f"{self.side} {f'#{self.number}' if name is None else name}".rstrip()
        toward = "from" if self.side == "argument" else "to"
        return f"{what} {toward} {spec_text(self.resting.sharding)} on {self.resting.mesh}"

    def collectives(self, mesh: AnyMesh, name: str | None = None) -> tuple[Collective, ...]:
        """The collectives of the crossing; `name` is that of the argument or result in messages."""
        ledger = (
            collectives(self.jaxpr(mesh), self.refinement.sizes, self.refinement.folded) if self.sends else ()
        )
        return tuple(replace(c, reason=self.reason(name)) for c in ledger)

    def jaxpr(self, mesh: AnyMesh) -> Any:
        """The program that runs, from or to the array that has the shards one after the other."""
        shape = self._stacked if self.side == "argument" else self.shape
        return jax.make_jaxpr(lambda x: self._permuted(x, mesh))(jax.ShapeDtypeStruct(shape, self.dtype))

    def inside(self, x, mesh: AnyMesh):
        """An argument, brought to the program's mesh as a part of what is being traced."""
        if not self.sends:
            return x
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.extended):
            return jax.random.wrap_key_data(
                self.inside(jax.random.key_data(x), mesh), impl=jax.random.key_impl(x)
            )
        own, every = self.resting.on(mesh), PartitionSpec(tuple(self.resting.mesh.sizes))
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # the same shards under another spec
            relabelled = jax.shard_map(
                lambda shard: shard, mesh=own.mesh, in_specs=own.spec, out_specs=every, check_vma=False
            )(x)
        return self._permuted(relabelled, mesh)

    def eagerly(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """The array on the other side, moved now. Its devices are not, or shall not be, in the program's
        order.
        """
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.extended):
            return jax.random.wrap_key_data(
                self.eagerly(jax.random.key_data(x), mesh), impl=jax.random.key_impl(x)
            )
        refined = sites.refined_mesh(mesh, self.refinement, concrete=True)
        placed = program_placement(self, len(self.shape)).on(mesh)
        if not self.sends:
            return _of_shards(x, x.shape, placed if self.side == "argument" else self.resting.on(mesh))
        every = NamedSharding(refined, PartitionSpec(refined.axis_names))
        if self.side == "argument":
            return jax.device_put(_compiled(self, mesh)(_of_shards(x, self._stacked, every)), placed)
        return _of_shards(_compiled(self, mesh)(x), self.shape, self.resting.on(mesh))

    def abstractly(self, x, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """The shape of an argument on the other side, for lowering."""
        own = program_placement(self, x.ndim).on(mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own, weak_type=getattr(x, "weak_type", False))

    def _permuted(self, x, mesh: AnyMesh):
        axes, refined = tuple(self.refinement.sizes), sites.refined_mesh(mesh, self.refinement)
        every, split = PartitionSpec(axes), self.sharding.spec
        before, after = (every, split) if self.side == "argument" else (split, every)

        def permuted(shard):
            with causes.scope("ppermute", self.reason(), Crossed(self)):
                return lax.ppermute(shard, axes, self.pairs)

        with jax.sharding.use_abstract_mesh(refined):
            return jax.shard_map(permuted, mesh=refined, in_specs=before, out_specs=after, check_vma=False)(x)

    @property
    def _stacked(self) -> tuple[int, ...]:
        first, *others = self.shard
        return (first * math.prod(self.refinement.sizes.values()), *others)


def crossings(
    side: str, avals: Sequence[Any], rests: Sequence[Placement], refined: Refinement
) -> tuple[Crossing, ...]:
    """The crossings of a program's arguments or results: those that rest on a mesh that does not fit, or has
    another order.
    """
    return tuple(
        _crossing(side, i, aval, placement, refined.sharding(placement), refined)
        for i, (aval, placement) in enumerate(zip(avals, rests, strict=True))
        if placement.mesh.places is not None or placement.mesh in refined.boundaries
    )


@lru_cache(1024)
def entering(number: int, aval, own: Placement, mesh: Mesh) -> Crossing:
    """The crossing of an argument whose devices are in another order than the program's. It needs no program
    to be known.
    """
    both = refinement([sites.program_mesh(mesh), own.mesh])
    return _crossing("argument", number, aval, own, both.sharding(own), both)


def program_placement(crossing: Crossing, rank: int) -> Placement:
    """The placement that the program sees of an argument or result that crosses outside: on its own mesh if
    that has a spec for it.
    """
    sharding, refined = Sharding(crossing.sharding.dims[:rank]), crossing.refinement
    spelled = refined.spelled(sharding)
    return (
        Placement(refined.program, spelled)
        if spelled
        else Placement(UserMesh(tuple(refined.sizes.items())), sharding)
    )


def _crossing(
    side: str, number: int, aval, resting: Placement, sharding: Sharding, refined: Refinement
) -> Crossing:
    """The crossing of one argument or result. Of random keys, their words cross."""
    shape, dtype = tuple(aval.shape), aval.dtype
    if unreduced := resting.sharding.owing.unreduced:
        raise ValueError(
            f"{side} #{number} of shape {shape} is unreduced over {', '.join(unreduced)} of the mesh "
            f"{resting.mesh}, which does not fit the program's, {refined.program}, and what crosses between "
            "the two owes nothing: do its sum on its own mesh, with jax.sharding.reshard"
        )
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        unsplit = ((),) * (len(words.shape) - len(shape))
        resting, sharding = (
            replace(resting, sharding=Sharding(resting.sharding.dims + unsplit)),
            Sharding(sharding.dims + unsplit),
        )
        shape, dtype = words.shape, words.dtype
    return Crossing(side, number, shape, np.dtype(dtype), resting, sharding, refined)


def _blocks(sharding: Sharding, sizes: AxisSizes) -> list[tuple[int, ...]]:
    """Which block each device of a mesh holds, in the order of the mesh."""
    if not sharding.dims:
        return [()] * math.prod(sizes.values())
    places = dict(
        zip(sizes, np.unravel_index(np.arange(math.prod(sizes.values())), tuple(sizes.values())), strict=True)
    )
    dims = [
        sum(places[a] * shard_count(dim[k + 1 :], sizes) for k, a in enumerate(dim)) for dim in sharding.dims
    ]
    return list(zip(*(np.broadcast_to(d, math.prod(sizes.values())).tolist() for d in dims), strict=True))


def _matched(have: Sequence[Any], needed: Sequence[Any]) -> Iterable[tuple[int, int]]:
    """Who sends to whom: devices that have the block that they need keep it; the others get it from its
    holders, in order.
    """
    holders: dict[Any, list[int]] = {}
    for device, block in enumerate(have):
        if needed[device] == block:
            yield device, device
        else:
            holders.setdefault(block, []).append(device)
    for device, block in enumerate(needed):
        if have[device] != block:
            yield holders[block].pop(0), device


def _of_shards(x: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [shard.data for shard in x.addressable_shards]
    )


@lru_cache
def _compiled(crossing: Crossing, mesh: Mesh):
    """The compiled crossing. It gets the sharding of its result, or JAX would choose a spec itself."""
    refined = sites.refined_mesh(mesh, crossing.refinement, concrete=True)
    spec = crossing.sharding.spec if crossing.side == "argument" else PartitionSpec(refined.axis_names)
    return jax.jit(lambda x: crossing._permuted(x, mesh), out_shardings=NamedSharding(refined, spec))
