"""build: the middle of the way, from a global jaxpr with annotations in it to the program that every device runs."""

import gc
import itertools
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

from shardax import _jax, annotations, graph, strict
from shardax.completion.complete import Completion, complete
from shardax.explain.ledger import collectives
from shardax.graph import Graph, Node
from shardax.options import Options
from shardax.partition.choose import choose
from shardax.partition.decisions import Decisions
from shardax.partition.emit import emit, purpose, reshard_reason
from shardax.partition.replicated import report_replicated
from shardax.passes import dead, scopes
from shardax.rotations import with_rotations
from shardax.sharding import AxisSizes, Layout, Sharding, at_rest


@dataclass(frozen=True, eq=False)
class Program:
    """What `build` makes.

    `jaxpr` is a ClosedJaxpr with the global program's inputs and outputs: one `shard_map` equation over `mesh`. `in_shardings`
    and `out_shardings` say how each argument and result lies between calls; every shard has the same size there.
    `phases` holds the seconds that each phase took; lowering and compiling add theirs.
    """

    jaxpr: Any
    mesh: jax.sharding.AbstractMesh
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    graph: Graph
    completion: Completion
    decisions: Decisions
    phases: dict[str, float] = field(default_factory=dict)

    def uneven_inputs(self) -> Iterator[tuple[int, Sharding, str]]:
        """(number, annotation, reason of what is sent to bring it there) of each argument that cannot rest as annotated."""
        numbers = {value: i for i, value in enumerate(self.graph.inputs)}
        for node, sharding in self._uneven():
            if node.inputs[0] in numbers:
                yield numbers[node.inputs[0]], sharding, reshard_reason(purpose(node), sharding)

    def uneven_outputs(self) -> Iterator[tuple[int, Sharding, str]]:
        """The same of each result; its reason is that of the collectives that bring it to rest."""
        uneven = {node.outputs[0]: (node, sharding) for node, sharding in self._uneven()}
        for i, (value, rest) in enumerate(zip(self.graph.outputs, self.out_shardings, strict=True)):
            if value in uneven:
                node, sharding = uneven[value]
                yield i, sharding, reshard_reason(purpose(node), rest)

    def _uneven(self) -> Iterator[tuple[Node, Sharding]]:
        sizes = self.completion.sizes
        for node, given in annotations.among(self.graph.nodes):
            if None not in given.dims:
                sharding = Sharding(tuple(axes or () for axes in given.dims))
                if at_rest(sharding, node.outputs[0].shape, sizes) != sharding:
                    yield node, sharding


_built: weakref.WeakKeyDictionary[Any, dict[Any, Program]] = weakref.WeakKeyDictionary()


def build(jaxpr, in_shardings: tuple[Sharding | None, ...], mesh: jax.sharding.AbstractMesh, options=None) -> Program:
    """Makes the program that every device runs. Memoized on the jaxpr, for as long as it lives.

    Args:
      jaxpr: the global ClosedJaxpr, annotations in it.
      in_shardings: for each input the sharding in which a committed argument rests, or None.
      mesh: the abstract mesh, its axes Auto.
      options: `shardax.Options`.
    """
    programs = _built.setdefault(jaxpr, {})
    key = (in_shardings, mesh, options)
    if key not in programs:
        with _collector_paused():
            programs[key] = _build(jaxpr, in_shardings, mesh, options)
    return programs[key]


def completed_results(jaxpr, mesh: jax.sharding.AbstractMesh) -> tuple[Sharding, ...]:
    """The shardings that completion alone gives to the results of a global jaxpr."""
    with _collector_paused():
        whole = graph.from_jaxpr(_jax.dce(jaxpr))
        done = complete(whole, (None,) * len(whole.inputs), dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)))
    return tuple(map(done.sharding, whole.outputs))


def _build(jaxpr, in_shardings: tuple[Sharding | None, ...], mesh: jax.sharding.AbstractMesh, options) -> Program:
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    phases: dict[str, float] = {}
    with timed(phases, "graph"):
        program = with_rotations(graph.from_jaxpr(_jax.dce(jaxpr)))
        annotations.check_meshes(program.walk(), sizes)
    with timed(phases, "completion"):
        completion = complete(program, in_shardings, sizes)
    with timed(phases, "choice"):
        resting = _resting(program, completion, sizes)
        layouts = [
            [Layout(s, v.shape) for s, v in zip(shardings, values, strict=True)]
            for shardings, values in zip(resting, (program.inputs, program.outputs), strict=True)
        ]
        decisions = choose(program, completion, *layouts)
    options = options or Options()
    report_replicated(decisions, sizes, strict=options.strict is True, allow=options.allow)
    with timed(phases, "emission"):
        local = _emit(program, decisions, resting, mesh, sizes)
    with timed(phases, "passes"):
        local = scopes.named(dead.dropped(local))
    if options.strict or options.max_gather_bytes is not None:
        asked = {note.source for _, note in annotations.among(program.walk())}
        strict.check(collectives(local, sizes), options, asked)
    return Program(local, mesh, *resting, program, completion, decisions, phases)


def _resting(program: Graph, completion: Completion, sizes: AxisSizes) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]]:
    """How arguments and results rest: as given, as the argument that they succeed, else nearest to what was completed."""
    ins = tuple(
        sharding or at_rest(completion.sharding(v), v.shape, sizes)
        for v, sharding in zip(program.inputs, completion.resting, strict=True)
    )
    likes = {node.outputs[0]: note.like for node, note in completion.notes if note.like is not None}
    outs = tuple(ins[likes[v]] if v in likes else at_rest(completion.sharding(v), v.shape, sizes) for v in program.outputs)
    return ins, outs


def _emit(program: Graph, decisions: Decisions, resting, mesh, sizes: AxisSizes):
    """The shard_map'd program, as a ClosedJaxpr over the global arguments."""
    ins, outs = (tuple(s.spec for s in side) for side in resting)
    full = [0 not in v.shape for v in program.inputs]

    def local(*shards):
        return tuple(emit(decisions, _with_empty(full, shards, decisions.inputs, program, sizes), sizes))

    def run(*args):
        """Arguments without elements stay outside: XLA takes no shard_map all of whose operands are such."""
        specs = tuple(itertools.compress(ins, full))
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
        return run(*itertools.compress(args, full))

    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in program.inputs))


def _with_empty(full: Sequence[bool], shards: Sequence[Any], layouts: Sequence[Layout], program: Graph, sizes: AxisSizes):
    given, slots = iter(shards), zip(full, program.inputs, layouts, strict=True)
    return [next(given) if has else lax.empty(lay.local_shape(sizes), v.aval.dtype) for has, v, lay in slots]


@contextmanager
def _collector_paused():
    """Planning makes many objects that stay and few cycles. The cyclic collector would walk them over and over: a third of the
    time of a plan for GPT-2."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def timed(phases: dict[str, float], name: str):
    """Notes the seconds of what is done inside."""
    start = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - start
