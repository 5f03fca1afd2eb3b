"""By cost: what an update computes of matrices of several sizes, independently of each other, is dealt out
together, so that the device that takes longest takes the least time.

    by size    U = f(stack of 3 large), V = g(stack of 3 small)     three devices compute, one after the other
    by cost    U, V = one of      f(a large one), zeros             six devices compute, at once
                                  zeros, g(a small one)
                                  zeros, zeros

Devices that compute with other sizes are at other branches of one `lax.switch`, in an island over the axes:
one branch for each load that differs (`loads`). Of each size a stack has as many rows for every device as the
one with most of them needs, zeros where it has none. So a stack goes there and back by one all_to_all each,
as it does by size, and the plan prices the branch that takes longest.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardax import _jax
from shardax.annotations.explicit import as_at
from shardax.cost.chips import Chip
from shardax.cost.network import PICO, Network, network_of_mesh
from shardax.explain.roofline import estimate, work
from shardax.sharding import Axes
from shardax.zero.chains import Chain, Chains
from shardax.zero.loads import Load, Size, loads, longest, rows
from shardax.zero.packs import Pack

GAIN = 0.99  # of the seconds by size: where devices have as much to do by cost, nothing is dealt out so

BY_COST: Literal["by cost"] = "by cost"
Dealt = bool | Literal["by cost"]
"""Whether matrices are dealt out: not, each size by number, or all by cost."""

Read = Callable[[Any], Any]


class _Scope(str):
    """The name of the scope around what is dealt out by cost."""


def is_dealt_by_cost(jaxpr) -> bool:
    """Whether anything in a program is."""
    eqns = _jax.closed(jaxpr).jaxpr.eqns
    return any(map(_is_dealt, eqns)) or any(
        is_dealt_by_cost(body) for eqn in eqns for body in jaxprs_in_params(eqn.params)
    )


def _is_dealt(eqn) -> bool:
    names = _jax.scope_names(eqn.source_info.name_stack)
    return eqn.primitive.name == "shard_map" and any(isinstance(name, _Scope) for name in names)


@dataclass(frozen=True)
class Costs:
    """By what matrices are dealt out: the axes of a mesh whose devices share them, and a chip's prices."""

    mesh: Mesh | AbstractMesh
    axes: Axes
    chip: Chip | None = None

    @functools.cached_property
    def network(self) -> Network:
        return network_of_mesh(self.mesh, self.chip)

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def seconds(self, jaxpr) -> float:
        """Those of a program on one device, by roofline."""
        return estimate(list(work(jaxpr)), (), self.network).seconds

    def sent(self, nbytes: int) -> float:
        """The seconds by which an all_to_all takes longer, of which each device sends so many bytes more."""
        one, two = (self.network.collective("all_to_all", self.axes, n) for n in (2**24, 2**25))
        return nbytes * (two - one) / 2**24 / PICO


@dataclass(frozen=True, eq=False)
class Kind:
    """Chains that compute the same, of other arrays, as of matrices and of transposed ones on their sides:
    their members are one stack.
    """

    chains: Sequence[Chain]

    @property
    def first(self) -> Chain:
        return self.chains[0]

    @property
    def count(self) -> int:
        return sum(chain.count for chain in self.chains)

    @property
    def stacks(self) -> Iterator[tuple[Pack, ...]]:
        """Of each stack, those of the chains that are in it."""
        return zip(*(chain.stacks for chain in self.chains), strict=True)

    @property
    def results(self) -> Iterator[tuple[Pack, ...]]:
        return zip(*(chain.results for chain in self.chains), strict=True)


@dataclass(frozen=True, eq=False)
class Deal:
    """Kinds that do not depend on each other, and how many members of each every device computes."""

    kinds: Sequence[Kind]
    loads: Sequence[Load]

    @property
    def packs(self) -> list[Pack]:
        return [pack for kind in self.kinds for chain in kind.chains for pack in chain.packs]

    @property
    def common(self) -> list[Any]:
        return list(dict.fromkeys(v for kind in self.kinds for v in kind.first.common))

    @property
    def reads(self) -> list[Any]:
        return [*(pack for kind in self.kinds for packs in kind.stacks for pack in packs), *self.common]

    def places(self, k: int) -> list[int | None]:
        """Of kind k, which member each row of its stack is: those of one device after those of another."""
        members = iter(range(self.kinds[k].count))
        of_device = range(rows(self.loads)[k])
        return [next(members, None) if n < load[k] else None for load in self.loads for n in of_device]


class ByCost(Chains):
    """Packs, of which those with matrices are dealt out by `costs`, if any, where a device has less to do
    then than with each size dealt out by number.
    """

    def __init__(self, closed, costs: Costs | None):
        super().__init__(closed)
        self._costs = costs
        self.deals: dict[Pack, Deal] = {}

    def _order(self) -> list[int]:
        order = super()._order()
        if self._costs is None:
            return order
        self.deals = dict(self._found_deals(order, self._costs))
        return super()._order()

    def _set_apart(self, pack: Pack) -> None:
        """What depends on itself only where it is dealt out is not."""
        if self.deals:
            self.deals = {}
        else:
            super()._set_apart(pack)

    def _task_of(self, pack: Pack) -> tuple[int, list[Any], list[Any]]:
        place, reads, makes = super()._task_of(pack)
        deal = self.deals.get(pack)
        return place, reads if deal is None else list(map(self._read, deal.reads)), makes

    def _make(self, pack: Pack, env: dict[Any, Any], read: Read) -> None:
        if pack not in self.deals:
            super()._make(pack, env, read)
        elif pack not in env:
            self._deal_out(self.deals[pack], env, read)

    def _found_deals(self, order: Sequence[int], costs: Costs) -> Iterator[tuple[Pack, Deal]]:
        for chains in self.chains(order):
            kinds = self._kinds(chains, costs.devices)
            dealt = _loads(kinds, [self._seconds(kind.first, costs) for kind in kinds], costs)
            if dealt:
                deal = Deal(kinds, dealt)
                yield from ((pack, deal) for pack in deal.packs)

    def _kinds(self, chains: Sequence[Chain], devices: int) -> list[Kind]:
        """Alike chains as one, where the device with most of their members then has fewer."""
        alike: dict[Hashable, list[Chain]] = defaultdict(list)
        for chain in chains:
            alike[self.chain_key(chain)].append(chain)
        return [kind for own in alike.values() for kind in _one_or_apart(own, devices)]

    def _seconds(self, chain: Chain, costs: Costs) -> float:
        """Of one member."""
        stacks = [jax.ShapeDtypeStruct((1, *x.shapes[0]), x.members[0].aval.dtype) for x in chain.stacks]
        common = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in chain.common]
        return costs.seconds(jax.make_jaxpr(lambda *xs: self.computed(chain, xs))(*stacks, *common))

    def _deal_out(self, deal: Deal, env: dict[Any, Any], read: Read) -> None:
        with as_at(deal.kinds[0].first.packs[0].made[0]), jax.named_scope(_Scope("dealt by cost")):
            pairs = [(kind, deal.places(k)) for k, kind in enumerate(deal.kinds)]
            stacks = [
                _placed(list(map(read, packs)), places) for kind, places in pairs for packs in kind.stacks
            ]
            made = iter(self._shared(deal, stacks, list(map(read, deal.common))))
            env.update(dict.fromkeys(deal.packs))  # all are done, and only results are read
            for kind, places in pairs:
                counts = [chain.count for chain in kind.chains]
                for packs in kind.results:
                    env.update(zip(packs, _unplaced(next(made), places, counts), strict=True))

    def _shared(self, deal: Deal, stacks: Sequence[Any], common: Sequence[Any]) -> Sequence[Any]:
        """The stacks of results: each device computes its load, in a branch of its own."""
        assert self._costs is not None
        axes, different = self._costs.axes, list(dict.fromkeys(deal.loads))
        firsts = [deal.loads.index(load) for load in different[1:]]  # alike loads are side by side
        branches = [functools.partial(self._of_load, deal, load) for load in different]

        def local(*operands):
            place = lax.axis_index(axes)
            number = sum((lax.convert_element_type(place >= n, "int32") for n in firsts), np.int32(0))
            return lax.switch(number, branches, *operands)

        split = PartitionSpec(axes)
        specs = (*[split] * len(stacks), *[PartitionSpec()] * len(common))
        with jax.sharding.use_abstract_mesh(_abstract(self._costs.mesh)):
            how = {"in_specs": specs, "out_specs": split, "axis_names": {*axes}}
            return jax.shard_map(local, check_vma=False, **how)(*stacks, *common)

    def _of_load(self, deal: Deal, load: Load, *operands) -> list[Any]:
        """The results of a device with this load: of each kind so many rows, and zeros in the others."""
        left, made = iter(operands), []
        stacks = [list(itertools.islice(left, len(kind.first.stacks))) for kind in deal.kinds]
        common = dict(zip(deal.common, left, strict=True))
        for kind, own, count, most in zip(deal.kinds, stacks, load, rows(deal.loads), strict=True):
            chain = kind.first
            values = [*(_rows(x, 0, count) for x in own), *(common[v] for v in chain.common)]
            results = self.computed(chain, values) if count else [None] * len(chain.results)
            made += [_filled(x, pack, most) for x, pack in zip(results, chain.results, strict=True)]
        return made


def _one_or_apart(chains: Sequence[Chain], devices: int) -> list[Kind]:
    one, apart = Kind(chains), [Kind([chain]) for chain in chains]
    most = sum(-(-kind.count // devices) for kind in apart)
    return [one] if -(-one.count // devices) < most else apart


def _loads(kinds: Sequence[Kind], seconds: Sequence[float], costs: Costs) -> list[Load]:
    """None, where the device that takes longest takes as long by size."""
    sent = (costs.sent(_nbytes(kind.first)) for kind in kinds)
    sizes = [Size(kind.count, one, its) for kind, one, its in zip(kinds, seconds, sent, strict=True)]
    found = loads(sizes, costs.devices)
    by_size = sum(-(-size.count // costs.devices) * size.seconds for size in sizes)
    return found if longest(found, sizes) < GAIN * by_size else []


def _nbytes(chain: Chain) -> int:
    """Those of a member that is sent to a device, and of what is made of it, back."""
    arrays = (pack.members[0].aval for pack in (*chain.stacks, *chain.results))
    return sum(aval.size * aval.dtype.itemsize for aval in arrays)


def _placed(stacks: Sequence[Any], places: Sequence[int | None]) -> Any:
    """A stack with the rows of others, one after the other, in these places, zeros in those of none."""
    members, parts = [(n, k) for n, x in enumerate(stacks) for k in range(x.shape[0])], []
    found = [(None, 0) if k is None else members[k] for k in places]
    for number, run in itertools.groupby(found, lambda place: place[0]):
        rows_ = [k for _, k in run]
        if number is None:
            parts.append(lax.full((len(rows_), *stacks[0].shape[1:]), 0, stacks[0].dtype))
        else:
            parts.append(_rows(stacks[number], rows_[0], rows_[-1] + 1))
    return _joined(parts)


def _unplaced(stack: Any, places: Sequence[int | None], counts: Sequence[int]) -> Iterator[Any]:
    """The stacks, of so many rows each, whose rows are in these places."""
    taken = (row for row, k in enumerate(places) if k is not None)
    for count in counts:
        own = enumerate(itertools.islice(taken, count))
        runs = [[row for _, row in run] for _, run in itertools.groupby(own, lambda pair: pair[1] - pair[0])]
        yield _joined([_rows(stack, run[0], run[-1] + 1) for run in runs])


def _filled(x: Any, pack: Pack, count: int) -> Any:
    """So many rows, zeros where there are none."""
    missing = count - (0 if x is None else x.shape[0])
    zeros = [lax.full((missing, *pack.shapes[0]), 0, pack.members[0].aval.dtype)] if missing else []
    return _joined([*([] if x is None else [x]), *zeros])


def _rows(stack: Any, first: int, end: int) -> Any:
    return stack if (first, end) == (0, stack.shape[0]) else lax.slice_in_dim(stack, first, end)


def _joined(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)


def _abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
