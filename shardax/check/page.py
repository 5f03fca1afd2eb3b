"""Writes `docs/primitives.md`: which dims of each primitive can be split, at which price, and which cannot,
and why.

All of it is read off the registered rules, bound to the samples that the checker tries, and off their
lowerings. Rows of primitives that the installed JAX does not have stay as they are.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from shardax.check.reasons import NO_RULE, UNCHECKED, UNSPLIT_BECAUSE
from shardax.check.rules import Case, cases, claim
from shardax.check.samples import samples
from shardax.graph.inline import BODIES, INLINED
from shardax.ledger.collectives import collectives
from shardax.sharding import round_up
from shardax.spmd_rules.elementwise import same_shape
from shardax.spmd_rules.localize import Splits, run_local
from shardax.spmd_rules.registry import RULES, Split
from shardax.spmd_rules.rule import REDUCTIONS, UNSPLIT

FILE = Path(__file__).parents[2] / "docs" / "primitives.md"
_MESH = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
_HEAD = """# Primitives: what can be split

`python -m shardax.check --page` makes this page from the rules, and a test checks that it is current.

A rule has a letter for each dim. The same letter on several arrays means that they are split alike.

| in a rule | to split that dim |
|---|---|
| `k` | is free, or costs what the lowering sends |
| `k+`, `k:max`, `k:min` | leaves a reduction owed, which is settled once, where the result is read |
| `k~` | costs what neighbours send each other at the borders of their shards |
| `k!` | is not possible: an operand's axes are moved to another dim by an all_to_all, or gathered |
| `(h w)` | is one of two factors, h the major: split as h is; over w too where each position of h is alone |
"""
_ELEMENTWISE = """
## Elementwise

Every dim is free.

"""
_INLINED = """
## With a program inside

What the equations inside allow.

"""
_RULES = """
## With a rule of their own

Rules are those of one example; `_0 _1` are the dims of arrays that have as many as they like. To split a
*free* dim sends nothing. To split a dim *at a price* sends the collectives that are named, or leaves a
reduction owed.

| primitive | rule | free | at a price | unsplit, and why |
|---|---|---|---|---|
"""
_OTHERS = """
## Others

"""
_NONE = """
## Without a rule

Where a program has one that cannot be looked into, it runs replicated, and a warning names the line.

"""
Cells = tuple[str, ...]  # of a row, without the names


def page(before: str) -> str:
    """The text of the page; `before` is what it was."""
    ruled = RULES.keys() - _elementwise() - UNCHECKED.keys()
    rows = {
        name: _of_case(case) if (case := next(_example(name), None)) else _kept(before).get(name) or _ABSENT
        for name in sorted(ruled)
    }
    table = [
        f"| {_listed(primitives)} | {' | '.join(cells)} |\n" for cells, primitives in _by_value(rows).items()
    ]
    return "".join(
        [
            *(_HEAD, _RULES, *table),
            *(_ELEMENTWISE, _paragraph(_listed(sorted(_elementwise())))),
            *(_INLINED, _paragraph(_listed(sorted({*BODIES, *INLINED} - RULES.keys())))),
            *(
                _OTHERS,
                *_reasons({name: why for name, why in UNCHECKED.items() if name not in _elementwise()}),
            ),
            *(_NONE, *_reasons(NO_RULE)),
        ]
    )


def _elementwise() -> set[str]:
    return {name for name, entry in RULES.items() if entry.rule is same_shape}


def primitives() -> set[str]:
    """All primitives that the page has."""
    return {*RULES, *INLINED, *BODIES, *NO_RULE}


def _by_value(items: Mapping[str, Any]) -> dict[Any, list[str]]:
    """The keys that have each value, in their order."""
    keys: dict[Any, list[str]] = {}
    for key, value in items.items():
        keys.setdefault(value, []).append(key)
    return keys


def _listed(primitives: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in primitives)


def _paragraph(text: str, indent: str = "") -> str:
    filled = textwrap.fill(
        text, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return f"{filled}\n"


def _reasons(why: Mapping[str, str]) -> Iterator[str]:
    """The primitives of each reason."""
    for reason, primitives in _by_value(dict(sorted(why.items()))).items():
        yield _paragraph(f"- {_listed(primitives)}: {reason}.", "  ")


def _kept(before: str) -> dict[str, Cells]:
    """The cells of every primitive that has a row."""
    rows = re.findall(r"^\| (`[^|]+`) \| (`.*) \|$", before, re.M)
    return {
        name: tuple(cells.split(" | "))
        for primitives, cells in rows
        for name in re.findall(r"`([^`]+)`", primitives)
    }


_ABSENT = ("", "", "", "not in the JAX that made this page")


def _example(name: str) -> Iterator[Case]:
    try:
        for sample in samples(name, count=1):
            yield from cases(sample.f, sample.args, name)
    except AttributeError:  # not in this JAX
        return


def _of_case(case: Case) -> Cells:
    factors, entry = case.factors, case.entry
    rule = str(entry.rule_of(case.node)).replace("...", " ".join(f for f in factors.sizes if f[0] == "_"))
    groups = [(f,) for f in factors.sizes if "~" not in f] + list(factors.window_groups)
    free, priced, unsplit = [], [], []
    for group in groups:
        word = group[0].partition("~")[0] + "~" * ("~" in group[0])
        price = _price(case, group)
        (unsplit if price == UNSPLIT else priced if price else free).append(
            f"{word}: {price}" if price not in ("", UNSPLIT) else word
        )
    because = (
        f"{', '.join(unsplit)}: {UNSPLIT_BECAUSE.get(case.node.name, 'mixed with one another')}"
        if unsplit
        else ""
    )
    return f"`{rule.strip()}`", ", ".join(free), ", ".join(priced), because


def _price(case: Case, group: tuple[str, ...]) -> str:
    """What it costs to split a factor: "" for nothing, UNSPLIT where it cannot be split."""
    type_ = case.factors.type_of(group[0])
    if type_ == UNSPLIT or type_ in REDUCTIONS:
        return UNSPLIT if type_ == UNSPLIT else f"{type_} owed"
    splits = {f: Split(("x",), round_up(case.factors.sizes[f], 2)) for f in group}
    return ", ".join(_sent(case, splits))


def _sent(case: Case, splits: Splits) -> list[str]:
    """The kinds of collectives in the lowering of an equation."""
    local = claim(case, splits, _MESH.shape)
    shapes = [
        jax.ShapeDtypeStruct(layout.padded, v.aval.dtype)
        for v, layout in zip(case.node.inputs, local.operands, strict=True)
    ]
    ins, outs = (tuple(layout.sharding.spec for layout in side) for side in (local.operands, local.results))
    run = lambda *shards: tuple(run_local(case.entry, local, case.factors, shards))  # noqa: E731
    with case.node.eqn.ctx.manager:
        jaxpr = jax.make_jaxpr(jax.shard_map(run, mesh=_MESH, in_specs=ins, out_specs=outs, check_vma=False))(
            *shapes
        )
    return sorted({c.kind for c in collectives(jaxpr, _MESH.shape)})
