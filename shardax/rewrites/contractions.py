"""Finds contractions over dims that were merged only for that, as by `jnp.vdot`, and contracts the dims
themselves instead.

    reshape x[64, 16] to [1024], y likewise, contract 1024     ->     contract x and y over 64 and 16

A merged dim can only be split over the axes of its major part, so those of its minor part would be gathered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardax.graph.graph import Graph, Node, Value
from shardax.rewrites.rewrite import Context, Replacements, makers_of


def unmerged_contractions(graph: Graph, context: Context) -> Replacements:
    """The contractions of what is not merged before."""
    makers, products = makers_of(graph), (node for node in graph.nodes if node.name == "dot_general")
    return Replacements({node: [new] for node in products if (new := _unmerged(node, makers))})


def _unmerged(node: Node, makers: Mapping[Value, Node]) -> Node | None:
    contracted, batch = node.params["dimension_numbers"]
    if len(contracted[0]) != 1:
        return None
    (one,), (two,) = contracted
    sizes = [_sizes_before(makers.get(v), d) for v, d in zip(node.inputs, (one, two), strict=True)]
    if sizes[0] != sizes[1] or len(sizes[0]) < 2:
        return None
    count = len(sizes[0])
    groups = tuple(tuple(range(d, d + count)) for d in (one, two))
    batch_dims = tuple(
        tuple(b + (count - 1) * (b > d) for b in dims) for dims, d in zip(batch, (one, two), strict=True)
    )
    inputs = [makers[v].inputs[0] for v in node.inputs]
    return replace(node, inputs=inputs, params={**node.params, "dimension_numbers": (groups, batch_dims)})


def _sizes_before(maker: Node | None, dim: int) -> Sequence[int]:
    """The sizes of the dims of which a reshape makes dim `dim`, the others being left as they are; none where
    it does not.
    """
    if maker is None or maker.name != "reshape" or maker.params["dimensions"] is not None:
        return ()
    (old,), (new,) = maker.in_shapes, maker.out_shapes
    end = len(old) - len(new) + dim + 1
    return old[dim:end] if old[:dim] == new[:dim] and old[end:] == new[dim + 1 :] and 0 not in old else ()
