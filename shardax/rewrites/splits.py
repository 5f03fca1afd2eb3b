"""Finds splits of which some parts are not read, and makes slices of the others.

    a, b = split x by (1, 3), a unread     ->     b = x[1:]

All parts of a split lie alike, and each costs what it takes to lay it out, read or not. The gradient of a
concatenation is a split, and of a shifting buffer, `concatenate([new, buffer[:-1]])`, reads one part.
"""

from dataclasses import replace

from jax import lax

from shardax.graph.graph import Graph, Node
from shardax.rewrites.rewrite import Context, Replacements


def unread_parts(graph: Graph, context: Context) -> Replacements:
    """A slice for each part that is read, where another is not."""
    read = {v for node in graph.nodes for v in node.inputs} | set(graph.outputs)
    splits = (node for node in graph.nodes if node.name == "split" and not read.issuperset(node.outputs))
    return Replacements({node: [part for part in _parts(node) if part.outputs[0] in read] for node in splits})


def _parts(node: Node) -> list[Node]:
    axis, (shape,), found, start = node.params["axis"], node.in_shapes, [], 0
    for size, made in zip(node.params["sizes"], node.outputs, strict=True):
        first = tuple(start if d == axis else 0 for d in range(len(shape)))
        start += size
        last = tuple(start if d == axis else n for d, n in enumerate(shape))
        params = {"start_indices": first, "limit_indices": last, "strides": None}
        found.append(replace(node, primitive=lax.slice_p, params=params, outputs=[made]))
    return found
