"""The rule checker: brute-forces what rules claim, on virtual devices, against the plain primitive.

    from shardax.check import check_rule, missing_claims

    check_rule(lambda a, b: a @ b, a, b)         # AssertionError: which split of which primitive gave what
    missing_claims(lambda a: jnp.sort(a, 0), a)  # the whole factors that would pass if they were kept

For each equation that has a rule, each factor that is not whole is split over one axis, over one axis with padding to spare,
and over two; each pair of factors over one axis each; each claim of `passes` is tried with operands that are really
pending. Operands are laid out with garbage in their padding, `run_local` runs under shard_map, what is pending is settled, the
result cropped. Integers, booleans, keys and random bits must be equal, floats close. All splits of one function share one
compilation, so prefer one function with a few equations of interest to many functions, and small sizes: 5 and 6 rather than 64.

`python -m shardax.check [--missing] [name ...]` runs the cases at the end of this file.
"""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardax import spmd_rules  # noqa: F401  (registers the built-in rules)
from shardax.graph import Graph, Node, from_jaxpr
from shardax.reshard import identity
from shardax.sharding import Layout, round_up, shard_count
from shardax.spmd_rules.localize import Splits, fits, reduced_pending, run_local, tensor_layout
from shardax.spmd_rules.registry import RULES, Entry, Local, Split
from shardax.spmd_rules.rule import KEEP, REDUCTIONS, WHOLE, Factors

AXES = MappingProxyType({"x": 2, "y": 2})
_SETTLE = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
_SLACK = 64  # ulps of the greatest result that reassociation may cost at the sizes that cases have


def check_rule(f: Callable, *args, axes: Mapping[str, int] = AXES, only: str = "") -> Counter[str]:
    """Checks the rules of every equation of `f(*args)`; returns how many splits of each primitive were tried.

    Args:
      only: check this primitive's equations and no others.
      axes: the mesh axes to split over and their sizes, at least two; their product is the number of devices needed.

    Raises:
      AssertionError: a split, or a claim of `passes`, gives another result than the primitive does, or an error.
    """
    trials = [trial for case in _cases(f, args, only) for trial in _claims(case, axes)]
    wrong = [f"{trial}: {problem}" for trial, problem in zip(trials, _run(trials, axes), strict=True) if problem]
    if wrong:
        raise AssertionError("these claims are wrong:\n" + "\n".join(wrong))
    return Counter(trial.case.node.name for trial in trials)


def missing_claims(f: Callable, *args, axes: Mapping[str, int] = AXES) -> list[str]:
    """What `f(*args)`'s rules do not claim and could: whole factors that pass when they are kept, or reduced."""
    found = (f"{t}: would pass" for case in _cases(f, args) for t in _candidates(case, axes) if not _fails(t, axes))
    return list(dict.fromkeys(found))


@dataclass(frozen=True, eq=False)
class _Case:
    """An equation with its rule and concrete values."""

    node: Node
    entry: Entry
    factors: Factors
    inputs: list[Any]
    outputs: list[Any]


@dataclass(frozen=True, eq=False)
class _Trial:
    """One claim: `splits` of the factors, or operands pending with kind `pending[1]` over the axis `pending[0]`."""

    case: _Case
    splits: Splits
    pending: tuple[str, str] | None = None
    pending_operands: tuple[int, ...] = ()
    note: str = ""

    def __str__(self):
        sizes = self.case.factors.sizes
        words = [f"{f} ({sizes[f]} in {s.padded}) over {'·'.join(s.axes)}" for f, s in self.splits.items()]
        words += [f"operands {self.pending_operands} pending {self.pending[1]}"] if self.pending else []
        shapes = f"{self.case.node.in_shapes} -> {self.case.node.out_shapes}"
        return f"{self.case.node.name} {shapes}, {self.note}{', '.join(words)}"

    def local(self, axes) -> Local:
        factors, pending = self.case.factors, (self.pending,) if self.pending else ()
        owed = pending or reduced_pending(factors, self.splits)
        owes = dict.fromkeys(self.pending_operands, pending)
        operands = [tensor_layout(t, factors, self.splits, owes.get(i, ())) for i, t in enumerate(factors.operands)]
        results = [tensor_layout(t, factors, self.splits, owed) for t in factors.results]
        return Local(self.case.node, tuple(operands), tuple(results), self.splits, axes)


def _cases(f: Callable, args: Sequence[Any], only: str = "") -> Iterator[_Case]:
    args = jax.tree.map(jnp.asarray, args)
    graph = from_jaxpr(jax.make_jaxpr(f)(*args))
    for node, inputs, outputs in _evaluate(graph, jax.tree.leaves(args)):
        entry = RULES.get(node.name)
        if entry is not None and only in ("", node.name):
            yield _Case(node, entry, entry.factors(node), inputs, outputs)


def _evaluate(graph: Graph, args: Sequence[Any]) -> Iterator[tuple[Node, list[Any], list[Any]]]:
    """Every node of the graph with its operands and results, by plain evaluation."""
    env = dict(zip(graph.inputs, args, strict=True))
    for node in graph.nodes:
        inputs = [jnp.asarray(v.literal, v.aval.dtype) if v.is_literal else env[v] for v in node.inputs]
        with node.eqn.ctx.manager:
            bound = node.primitive.bind(*inputs, **node.params)
        outputs = list(bound) if node.primitive.multiple_results else [bound]
        env.update(zip(node.outputs, outputs, strict=True))
        yield node, inputs, outputs


def _claims(case: _Case, axes) -> Iterator[_Trial]:
    free = _free(case)
    for splits in itertools.chain(*(_one_split(case, group, axes) for group in free), _pairs(case, free, axes)):
        if fits(case.factors, splits, axes):
            yield _Trial(case, splits)
    for passes in case.entry.passes_of(case.node):
        for kind in passes.kinds:
            dtypes = [case.node.inputs[i].aval.dtype for i in passes.operands]
            ordered = not any(jnp.issubdtype(d, jnp.complexfloating) for d in dtypes)
            if all(jnp.issubdtype(d, jnp.number) for d in dtypes) and (kind == "sum" or ordered):
                yield _Trial(case, {}, (next(iter(axes)), kind), passes.operands)


def _free(case: _Case) -> list[tuple[str, ...]]:
    """The factors that may be split; windowed ones that go together, together."""
    factors = case.factors
    tied = {f for group in factors.tied for f in group}
    groups = [*((f,) for f in factors.sizes if f not in tied), *factors.tied]
    return [g for g in groups if factors.kind(g[0]) != WHOLE and max(factors.sizes[f] for f in g) > 1]


def _one_split(case: _Case, group: Sequence[str], axes) -> Iterator[Splits]:
    every = tuple(axes)
    first, count = every[:1], shard_count(every, axes)
    ways = {f: _ways(case.factors.sizes[f], axes[every[0]], count) for f in group}
    for over, way in ((first, 0), (first, 1), (every, 1)):
        yield {f: Split(over, ways[f][way]) for f in group}
    shown = {f for tensor in case.factors.results for dim in tensor for f in dim}.union(case.factors.reduced)
    if whole := [f for f in group if "~" in f and f not in shown]:
        yield {f: Split(every, ways[f][1]) for f in group if f not in whole}


def _ways(size: int, few: int, many: int) -> tuple[int, int]:
    """The padded sizes of a dim for few and for many shards."""
    return round_up(size, few), round_up(size, many)


def _pairs(case: _Case, free: Sequence[tuple[str, ...]], axes) -> Iterator[Splits]:
    for groups in itertools.combinations(free, 2):
        split = zip(groups, tuple(axes)[:2], strict=True)
        yield {f: Split((a,), round_up(case.factors.sizes[f], axes[a])) for group, a in split for f in group}


def _candidates(case: _Case, axes) -> Iterator[_Trial]:
    """For each whole factor, the trials that its splitting stands or falls with, one for each kind it could have."""
    kept = {f for tensor in case.factors.results for dim in tensor for f in dim}
    for factor, n in case.factors.sizes.items():
        if n > 1 and case.factors.kind(factor) == WHOLE:
            for kind in (KEEP,) if factor in kept else (KEEP, *REDUCTIONS):
                kinds = MappingProxyType({**case.factors.kinds, factor: kind})
                freed = replace(case, factors=replace(case.factors, kinds=kinds))
                split = {factor: Split(tuple(axes), round_up(n, shard_count(tuple(axes), axes)))}
                if fits(freed.factors, split, axes):
                    yield _Trial(freed, split, note=f"if {kind}: ")


def _fails(trial: _Trial, axes) -> bool:
    try:
        return bool(_run([trial], axes)[0])
    except Exception:  # a claim that cannot even be compiled is rightly not made
        return True


def _run(trials: Sequence[_Trial], axes) -> list[str]:
    """Runs all trials in one compilation; for each, what is wrong, or ""."""
    locals_ = [trial.local(axes) for trial in trials]
    problems = [""] * len(trials)

    def on_shards(shards):
        return [_attempt(i, *packed, problems) for i, packed in enumerate(zip(trials, locals_, shards, strict=True))]

    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    operands = [_lay_out(trial, local) for trial, local in zip(trials, locals_, strict=True)]
    in_specs = [[_spec(layout) for layout in local.operands] for local in locals_]
    out_specs = [[layout.sharding.spec for layout in local.results] for local in locals_]
    mapped = jax.shard_map(on_shards, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)
    results = jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 0})(operands)  # compiles thrice as fast
    checked = zip(problems, trials, results, strict=True)
    return [problem or _difference(trial.case, out) for problem, trial, out in checked]


def _attempt(i: int, trial: _Trial, local: Local, shards, problems: list[str]):
    """The settled results of one trial on shards; an error, or a wrong shape, goes to `problems`."""
    shards = [shard[0] if layout.pending else shard for shard, layout in zip(shards, local.operands, strict=True)]
    wanted = [(local.out_shape(j), v.aval.dtype) for j, v in enumerate(trial.case.node.outputs)]
    try:
        with trial.case.node.eqn.ctx.manager:
            results = run_local(trial.case.entry, local, trial.case.factors, shards)
    except Exception as error:
        problems[i] = f"{type(error).__name__}: {str(error)[:300]}"
        results = []
    if not problems[i] and [(r.shape, r.dtype) for r in results] != wanted:
        problems[i] = f"shards of {[(r.shape, str(r.dtype)) for r in results]}, wanted {wanted}"
    if problems[i]:
        return [jnp.zeros(shape + _words(v).shape[v.ndim :]) for v, (shape, _) in zip(trial.case.outputs, wanted, strict=True)]
    return [_settle(result, layout) for result, layout in zip(results, local.results, strict=True)]


def _settle(result, layout: Layout):
    for axis, kind in layout.pending:
        result = _SETTLE[kind](result, axis)
    return _words(result)


def _spec(layout: Layout) -> P:
    return P(layout.pending[0][0], *layout.sharding.spec) if layout.pending else layout.sharding.spec


def _lay_out(trial: _Trial, local: Local) -> list[Any]:
    """The operands, padded with garbage; one that is pending as what each device along its axis holds, stacked in front."""
    return [_lay_out_one(*pair, local.sizes) for pair in zip(trial.case.inputs, local.operands, strict=True)]


def _lay_out_one(value, layout: Layout, sizes):
    if layout.pending:
        (axis, kind), *_ = layout.pending
        return np.stack(_owed(np.asarray(value), kind, sizes[axis]))
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = jnp.asarray(_with_garbage(np.asarray(jax.random.key_data(value)), layout.padded))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    return _with_garbage(np.asarray(value), layout.padded)


def _with_garbage(value: np.ndarray, padded: tuple[int, ...]) -> np.ndarray:
    """Padded at the end of each dim with NaN, the greatest integer, or the negation of the last boolean."""
    shape = padded + value.shape[len(padded) :]
    widths = [(0, p - n) for p, n in zip(shape, value.shape, strict=True)]
    if value.dtype == bool:
        filler = ~np.pad(value, widths, mode="edge")
    else:
        filler = np.full(shape, np.iinfo(value.dtype).max if value.dtype.kind in "iu" else np.nan, value.dtype)
    filler[tuple(map(slice, value.shape))] = value
    return filler


def _owed(value: np.ndarray, kind: str, count: int) -> list[np.ndarray]:
    """`count` arrays whose reduction of this kind is `value`: at each place a different one holds the whole of it."""
    if kind == "sum":
        parts = [value // count if value.dtype.kind in "iu" else value * value.dtype.type(d + 1) for d in range(1, count)]
        return [value - sum(parts[1:], parts[0]), *parts]
    owner = np.arange(value.size).reshape(value.shape) % count
    return [np.where(owner == d, value, identity(kind, value.dtype)) for d in range(count)]


def _difference(case: _Case, results: Sequence[Any]) -> str:
    """Where a device's cropped shard differs from the primitive's result, or ""."""
    for i, (result, wanted) in enumerate(zip(results, map(_words, case.outputs), strict=True)):
        for shard in result.addressable_shards:
            part = np.asarray(wanted)[shard.index]
            got = np.asarray(shard.data)[tuple(map(slice, part.shape))]
            if not _close(got, part):
                return f"result {i} is on one device\n{got}\nnot\n{part}"
    return ""


def _words(value):
    """Keys as the integers that they are made of; anything else as it is."""
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value


def _close(got: np.ndarray, wanted: np.ndarray) -> bool:
    if not jnp.issubdtype(wanted.dtype, jnp.inexact):
        return np.array_equal(got, wanted)
    eps = float(jnp.finfo(wanted.dtype).eps) * _SLACK
    wide = np.complex128 if jnp.issubdtype(wanted.dtype, jnp.complexfloating) else np.float64
    got, wanted = got.astype(wide), wanted.astype(wide)
    greatest = np.max(np.abs(wanted), where=np.isfinite(wanted), initial=0)
    return np.allclose(got, wanted, rtol=eps, atol=eps * greatest, equal_nan=True)


def ramp(*shape: int, dtype: Any = "float32") -> np.ndarray:
    """Different numbers of both signs around zero, in no order: an argument for cases.

    >>> ramp(5).tolist()
    [0.0, -0.5, -0.25, 0.25, 0.5]
    """
    n = math.prod(shape)
    shuffled = np.random.RandomState(0).permutation(n) - n // 2
    return (shuffled if np.issubdtype(dtype, np.integer) else shuffled / 4).astype(dtype).reshape(shape)


_CASES: dict[str, tuple[Callable, tuple[Any, ...]]] = {
    "add": (lambda a, b: a + b, (ramp(5, 6), ramp(5, 6))),
    "argmax": (lambda a: jnp.argmax(a, 0), (ramp(5, 6),)),
    "conv_general_dilated": (lambda a, b: lax.conv(a, b, (1, 1), "SAME"), (ramp(5, 6, 4, 4), ramp(3, 6, 3, 3))),
    "cumsum": (lambda a: lax.cumsum(a, 0), (ramp(5, 6),)),
    "dot_general": (lax.batch_matmul, (ramp(3, 5, 6), ramp(3, 6, 4))),
    "gather": (lambda a, i: jnp.take(a, i, 0, mode="clip"), (ramp(7, 6), np.asarray([5, 0, 6]))),
    "random_bits": (lambda seed: jax.random.bits(jax.random.key(seed), (5, 6)), (np.uint32(0),)),
    "reduce_max": (lambda a: a.max(0), (ramp(5, 6),)),
    "reduce_sum": (lambda a: a.sum(1), (ramp(5, 6),)),
    "reshape": (lambda a: a.reshape(6, 10), (ramp(3, 4, 5),)),
    "sort": (lambda a: lax.sort(a, dimension=1), (ramp(5, 6),)),
    "top_k": (lambda a: lax.top_k(a, 2), (ramp(5, 6),)),
}


def main(words: Sequence[str]) -> None:
    """Prints one line for each case: the splits tried, or with --missing the claims that could be added."""
    names = [word for word in words if not word.startswith("-")] or list(_CASES)
    for name in names:
        f, args = _CASES[name]
        found = missing_claims(f, *args) if "--missing" in words else [f"{check_rule(f, *args, only=name)[name]} splits"]
        print(f"{name:24} {', '.join(found)}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", math.prod(AXES.values()))
    main(sys.argv[1:])
