"""How the weights of a cut loss may rest so that each stage has its own."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardax.annotations.explicit import shape_of
from shardax.pipeline.cut import Cut
from shardax.pipeline.origins import Read, Reads, text
from shardax.pipeline.packed import FLAT, STACKED, WHOLE, PackedArray, Packing, Part
from shardax.pipeline.table import Schedule

Type = jax.ShapeDtypeStruct
Kind = tuple[Any, ...]  # equal for what may rest in one array


def packing_of(
    cut: Cut,
    schedule: Schedule,
    params: Any,
    rest: Sequence[Any],
    axis: str,
    specs: Any = None,
    labels: Any = None,
) -> Packing:
    """How parameters rest for a cut loss. `specs` and `labels`: of leaves; None: nothing is said."""
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    types = [shape_of(jax.typeof(x)) for _, x in paths]
    of_leaves = [_spec(x, axis) for x in _broadcast(specs, tree)]
    reads = Reads.of(cut, schedule, types, rest)
    arrays = _Packer(types, of_leaves, _broadcast(labels, tree), reads, schedule).arrays()
    return Packing(
        tree=tree,
        shapes=tuple(tuple(x.shape) for x in types),
        dtypes=tuple(x.dtype for x in types),
        names=tuple(jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path, _ in paths),
        arrays=tuple(arrays),
        axis=axis,
        stages=schedule.stages,
    )


def _broadcast(said: Any, tree: Any) -> list[Any]:
    return [None] * tree.num_leaves if said is None else tree.flatten_up_to(said)


def _spec(spec: PartitionSpec | None, axis: str) -> PartitionSpec:
    spec = PartitionSpec() if spec is None else spec
    if any(axis in (axes if isinstance(axes, tuple) else (axes,)) for axes in spec):
        raise ValueError(
            f"specs has {spec}, and {axis!r} is the axis of stages, along which the packing itself splits; "
            "name other axes alone"
        )
    return spec


@dataclass
class _Packer:
    """Which arrays rest, of what the stages of a cut read."""

    types: Sequence[Type]
    specs: Sequence[PartitionSpec]
    labels: Sequence[Any]
    reads: Reads
    schedule: Schedule

    def arrays(self) -> list[PackedArray]:
        reads: dict[int, list[Read]] = defaultdict(list)
        for read in self.reads.all:
            if read.origin is not None:
                reads[read.origin.leaf].append(read)
        alone = {leaf: some for leaf, some in reads.items() if self._is_alone(leaf, some)}
        layers = {leaf for leaf, some in reads.items() if self._is_of_layers(leaf, some)}
        made = [*self._layers(layers), *self._alone(alone)]
        placed = {part.leaf for each in made for parts in each.parts for part in parts}
        return made + [self._whole(leaf) for leaf in range(len(self.types)) if leaf not in placed]

    @property
    def stages(self) -> int:
        return self.schedule.stages

    def _whole(self, leaf: int) -> PackedArray:
        type = self.types[leaf]
        return PackedArray(WHOLE, ((Part(leaf),),), type.shape, type.dtype, self.specs[leaf])

    def _kind(self, leaf: int) -> Kind:
        type = self.types[leaf]
        return type.dtype, self.specs[leaf], self.labels[leaf]

    # Rows of stacked layers

    def _is_of_layers(self, leaf: int, reads: Sequence[Read]) -> bool:
        """Whether the stages read rows of it, all rows together and none twice."""
        if leaf in self.reads.others:
            return False
        if not all(read.rows and read.origin and read.origin.is_elementwise for read in reads):
            return False
        rows = sorted({(*(read.rows or ()), read.stage) for read in reads})
        ends = [0, *(stop for _, stop, _ in rows)]
        return [start for start, _, _ in rows] == ends[:-1] and ends[-1] == self.types[leaf].shape[0]

    def _layers(self, leaves: set[int]) -> Iterator[PackedArray]:
        """An array for the nth of a kind on each stage, chunk by chunk."""
        for row in self.schedule.placement:
            alike: dict[Any, dict[int, Part]] = defaultdict(dict)
            for d, k in enumerate(row):
                mine = [Part(read.origin.leaf, read.rows) for read in self.reads.by_virtual[k] if read.origin]
                seen: Counter[Kind] = Counter()
                for part in dict.fromkeys(part for part in mine if part.leaf in leaves):
                    kind = (*self._kind(part.leaf), self.types[part.leaf].shape[1:])
                    alike[kind, seen[kind]][d] = part
                    seen[kind] += 1
            yield from map(self._stacked, alike.values())

    def _stacked(self, by_stage: dict[int, Part]) -> PackedArray:
        parts = tuple((by_stage[d],) if d in by_stage else () for d in range(self.stages))
        leaf, rows = next(iter(by_stage.values()))[:2]
        shape, dtype = self.types[leaf].shape, self.types[leaf].dtype
        if rows:
            counts = [part.rows[1] - part.rows[0] for part in by_stage.values() if part.rows]
            shape = (max(counts), *shape[1:])
        return PackedArray(STACKED, parts, shape, dtype, self.specs[leaf])

    # What one stage alone reads

    def _is_alone(self, leaf: int, reads: Sequence[Read]) -> bool:
        whole = all(read.rows is None for read in reads) and leaf not in self.reads.others
        return whole and len({read.stage for read in reads}) == 1

    def _alone(self, reads: dict[int, list[Read]]) -> list[PackedArray]:
        """Of one shape on most stages, an array each; the others in flat ones, where it saves room."""
        groups: dict[Any, dict[int, int]] = defaultdict(dict)
        seen: Counter[Any] = Counter()
        for leaf, some in reads.items():
            kind, d = (*self._kind(leaf), self.types[leaf].shape), some[0].stage
            groups[kind, seen[kind, d]][d] = leaf
            seen[kind, d] += 1
        stacked, flat = [], defaultdict(lambda: defaultdict(list))
        for members in groups.values():
            if 2 * len(members) > self.stages or not self._is_flat(members, reads):
                stacked.append(self._stacked({d: Part(leaf) for d, leaf in members.items()}))
                continue
            for d, leaf in members.items():
                origin = reads[leaf][0].origin
                flat[(*self._kind(leaf), text(origin.elementwise) if origin else "")][d].append(leaf)
        return stacked + [self._flat(by_stage) for by_stage in flat.values() if len(by_stage) > 1]

    def _is_flat(self, members: dict[int, int], reads: dict[int, list[Read]]) -> bool:
        """Whether leaves can be read out of a flat array, and no other axis splits them."""
        if any(axes is not None for leaf in members.values() for axes in self.specs[leaf]):
            return False
        origins = [read.origin for leaf in members.values() for read in reads[leaf]]
        return all(origin is not None and origin.keeps_order for origin in origins)

    def _flat(self, by_stage: dict[int, list[int]]) -> PackedArray:
        parts, sizes = [], []
        for d in range(self.stages):
            leaves = by_stage.get(d, [])
            ends = [0, *accumulate(math.prod(self.types[leaf].shape) for leaf in leaves)]
            parts.append(tuple(Part(leaf, None, end) for leaf, end in zip(leaves, ends, strict=False)))
            sizes.append(ends[-1])
        first = next(leaf for leaves in by_stage.values() for leaf in leaves)
        return PackedArray(FLAT, tuple(parts), (max(sizes),), self.types[first].dtype, PartitionSpec())
