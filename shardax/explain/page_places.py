"""The arguments and results of a plan, for its page: equal layers folded, each array can be chosen."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from shardax.explain.analysis import Analysis
from shardax.explain.page import Cell, Section, fold, nbytes, short, table, text
from shardax.explain.page_arrays import Arrays
from shardax.explain.picture import picture_of
from shardax.explain.placed import Placed
from shardax.explain.places import Fold, folds, passed_on, resting_text
from shardax.ledger.collectives import array_text
from shardax.ledger.words import times

HEADS = ("path", "type", "sharding", "on each device")
Button = Callable[[Placed], str]


def places(plan: Analysis, arrays: Arrays) -> Iterator[Section]:
    """A section for the arguments, and one for the results."""
    values = arrays.story.insides() if arrays.story else {}
    named = {p.path: replace(p, path=p.named or p.path) for p in plan.arguments()}
    buttons = {p.path: _argument(plan, arrays, p, values.get(i)) for i, p in enumerate(named.values())}

    def argument(p: Placed) -> str:
        return buttons[p.path]

    arguments = folds(named.values())
    if arguments:
        yield _section("arguments", arguments, [_row(found, argument) for found in arguments])
    same, other = passed_on(plan)
    results = folds(other)
    rows = [_row(found, lambda p: _result(plan, arrays, p)) for found in results]
    if same:
        name = f"{len(same)} as the arguments of the same paths"
        results.append(Fold(name, tuple(named[p.path] for p in same)))
        rows.append(_row(results[-1], argument))
    if rows:
        yield _section("results", results, rows)


def _section(side: str, found: list[Fold], rows: list[list[Cell]]) -> Section:
    title = f"{side.capitalize()} at rest: {resting_text(p for each in found for p in each.places)}"
    return Section(side, title, table(HEADS, rows, "places"), side.capitalize())


def _argument(plan: Analysis, arrays: Arrays, p: Placed, value) -> str:
    why = arrays.why(value, p.sharding)
    return arrays.button(f"argument {p.path}", p.aval, picture_of(plan, p), p.path, why)


def _result(plan: Analysis, arrays: Arrays, p: Placed) -> str:
    name = p.path or "the value"
    return arrays.button(f"result {name}", p.aval, picture_of(plan, p), name)


def _row(found: Fold, button: Button) -> list[Cell]:
    kind, sharding = _how(found)
    return [Cell(_name(found, button)), short(kind), text(sharding), nbytes(found.resident)]


def _name(found: Fold, button: Button) -> str:
    """A fold opens to show each array; where they differ, the folds of which it is made."""
    if len(found.places) == 1:
        return button(found.places[0])
    if _is_alike(found):
        items = [button(p) for p in found.places]
    else:
        items = [
            f"{_name(f, button)} <span>{text(' '.join(_how(f))).html}</span>" for f in folds(found.places)
        ]
    return fold(found.name, f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>")


def _how(found: Fold) -> tuple[str, str]:
    first, count = found.places[0], len(found.places)
    if _is_alike(found):
        return times(count) + array_text(first.aval), first.text
    return f"{count} arrays", f"as {found.original}" if found.original else ""


def _is_alike(found: Fold) -> bool:
    return not found.original and len({(array_text(p.aval), p.text) for p in found.places}) == 1
