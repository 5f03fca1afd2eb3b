"""Candidates: the ways to run a node that the layouts of its operands and those requested for its results
suggest.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardax.sharding import Axes, AxisSizes, Layout, Padding, shard_count
from shardax.spmd_rules.localize import Pending, Splits, fits, project, reduced_pending, tensor_layout
from shardax.spmd_rules.registry import Passes, Split
from shardax.spmd_rules.rule import KEEP, UNSPLIT, Factors

BUSY = 8  # one device in so many, at least, has an element


class Candidate(NamedTuple):
    """Splits of factors, and the layouts that operands and results take by them, pending reductions
    included.
    """

    splits: Splits
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


def candidate_of(factors: Factors, splits: Splits, group: Sequence[int], pending: Pending) -> Candidate:
    """Layouts from splits; the operands of `group` come in owing `pending`, and so leave the results."""
    owed = tuple(sorted({*reduced_pending(factors, splits), *pending}))
    operands = [
        tensor_layout(dims, factors, splits, pending if i in group else ())
        for i, dims in enumerate(factors.operands)
    ]
    results = [tensor_layout(dims, factors, splits, owed) for dims in factors.results]
    return Candidate(splits, tuple(operands), tuple(results))


def project_all(layouts: Sequence[Layout], tensors, factors: Factors, sizes: AxisSizes) -> dict[str, Split]:
    splits: dict[str, Split] = {}
    for layout, dims in zip(layouts, tensors, strict=True):
        for dim, axes, padded in zip(dims, layout.dims, layout.padded, strict=True):
            splits.update(project(dim, axes, padded, factors, sizes) if axes else {})
    return splits


@dataclass(frozen=True, slots=True)
class Offer:
    """The axes that may go to any dim, whether or not some tensor has them: what all_to_alls bring there, or
    what splits nothing else. None: those that some tensor has. `whole`: those that go together, because they
    are one that is cut only for other parts of the program.
    """

    axes: Axes | None = ()
    whole: tuple[Axes, ...] = ()

    def groups(self, used: Iterable[Axes]) -> list[Axes]:
        """Axes that may split a dim together: all; those that do it somewhere, alone or with all others;
        each.
        """
        used = list(used)
        axes = tuple(dict.fromkeys(itertools.chain(*used))) if self.axes is None else self.axes
        more = [group + tuple([a for a in axes if a not in group]) for group in used]
        runs = ([run for run in self.whole if a in run] or [(a,)] for a in axes)
        apart = [tuple([a for a in axes if a in run]) for (run,) in runs]
        return list(dict.fromkeys(filter(None, [axes, *used, *more, *apart])))


def suggest(
    layouts: Sequence[Sequence[Layout]], tensors, factors: Factors, padding: Padding, offer: Offer
) -> dict[str, list[Split]]:
    """For each factor the splits that some layout of some tensor suggests, first suggested first; then those
    over the axes on offer, so that no device gets more than its part.

    Where there are more devices than elements some have none, as most do of a few matrices: what that takes
    has its price. Where fewer than an eighth would have one, only axes that must leave an unsplit factor
    come, for which there may be no other way.
    """
    suggestions: dict[str, list[Split]] = {}
    used: dict[Axes, None] = {}
    must_leave = set[str]()
    for alternatives, dims in zip(layouts, tensors, strict=True):
        for layout in alternatives:
            for factor, split in project_all([layout], [dims], factors, padding.sizes).items():
                used[split.axes] = None
                if factors.type_of(factor) == UNSPLIT:
                    must_leave.update(split.axes)
                else:
                    _append(suggestions, factor, split)
    going = filter(must_leave.intersection, used) if offer.axes == () else offer.groups(used)
    groups = [(axes, shard_count(axes, padding.sizes)) for axes in going]
    for factor in dict.fromkeys(f for dims in tensors for dim in dims for f in dim):
        size = factors.sizes[factor]
        if factors.type_of(factor) != KEEP or size <= 1:
            continue
        for axes, count in groups:
            if BUSY * size >= count or must_leave.intersection(axes):
                _append(suggestions, factor, Split(axes, padding.padded(size, axes)))
    return suggestions


def _append(suggestions: dict[str, list[Split]], factor: str, split: Split) -> None:
    have = suggestions.setdefault(factor, [])
    if split not in have:
        have.append(split)


_MOST_CANDIDATES = 256
_MOST_BLOCKS = 12  # ways to lay out the blocks of one group of windowed factors
Options = list[list[Splits]]  # for each factor, or group of tied ones, the ways to split it


def options_of(suggestions: dict[str, list[Split]], factors: Factors, padding: Padding) -> Options:
    groups = {factor: group for group in factors.window_groups for factor in group}
    options: dict[tuple[str, ...], list[Splits]] = {}
    for factor, splits in suggestions.items():
        group = groups.get(factor)
        if group is None:
            options[factor,] = [{factor: split} for split in splits]
        elif group not in options:
            options[group] = list(_window_options(group, suggestions, factors, padding))
    return [ways for ways in options.values() if ways]


def _window_options(
    group: Sequence[str], suggestions: dict[str, list[Split]], factors: Factors, padding: Padding
) -> Iterator[Splits]:
    """The ways to split windowed factors over the same axes: each in blocks of its own, or in those of
    another where these are not much too large. What only operands have may also stay unsplit, its parts being
    cut out, but not what is reduced."""
    shown = {f for tensor in factors.results for dim in tensor for f in dim}.union(factors.reduced)
    for axes in dict.fromkeys(split.axes for f in group for split in suggestions.get(f, ())):
        sizes = {f: [s.padded for s in suggestions.get(f, ()) if s.axes == axes] for f in group}
        ways = [_blocks(f, factors.sizes[f], axes, sizes, padding) + [None] * (f not in shown) for f in group]
        for chosen in itertools.islice(itertools.product(*ways), _MOST_BLOCKS):
            yield {f: split for f, split in zip(group, chosen, strict=True) if split}


def _blocks(
    factor: str, size: int, axes: Axes, padded: dict[str, list[int]], padding: Padding
) -> list[Split | None]:
    own = [*padded[factor], padding.padded(size, axes)]
    others = (p for sizes in padded.values() for p in sizes if size <= p <= 2 * size)
    return [Split(axes, p) for p in dict.fromkeys((*own, *others))]


def whole(layouts: Sequence[Sequence[Layout]], tensors, factors: Factors, sizes: AxisSizes) -> list[Splits]:
    """The splits that each layout of each tensor suggests by itself, but for windowed factors, which are
    split together.
    """
    windowed = {factor for group in factors.window_groups for factor in group}
    found = [
        project_all([layout], [dims], factors, sizes)
        for alternatives, dims in zip(layouts, tensors, strict=True)
        for layout in alternatives
    ]
    splittable = [{f: s for f, s in splits.items() if factors.type_of(f) != UNSPLIT} for splits in found]
    return [splits for splits in splittable if splits and windowed.isdisjoint(splits)]


def is_many(options: Options) -> bool:
    """Whether there are more combinations than all are looked at."""
    return math.prod(len(ways) + 1 for ways in options) > _MOST_CANDIDATES


def in_order(suggestions: Mapping[str, Sequence[Split]]) -> dict[str, list[Split]]:
    """The same, whoever suggested which first."""

    def order(split: Split) -> tuple[int, Axes, int]:
        return -len(split.axes), split.axes, split.padded

    return {factor: sorted(suggestions[factor], key=order) for factor in sorted(suggestions)}


def assignments(
    options: Options, factors: Factors, sizes: AxisSizes, each: Callable[[], Sequence[Splits]]
) -> Iterator[Splits]:
    """Ways to split each factor as suggested or not at all, the fullest first, as far as there is patience;
    last, none. Where there may be none for all, those of `each` come before.
    """
    found = _compatible_choices(options, factors, {})
    if is_many(options):
        some = (splits for splits in each() if compatible(factors, splits, ()))
        found = itertools.chain(some, itertools.islice(found, _MOST_CANDIDATES))
    yield from (splits for splits in found if splits and fits(factors, splits, sizes))
    yield {}


def _compatible_choices(options: Options, factors: Factors, chosen: Splits) -> Iterator[Splits]:
    """Each way of each factor with each of the others, or none, in order; what is incompatible already does
    not go on."""
    if not options:
        yield chosen
        return
    for way in options[0]:
        more = {**chosen, **way}
        if compatible(factors, more, ()):
            yield from _compatible_choices(options[1:], factors, more)
    yield from _compatible_choices(options[1:], factors, chosen)


def compatible(factors: Factors, splits: Splits, pending: Pending) -> bool:
    """Whether no tensor is split twice by one axis, and no axis over which a result owes a reduction splits
    it too.
    """
    once = [a for split in splits.values() for a in split.axes] + [axis for axis, _ in pending]
    if len(set(once)) < len(once):
        if factors.all_meet:
            return False
    elif not factors.has_diagonals:
        return True
    owed = [axis for axis, _ in (*reduced_pending(factors, splits), *pending)]
    if len(set(owed)) != len(owed):
        return False
    for i, dims in enumerate(factors.tensors):
        axes = [a for dim in dims for f in dim if f in splits for a in splits[f].axes]
        if i >= len(factors.operands) or pending:
            axes += owed if i >= len(factors.operands) else [axis for axis, _ in pending]
        if len(set(axes)) != len(axes):
            return False
    return True


def waits(
    passes: Sequence[Passes], operands: Sequence[Sequence[Layout]]
) -> Iterator[tuple[tuple[int, ...], Pending]]:
    """The ways to let pending operands wait: (operands that come in pending, what they owe); last, that none
    does.
    """
    for group in passes:
        owed = [
            tuple(p for p in lay.pending if p[1] in group.reductions)
            for i in group.operands
            for lay in operands[i]
        ]
        together = tuple(sorted(set(itertools.chain(*owed))))
        if len({axis for axis, _ in together}) == len(together):
            owed.insert(0, together)
        for pending in dict.fromkeys(filter(None, owed)):
            yield group.operands, pending
    yield (), ()
