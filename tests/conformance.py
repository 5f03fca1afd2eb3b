"""JAX's own primitive test cases, each run through shard_jit under a random mesh and random shardings,
against jax.jit.

`python -m tests.conformance [--primitive NAME] [--case WORDS] [--sample N] [--part K/N] [--seed S] [--jobs
N]` prints a table by primitive, and fails where a case is wrong or refused, or a primitive is replicated that
is not among `MEANT`:

    equal       every result is as the unsharded function gives it: integers equal, floats within reassociation error
    wrong       some result is not
    refused     shard_jit raised
    replicated  some primitive gathered an operand over an axis that then split nothing: its devices did all the same
                (`partition.replicated`)
    small       the same, where it took no longer than to start the four collectives that would have to be instead
    sent        bytes that one device sends, all cases together

The last lines name those primitives, which need not be the one that a case is about, each with the bytes that
it gathered.

Cases come stratified: first one of each primitive, then a second one, so a sample has some of all. What a
case gets is drawn from its name and the seed, so it is the same in every sample. Compilation takes the time:
cases with the same mesh share one, unoptimized.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import threading
import time
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import _jax
from shardax.check.shards import difference, words
from shardax.graph.graph import Node
from shardax.ledger.collectives import collectives, comm_bytes
from shardax.partition.replicated import Replicated, replicated
from shardax.spmd_rules.registry import RULES
from shardax.transform import primitive

MESHES = ((2,), (3,), (4,), (5,), (8,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (2, 2, 2))
AXES = ("x", "y", "z")
BATCH = 24  # cases in one compilation
_ALONE = "no batch to split: it is gathered once"
MEANT = {  # the primitives that may be replicated, at most ten, each with why
    **dict.fromkeys("cholesky eig eigh lu qr svd triangular_solve".split(), f"one matrix, {_ALONE}"),
    "fft": f"one transform, {_ALONE}",
    "sort": f"one row, {_ALONE}",
    "gather": "a table smaller than what is looked up in it, of which a masked sum would send more",
}
SPLIT = sx.Options(chip="slow")  # whatever can be split, however small
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Outcome:
    """What became of one case; `verdict` is "equal", "wrong", "refused", or "skipped" where JAX itself cannot
    run it.
    """

    primitive: str
    case: str
    verdict: str
    gathered: tuple[tuple[str, int], ...] = ()
    sent: int = 0
    note: str = ""
    small: tuple[tuple[str, int], ...] = ()


@cache
def cases() -> dict[str, Any]:
    """The cases that run on CPUs by their full names, stratified by primitive."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for case in _jax.primitive_cases():
        groups[case.group_name].append(case)
    for group in groups.values():
        group.sort(key=lambda case: zlib.crc32(case.fullname.encode()))
    rounds = itertools.zip_longest(*groups.values())
    return {case.fullname: case for each in rounds for case in each if case is not None}


def _function(name: str) -> Any:
    """The function of a case. Of approx_top_k, which does not say in what order equal values come, what lies
    at its places.
    """
    case = cases()[name]
    return case.dyn_fun if case.group_name != "approx_top_k" else partial(_looked_up, case.dyn_fun)


def _looked_up(f: Any, x: Any) -> Any:
    values, places = f(x)
    return values, jnp.take_along_axis(x, places, -1), (jnp.diff(jnp.sort(places)) > 0).all()


def selected(primitive: str = "", words: str = "", sample: int | None = None) -> list[str]:
    names = [name for name, case in cases().items() if primitive in ("", case.group_name) and words in name]
    return names[:sample]


def run(names: Sequence[str], jobs: int = 1, seed: int = 0) -> Iterator[Outcome]:
    """The outcome of each case, in no order."""
    with ThreadPoolExecutor(jobs) as threads:
        for outcomes in threads.map(partial(_in_worker, seed=seed), batches(names, seed)):
            yield from outcomes


_own = threading.local()


def _in_worker(names: Sequence[str], seed: int) -> list[Outcome]:
    """Runs a batch in this thread's process. XLA may take a process down: then by halves, until the case is
    found.
    """
    if not hasattr(_own, "worker"):
        _own.worker = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    try:
        return _own.worker.submit(run_batch, names, seed).result()
    except BrokenProcessPool:
        del _own.worker
        middle = len(names) // 2
        if not middle:
            return [_outcome(names[0], "refused", note="the process died")]
        return [*_in_worker(names[:middle], seed), *_in_worker(names[middle:], seed)]


def batches(names: Sequence[str], seed: int = 0) -> Iterator[list[str]]:
    """Cases that run on the same mesh, so many at a time."""
    for mesh in MESHES:
        same = [name for name in names if mesh_of(name, seed) == mesh]
        yield from (same[i : i + BATCH] for i in range(0, len(same), BATCH))


def mesh_of(name: str, seed: int = 0) -> tuple[int, ...]:
    return _dice(name, "mesh", seed).choice(MESHES)


def _dice(name: str, what: str, seed: int) -> random.Random:
    return random.Random(zlib.crc32(f"{name} {what}{f' {seed}' if seed else ''}".encode()))


def run_batch(names: Sequence[str], seed: int = 0) -> list[Outcome]:
    """The outcomes of cases in one compilation; each by itself where that raises."""
    try:
        return _run_together(names, seed)
    except Exception as error:
        if len(names) == 1:
            return [_outcome(names[0], "refused", note=f"{type(error).__name__}: {str(error)[:2000]}")]
        return [outcome for name in names for outcome in run_batch([name], seed)]


def _run_together(names: Sequence[str], seed: int) -> list[Outcome]:
    args = [cases()[name].dyn_args_maker(np.random.RandomState(zlib.crc32(name.encode()))) for name in names]
    plain = jax.jit(lambda args: [_function(name)(*x) for name, x in zip(names, args, strict=True)])
    try:
        wanted = plain.lower(args).compile(compiler_options=FAST)(args)
    except Exception as error:
        if len(names) == 1:
            return [_outcome(names[0], "skipped", note=f"{type(error).__name__}: {str(error)[:200]}")]
        raise
    shape = mesh_of(names[0], seed)
    step = sx.shard_jit(
        lambda args: [_sharded(*x, seed, len(shape)) for x in zip(names, args, strict=True)],
        mesh=_mesh(shape),
        options=SPLIT,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no sharding rule")
        plan = step.plan(args)
        got = step.lower(args).compile(compiler_options=FAST)(args)
    gathered = _replicated_nodes(plan)
    return [_judged(*x, plan, gathered) for x in zip(names, wanted, got, strict=True)]


def _replicated_nodes(plan: Any) -> list[Replicated]:
    """Those of the plan's program that run replicated, as `partition.replicated` defines it."""
    given = (None,) * len(plan.global_jaxpr.in_avals)
    built = primitive.build(plan.global_jaxpr, given, plan.mesh, SPLIT)
    return list(replicated(built.decisions, built.refinement.sizes))


@cache
def _mesh(shape: tuple[int, ...]):
    return jax.make_mesh(shape, AXES[: len(shape)], axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def _sharded(name: str, args: Any, seed: int, axes: int) -> Any:
    """A case with its arguments, and about half of its results, in random shardings."""
    with jax.named_scope(_scope(name)):
        dice = _dice(name, "shardings", seed)
        args = jax.tree.map(lambda x: sx.annotate(jnp.asarray(x), _spec(dice, axes, jnp.shape(x))), args)
        out = _function(name)(*args)
        return jax.tree.map(
            lambda x: x if dice.random() < 0.5 else sx.annotate(x, _spec(dice, axes, jnp.shape(x))), out
        )


def _scope(name: str) -> str:
    return f"case_{zlib.crc32(name.encode())}"


def _spec(dice: random.Random, axes: int, shape: tuple[int, ...]) -> P:
    """Each axis of the mesh on some dim, or with a chance of one in four on none."""
    dims: list[list[str]] = [[] for _ in shape]
    for axis in dice.sample(AXES[:axes], axes):
        if shape and dice.random() < 0.75:
            dice.choice([d for d, n in zip(dims, shape, strict=True) if n > 1] or dims).append(axis)
    return P(*map(tuple, dims))


def _judged(name: str, wanted: Any, got: Any, plan: Any, nodes: Sequence[Replicated]) -> Outcome:
    pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True)
    found = (difference(*(np.asarray(words(x)) for x in (got, wanted))) for wanted, got in pairs)
    different = [f"result {i}: {problem}" for i, problem in enumerate(found) if problem]
    own = [one for one in nodes if _scope(name) in str(one.node.scope)]
    small, gathered = (
        tuple((_named(r.node), int(r.nbytes)) for r in own if r.small == few) for few in (True, False)
    )
    note = "; ".join(
        different[:1] or [f"{_named(r.node)} gathers {r.nbytes:,.0f} B" for r in own if not r.small]
    )
    outcome = _outcome(
        name, "wrong" if different else "equal", gathered, comm_bytes(_sends(name, plan)), note
    )
    return replace(outcome, small=small)


def _named(node: Node) -> str:
    return node.name if node.name in RULES else f"{node.name} (no rule)"


def _outcome(
    name: str, verdict: str, gathered: tuple[tuple[str, int], ...] = (), sent: int = 0, note: str = ""
) -> Outcome:
    return Outcome(cases()[name].group_name, name, verdict, gathered, sent, note)


def _sends(name: str, plan: Any) -> tuple[Any, ...]:
    """The collectives of one case of a batch: those under its scope."""
    (whole,) = (eqn for eqn in plan.local_jaxpr.eqns if eqn.primitive.name == "shard_map")
    body = _jax.closed(whole.params["jaxpr"])
    own = [eqn for eqn in body.eqns if _scope(name) in str(eqn.source_info.name_stack)]
    return collectives(_jax.with_eqns(body, own), whole.params["mesh"].shape)


def table(outcomes: Sequence[Outcome]) -> str:
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for o in outcomes:
        for name in (o.primitive, "all"):
            groups[name] += Counter(
                {"cases": 1, o.verdict: 1, "replicated": int(bool(o.gathered)), "small": int(bool(o.small))}
            )
            groups[name]["sent"] += o.sent
    columns = ("cases", "equal", "wrong", "refused", "skipped", "replicated", "small", "sent")
    head = "".join(f"{c:>12}" for c in columns)
    rows = [
        f"{name:28}" + "".join(f"{groups[name][c]:>12,}" for c in columns)
        for name in sorted(groups, key=lambda n: (n == "all", n))
    ]
    return "\n".join([" " * 28 + head, *rows, "", _replicated(outcomes)])


def _replicated(outcomes: Sequence[Outcome]) -> str:
    lines = [f"{line}  {MEANT.get(p, 'NOT MEANT')}" for p, line in _counted(outcomes, lambda o: o.gathered)]
    small = [line for _, line in _counted(outcomes, lambda o: o.small)]
    return "\n".join(["replicated by", *(lines or ["  none"]), "small", *(small or ["  none"])])


def _counted(
    outcomes: Sequence[Outcome], of: Callable[[Outcome], tuple[tuple[str, int], ...]]
) -> Iterator[tuple[str, str]]:
    """(primitive, cases and bytes) of what was gathered, by primitive."""
    counts, nbytes = Counter(), Counter()
    for o in outcomes:
        counts.update({name for name, _ in of(o)})
        for name, sent in of(o):
            nbytes[name] += sent
    for p, n in counts.most_common():
        yield p, f"  {p:26} {n:6} cases {nbytes[p]:>12,} B"


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """What must not be: wrong and refused cases, and what replicates that is not meant to."""
    bad = [f"{o.verdict}: {o.case}: {o.note}" for o in outcomes if o.verdict in ("wrong", "refused")]
    return bad + [f"replicated: {o.case}: {o.note}" for o in outcomes if _is_not_meant(o)]


def _is_not_meant(o: Outcome) -> bool:
    return not {p for p, _ in o.gathered} <= {*MEANT}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance")
    parser.add_argument("--primitive", default="", help="the cases of this primitive alone")
    parser.add_argument("--case", default="", help="the cases whose names have these words")
    parser.add_argument("--sample", type=int, help="so many cases, stratified")
    parser.add_argument("--part", default="1/1", help="of those the k-th of n parts: k/n")
    parser.add_argument("--seed", type=int, default=0, help="of the meshes and shardings that are drawn")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--verbose", action="store_true", help="says what was gathered, and what JAX cannot run"
    )
    given = parser.parse_args(words)
    start, outcomes = time.time(), []
    part, parts = map(int, given.part.split("/"))
    names = selected(given.primitive, given.case, given.sample)[part - 1 :: parts]
    for outcome in run(names, given.jobs, given.seed):
        outcomes.append(outcome)
        if outcome.verdict in ("wrong", "refused") or given.verbose and outcome.note:
            print(
                f"{outcome.verdict}: {outcome.case} on {mesh_of(outcome.case, given.seed)}: {outcome.note}",
                flush=True,
            )
    print(table(outcomes))
    print(f"{len(outcomes)} cases, seed {given.seed}, {time.time() - start:.0f} s, JAX {jax.__version__}")
    return bool(failures(outcomes))


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main(sys.argv[1:]))
