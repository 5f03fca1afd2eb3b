"""Runs the rewrites over a program: what JAX shows only expanded becomes nodes of its own."""

from collections.abc import Sequence
from dataclasses import replace

from shardax.graph.graph import Graph, Node, without_unread
from shardax.rewrites.associative import associative_scans, reversed_scans
from shardax.rewrites.batched_indices import batched_indices
from shardax.rewrites.contractions import unmerged_contractions
from shardax.rewrites.opened import opened
from shardax.rewrites.rewrite import Context, Rewrite, replaced
from shardax.rewrites.rotations import rotations
from shardax.rewrites.rows import scanned_rows
from shardax.rewrites.shifts import shifts
from shardax.rewrites.splits import unread_parts
from shardax.rewrites.whiles import counted_whiles

REWRITES: tuple[Rewrite, ...] = (
    opened,  # before all others, which look for what JAX's functions expand into
    associative_scans,
    reversed_scans,
    rotations,
    counted_whiles,  # before rows: the loops that count are scans then
    scanned_rows,
    batched_indices,
    unmerged_contractions,
    unread_parts,  # before shifts, of which slices may be a part
    shifts,
)
"""In the order in which they run, each over the whole program."""


def rewritten(graph: Graph, rewrites: Sequence[Rewrite] = REWRITES) -> Graph:
    """The graph after these rewrites, without what nothing reads; its argument stays as it is."""
    graph = without_unread(graph)
    for rewrite in rewrites:
        graph = _everywhere(rewrite, Context(graph))
    return graph


def _everywhere(rewrite: Rewrite, context: Context) -> Graph:
    """The graph after a rewrite of it, and then of its bodies."""
    again = True
    while again:
        replacements = rewrite(context.graph, context)
        graph, again = replaced(context.graph, replacements), replacements.again
        if graph is not context.graph:
            context = replace(context, graph=graph)
    return _inside(rewrite, context)


def _inside(rewrite: Rewrite, context: Context) -> Graph:
    graph, changed = context.graph, dict[Node, Node]()
    for node in (node for node in graph.nodes if node.bodies):
        bodies = tuple(_everywhere(rewrite, Context(body, node, context)) for body in node.bodies)
        if bodies != node.bodies:
            changed[node] = replace(node, bodies=bodies)
    nodes = [changed.get(node, node) for node in graph.nodes] if changed else graph.nodes
    return Graph(graph.inputs, nodes, graph.outputs) if changed else graph
