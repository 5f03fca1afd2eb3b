"""Arguments and results of a plan as text: grouped by sharding, equal layers and the moments of an optimizer
only mentioned.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from shardax.explain.facts import Facts
from shardax.explain.placed import Placed
from shardax.explain.tables import Group, Row, Table
from shardax.ledger.collectives import array_bytes, array_text
from shardax.ledger.words import as_one, bytes_text, form, natural, times

SUBTREE = 8  # arrays: a smaller part of the arguments is shown, even where another part is laid out alike
HEADS = ("", "")  # type, bytes on each device


def arguments(plan: Facts) -> Iterator[Table]:
    places = [replace(p, path=p.named or p.path) for p in plan.arguments()]
    repeats = _repeats(places)
    groups = list(_by_sharding([p for p in places if not _inside(p.path, repeats)]))
    for subtree, original in repeats.items():
        below = [p for p in places if _inside(p.path, [subtree])]
        row = Row(subtree, (f"{len(below)} arrays", bytes_text(_resident(below))))
        groups.append(Group(f"as {original}", (row,)))
    if groups:
        yield Table(f"Arguments at rest: {resting_text(places)}", tuple(groups), HEADS, 1)


def results(plan: Facts) -> Iterator[Table]:
    """Rows of the results. Those that rest as the argument of the same path, such as a state that is passed
    on, are only counted.
    """
    same, other = passed_on(plan)
    groups = [Group(f"{len(same)} are sharded as the arguments of the same paths")] * bool(same)
    groups += _by_sharding(other)
    if groups:
        yield Table(f"Results at rest: {resting_text([*same, *other])}", tuple(groups), HEADS, 1)


def resting_text(places: Iterable[Placed]) -> str:
    """ "3.0 MiB on each device, 12.0 MiB in its host's memory"; the latter where there is any."""
    places = list(places)
    sizes = (bytes_text(_resident(p for p in places if p.at_host is host)) for host in (False, True))
    on_device, at_host = (f"{next(sizes)} on each device", f", {next(sizes)} in its host's memory")
    return on_device + at_host * any(p.at_host for p in places)


def passed_on(plan: Facts) -> tuple[list[Placed], list[Placed]]:
    """The results that are laid out as the arguments of the same paths, and the others."""
    known = {(p.path, *_how(p)) for p in plan.arguments()}
    same, other = [], []
    for place in plan.results():
        (same if (place.path, *_how(place)) in known else other).append(place)
    return same, other


@dataclass(frozen=True)
class Fold:
    """Places that are shown as one row, in the order in which a person counts.

    `name`: of the row. `original`: where the places are those of a subtree that is laid out as an earlier
    one, that one.
    """

    name: str
    places: tuple[Placed, ...]
    original: str = ""

    @property
    def resident(self) -> int:
        """Bytes on each device."""
        return _resident(self.places)


def folds(places: Iterable[Placed]) -> list[Fold]:
    """One fold for all places of one type and sharding whose paths differ only in their numbers, as those of
    equal layers do, and one for each part that is laid out as another; by their names, as a person counts.
    """
    places = list(places)
    repeats = _repeats(places)
    places.sort(key=lambda p: natural(p.path))
    alike = defaultdict(list)
    for place in places:
        if not _inside(place.path, repeats):
            alike[form(place.path), *_how(place)].append(place)
    found = [Fold(as_one([p.path for p in group]) or "the value", tuple(group)) for group in alike.values()]
    for subtree, original in repeats.items():
        found.append(Fold(subtree, tuple(p for p in places if _inside(p.path, [subtree])), original))
    return sorted(found, key=lambda fold: natural(fold.places[0].path))


def _by_sharding(places: Iterable[Placed]) -> Iterator[Group]:
    groups = defaultdict(list)
    for place in places:
        groups[place.text].append(place)
    for spec, group in sorted(groups.items(), key=lambda item: -_resident(item[1])):
        yield Group(spec, tuple(_alike(group)))


def _alike(places: Iterable[Placed]) -> Iterator[Row]:
    """One row for all places whose paths differ only in their numbers, as those of equal layers do."""
    groups = defaultdict(list)
    for place in places:
        groups[form(place.path), array_text(place.aval)].append(place)
    for (_, array), group in sorted(groups.items(), key=lambda item: -_resident(item[1])):
        path = as_one([p.path for p in group]) or "-"
        yield Row(path, (times(len(group)) + array, bytes_text(_resident(group))))


def _repeats(places: Iterable[Placed]) -> dict[str, str]:
    """Subtrees, each with an earlier one whose arrays have the same paths, types and shardings, as an
    optimizer's moments have.

    The largest count, and none that differs from the earlier one in its numbers only, which `_alike` shows
    better.
    """
    contents = defaultdict(list)
    for place in places:
        keys = place.path.split("/")
        for end in range(1, len(keys)):
            contents["/".join(keys[:end])].append(("/".join(keys[end:]), *_how(place)))
    first: dict[tuple, str] = {}
    repeats: dict[str, str] = {}
    for subtree, arrays in contents.items():
        original = first.setdefault(tuple(arrays), subtree)
        if len(arrays) >= SUBTREE and form(original) != form(subtree) and not _inside(subtree, repeats):
            repeats[subtree] = original
    return repeats


def _inside(path: str, subtrees: Collection[str]) -> bool:
    return any(path.startswith(f"{subtree}/") for subtree in subtrees)


def _how(place: Placed) -> tuple[str, str]:
    return array_text(place.aval), place.text


def _resident(places: Iterable[Placed]) -> int:
    return sum(array_bytes(p.aval) // p.shards for p in places)
