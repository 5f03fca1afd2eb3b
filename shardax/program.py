"""build: makes the program that every device runs of a global jaxpr with annotations in it."""

import functools
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from shardax import _jax, collector, strict
from shardax.annotations.explicit import explicit_mesh, shape_of
from shardax.completion.complete import Completion, complete
from shardax.completion.node_classes import NodeClasses
from shardax.completion.reshapes import split_inside
from shardax.graph import annotations, inline
from shardax.graph.graph import Graph, Node, Value
from shardax.ledger.collectives import collectives
from shardax.meshes import sites
from shardax.meshes.crossing import Crossing, crossings, program_placement
from shardax.meshes.refinement import Placement, Refinement, refinement
from shardax.options import Options
from shardax.partition.choose import choose
from shardax.partition.decisions import Decisions
from shardax.partition.emit import emit
from shardax.partition.replicated import report_replicated
from shardax.passes import scopes
from shardax.passes.table import PassContext, planned
from shardax.rewrites.driver import rewritten
from shardax.sharding import NOTHING_OWED, Sharding, at_rest, layout_at_rest, replicated, trivial_axes

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


@dataclass(frozen=True, eq=False)
class Program:
    """What `build` makes.

    `jaxpr` is a ClosedJaxpr with the global program's inputs and outputs: one `shard_map` equation over
    `mesh`, the refined one. `arguments` and `results` are how each rests between calls, on a mesh that the
    user named, `in_shardings` and `out_shardings` the same in the axes of `mesh`; every shard has the same
    size there. `phases` holds the seconds that each phase took; lowering and compiling add theirs.
    """

    jaxpr: Any
    mesh: jax.sharding.AbstractMesh
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    arguments: tuple[Placement, ...]
    results: tuple[Placement, ...]
    graph: Graph
    completion: Completion
    decisions: Decisions
    refinement: Refinement
    phases: dict[str, float] = field(default_factory=dict)

    @cached_property
    def entering(self) -> tuple[Crossing, ...]:
        """The arguments that cross to `mesh`."""
        return crossings("argument", self.jaxpr.in_avals, self.arguments, self.refinement)

    @cached_property
    def leaving(self) -> tuple[Crossing, ...]:
        """The results that cross from it."""
        return crossings("result", self.jaxpr.out_avals, self.results, self.refinement)

    def left(self, mesh: AnyMesh) -> tuple[NamedSharding, ...]:
        """The shardings in which the compiled program leaves its results. Those that cross outside are left
        on the refined mesh.
        """
        outside = {
            c.number: program_placement(c, p.sharding.rank)
            for c in self.leaving
            if c.outside
            for p in (self.results[c.number],)
        }
        return tuple(outside.get(i, placement).on(mesh) for i, placement in enumerate(self.results))

    def taking(self, used: Sequence[bool]) -> "Program":
        """The same without the arguments that are not `used`; `graph` and `decisions` still have them."""
        pruned, _ = _jax.prune(self.jaxpr, [True] * len(self.results), used)
        ins, rests = (tuple(itertools.compress(x, used)) for x in (self.in_shardings, self.arguments))
        return replace(self, jaxpr=pruned, in_shardings=ins, arguments=rests)


_built: weakref.WeakKeyDictionary[Any, dict[Any, Program]] = weakref.WeakKeyDictionary()
_wholes: weakref.WeakKeyDictionary[Any, tuple[weakref.ref, tuple[bool, ...]]] = weakref.WeakKeyDictionary()


def build(jaxpr, committed: tuple[Sharding | Placement | None, ...], mesh: AnyMesh, options=None) -> Program:
    """Makes the program that every device runs. Memoized on the jaxpr, for as long as it lives.

    Args:
      jaxpr: the global ClosedJaxpr, annotations in it.
      committed: for each input the sharding in which a committed argument rests, or None.
      mesh: the mesh, its axes Auto. An abstract one has no order of devices.
      options: `shardax.Options`.
    """
    programs, own = _built.setdefault(jaxpr, {}), sites.program_mesh(mesh)
    placements = tuple(Placement(own, x) if isinstance(x, Sharding) else x for x in committed)
    key = (placements, mesh, options)  # one key, whether types or arrays say how arguments rest
    if key not in programs:
        reference, used = _wholes.get(jaxpr, (None, ()))
        whole = reference and reference()
        if whole is not None:
            programs[key] = _built_whole(whole, used, placements, mesh, options).taking(used)
        elif serving := _serving(jaxpr, (True,) * len(placements), *key):
            programs[key] = serving
        else:
            with collector.paused():
                programs[key] = _build(jaxpr, placements, mesh, options)
    return programs[key]


def note_whole(jaxpr, whole, used: Sequence[bool]) -> None:
    """Notes that a jaxpr is another one without the inputs that are not `used`, all results kept. It is built
    as that one, so that a plan, which has all arguments, and what is lowered are one program, built once.
    """
    _wholes[jaxpr] = weakref.ref(whole), tuple(used)


def _built_whole(whole, used: tuple[bool, ...], placements: Sequence[Any], mesh: AnyMesh, options) -> Program:
    """The program of all inputs, given how those that are used are committed."""
    if serving := _serving(whole, used, placements, mesh, options):
        return serving
    left = iter(placements)
    return build(whole, tuple(next(left) if needed else None for needed in used), mesh, options)


def _serving(jaxpr, used: tuple[bool, ...], later: Sequence[Any], mesh: AnyMesh, options) -> Program | None:
    """A program that is built already, and is the one of later arguments: what was left to completion comes
    as that chose it, so that a state which comes back placed finds its program compiled. `later`: how those
    that are used are committed.
    """
    for (committed, *rest), built in _built.get(jaxpr, {}).items():
        sides = (itertools.compress(x, used) for x in (committed, built.arguments))
        if rest == [mesh, options] and all(
            new == old or old is None and new == chosen
            for new, old, chosen in zip(later, *sides, strict=True)
        ):
            return built
    return None


def completed_results(jaxpr, mesh: AnyMesh) -> tuple[Sharding, ...]:
    """The shardings that completion alone gives to the results of a global jaxpr, in axes of `mesh`: of none,
    where it has no spec for them."""
    return _completed_values(jaxpr, mesh, lambda graph: graph.outputs)


def completed_arguments(jaxpr, mesh: AnyMesh) -> tuple[Sharding, ...]:
    """Likewise those of its arguments, nearest to how they could rest."""
    completed = _completed_values(jaxpr, mesh, lambda graph: graph.inputs)
    return tuple(at_rest(s, a.shape, mesh.shape) for s, a in zip(completed, jaxpr.in_avals, strict=True))


def _completed_values(
    jaxpr, mesh: AnyMesh, values: Callable[[Graph], Sequence[Value]]
) -> tuple[Sharding, ...]:
    with collector.paused():
        program_graph = _graph(jaxpr)
        refined, _, done = _completed(program_graph, (None,) * len(program_graph.inputs), mesh)
    return tuple(refined.spelled(done.sharding(v)) or replicated(len(v.shape)) for v in values(program_graph))


def _graph(jaxpr) -> Graph:
    """The flat program, in which what JAX shows only expanded is a node of its own."""
    return rewritten(inline.from_jaxpr(_jax.dce(jaxpr)))


def _build(jaxpr, committed: Sequence[Placement | None], mesh: AnyMesh, options) -> Program:
    options = options or Options()
    built = _build_one(jaxpr, committed, mesh, options)
    report_replicated(
        built.decisions, built.refinement.sizes, strict=options.strict is True, allow=options.allow
    )
    if options.strict or options.max_gather_bytes is not None:
        _check(built, options)
    return built


def _build_one(jaxpr, committed: Sequence[Placement | None], mesh: AnyMesh, options: Options) -> Program:
    phases: dict[str, float] = {}
    with timed(phases, "graph"):
        program = _graph(jaxpr)
    with timed(phases, "completion"):
        refined, resting, completion = _completed(program, committed, mesh, options)
    with timed(phases, "choice"):
        rests = _resting(program, completion, resting, refined)
        shardings = [tuple(map(refined.sharding, side)) for side in rests]
        trivial = trivial_axes(refined.sizes)
        layouts = [
            [layout_at_rest(s.without(trivial), v.shape) for s, v in zip(side, values, strict=True)]
            for side, values in zip(shardings, (program.inputs, program.outputs), strict=True)
        ]
        allowed = functools.partial(strict.allowed, options.allow) if options.strict is True else None
        ins, outs = layouts
        decisions = choose(program, completion.of_several(), ins, outs, allowed, idle_axes=options.idle_axes)
    with timed(phases, "emission"):
        abstract = sites.refined_mesh(mesh, refined)
        with jax.sharding.use_abstract_mesh(abstract):
            local = _emit(program, decisions, shardings, abstract, refined, completion.items.node_classes)
    with timed(phases, "passes"):
        local = scopes.named(planned(local, PassContext(refined.sizes, options)))
    (ins, outs), (arguments, results) = shardings, rests
    return Program(
        local, abstract, ins, outs, arguments, results, program, completion, decisions, refined, phases
    )


def _check(built: Program, options: Options) -> None:
    """Checks the program against strict mode. An argument that comes in on a mesh which the program itself
    names may cross.
    """
    refined = built.refinement
    crossed = [
        x for c in built.entering if c.resting.mesh not in refined.named for x in c.collectives(built.mesh)
    ]
    sent = [*crossed, *collectives(built.jaxpr, refined.sizes, refined.folded)]
    strict.check(sent, options, refined.shown, dict.fromkeys(_conflicts(built.graph, refined)))


def _conflicts(graph: Graph, refined: Refinement) -> Iterator[strict.Conflict]:
    """The annotations that are only read by another annotation, which requests something else. Arguments may
    rest in another sharding than they are used in, and so may results.
    """
    makers = {node.outputs[0]: node for node, note in annotations.among(graph.nodes) if note.role == "inside"}
    reads = Counter(v for node in graph.nodes for v in node.inputs) + Counter(graph.outputs)
    for node, note in annotations.among(graph.nodes):
        maker = makers.get(node.inputs[0])
        if maker is not None and note.role == "inside" and reads[node.inputs[0]] == 1:
            before = annotations.of_node(maker)
            assert before is not None
            if any(
                None not in pair and pair[0] != pair[1] for pair in zip(before.dims, note.dims, strict=True)
            ):
                yield strict.Conflict(
                    *(_conflict_side(n, x, refined) for n, x in ((maker, before), (node, note)))
                )
    for body in (body for node in graph.nodes for body in node.bodies):
        yield from _conflicts(body, refined)


def _conflict_side(node: Node, note: annotations.Annotation, refined: Refinement) -> tuple[str, str, str]:
    words = note.source if " at " in note.source else f"{note.source} at {node.line or 'an unknown line'}"
    return words, node.line, str(refined.shown(note.sharding))


def _completed(
    program: Graph,
    committed: Sequence[Placement | None],
    mesh: AnyMesh,
    options: Options = Options(),  # noqa: B008  (frozen)
) -> tuple[Refinement, list[Placement | None], Completion]:
    """The mesh that the program runs on, how arguments rest, and the completion on it.

    Where a reshape needs a part of an axis, which only completion tells, the mesh is refined and all is
    completed anew.
    """
    annotated = sites.sites(program, mesh)
    of_arguments = [p.mesh for p in committed if p]
    refined = refinement([sites.program_mesh(mesh), *(site.mesh for site in annotated)], of_arguments)
    refined = replace(refined, chip=options.priced_for)
    while True:
        sites.rewrite(annotated, refined)
        resting = sites.placements(program, committed, annotated, refined)
        done = complete(program, [p and refined.sharding(p) for p in resting], refined.sizes)
        finer = refined.cut(split_inside(program, done))
        if finer == refined:
            return refined, resting, done
        refined = finer


def _resting(
    program: Graph, completion: Completion, resting: Sequence[Placement | None], refined: Refinement
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """How arguments and results rest: as committed, as the argument that they succeed, else nearest to what
    was completed.
    """
    ins = tuple(
        placement or refined.rest(completion.sharding(v), v.shape)
        for v, placement in zip(program.inputs, resting, strict=True)
    )
    notes = {
        node.outputs[0]: replace(note, role="inside") if node.callers else note
        for node, note in completion.notes
    }
    return ins, tuple(_result(v, notes.get(v), ins, completion, refined) for v in program.outputs)


def _result(
    value: Value,
    note: annotations.Annotation | None,
    ins: Sequence[Placement],
    completion: Completion,
    refined,
):
    if note is None or note.like is None:
        across, owing = note is not None and note.is_of_result, note.at_rest if note else NOTHING_OWED
        requested = completion.sharding(value).without(owing.unreduced)
        return refined.owing_on(refined.rest(requested, value.shape, note and note.on, across), owing)
    argument = replace(ins[note.like], sharding=ins[note.like].sharding.settled)
    return (
        argument
        if refined.may_rest_on(argument.mesh)
        else refined.rest(refined.sharding(argument), value.shape)
    )


def _emit(program: Graph, decisions: Decisions, shardings, mesh, refined: Refinement, classes: NodeClasses):
    """The shard_map'd program, as a ClosedJaxpr over the global arguments."""
    sizes = refined.sizes
    if owes := any(s.owing for side in shardings for s in side):  # JAX has that in the types of values
        mesh = explicit_mesh(mesh)
    ins, outs = (tuple(s.spec for s in side) for side in shardings)
    full = [0 not in v.shape for v in program.inputs]

    def local(*shards):
        left, slots = iter(shards), zip(full, program.inputs, decisions.inputs, strict=True)
        every = [next(left) if has else lax.empty(x.local_shape(sizes), v.aval.dtype) for has, v, x in slots]
        return tuple(emit(decisions, every, sizes, refined.shown, classes))

    def run(*args):
        """Arguments without elements stay outside: XLA takes no shard_map all of whose operands are such."""
        specs = tuple(itertools.compress(ins, full))
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
        return run(*itertools.compress(args, full))

    types = [NamedSharding(mesh, spec) if owes else None for spec in ins]
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.make_jaxpr(run)(*map(shape_of, (v.aval for v in program.inputs), types))


@contextmanager
def timed(phases: dict[str, float], name: str):
    """Notes in `phases` the seconds of what is done inside."""
    start = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - start
