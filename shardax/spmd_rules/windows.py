"""Convolutions and windowed reductions. A dim on which the window does nothing is kept; one that it slides along is whole."""

from collections.abc import Sequence

from shardax.graph import Node
from shardax.spmd_rules.registry import LINEAR, Local, Passes, register_rule


def conv_general_dilated(node: Node) -> str:
    """ "n c+ s!, o c+ w! -> n o t!" in the order of the dimension numbers.

    With feature groups "n (g c+) s!, (g o) c+ w! -> n (g o) t!", with batch groups "(g n) c+ s!, (g o) c+ w! -> n (g o) t!".
    """
    lhs_dims, rhs_dims, out_dims = node.params["dimension_numbers"]
    by_feature, by_batch = (node.params[f"{kind}_group_count"] > 1 for kind in ("feature", "batch"))
    outs = "(g o)" if by_feature or by_batch else "o"
    lhs = ["(g n)" if by_batch else "n", "(g c+)" if by_feature else "c+"]
    rhs, out = [outs, "c+"], ["n", outs]
    for i in range(len(lhs_dims) - 2):
        for side, word in zip((lhs, rhs, out), _spatial(node, i), strict=True):
            side.append(word)
    lhs, rhs, out = (_in_order(*pair) for pair in ((lhs, lhs_dims), (rhs, rhs_dims), (out, out_dims)))
    return f"{lhs}, {rhs} -> {out}"


def _in_order(words: Sequence[str], dims: Sequence[int]) -> str:
    return " ".join(word for _, word in sorted(zip(dims, words, strict=True)))


def _spatial(node: Node, i: int) -> tuple[str, str, str]:
    """The factors of spatial dim i in lhs, rhs and result."""
    params = node.params
    size = node.inputs[1].shape[params["dimension_numbers"][1][2 + i]]
    dilated = params["lhs_dilation"][i] != 1
    if size == 1 and params["window_strides"][i] == 1 and tuple(params["padding"][i]) == (0, 0) and not dilated:
        return f"k{i}", "1", f"k{i}"
    return f"s{i}!", f"w{i}!", f"t{i}!"


def _conv_local(local: Local, lhs, rhs):
    """Devices hold whole groups: there are fewer of them."""
    groups = {f"{kind}_group_count": local.params[f"{kind}_group_count"] for kind in ("feature", "batch")}
    if "g" in local.splits:
        split = local.splits["g"]
        groups = {name: split.padded // local.count(split.axes) if count > 1 else 1 for name, count in groups.items()}
    return local.bind(lhs, rhs, **groups, out_sharding=None)


def _windowed(node: Node) -> list[tuple[str, str]]:
    """The factors of each dim before and after its window."""
    pads, ones = node.params["padding"], ((1,) * len(node.params["window_dimensions"]))
    steps = [node.params["window_dimensions"], node.params["window_strides"]]
    steps += [node.params.get(name, ones) for name in ("base_dilation", "window_dilation")]
    still = [all(s == 1 for s in dim[:-1]) and tuple(dim[-1]) == (0, 0) for dim in zip(*steps, pads, strict=True)]
    return [(f"k{i}", f"k{i}") if kept else (f"s{i}!", f"t{i}!") for i, kept in enumerate(still)]


def reduce_window(node: Node) -> str:
    """ "k s! -> k t!" for each operand; scalars, the initial values, follow."""
    before, after = (" ".join(side) for side in zip(*_windowed(node), strict=True))
    count = len(node.outputs)
    return f"{', '.join([before] * count + [''] * (len(node.inputs) - count))} -> {', '.join([after] * count)}"


def select_and_gather_add(node: Node) -> str:
    """Tangents, and the operand whose places decide which of them is taken."""
    before, after = (" ".join(side) for side in zip(*_windowed(node), strict=True))
    return f"{before}, {before} -> {after}"


def select_and_scatter(node: Node) -> str:
    """The operand, what is scattered over the places chosen in its windows, and the initial value."""
    before, after = (" ".join(side) for side in zip(*_windowed(node), strict=True))
    return f"{before}, {after},  -> {before}"


def select_and_scatter_add(node: Node) -> str:
    """What is scattered, and the operand in whose windows the places are chosen."""
    before, after = (" ".join(side) for side in zip(*_windowed(node), strict=True))
    return f"{after}, {before} -> {before}"


register_rule("conv_general_dilated", conv_general_dilated, _conv_local, passes=(LINEAR(0), LINEAR(1)))
register_rule("reduce_window", reduce_window)
register_rule("reduce_window_max", reduce_window, passes=(Passes(("max",), (0,)),))
register_rule("reduce_window_min", reduce_window, passes=(Passes(("min",), (0,)),))
register_rule("reduce_window_sum", reduce_window, passes=(LINEAR(0),))
register_rule("select_and_gather_add", select_and_gather_add, passes=(LINEAR(0),))
register_rule("select_and_scatter", select_and_scatter)
register_rule("select_and_scatter_add", select_and_scatter_add, passes=(LINEAR(0),))
