"""Finds padding of a slice, and slices of what is padded, and makes one shift of the two.

    pad x[1:] by one behind     ->     pad x by -1 in front and 1 behind

A slice of an uneven dim is in other blocks than the array, and padding brings its rows back: two exchanges
of rows instead of one.
"""

from collections import Counter
from dataclasses import replace

from shardax.graph.graph import Graph, Node
from shardax.rewrites.rewrite import Context, Replacements

Config = tuple[int, int, int]


def shifts(graph: Graph, context: Context) -> Replacements:
    """A pad for what is padded and sliced, where nothing else reads in between."""
    cutting = [node for node in graph.nodes if node.name in ("pad", "slice")]
    if not cutting:
        return Replacements()
    uses = Counter(v for node in graph.nodes for v in node.inputs) + Counter(graph.outputs)
    makers, new = {v: node for node in cutting for v in node.outputs}, {}
    for node in cutting:
        if uses[node.inputs[0]] == 1 and (made := _shift(node, makers.get(node.inputs[0]))):
            new[node] = [made]
            makers[made.outputs[0]] = made
    return Replacements(new)


def _shift(node: Node, maker: Node | None) -> Node | None:
    """One node instead of a pad and a slice, whichever comes first."""
    if maker is None or {node.name, maker.name} != {"pad", "slice"}:
        return None
    pad, cut = (node, maker) if node.name == "pad" else (maker, node)
    merge = _padded_slice if pad is node else _sliced_padding
    limits = zip(cut.params["start_indices"], cut.params["limit_indices"], cut.in_shapes[0], strict=True)
    strides = cut.params["strides"] or (1,) * len(cut.in_shapes[0])
    # Of each dim how many rows the slice leaves out in front and behind, and its stride.
    cuts = [(first, n - limit, s) for (first, limit, n), s in zip(limits, strides, strict=True)]
    dims = zip(pad.params["padding_config"], cuts, maker.in_shapes[0], strict=True)
    configs = [merge(*dim) for dim in dims]
    if None in configs or 0 in node.out_shapes[0]:
        return None
    params = {**pad.params, "padding_config": tuple(configs)}
    return replace(pad, inputs=[maker.inputs[0], pad.inputs[1]], outputs=node.outputs, params=params)


def _padded_slice(config: Config, cut: tuple[int, int, int], size: int) -> Config | None:
    """The padding of one dim instead of its slice and then its padding; None where rows are cut off and
    others put there.
    """
    (low, high, holes), (front, behind, stride) = config, cut
    if not (front or behind) and stride == 1:
        return config
    refilled = front and low > 0 or behind and high > 0
    return None if holes or stride != 1 or refilled else (low - front, high - behind, 0)


def _sliced_padding(config: Config, cut: tuple[int, int, int], size: int) -> Config | None:
    """The same of its padding and then its slice; None where hardly anything but padding is left."""
    (low, high, holes), (front, behind, stride) = config, cut
    if not (front or behind) and stride == 1:
        return config
    low, high = low - front, high - behind
    lost = max(0, -low) + max(0, -high)
    return None if holes or stride != 1 or lost >= size else (low, high, 0)
