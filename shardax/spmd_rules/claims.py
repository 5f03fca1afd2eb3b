"""Whether the parts of a registration fit each other, and its functions give what they must: ValueErrors, if
not.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from shardax.spmd_rules.rule import Factors, Rule, base_name, complain
from shardax.validation import require, require_array

_WAYS_OUT = {
    "operands": "no result has it: mark it {0}+ ({0}:max, {0}:min) if results are reduced over it, "
    "{0}! if it must be unsplit",
    "results": "no operand has it, so nothing is computed in parts along it: mark it {0}!",
}


def require_placed(rule: Rule, dims: Rule | Factors) -> None:
    """That of a primitive which is bound on shards as it is: kept factors on both sides, none that wants a
    neighbour's rows.

    `dims` has the rule's tensors, as they are written or bound to shapes.
    """
    before, after = (
        {f for t in side for dim in t for f in _factors_of(dim)} for side in (dims.operands, dims.results)
    )
    marked = {name for name, _ in rule.types}
    for factor in sorted(before | after):
        if "~" in factor:
            raise complain(
                rule.text,
                base_name(factor),
                "a windowed factor needs what neighbours have: give `local`, which sends it",
            )
        if factor not in before & after and factor not in marked:
            side = "operands" if factor in before else "results"
            way_out = (
                _WAYS_OUT[side].format(factor) if factor != "..." else f"only {side} have it: name the dims"
            )
            raise complain(
                rule.text, factor, f"{way_out}; or give `local`, which writes the primitive on shards"
            )


def _factors_of(dim) -> tuple[str, ...]:
    return (dim,) if dim == "..." else dim


def require_operands(rule: Rule, passes: Iterable[Any], in_place: tuple[int, int] | None) -> None:
    """That the operands and results which `passes` and `in_place` mean exist."""
    operands, tensors = len(rule.operands), len(rule.operands + rule.results)
    for number in (i for p in passes for i in p.operands):
        if number >= operands:
            raise ValueError(
                f"passes of register_rule names operand {number}, the rule {rule.text!r} has {operands}: "
                "count from 0"
            )
    for number in in_place or ():
        if not -tensors <= number < tensors:
            has = f"the rule {rule.text!r} has {tensors} operands and results"
            raise ValueError(
                f"in_place of register_rule names place {number}, {has}: count from 0, or back from -1"
            )


@contextmanager
def noting(where: Callable[[], str]) -> Iterator[None]:
    """Errors from a function that was registered say where it was called."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {where()}")
        raise


def require_promised(results: Any, expected: Sequence[tuple[Any, Any]], what: Callable[[], str]) -> list[Any]:
    """The results of a lowering, which must have the shapes and dtypes that the rule promises."""
    if not isinstance(results, list | tuple):
        require(False, f"what {what()} gives", results, "a list with a shard for each result")
    try:
        types = [(x.shape, x.dtype) for x in map(jax.typeof, results)]
    except TypeError:
        for x in results:
            require_array(x, f"what {what()} gives", "a shard for each result")
        raise
    if types != list(expected):
        got, promised = (
            ", ".join(f"{dtype}{list(shape)}" for shape, dtype in xs) for xs in (types, expected)
        )
        way_out = (
            "mark what cannot be split with '!', or have it written on shards (`local` of register_rule)"
        )
        raise ValueError(f"{what()} gives {got or 'nothing'}, where it promises {promised}: {way_out}")
    return list(results)
