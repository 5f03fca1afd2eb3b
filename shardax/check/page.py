"""Writes `docs/primitives.md`: which dims of each primitive can be split, at which price, and which cannot, and why.

All of it is read off the registered rules, bound to the samples that the checker tries, and off their lowerings. Rows of
primitives that the installed JAX does not have stay as they are.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, AxisType

from shardax.check.reasons import NO_RULE, UNCHECKED, WHOLE_BECAUSE
from shardax.check.rules import Case, cases, claim
from shardax.check.samples import samples
from shardax.explain.ledger import collectives
from shardax.graph import BODIES, INLINED
from shardax.sharding import round_up
from shardax.spmd_rules.elementwise import same_shape
from shardax.spmd_rules.localize import Splits, run_local
from shardax.spmd_rules.registry import RULES, Split
from shardax.spmd_rules.rule import REDUCTIONS, WHOLE

FILE = Path(__file__).parents[2] / "docs" / "primitives.md"
_MESH = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
_HEAD = """# Primitives: what can be split

`python -m shardax.check --page` makes this page from the rules, and a test checks that it is current. Each rule is that of
one example; see `shardax/spmd_rules/rule.py` for how to read it. To split a *free* dim sends nothing. To split a dim *at a
price* makes the collectives that are named, which the lowering itself sends, or leaves a reduction owed (`k+`, `k:max`,
`k:min`), which is settled once, where the result is read. A *whole* dim is never split. If an operand comes in with such a
dim split, its axes are moved to another dim by an all_to_all where there is one, and gathered where there is none.

| primitive | rule | free | at a price | whole, and why |
|---|---|---|---|---|
"""


def page(before: str) -> str:
    """The text of the page; `before` is what it was."""
    kept = {m[1]: m[0] for m in re.finditer(r"^\| `([^`]+)` .*$", before, re.M)}
    return _HEAD + "".join(f"{_row(name) or kept.get(name) or _absent(name)}\n" for name in sorted(names()))


def names() -> set[str]:
    """All primitives that the page tells of."""
    return {*RULES, *INLINED, *BODIES, *NO_RULE}


def _absent(name: str) -> str:
    return _line(name, "", "", "", "not in the JAX that made this page")


def _line(*cells: str) -> str:
    name, rule, *rest = cells
    return f"| `{name}` | {f'`{rule}`' if rule else ''} | {' | '.join(rest)} |"


def _row(name: str) -> str:
    """The row of a primitive, "" where there is no example of it."""
    if name in NO_RULE:
        return _line(name, "", "", "", f"no rule: {NO_RULE[name]}")
    if name in BODIES:
        return _line(name, "", "what its body, carries and leading dims allow", "", "")
    if name in INLINED and name not in RULES:
        return _line(name, "", "what its equations allow: it is inlined", "", "")
    if RULES[name].rule is same_shape:
        return _line(name, "a b -> a b", "every dim", "", "")
    if name in UNCHECKED:
        rule = RULES[name].rule
        return _line(name, rule if isinstance(rule, str) else "", "", "", UNCHECKED[name])
    return next((_of_case(case) for case in _example(name)), "")


def _example(name: str) -> Iterator[Case]:
    try:
        for sample in samples(name, count=1):
            yield from cases(sample.f, sample.args, name)
    except AttributeError:  # not in this JAX
        return


def _of_case(case: Case) -> str:
    factors, entry = case.factors, case.entry
    rule = str(entry.rule_of(case.node))
    groups = [(f,) for f in factors.sizes if "~" not in f] + list(factors.tied)
    free, priced, whole = [], [], []
    for group in groups:
        word = group[0].partition("~")[0] + "~" * ("~" in group[0])
        price = _price(case, group)
        (whole if price == WHOLE else priced if price else free).append(
            f"{word}: {price}" if price not in ("", WHOLE) else word
        )
    because = f"{', '.join(whole)}: {WHOLE_BECAUSE.get(case.node.name, 'mixed with one another')}" if whole else ""
    return _line(case.node.name, rule, ", ".join(free), ", ".join(priced), because)


def _price(case: Case, group: tuple[str, ...]) -> str:
    """What it costs to split a factor: "" for nothing, WHOLE where it cannot be split."""
    kind = case.factors.kind(group[0])
    if kind == WHOLE or kind in REDUCTIONS:
        return WHOLE if kind == WHOLE else f"{kind} owed"
    splits = {f: Split(("x",), round_up(case.factors.sizes[f], 2)) for f in group}
    return ", ".join(_sent(case, splits))


def _sent(case: Case, splits: Splits) -> list[str]:
    """The kinds of collectives in the lowering of an equation."""
    local = claim(case, splits, _MESH.shape)
    shapes = [
        jax.ShapeDtypeStruct(layout.padded, v.aval.dtype) for v, layout in zip(case.node.inputs, local.operands, strict=True)
    ]
    ins, outs = (tuple(layout.sharding.spec for layout in side) for side in (local.operands, local.results))
    run = lambda *shards: tuple(run_local(case.entry, local, case.factors, shards))  # noqa: E731
    with case.node.eqn.ctx.manager:
        jaxpr = jax.make_jaxpr(jax.shard_map(run, mesh=_MESH, in_specs=ins, out_specs=outs, check_vma=False))(*shapes)
    return sorted({c.kind for c in collectives(jaxpr, _MESH.shape)})
