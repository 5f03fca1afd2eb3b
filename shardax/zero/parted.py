"""Parted: a `cond` whose branches compute several things alike becomes one `cond` for each of these.

    bases = cond(now, turned, kept, statistics)         b1 = cond(now, turned, kept, s1)
                                                        b2 = cond(now, turned, kept, s2)

An optimizer that makes new bases for all its matrices every few steps does so under one condition. What has
nothing to do with each other in the branches need not be there together, and what is alike can be one stack.
"""

from collections.abc import Callable, Sequence
from typing import Any

from shardax import _jax
from shardax.graph.evaluate import without_calls
from shardax.zero.alike import key

Results = Sequence[int]  # by their numbers


def parted(eqn, apart: Callable[[Any], bool]) -> list[Any]:
    """The equations in the place of a `cond`: one for each group of results that depend on each other, where
    another is alike, and they are such that `apart` wants it, and one for all others. Of other equations
    these.
    """
    if eqn.primitive.name != "cond" or eqn.effects:
        return [eqn]
    branches = [without_calls(branch) for branch in eqn.params["branches"]]
    parts: dict[Any, list[tuple[Results, Any]]] = {}
    for results in _groups(branches):
        part = _of_results(eqn, branches, results)
        parts.setdefault(key(part), []).append((results, part))
    kept = [alike for alike in parts.values() if len(alike) > 1 and apart(alike[0][1])]
    done = {n for alike in kept for results, _ in alike for n in results}
    others = [n for n in range(len(eqn.outvars)) if n not in done]
    rest = [_of_results(eqn, branches, others)] if others else []
    return [*(part for alike in kept for _, part in alike), *rest] if kept else [eqn]


def _groups(branches: Sequence[Any]) -> list[Results]:
    """The results, those together of which some branch makes one array of what it makes another of."""
    parent = {n: n for n in range(len(branches[0].out_avals))}
    for branch in branches:
        _join(branch.jaxpr, parent)
    groups: dict[int, list[int]] = {}
    for n in parent:
        groups.setdefault(_root(parent, n), []).append(n)
    return list(groups.values())


def _join(jaxpr, parent: dict[int, int]) -> None:
    """Joins results that share an equation which depends on any array; others each can have for itself."""
    inputs = {v for v in jaxpr.invars if v.aval.shape}
    made = set()
    for eqn in jaxpr.eqns:
        if any(not _jax.is_literal(v) and (v in inputs or v in made) for v in eqn.invars):
            made.update(eqn.outvars)
    of: dict[Any, int] = {}  # a result that is made of it

    def note(n: int, variables: Sequence[Any]) -> None:
        for v in variables:
            if not _jax.is_literal(v) and v in made:
                parent[_root(parent, n)] = _root(parent, of.setdefault(v, n))

    for n, v in enumerate(jaxpr.outvars):
        note(n, [v])
    for eqn in reversed(jaxpr.eqns):
        if numbers := [of[v] for v in eqn.outvars if v in of]:
            note(numbers[0], [*eqn.outvars, *eqn.invars])


def _root(parent: dict[int, int], n: int) -> int:
    while parent[n] != n:
        n = parent[n]
    return n


def _of_results(eqn, branches: Sequence[Any], results: Results) -> Any:
    """A `cond` of some of the results, with the operands that these need."""
    wanted = [n in results for n in range(len(eqn.outvars))]
    needs = [_jax.prune(branch, wanted)[1] for branch in branches]
    kept = [any(used) for used in zip(*needs, strict=True)]
    pruned = tuple(_jax.prune(branch, wanted, kept)[0] for branch in branches)
    index, *operands = eqn.invars
    read = [v for v, used in zip(operands, kept, strict=True) if used]
    made = [v for v, is_wanted in zip(eqn.outvars, wanted, strict=True) if is_wanted]
    return eqn.replace(invars=[index, *read], outvars=made, params={**eqn.params, "branches": pruned})
