"""Branches: a `cond` that takes all parts of a bucket, or gives them, takes or gives the bucket, and a `scan`
that carries them carries it.

    a, b = cond(ok, update, keep, a, b, g)        bucket = cond(ok, update', keep', bucket, g)
    a, b = scan(step, a, b)                       bucket = scan(step', bucket)

An optimizer that skips steps, or updates in some of them, has its update in there; a program that makes
several steps in one call has them in a loop.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax

from shardax import _jax
from shardax.annotations.explicit import as_at, shape_of
from shardax.differentiated import is_differentiated
from shardax.graph.evaluate import bound, evaluate
from shardax.zero.bucket import BUCKET, joined, parts_of

Members = tuple[Any, ...]  # variables
Kind = tuple[Any, tuple[tuple[int, ...], ...], bool]
"""Of a bucket: the dtype, the shapes of its parts, and whether it is a stack."""


@dataclass(frozen=True)
class Cuts:
    """The buckets of a jaxpr, each variable with those of its parts: `cut` are taken apart, `joined` are
    made.
    """

    cut: Mapping[Any, Members]
    joined: Mapping[Any, Members]


def is_of_bucket(eqn) -> bool:
    return BUCKET in str(eqn.source_info.name_stack)


def buckets_in(eqns: Sequence[Any], stacks: bool | None = None) -> Cuts:
    """The buckets; those that are stacks alone, or the others, where that is said."""
    found = _buckets_in(eqns)
    if stacks is None:
        return found
    cut, made = (
        {whole: vs for whole, vs in side.items() if _is_stack(whole) == stacks}
        for side in (found.cut, found.joined)
    )
    return Cuts(cut, made)


def _is_stack(whole) -> bool:
    return len(whole.aval.shape) > 1


def _buckets_in(eqns: Sequence[Any]) -> Cuts:
    reshaped = {eqn.invars[0]: eqn for eqn in eqns if _is_named(eqn, "reshape")}
    flattened = {eqn.outvars[0]: eqn for eqn in eqns if _is_named(eqn, "reshape")}
    parts: dict[Any, dict[int, Any]] = {}
    for eqn in eqns:
        if _is_named(eqn, "slice"):
            (v,), (start, *_) = eqn.outvars, eqn.params["start_indices"]
            parts.setdefault(eqn.invars[0], {})[start] = reshaped[v].outvars[0] if v in reshaped else v
    cut = {whole: tuple(v for _, v in sorted(found.items())) for whole, found in parts.items()}
    made = {
        eqn.outvars[0]: tuple(flattened[v].invars[0] if v in flattened else v for v in eqn.invars)
        for eqn in eqns
        if _is_named(eqn, "concatenate")
    }
    return Cuts({w: vs for w, vs in cut.items() if sum(v.aval.size for v in vs) == w.aval.size}, made)


def _is_named(eqn, name: str) -> bool:
    return eqn.primitive.name == name and is_of_bucket(eqn)


def with_whole_buckets(closed, change: Callable[[Any], Any]) -> Any:
    """The program, buckets whole in and out of branches and loops, which become what `change` makes of
    them.
    """
    found, eqns = buckets_in(closed.jaxpr.eqns), closed.jaxpr.eqns
    kinds = {_kind(*bucket) for bucket in (*found.cut.items(), *found.joined.items())}
    if not kinds or not any(map(_has_whole, eqns)):
        return closed

    def run(*args):
        jaxpr = closed.jaxpr
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

        def read(atom):
            return atom.val if _jax.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            operands = list(map(read, eqn.invars))
            if _has_whole(eqn):
                made = _WITH_WHOLE[eqn.primitive.name](eqn, operands, kinds, found, change)
            else:
                made = bound(eqn, operands)
            env.update(zip(eqn.outvars, made, strict=True))
        return list(map(read, jaxpr.outvars))

    return _jax.dce(jax.make_jaxpr(run)(*map(shape_of, closed.in_avals)))


def _has_whole(eqn) -> bool:
    return eqn.primitive.name in _WITH_WHOLE and not is_differentiated(eqn.source_info.name_stack)


@dataclass(frozen=True)
class Group:
    """The numbers of arrays that may be together in a bucket."""

    numbers: Sequence[int]
    is_stack: bool

    def joined(self, arrays: Sequence[Any]) -> Any:
        return joined([arrays[n] for n in self.numbers], self.is_stack)

    def put(self, arrays: list[Any], whole: Any) -> None:
        """Puts the parts of a bucket in their places."""
        for n, x in zip(self.numbers, parts_of(whole, [arrays[n].shape for n in self.numbers]), strict=True):
            arrays[n] = x


def _kind(whole, members: Members) -> Kind:
    return members[0].aval.dtype, tuple(v.aval.shape for v in members), _is_stack(whole)


def _groups(atoms: Sequence[Any], kinds: Collection[Kind], known: Mapping[Any, Members]) -> list[Group]:
    """Those that may be together in a bucket of some kind: what is `known` to be, and of the others in turn
    as many of each shape, since trees that are alike have one order.
    """
    numbers = {v: n for n, v in enumerate(atoms) if not _jax.is_literal(v)}
    groups = [
        Group([numbers[v] for v in members], _is_stack(whole))
        for whole, members in known.items()
        if numbers.keys() >= set(members)
    ]
    done = {n for group in groups for n in group.numbers}
    for dtype, shapes, is_stack in kinds:
        left = {
            shape: [n for n in numbers.values() if n not in done and _is(atoms[n], dtype, shape)]
            for shape in shapes
        }
        for _ in range(min(len(left[shape]) // shapes.count(shape) for shape in shapes)):
            groups.append(Group([left[shape].pop(0) for shape in shapes], is_stack))
    return groups


def _is(v, dtype, shape: tuple[int, ...]) -> bool:
    return v.aval.shape == shape and v.aval.dtype == dtype


def _cond(
    eqn, operands: Sequence[Any], kinds: Collection[Kind], found: Cuts, change: Callable[[Any], Any]
) -> list[Any]:
    """The results of the `cond`, which takes and gives buckets of these kinds, of all that may be in one."""
    taken = _groups(eqn.invars[1:], kinds, found.cut)
    given = _groups(eqn.outvars, kinds, found.joined)
    with as_at(eqn):
        branches = tuple(_branch(branch, taken, given, change) for branch in eqn.params["branches"])
        buckets = [group.joined(operands[1:]) for group in taken]
    made = bound(eqn, [*operands, *buckets], branches=branches)
    results = made[: len(eqn.outvars)]
    with as_at(eqn):
        for whole, group in zip(made[len(results) :], given, strict=True):
            group.put(results, whole)
    return results


def _branch(branch, taken: Sequence[Group], given: Sequence[Group], change: Callable[[Any], Any]) -> Any:
    """The branch, which takes buckets besides its operands, and gives some besides its results."""
    branch = _jax.closed(branch)
    types = list(map(shape_of, branch.in_avals))
    buckets = [jax.eval_shape(partial(group.joined, types)) for group in taken]

    def run(*args):
        operands = list(args[: len(types)])
        for whole, group in zip(args[len(types) :], taken, strict=True):
            group.put(operands, whole)
        results = evaluate(branch, operands)
        return [*results, *(group.joined(results) for group in given)]

    return change(jax.make_jaxpr(run)(*types, *buckets))


def _scan(
    eqn, operands: Sequence[Any], kinds: Collection[Kind], found: Cuts, change: Callable[[Any], Any]
) -> list[Any]:
    """The results of the loop, which carries buckets of these kinds, of all that it carries of one."""
    consts, carries = _jax.scan_counts(eqn.params)
    groups = _groups(eqn.invars[consts : consts + carries], (), found.cut)
    if not groups:
        return bound(eqn, operands)
    fixed, start, rows = (
        operands[:consts],
        operands[consts : consts + carries],
        operands[consts + carries :],
    )
    body = _jax.closed(eqn.params["jaxpr"])

    def trip(start, buckets, rows):
        start = list(start)
        for whole, group in zip(buckets, groups, strict=True):
            group.put(start, whole)
        results = evaluate(body, [*fixed, *start, *rows])
        new = results[:carries]
        return (new, [group.joined(new) for group in groups]), results[carries:]

    def changed(state, rows):
        leaves, tree = jax.tree.flatten((*state, rows))
        jaxpr, out = jax.make_jaxpr(lambda *xs: trip(*tree.unflatten(xs)), return_shape=True)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(out), evaluate(change(jaxpr), leaves))

    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    with as_at(eqn):
        buckets = [group.joined(start) for group in groups]
        (new, buckets), stacked = lax.scan(changed, (start, buckets), rows, **how)
        results = [*new, *stacked]
        for whole, group in zip(buckets, groups, strict=True):
            group.put(results, whole)
    return results


_WITH_WHOLE = {"cond": _cond, "scan": _scan}
