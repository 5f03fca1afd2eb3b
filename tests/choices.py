"""Programs laid out and chosen on layouts that a test writes itself, on no devices."""

from collections.abc import Iterator, Sequence

import jax
from jax.sharding import PartitionSpec as P

from shardax import _jax
from shardax.completion.complete import complete
from shardax.cost.chips import SLOW
from shardax.cost.network import Network
from shardax.graph.graph import Graph, Node
from shardax.partition.alternatives import Alternatives
from shardax.partition.choose import replayed
from shardax.partition.decisions import Decision, Decisions
from shardax.partition.emit import emit
from shardax.partition.search import Search
from shardax.sharding import Layout, Padding, from_spec
from tests.graphs import auto_mesh

SIZES = Network({"x": 4, "y": 2, "z": 2}, SLOW)


def layout(spec: P, shape: Sequence[int], pending=(), sizes=SIZES) -> Layout:
    """The layout of this spec, split dims padded to whole blocks; `pending`: axes over which a sum is."""
    owed = tuple((axis, "sum") for axis in pending)
    return Padding(sizes).layout(from_spec(spec, len(shape)), tuple(shape), owed)


def laid_out(
    program: Graph, ins: Sequence[P], outs: Sequence[P] | None = None, sizes=SIZES, returned=None
) -> Search:
    """A search of a program whose inputs come in so; results leave so, or else as completion has them.
    `returned`: of carries, the layouts in which their bodies gave them back before."""
    specs = [from_spec(s, len(v.shape)) for s, v in zip(ins, program.inputs, strict=True)]
    known = complete(program, specs, sizes)
    alternatives = Alternatives(program, known)
    search = Search(program, known, alternatives, {}, returned or {})
    results = [known.sharding(v) for v in program.outputs]
    if outs is not None:
        results = [from_spec(s, len(v.shape)) for s, v in zip(outs, program.outputs, strict=True)]
    inputs, outputs = (
        [alternatives.paddings.of(v).layout(s, v.shape) for s, v in zip(side, values, strict=True)]
        for side, values in ((specs, program.inputs), (results, program.outputs))
    )
    search.program(program, inputs, outputs)
    return search


def chosen(search: Search) -> Decisions:
    """What a search chooses, its price among it."""
    solution = search.solve()
    graph = search.completion.graph
    inputs = [search.layouts[v][0] for v in graph.inputs]
    outputs = [site.chosen.operands[0] for site in search.sites[len(search.sites) - len(graph.outputs) :]]
    return replayed(search, solution, graph, inputs, outputs)


def steps(decisions: Decisions) -> Iterator[tuple[Node, Decision]]:
    """Every node with its decision, bodies included."""
    for node, decision in decisions.pairs():
        for body in decision.bodies:
            yield from steps(body)
        yield node, decision


SENDING = ("all_gather", "all_to_all", "ppermute", "psum", "psum_invariant", "reduce_scatter", "pmax", "pmin")


def emitted(decisions: Decisions, run=emit, sizes=SIZES, shown=None):
    """The program that each device runs, around which all stands padded: a ClosedJaxpr. `run`: what is done
    with the decisions and shards; its results are per device."""
    graph, known = decisions.graph, () if shown is None else (shown,)
    specs = tuple(lay.sharding.spec for lay in decisions.inputs)
    args = [
        jax.ShapeDtypeStruct(lay.padded, v.aval.dtype)
        for v, lay in zip(graph.inputs, decisions.inputs, strict=True)
    ]
    outs = tuple(r.target.sharding.spec for r in decisions.outputs)
    mesh = auto_mesh(**sizes)
    local = jax.shard_map(
        lambda *shards: tuple(run(decisions, shards, sizes, *known)),
        mesh=mesh,
        in_specs=specs,
        out_specs=outs,
        check_vma=False,
    )
    with jax.sharding.use_abstract_mesh(mesh):
        (eqn,) = jax.make_jaxpr(local)(*args).eqns
    return _jax.closed(eqn.params["jaxpr"])


def equations(jaxpr, *names: str) -> Iterator:
    """All of these primitives, in bodies too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in names:
            yield eqn
        for body in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(body, "jaxpr", body)
            yield from equations(inner, *names) if hasattr(inner, "eqns") else ()
