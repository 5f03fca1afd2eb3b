"""Convolutions and windowed reductions. A dim along which the window slides may be split: the halo comes from
the neighbours.

Where the operand is dilated, its rows are `holes` apart. The first row that a device needs is some places
into its window, and how many depends on the device (GSPMD, section 3.2, the three cases of base dilation):

    window of device 0    x . . x . . x     all alike: the padding is that for all
    window of device 1    . x . . x . .     stride 1: the most padding for all, then each cuts its results out
                                            else: the dilated rows are written out, and each cuts its window
                                            out of them
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from shardax import _jax
from shardax.graph.graph import Node
from shardax.reshard.halo import HaloRequest, exchange_of, inside_of, slice_by_device
from shardax.reshard.run import identity
from shardax.spmd_rules import flops
from shardax.spmd_rules.halo import halo_sends, request_beside, request_of, take, window_of
from shardax.spmd_rules.reductions import skipping
from shardax.spmd_rules.registry import LINEAR, Local, Passes, register_rule


@dataclass(frozen=True)
class _Slide:
    """How a window moves along a dim. Result r sees the places r·stride - low + k·spread, for k < size, of an
    operand whose rows are `holes` apart.
    """

    size: int
    stride: int = 1
    low: int = 0
    high: int = 0
    holes: int = 1
    spread: int = 1

    @property
    def is_pointwise(self) -> bool:
        return (self.size, self.stride, self.low, self.high, self.holes) == (1, 1, 0, 0, 1)

    def rows(self, results: int) -> int:
        """The most rows in the window of so many results."""
        return -(-self.width(results) // self.holes)

    def width(self, results: int) -> int:
        return (results - 1) * self.stride + (self.size - 1) * self.spread + 1

    def span(self, first, end):
        """The rows that the results from `first` to before `end` see."""
        place = first * self.stride - self.low
        return -(-place // self.holes), (place + self.width(end - first) - 1) // self.holes + 1

    def reaching(self, first, end):
        """The results that see any of the rows from `first` to before `end`."""
        return -(-(first + self.low - self.size + 1) // self.stride), (end - 1 + self.low) // self.stride + 1

    def seen(self, first, end):
        """All rows that those results see."""
        first, end = self.reaching(first, end)
        return first * self.stride - self.low, (end - 1) * self.stride - self.low + self.size


@dataclass(frozen=True)
class _Part:
    """What a device takes of one dim: `request`, seen by `results` results; `starts`, the place at which each
    device's window begins among the dilated places of the operand."""

    slide: _Slide
    request: HaloRequest
    results: int
    starts: Sequence[int]

    @property
    def skipped(self) -> np.ndarray:
        """How far into its window each device finds its first row."""
        return np.array(self.request.firsts) * self.slide.holes - np.array(self.starts)

    @property
    def written_out(self) -> bool:
        return self.slide.stride > 1 and len(set(self.skipped)) > 1

    @property
    def padding(self) -> tuple[int, int]:
        """What is left to pad of the rows that `taken` gives."""
        if self.written_out:
            return (0, 0)
        length = (self.request.rows - 1) * self.slide.holes + 1
        return int(max(self.skipped)), int(self.slide.width(self.results) - min(self.skipped) - length)

    @property
    def holes(self) -> int:
        return 1 if self.written_out else self.slide.holes

    def taken(self, local: Local, shard, fill):
        rows = take(local, self.request, shard, fill)
        return self._write_out(local, rows, fill, self.request.dim) if self.written_out else rows

    def _write_out(self, local: Local, rows, fill, dim: int):
        width, holes = self.slide.width(self.results), self.slide.holes
        config = [(0, 0, 0)] * rows.ndim
        config[dim] = (holes - 1, width, holes - 1)
        rows = lax.pad(rows, jnp.asarray(fill, rows.dtype), config)
        starts = (holes - 1 - self.skipped).tolist()
        return slice_by_device(rows, starts, width, dim, local.index(self.request.axes))

    def shows_filling(self, local: Local) -> bool:
        """Whether some device sees what `taken` has filled in."""
        return self.written_out or exchange_of(self.request).outside

    def inside(self, local: Local):
        """Which of the rows that `taken` gives are the operand's."""
        inside = inside_of(self.request, local.index(self.request.axes), (self.request.rows,), 0)
        return self._write_out(local, inside, False, 0) if self.written_out else inside

    def cut(self, local: Local, result, dim: int):
        """This device's results out of more."""
        if result.shape[dim] == self.results:
            return result
        starts = (max(self.skipped) - self.skipped).tolist()
        return slice_by_device(result, starts, self.results, dim, local.index(self.request.axes))


def _part(local: Local, slide: _Slide, dims: tuple[int, int], operand: int = 0) -> _Part:
    """The part of an operand's dim that this device's block of the result's dim sees."""
    block = local.out_shape()[dims[1]]
    request = request_of(local, operand, dims[0], (0, dims[1]), slide.span, slide.rows(block))
    return _Part(
        slide, request, block, [i * block * slide.stride - slide.low for i in range(len(request.firsts))]
    )


# Convolutions


def conv_general_dilated(node: Node) -> str:
    """ "n c+ s~, o c+ w! -> n o s~" in the order of the dimension numbers.

    With feature groups "n (g c+) s~, (g o) c+ w! -> n (g o) s~", with batch groups "(g n) c+ s~, (g o) c+ w!
    -> n (g o) s~". A window that reaches further than the results, as in the gradient of a kernel, is summed
    over: "s~+, s~+ -> t!".
    """
    lhs_dims, rhs_dims, out_dims = node.params["dimension_numbers"]
    by_feature, by_batch = (node.params[f"{prefix}_group_count"] > 1 for prefix in ("feature", "batch"))
    outs = "(g o)" if by_feature or by_batch else "o"
    lhs = ["(g n)" if by_batch else "n", "(g c+)" if by_feature else "c+"]
    rhs, out = [outs, "c+"], ["n", outs]
    for i in range(len(lhs_dims) - 2):
        for side, word in zip((lhs, rhs, out), _spatial(node, i), strict=True):
            side.append(word)
    lhs, rhs, out = (
        " ".join(word for _, word in sorted(zip(dims, words, strict=True)))
        for words, dims in ((lhs, lhs_dims), (rhs, rhs_dims), (out, out_dims))
    )
    return f"{lhs}, {rhs} -> {out}"


def _spatial(node: Node, i: int) -> tuple[str, str, str]:
    """The factors of spatial dim i in lhs, rhs and result."""
    slide, results = _conv_slide(node, i), node.out_shapes[0][_conv_dims(node, i)[2]]
    if slide.is_pointwise:
        return f"k{i}", "1", f"k{i}"
    factor = window_of(f"s{i}", node)
    # The gradient of patches has a kernel that reaches further than the results even where it has fewer rows.
    if (slide.size - 1) * slide.spread > (results - 1) * slide.stride and factor[-1] == "~":
        return f"{factor}+", f"{factor}+", f"t{i}!"
    return factor, f"w{i}!", factor


def _conv_dims(node: Node, i: int) -> tuple[int, ...]:
    """Where spatial dim i is in lhs, rhs and result."""
    return tuple(dims[2 + i] for dims in node.params["dimension_numbers"])


def _conv_slide(node: Node, i: int) -> _Slide:
    params = node.params
    low, high = params["padding"][i]
    size = node.in_shapes[1][_conv_dims(node, i)[1]]
    return _Slide(
        size, params["window_strides"][i], low, high, params["lhs_dilation"][i], params["rhs_dilation"][i]
    )


def _conv_parts(local: Local) -> Iterator[tuple[int, _Part]]:
    """The pairs (spatial dim, what is taken of it) of the spatial dims that are split."""
    node = local.node
    for i in range(len(node.params["padding"])):
        lhs, rhs, out = _conv_dims(node, i)
        slide = _conv_slide(node, i)
        if not slide.is_pointwise and local.operands[1].dims[rhs]:
            yield i, _summed_part(local, slide, lhs, rhs, node.out_shapes[0][out])
        elif not slide.is_pointwise and local.results[0].dims[out]:
            yield i, _part(local, slide, (lhs, out))


def _summed_part(local: Local, slide: _Slide, lhs: int, rhs: int, results: int) -> _Part:
    """The part that this device's block of the kernel sees, and no row more: its products with the kernel's
    padding count. Its window begins where the block does.
    """
    block = local.in_shape(1)[rhs]
    own = _Slide(block, slide.stride, slide.low, slide.high, slide.holes, slide.spread)

    def span(first, end):
        place = first * slide.spread - slide.low
        width = (results - 1) * slide.stride + (end - first - 1) * slide.spread + 1
        return -(-place // slide.holes), (place + width - 1) // slide.holes + 1

    request = replace(request_beside(local, 0, lhs, (1, rhs), span, own.rows(results)), exact=True)
    return _Part(
        own, request, results, [i * block * slide.spread - slide.low for i in range(len(request.firsts))]
    )


def _conv_requests(local: Local) -> Iterator[HaloRequest]:
    return (part.request for _, part in _conv_parts(local))


def _conv_local(local: Local, lhs, rhs):
    """The lowering on shards. Devices hold whole feature or batch groups, so there are fewer groups."""
    padding, dilation = list(local.params["padding"]), list(local.params["lhs_dilation"])
    parts = list(_conv_parts(local))
    for i, part in parts:
        lhs = part.taken(local, lhs, 0)
        padding[i], dilation[i] = part.padding, part.holes
        rhs = local.mask(1, rhs, 0, _conv_dims(local.node, i)[1:2]) if part.request.exact else rhs
    groups = {
        f"{prefix}_group_count": local.params[f"{prefix}_group_count"] for prefix in ("feature", "batch")
    }
    if "g" in local.splits:
        split = local.splits["g"]
        groups = {
            name: split.padded // local.count(split.axes) if count > 1 else 1
            for name, count in groups.items()
        }
    (out,) = local.bind(
        lhs, rhs, **groups, padding=tuple(padding), lhs_dilation=tuple(dilation), out_sharding=None
    )
    for i, part in parts:
        out = part.cut(local, out, _conv_dims(local.node, i)[2])
    return [out]


# Windowed reductions


def _slides(node: Node) -> list[_Slide]:
    params = node.params
    sizes, ones = params["window_dimensions"], (1,) * len(params["window_dimensions"])
    lows, highs = zip(*params["padding"], strict=True) if sizes else ((), ())
    holes, spread = (params.get(f"{prefix}_dilation", ones) for prefix in ("base", "window"))
    return [
        _Slide(*dim) for dim in zip(sizes, params["window_strides"], lows, highs, holes, spread, strict=True)
    ]


def _windowed(node: Node) -> str:
    """The factors of the dims, as text of a rule: the same for the operand of the windows and for the
    result.
    """
    return " ".join(
        f"k{i}" if slide.is_pointwise else window_of(f"s{i}", node) for i, slide in enumerate(_slides(node))
    )


def reduce_window(node: Node) -> str:
    """ "k s~ -> k s~" for each operand; scalars, the initial values, follow."""
    count, dims = len(node.outputs), _windowed(node)
    return f"{', '.join([dims] * count + [''] * (len(node.inputs) - count))} -> {', '.join([dims] * count)}"


def _window_parts(local: Local, operand: int = 0) -> Iterator[_Part]:
    for d, slide in enumerate(_slides(local.node)):
        if local.results[0].dims[d] and not slide.is_pointwise:
            yield _part(local, slide, (d, d), operand)


def _window_requests(local: Local) -> Iterator[HaloRequest]:
    """Of all operands that have the window's dims."""
    for i, layout in enumerate(local.operands):
        yield from (part.request for part in _window_parts(local, i)) if layout.dims else ()


def _windows_local(fills: Callable[[Local, Sequence[Any]], Sequence[Any]], bind: Callable = Local.bind):
    """The lowering of a windowed reduction; `fills` gives for each operand with dims what pads it, `bind`
    reduces.
    """

    def lowering(local: Local, *shards):
        padding, holes = list(local.params["padding"]), list(local.params.get("base_dilation", ()))
        shards, parts = list(shards), list(_window_parts(local))
        for i, fill in enumerate(fills(local, shards)):
            for part in _window_parts(local, i):
                shards[i] = part.taken(local, shards[i], fill)
        for part in parts:
            padding[part.request.dim] = part.padding
            if holes:
                holes[part.request.dim] = part.holes
        results = bind(
            local, *shards, padding=tuple(padding), **({"base_dilation": tuple(holes)} if holes else {})
        )
        for part in parts:
            results = [part.cut(local, result, part.request.dim) for result in results]
        return results

    return lowering


def _initial_values(local: Local, shards) -> Sequence[Any]:
    return shards[len(local.node.outputs) :]


def _bind_skipping(local: Local, *shards, padding, base_dilation):
    """Runs the reduction with a flag beside the values, which leaves out what has no flag. XLA does not
    combine padding, whatever the initial value is; so what was filled in must not be combined either.
    """
    parts, count = (
        [part for part in _window_parts(local) if part.shows_filling(local)],
        len(local.node.outputs),
    )
    if not parts:
        return local.bind(*shards, padding=padding, base_dilation=base_dilation)
    shape, inside = shards[0].shape, np.True_
    for part in parts:
        inside &= lax.broadcast_in_dim(part.inside(local), shape, (part.request.dim,))
    how = {name: local.params[name] for name in ("window_dimensions", "window_strides", "window_dilation")}
    operands, starts = (*shards[:count], inside), (*shards[count:], np.True_)
    combine = skipping(jaxpr_as_fun(_jax.closed(local.params["jaxpr"])))
    return lax.reduce_window(operands, starts, combine, padding=padding, base_dilation=base_dilation, **how)[
        :-1
    ]


def _neutral(reduction: str, local: Local, shards) -> Sequence[Any]:
    return [0 if reduction == "sum" else identity(reduction, shards[0].dtype)]


def select_and_gather_add(node: Node) -> str:
    """Tangents, and the operand whose places decide which of them is taken."""
    dims = _windowed(node)
    return f"{dims}, {dims} -> {dims}"


def _never_selected(local: Local, shards) -> Sequence[Any]:
    return [0, _least_selected(local, shards[1].dtype)]


def _least_selected(local: Local, dtype):
    return identity("max" if local.params["select_prim"].name == "ge" else "min", dtype)


def select_and_scatter(node: Node) -> str:
    """The operand, what is scattered over the places chosen in its windows, and the initial value: slid dims
    are unsplit, how competing updates combine only the user knows."""
    dims = " ".join(f"k{i}" if slide.is_pointwise else f"s{i}~!" for i, slide in enumerate(_slides(node)))
    return f"{dims}, {dims},  -> {dims}"


def select_and_scatter_add(node: Node) -> str:
    """What is scattered, and the operand in whose windows the places are chosen."""
    dims = _windowed(node)
    return f"{dims}, {dims} -> {dims}"


@dataclass(frozen=True)
class _Scattered:
    """One dim of select_and_scatter_add: the windows that reach a device's block, and what they see of the
    operand.

    block                 |=========|          the first window may begin before it,
    windows          [-----][-----][-----]     the last may end after it
    """

    windows: HaloRequest
    seen: HaloRequest
    offsets: Sequence[int]  # of each device's block behind the beginning of its first window


def _scattered(local: Local) -> Iterator[_Scattered]:
    for d, slide in enumerate(_slides(local.node)):
        if local.results[0].dims[d] and not slide.is_pointwise:
            block = local.out_shape()[d]
            count = (block + slide.size - 2) // slide.stride + 1
            windows = request_of(local, 0, d, (0, d), slide.reaching, count)
            seen = request_of(local, 1, d, (0, d), slide.seen, slide.width(count))
            starts = np.array(windows.firsts) * slide.stride - slide.low
            yield _Scattered(windows, seen, (np.arange(len(starts)) * block - starts).tolist())


def _scattered_requests(local: Local) -> Iterator[HaloRequest]:
    for dim in _scattered(local):
        yield from (dim.windows, dim.seen)


def _select_and_scatter_add_local(local: Local, source, operand):
    """All windows that reach the block scatter; then the block is cut out."""
    dims, padding = list(_scattered(local)), list(local.params["padding"])
    for dim in dims:
        source = take(local, dim.windows, source, 0)
        operand = take(local, dim.seen, operand, _least_selected(local, operand.dtype))
        padding[dim.seen.dim] = (0, 0)
    (out,) = local.bind(source, operand, padding=tuple(padding))
    for dim in dims:
        d, stride = dim.seen.dim, local.params["window_strides"][dim.seen.dim]
        block = local.out_shape()[d]
        config = [(stride, block, 0) if e == d else (0, 0, 0) for e in range(out.ndim)]
        starts = [offset + stride for offset in dim.offsets]
        out = slice_by_device(
            lax.pad(out, np.zeros((), out.dtype), config), starts, block, d, local.index(dim.seen.axes)
        )
    return [out]


def _images(params, in_shapes, out_shapes) -> int | None:
    """A window of one place is a product, to which places are items as images are. One that reaches further
    than what it makes is that of a kernel's gradient, whose images are summed over and whose items are
    channels: the TPU compiler takes no longer for few of either.
    """
    numbers = params["dimension_numbers"]
    window = [in_shapes[1][d] for d in numbers.rhs_spec[2:]]
    made = [out_shapes[0][d] for d in numbers.out_spec[2:]]
    reach = math.prod(map(_extent, window, params["rhs_dilation"]))
    is_gradient = reach > math.prod(map(_extent, made, params["window_strides"]))
    return None if math.prod(window) == 1 or is_gradient else in_shapes[0][numbers.lhs_spec[0]]


def _extent(count: int, step: int) -> int:
    """From the first to the last of so many places, a step apart."""
    return (count - 1) * step + 1


_sends = halo_sends(_window_requests)
register_rule(
    "conv_general_dilated",
    conv_general_dilated,
    _conv_local,
    passes=(LINEAR(0), LINEAR(1)),
    sends=halo_sends(_conv_requests),
    flops=flops.conv_general_dilated,
    batch=_images,
    fuses="transposes",
)
register_rule(
    "reduce_window",
    reduce_window,
    _windows_local(_initial_values, _bind_skipping),
    sends=_sends,
    fuses="operands",
)
for _reduction, _passes in (
    ("max", Passes(("max",), (0,))),
    ("min", Passes(("min",), (0,))),
    ("sum", LINEAR(0)),
):
    _lowering = _windows_local(partial(_neutral, _reduction))
    register_rule(
        f"reduce_window_{_reduction}",
        reduce_window,
        _lowering,
        passes=(_passes,),
        sends=_sends,
        fuses="operands",
    )
register_rule(
    "select_and_gather_add",
    select_and_gather_add,
    _windows_local(_never_selected),
    passes=(LINEAR(0),),
    sends=_sends,
)
register_rule("select_and_scatter", select_and_scatter)
register_rule(
    "select_and_scatter_add",
    select_and_scatter_add,
    _select_and_scatter_add_local,
    passes=(LINEAR(0),),
    sends=halo_sends(_scattered_requests),
)
