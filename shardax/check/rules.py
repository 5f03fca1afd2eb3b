"""The rule checker: brute-forces what rules claim, on virtual devices, against the plain primitive.

    from shardax.check import check_rule, missing_claims

    check_rule(lambda a, b: a @ b, a, b)         # AssertionError: which split of which primitive gave what
    missing_claims(lambda a: jnp.sort(a, 0), a)  # the unsplit factors that would pass if they were kept

For each equation that has a rule, each factor that may be split is over one axis, over one axis with
padding to spare, and over two; each pair of factors over one axis each; each claim of `passes` is tried with
operands that are really pending. Operands are laid out with garbage in their padding, `run_local` runs under
shard_map, what is pending is settled, the result cropped. Integers, booleans, keys and random bits must be
equal, floats close; and the lowering must send what `sends` says, by which splits are priced. All splits
of one function share one compilation, so prefer one function with a few equations of interest to many
functions, and small sizes: 5 and 6 rather than 64.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardax import _jax, spmd_rules  # noqa: F401  (registers the built-in rules)
from shardax.check.evaluate import evaluate
from shardax.check.missing import Missing, missing
from shardax.check.shards import difference, is_key, with_garbage, words
from shardax.graph.graph import Node
from shardax.graph.inline import from_jaxpr
from shardax.ledger.collectives import collectives
from shardax.reshard.run import identity
from shardax.sharding import Layout, round_up, shard_count
from shardax.spmd_rules.localize import Splits, fits, reduced_pending, run_local, tensor_layout
from shardax.spmd_rules.registry import RULES, Entry, Local, Split
from shardax.spmd_rules.rule import UNSPLIT, Factors
from shardax.validation import is_integer, require, require_array, require_function

AXES = MappingProxyType({"x": 2, "y": 2})
_SETTLE = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
_SLACK = 64  # ulps of the greatest result that reassociation may cost at the sizes that cases have


@_jax.boundary
def check_rule(f: Callable, *args, axes: Mapping[str, int] = AXES, only: str = "") -> Counter[str]:
    """Checks the rules of every equation of `f(*args)`; returns how many splits of each primitive were tried.

    Args:
      only: check this primitive's equations and no others.
      axes: the mesh axes to split over and their sizes, at least two; their product is the number of devices
        needed.

    Raises:
      AssertionError: a split, or a claim of `passes`, gives another result than the primitive does, or an
        error.
    """
    _check_arguments(f, args, only)
    ok = (
        isinstance(axes, Mapping)
        and len(axes) > 1
        and all(isinstance(a, str) and is_integer(n, 1) for a, n in axes.items())
    )
    require(
        ok, "axes of check_rule", axes, "a mapping of at least two axes to sizes, such as {'x': 2, 'y': 2}"
    )
    trials = [trial for case in cases(f, args, only) for trial in _claims(case, axes)]
    wrong = [
        f"{trial}: {problem}" for trial, problem in zip(trials, _run(trials, axes), strict=True) if problem
    ]
    if wrong:
        raise AssertionError("these claims are wrong:\n" + "\n".join(wrong))
    return Counter(trial.case.node.name for trial in trials)


@_jax.boundary
def missing_claims(f: Callable, *args, only: str = "") -> list[str]:
    """What the rules of `f(*args)` do not claim and could: dims that are unsplit and need not be. See
    `shardax.check.missing`.
    """
    _check_arguments(f, args, only)
    return list(map(str, missing_of(f, args, only)[0]))


def _check_arguments(f, args, only) -> None:
    require_function(f, "f of a check")
    for i, leaf in enumerate(jax.tree.leaves(args)):
        require_array(leaf, f"argument {i} of a check")
    require(isinstance(only, str), "only of a check", only, "the name of a primitive, such as 'dot_general'")


def missing_of(f: Callable, args: Sequence[Any], only: str = "") -> tuple[list[Missing], int]:
    """Missing claims, each once, and the number of equations that were looked at."""
    claims = [
        list(missing(case.node, case.entry, case.inputs, case.outputs)) for case in cases(f, args, only)
    ]
    return list(dict.fromkeys(m for each in claims for m in each)), len(claims)


@dataclass(frozen=True, eq=False)
class Case:
    """An equation with its rule and concrete values."""

    node: Node
    entry: Entry
    factors: Factors
    inputs: list[Any]
    outputs: list[Any]


@dataclass(frozen=True, eq=False)
class _Trial:
    """One claim: `splits` of the factors, or operands pending with kind `pending[1]` over the axis
    `pending[0]`.
    """

    case: Case
    splits: Splits
    pending: tuple[str, str] | None = None
    pending_operands: tuple[int, ...] = ()

    def __str__(self):
        sizes = self.case.factors.sizes
        texts = [f"{f} ({sizes[f]} in {s.padded}) over {'·'.join(s.axes)}" for f, s in self.splits.items()]
        texts += [f"operands {self.pending_operands} pending {self.pending[1]}"] if self.pending else []
        shapes = f"{self.case.node.in_shapes} -> {self.case.node.out_shapes}"
        return f"{self.case.node.name} {shapes}, {', '.join(texts)}"

    def local(self, axes) -> Local:
        factors, pending = self.case.factors, (self.pending,) if self.pending else ()
        owed = pending or reduced_pending(factors, self.splits)
        owes = dict.fromkeys(self.pending_operands, pending)
        operands = [
            tensor_layout(t, factors, self.splits, owes.get(i, ())) for i, t in enumerate(factors.operands)
        ]
        results = [tensor_layout(t, factors, self.splits, owed) for t in factors.results]
        return Local(self.case.node, tuple(operands), tuple(results), self.splits, axes)


def cases(f: Callable, args: Sequence[Any], only: str = "") -> Iterator[Case]:
    args = jax.tree.map(jnp.asarray, args)
    graph = from_jaxpr(jax.make_jaxpr(f)(*args))
    for node, inputs, outputs in evaluate(graph, jax.tree.leaves(args)):
        entry = RULES.get(node.name)
        if entry is not None and only in ("", node.name):
            yield Case(node, entry, entry.factors(node), inputs, outputs)


def claim(case: Case, splits: Splits, axes) -> Local:
    """What the lowering of an equation knows under these splits."""
    return _Trial(case, splits).local(axes)


def _claims(case: Case, axes) -> Iterator[_Trial]:
    factors = case.factors
    windowed = {f for group in factors.window_groups for f in group}
    groups = [*((f,) for f in factors.sizes if f not in windowed), *factors.window_groups]
    free = [g for g in groups if factors.type_of(g[0]) != UNSPLIT and max(factors.sizes[f] for f in g) > 1]
    for splits in itertools.chain(
        *(_one_split(case, group, axes) for group in free), _pairs(case, free, axes)
    ):
        if fits(factors, splits, axes):
            yield _Trial(case, splits)
    for passes in case.entry.passes_of(case.node):
        for reduction in passes.reductions:
            dtypes = [case.node.inputs[i].aval.dtype for i in passes.operands]
            ordered = not any(jnp.issubdtype(d, jnp.complexfloating) for d in dtypes)
            if all(jnp.issubdtype(d, jnp.number) for d in dtypes) and (reduction == "sum" or ordered):
                yield _Trial(case, {}, (next(iter(axes)), reduction), passes.operands)


def _one_split(case: Case, group: Sequence[str], axes) -> Iterator[Splits]:
    every = tuple(axes)
    first, count = every[:1], shard_count(every, axes)
    # padded for few shards, and for many: more than its size
    sizes = {f: case.factors.sizes[f] for f in group}
    ways = {f: (round_up(n, axes[every[0]]), round_up(n + 1, count)) for f, n in sizes.items()}
    for over, way in ((first, 0), (first, 1), (every, 1)):
        yield {f: Split(over, ways[f][way]) for f in group}
    shown = {f for tensor in case.factors.results for dim in tensor for f in dim}.union(case.factors.reduced)
    if uncut := [f for f in group if "~" in f and f not in shown]:
        yield {f: Split(every, ways[f][1]) for f in group if f not in uncut}


def _pairs(case: Case, free: Sequence[tuple[str, ...]], axes) -> Iterator[Splits]:
    for groups in itertools.combinations(free, 2):
        split = zip(groups, tuple(axes)[:2], strict=True)
        yield {f: Split((a,), round_up(case.factors.sizes[f], axes[a])) for group, a in split for f in group}


def _run(trials: Sequence[_Trial], axes) -> list[str]:
    """Runs all trials in one compilation; for each, what is wrong, or ""."""
    locals_ = [trial.local(axes) for trial in trials]
    problems = [""] * len(trials)

    def on_shards(shards):
        return [
            _attempt(i, *packed, problems)
            for i, packed in enumerate(zip(trials, locals_, shards, strict=True))
        ]

    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )
    operands = [
        [_lay_out(*pair, local.sizes) for pair in zip(trial.case.inputs, local.operands, strict=True)]
        for trial, local in zip(trials, locals_, strict=True)
    ]
    in_specs = [[_spec(layout) for layout in local.operands] for local in locals_]
    out_specs = [[layout.sharding.spec for layout in local.results] for local in locals_]
    mapped = jax.shard_map(on_shards, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)
    results = jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 0})(
        operands
    )  # compiles thrice as fast
    checked = zip(problems, trials, results, strict=True)
    return [problem or _difference(trial.case, out) for problem, trial, out in checked]


def _attempt(i: int, trial: _Trial, local: Local, shards, problems: list[str]):
    """The settled results of one trial on shards; an error, or a wrong shape, goes to `problems`."""
    shards = [
        shard[0] if layout.pending else shard for shard, layout in zip(shards, local.operands, strict=True)
    ]
    expected = [(local.out_shape(j), v.aval.dtype) for j, v in enumerate(trial.case.node.outputs)]
    try:
        with trial.case.node.eqn.ctx.manager:
            run = partial(run_local, trial.case.entry, local, trial.case.factors)
            results, problems[i] = run(shards), _sent_otherwise(trial.case.entry, local, run, shards)
    except Exception as error:
        problems[i] = f"{type(error).__name__}: {str(error)[:300]}"
        results = []
    if not problems[i] and [(r.shape, r.dtype) for r in results] != expected:
        problems[i] = f"shards of {[(r.shape, str(r.dtype)) for r in results]}, wanted {expected}"
    if problems[i]:
        return [
            jnp.zeros(shape + words(v).shape[v.ndim :])
            for v, (shape, _) in zip(trial.case.outputs, expected, strict=True)
        ]
    return [_settle(result, layout) for result, layout in zip(results, local.results, strict=True)]


def _sent_otherwise(entry: Entry, local: Local, run: Callable, shards: Sequence[Any]) -> str:
    """How what a lowering sends differs from what `sends` says, or ""."""
    made = collectives(jax.make_jaxpr(run)(shards), local.sizes)
    sent, said = (
        Counter((m.kind, frozenset(m.axes), math.ceil(m.nbytes), m.far) for m in messages if m.nbytes)
        for messages in ((c.message._replace(nbytes=c.total) for c in made), entry.sent(local))
    )
    return "" if sent == said else f"sends {_told(sent)}, and its `sends` says {_told(said)}"


def _told(messages: Counter) -> str:
    told = (
        f"{count} x {kind} over {','.join(sorted(axes))} of {nbytes} bytes{' far' * far}"
        for (kind, axes, nbytes, far), count in sorted(messages.items(), key=str)
    )
    return "; ".join(told) or "nothing"


def _settle(result, layout: Layout):
    for axis, reduction in layout.pending:
        result = _SETTLE[reduction](result, axis)
    return words(result)


def _spec(layout: Layout) -> P:
    return P(layout.pending[0][0], *layout.sharding.spec) if layout.pending else layout.sharding.spec


def _lay_out(value, layout: Layout, sizes):
    """An operand, padded with garbage; one that is pending as what each device along its axis holds, stacked
    in front.
    """
    if layout.pending:
        (axis, reduction), *_ = layout.pending
        return np.stack(_owed(np.asarray(value), reduction, sizes[axis]))
    if is_key(value):
        words = jnp.asarray(with_garbage(np.asarray(jax.random.key_data(value)), layout.padded))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    return with_garbage(np.asarray(value), layout.padded)


def _owed(value: np.ndarray, reduction: str, count: int) -> list[np.ndarray]:
    """`count` arrays whose reduction of this kind is `value`: at each place a different one holds the whole
    of it.
    """
    if reduction == "sum":
        parts = [
            value // count if value.dtype.kind in "iu" else value * value.dtype.type(d + 1)
            for d in range(1, count)
        ]
        return [value - sum(parts[1:], parts[0]), *parts]
    owner = np.arange(value.size).reshape(value.shape) % count
    return [np.where(owner == d, value, identity(reduction, value.dtype)) for d in range(count)]


def _difference(case: Case, results: Sequence[Any]) -> str:
    """Where a device's cropped shard differs from the primitive's result, or ""."""
    for i, (result, expected) in enumerate(zip(results, map(words, case.outputs), strict=True)):
        for shard in result.addressable_shards:
            part = np.asarray(expected)[shard.index]
            got = np.asarray(shard.data)[tuple(map(slice, part.shape))]
            if problem := difference(got, part, _SLACK):
                return f"result {i} on one device: {problem}"
    return ""
