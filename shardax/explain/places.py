"""Arguments and results of a plan as text: grouped by sharding, equal layers and the moments of an optimizer only mentioned."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from shardax.explain.ledger import array_bytes, array_text
from shardax.explain.words import as_one, bytes_text, form, spec_text, times
from shardax.sharding import AxisSizes, shard_count

if TYPE_CHECKING:
    from shardax.explain.plan import Placed, Plan

SUBTREE = 8  # arrays: a smaller part of the arguments is shown, even where another part lies alike


def arguments(plan: "Plan") -> Iterator[str]:
    places = list(plan.arguments())
    if places:
        yield f"Arguments at rest: {bytes_text(_resident(places, plan.mesh.shape))} on each device"
    repeats = _repeats(places)
    yield from _by_sharding([p for p in places if not _inside(p.path, repeats)], plan.mesh.shape)
    for subtree, original in repeats.items():
        below = [p for p in places if _inside(p.path, [subtree])]
        yield f"  as {original}"
        yield _row(subtree, f"{len(below)} arrays", _resident(below, plan.mesh.shape))


def results(plan: "Plan") -> Iterator[str]:
    """Those that lie as the argument of the same path, as a state does that is passed on, are only counted."""
    known = {(p.path, *_how(p)) for p in plan.arguments()}
    places = list(plan.results())
    other = [p for p in places if (p.path, *_how(p)) not in known]
    if places:
        yield f"Results at rest: {bytes_text(_resident(places, plan.mesh.shape))} on each device"
    if len(other) < len(places):
        yield f"  {len(places) - len(other)} lie as the arguments of the same paths"
    yield from _by_sharding(other, plan.mesh.shape)


def _by_sharding(places: Iterable["Placed"], sizes: AxisSizes) -> Iterator[str]:
    groups = defaultdict(list)
    for place in places:
        groups[spec_text(place.sharding)].append(place)
    for spec, group in groups.items():
        yield f"  {spec}"
        yield from _alike(group, sizes)


def _alike(places: Iterable["Placed"], sizes: AxisSizes) -> Iterator[str]:
    """One line for all places whose paths differ in their numbers only, as those of equal layers do."""
    groups = defaultdict(list)
    for place in places:
        groups[form(place.path), array_text(place.aval)].append(place)
    for (_, array), group in groups.items():
        path = as_one([p.path for p in group]) or "-"
        yield _row(path, times(len(group)) + array, _resident(group, sizes))


def _row(path: str, what: str, nbytes: int) -> str:
    return f"    {path:<60.60}  {what:<30} {bytes_text(nbytes):>12}"


def _repeats(places: Iterable["Placed"]) -> dict[str, str]:
    """Subtrees, each with an earlier one whose arrays have the same paths, types and shardings, as an optimizer's moments have.

    The largest count, and none that differs from the earlier one in its numbers only, which `_alike` shows better.
    """
    contents = defaultdict(list)
    for place in places:
        keys = place.path.split("/")
        for end in range(1, len(keys)):
            contents["/".join(keys[:end])].append(("/".join(keys[end:]), *_how(place)))
    first: dict[tuple, str] = {}
    found: dict[str, str] = {}
    for subtree, arrays in contents.items():
        original = first.setdefault(tuple(arrays), subtree)
        if len(arrays) >= SUBTREE and form(original) != form(subtree) and not _inside(subtree, found):
            found[subtree] = original
    return found


def _inside(path: str, subtrees: Collection[str]) -> bool:
    return any(path.startswith(f"{subtree}/") for subtree in subtrees)


def _how(place: "Placed") -> tuple[str, str]:
    return array_text(place.aval), spec_text(place.sharding)


def _resident(places: Iterable["Placed"], sizes: AxisSizes) -> int:
    return sum(array_bytes(p.aval) // shard_count(p.sharding.axes, sizes) for p in places)
