"""Reductions over dims. Sums, maxima and minima over a split dim stay pending; for others, devices exchange
what they found.

So do reductions with a reducer of the user's. For argmax each device finds the greatest value of its shard,
and its place:

    shard 0   shard 1   shard 2       values found, gathered     their argmax     its place
    3 1 4     1 5 9     2 6 5    ->   4 9 6                  ->  1            ->  5

Where much is found, each device gets a part of what all of them found, and what it makes of that is gathered.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from shardax import _jax
from shardax.cost.network import Message, network_of
from shardax.graph.graph import Node
from shardax.reshard.run import identity
from shardax.sharding import Axes
from shardax.spmd_rules.indexing import at_places
from shardax.spmd_rules.registry import LINEAR, MOVES, Local, Passes, register_rule
from shardax.spmd_rules.sends import all_gather, all_to_all


def _reduction(mark: str) -> Callable[[Node], str]:
    """The rule that marks every reduced dim with `mark` and keeps the others; no collective orders complex
    numbers.
    """

    def rule(node: Node) -> str:
        axes, complex_ = node.params["axes"], node.inputs[0].aval.dtype.kind == "c"
        own = "!" if complex_ and mark in (":max", ":min") else mark
        operand = [f"r{d}{own}" if d in axes else f"k{d}" for d in range(len(node.inputs[0].shape))]
        return f"{' '.join(operand)} -> {' '.join(f for f in operand if f[0] == 'k')}"

    return rule


def _logical(mark: str) -> Callable[[Node], str]:
    """Of booleans `and` is the minimum and `or` the maximum; bits of integers are exchanged."""
    return lambda node: _reduction(mark if _waits(node) else "")(node)


def _waits(node: Node) -> bool:
    return node.name in ("reduce_and", "reduce_or") and node.inputs[0].aval.dtype == np.bool_


def _over(local: Local) -> Axes:
    """The axes that split the reduced dims."""
    gone = local.params["dimensions" if local.node.name == "reduce" else "axes"]
    return tuple(a for d in gone for a in local.operands[0].dims[d])


def _exchange(local: Local) -> Iterator[Message]:
    """The collectives that exchange what the devices found."""
    if not _waits(local.node) and local.count(_over(local)) > 1:
        network = network_of(local.sizes)
        yield from min(_ways(local), key=lambda way: sum(network.collective(*m) for m in way))


def _ways(local: Local) -> tuple[list[Message], list[Message]]:
    """All that was found is gathered; or parts of it go to each device, whose results are gathered. Found is
    for argmax the value too, for reduce a flag."""
    results = [v.itemsize for v in local.node.outputs]
    partials = results + [v.itemsize for v in local.node.inputs if "index_dtype" in local.params]
    partials += [1] * (local.node.name == "reduce")
    axes, size = _over(local), math.prod(local.out_shape())
    others, part = local.count(axes) - 1, -(-size // local.count(axes))
    return (
        [Message("all_gather", axes, others * size * itemsize) for itemsize in partials],
        [Message("all_to_all", axes, others * part * itemsize) for itemsize in partials]
        + [Message("all_gather", axes, others * part * itemsize) for itemsize in results],
    )


def _combined(local: Local, what: str, partials: Sequence[Any], combine: Callable) -> list[Any]:
    """What `combine` makes of what the devices found, stacked in their order, on every device."""
    axes, shape = _over(local), partials[0].shape
    if [*_exchange(local)] == _ways(local)[0]:
        return list(combine([all_gather(local, what, x, axes) for x in partials]))
    count, size = local.count(axes), math.prod(shape)
    part = -(-size // count)
    flat = (jnp.pad(x.reshape(-1), (0, count * part - size)).reshape(count, part) for x in partials)
    mine = combine([all_to_all(local, what, x, axes) for x in flat])
    return [all_gather(local, what, x, axes, 0)[:size].reshape(shape) for x in mine]


def _exchanged(neutral: Callable) -> Callable:
    """The lowering of a reduction that leaves `neutral(dtype)` as it is."""

    def lowering(local: Local, shard):
        axes = _over(local)
        if local.count(axes) == 1 or _waits(local.node):
            return local.bind(shard)
        partials = local.bind(local.mask(0, shard, neutral(shard.dtype), local.params["axes"]))
        return _combined(local, "parts", partials, lambda parts: local.bind(*parts, axes=(0,)))

    return lowering


def _arg_local(reduction: str) -> Callable:
    """The lowering of argmax and argmin. Among equals the first shard's wins, as within a shard the first
    place does.
    """

    def lowering(local: Local, shard):
        (dim,) = local.params["axes"]
        if local.count(local.operands[0].dims[dim]) == 1:
            return local.bind(shard)
        shard = local.mask(0, shard, identity(reduction, shard.dtype), [dim])
        (place,) = local.bind(shard)
        value = at_places(shard, place, dim)
        place += lax.convert_element_type(local.start(local.operands[0], dim), place.dtype)

        def places_of_the_best(partials):
            values, places = partials
            (best,) = local.bind(values, axes=(0,))
            return [at_places(places, best, 0)]

        return _combined(local, "bests", [value, place], places_of_the_best)

    return lowering


def _all_bits(dtype):
    return np.asarray(True) if dtype == np.bool_ else np.invert(np.zeros((), dtype))


def reduce(node: Node) -> str:
    """ "k r, k r, ,  -> k, k": operands, then initial values."""
    gone, count = node.params["dimensions"], len(node.outputs)
    shape = node.in_shapes[0]
    operand = [f"r{d}{'!' * (0 in shape)}" if d in gone else f"k{d}" for d in range(len(shape))]
    result = " ".join(f for f in operand if f[0] == "k")
    return f"{', '.join([' '.join(operand)] * count + [''] * count)} -> {', '.join([result] * count)}"


def _reduce_local(local: Local, *shards):
    """The devices' results are reduced in the order of devices, and the initial value, which need not be
    neutral, is combined with what that gives: XLA may take it for neutral, and loses it where a dim of size
    one is reduced.
    """
    count = len(local.node.outputs)
    operands, starts, gone = shards[:count], shards[count:], local.params["dimensions"]
    if local.count(_over(local)) == 1:  # behind a barrier: else it is lost where operands were concatenated
        return local.bind(*lax.optimization_barrier(operands), *starts)
    inside = local.mask(0, lax.full(operands[0].shape, True), False, gone)
    combine = jaxpr_as_fun(_jax.closed(_jax.under_local_mesh(local.params["jaxpr"])))
    reduced = partial(lax.reduce, init_values=(*starts, np.False_), computation=skipping(combine))
    partials = reduced((*operands, inside), dimensions=gone)

    def with_the_initial_value(parts):
        values = reduced(tuple(parts), dimensions=(0,))[:-1]
        results = jax.vmap(partial(combine, *starts))(*(x.reshape(-1) for x in values))
        return [result.reshape(x.shape) for result, x in zip(results, values, strict=True)]

    return _combined(local, "parts", partials, with_the_initial_value)


def skipping(combine: Callable) -> Callable:
    """A reducer of pairs (values, flag): it combines the values whose flag is set by `combine`, and skips the
    others.
    """

    def reducer(a, b):
        (*xs, one), (*ys, other) = a, b
        pairs = zip(combine(*xs, *ys), xs, ys, strict=True)
        return (*(lax.select(one & other, both, lax.select(one, x, y)) for both, x, y in pairs), one | other)

    return reducer


def _reduce_max_local(local: Local, shard):
    return [
        lax.reduce_max(shard, local.params["axes"])
    ]  # not bound: 0.12 wants out_sharding here and nowhere else


def _reduce_min_local(local: Local, shard):
    return [lax.reduce_min(shard, local.params["axes"])]


def _sum_passes(node: Node) -> tuple[Passes, ...]:
    """The sum of one element is the element."""
    return (LINEAR(0) if any(node.in_shapes[0][d] != 1 for d in node.params["axes"]) else MOVES(0),)


_reduces = partial(register_rule, fuses="operands")
_reduces("argmax", _reduction(""), _arg_local("max"), sends=_exchange)
_reduces("argmin", _reduction(""), _arg_local("min"), sends=_exchange)
_reduces("reduce_and", _logical(":min"), _exchanged(_all_bits), sends=_exchange)
_reduces("reduce", reduce, _reduce_local, sends=_exchange)
_reduces("reduce_max", _reduction(":max"), _reduce_max_local, passes=(Passes(("max",), (0,)),))
_reduces("reduce_min", _reduction(":min"), _reduce_min_local, passes=(Passes(("min",), (0,)),))
_reduces("reduce_or", _logical(":max"), _exchanged(partial(np.zeros, ())), sends=_exchange)
_reduces("reduce_prod", _reduction(""), _exchanged(partial(np.ones, ())), sends=_exchange)
_reduces("reduce_sum", _reduction("+"), passes=_sum_passes)
_reduces("reduce_xor", _reduction(""), _exchanged(partial(np.zeros, ())), sends=_exchange)
