"""emit for scan, while and cond: the same loops and branches, over shards."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from jax import lax

from shardax import _jax
from shardax.graph.graph import Node, Value
from shardax.partition.decisions import Decision, Decisions, local_trip_count
from shardax.reshard import run
from shardax.sharding import AxisSizes, Layout
from shardax.spmd_rules.maps import LAST, SAME, STEPS, Carry, carries_of_map
from shardax.spmd_rules.registry import Local, Split


class Emitter(Protocol):
    """What runs the graphs of bodies."""

    sizes: AxisSizes

    def graph(self, decisions: Decisions, shards: Sequence[Any]) -> list[Any]:
        """Runs a decided graph on the shards of its inputs; returns those of its outputs."""
        ...


def emit_structured(emitter: Emitter, node: Node, decision: Decision, shards: Sequence[Any]) -> Sequence[Any]:
    """Runs a node with bodies."""
    return _STRUCTURED[node.name](emitter, node, decision, shards)


def _scan(emitter: Emitter, node: Node, decision: Decision, shards: Sequence[Any]) -> list[Any]:
    params = node.params
    consts, carries = _jax.scan_counts(params)
    (body,) = decision.bodies

    def iteration(carry, xs):
        out = emitter.graph(body, [*shards[:consts], *carry, *xs])
        return out[:carries], out[carries:]

    init, xs = shards[consts : consts + carries], shards[consts + carries :]
    init = [_of_dtype(x, v) for x, v in zip(init, body.graph.inputs[consts:], strict=False)]
    length = local_trip_count(node, decision, emitter.sizes)
    loop_params = {
        "length": length,
        "reverse": params["reverse"],
        "unroll": min(params["unroll"], max(length, 1)),
    }
    if split := decision.splits.get("trips"):
        return _split_scan(decision.local(node, emitter.sizes), split, iteration, init, xs, loop_params)
    kept = {i: lay for i, lay in enumerate(decision.results[carries:]) if lay.dims[0]}
    carry, ys = _scan_keeping(decision.local(node, emitter.sizes), kept, iteration, init, xs, loop_params)
    return [*carry, *ys]


def _scan_keeping(
    local: Local, kept: dict[int, Layout], iteration, init, xs, loop_params
) -> tuple[Sequence[Any], Sequence[Any]]:
    """A scan of whose stacked results `kept` each device keeps only a block, by writing the rows of its own
    iterations.
    """
    if not kept:
        return lax.scan(iteration, init, xs, **loop_params)
    outputs = local.node.outputs[len(init) :]
    blocks = [lax.full(lay.local_shape(local.sizes), 0, outputs[i].aval.dtype) for i, lay in kept.items()]

    def step(state, xs):
        carry, at, blocks = state
        carry, ys = iteration(carry, xs)
        firsts = [local.start(lay, 0) for lay in kept.values()]
        blocks = [_written(b, ys[i], at - first) for b, i, first in zip(blocks, kept, firsts, strict=True)]
        return (carry, at + (-1 if loop_params["reverse"] else 1), blocks), [
            y for i, y in enumerate(ys) if i not in kept
        ]

    first = np.int32(loop_params["length"] - 1 if loop_params["reverse"] else 0)
    (carry, _, blocks), rest = lax.scan(step, (list(init), first, blocks), xs, **loop_params)
    others, blocks = iter(rest), iter(blocks)
    return carry, [next(blocks) if i in kept else next(others) for i in range(len(outputs))]


def _written(block, row, at):
    """The block with a row written at a place, if the place is inside of it."""
    place = lax.clamp(np.int32(0), at, np.int32(block.shape[0] - 1))
    first = (place, *[np.int32(0)] * row.ndim)
    old = lax.dynamic_slice(block, first, (1, *row.shape))
    return lax.dynamic_update_slice(block, lax.select(at == place, row[None], old), first)


def _split_scan(local: Local, split: Split, iteration, init, xs, loop_params) -> list[Any]:
    """Each device does the iterations of its own block. Those past the end compute garbage: no carry keeps
    any of it.

    device       0       1       2       3          10 iterations in blocks of 3: device 3 does one,
    iterations   0 1 2   3 4 5   6 7 8   9 - -      and two more that nobody sees
    """
    total, block, reverse = local.params["length"], loop_params["length"], loop_params["reverse"]
    carries, first = carries_of_map(local.node) or (), local.index(split.axes) * block
    done = total - lax.min(np.int32(total), first + block) if reverse else first
    start = [_stepped(c, x, done) for c, x in zip(carries, init, strict=True)]

    def guarded(old, inside_and_xs):
        inside, xs = inside_and_xs
        new, ys = iteration(old, xs)
        triples = zip(carries, old, new, strict=True)
        return [y if c.kind == SAME else lax.select(inside, y, x) for c, x, y in triples], ys

    if split.padded == total:
        last, ys = lax.scan(iteration, start, xs, **loop_params)
    else:
        inside = first + lax.iota("int32", block) < total
        last, ys = lax.scan(guarded, start, (inside, xs), **loop_params)
    holds_last = local.index(split.axes) == (0 if reverse else (total - 1) // block)
    return [*(_end(c, x, y, total, holds_last) for c, x, y in zip(carries, init, last, strict=True)), *ys]


def _stepped(carry: Carry, start, count):
    """The value of a counter after so many iterations."""
    return start + lax.convert_element_type(count * carry.step, start.dtype) if carry.kind == STEPS else start


def _end(carry: Carry, start, end, total: int, holds_last):
    """The value of a carry after all iterations, from its value after this device's."""
    if carry.kind == LAST:
        return lax.select(holds_last, end, lax.full_like(end, 0))
    return _stepped(carry, start, total) if carry.kind == STEPS else end


def _while(emitter: Emitter, node: Node, decision: Decision, shards: Sequence[Any]) -> Sequence[Any]:
    params = node.params
    cond_consts, body_consts = params["cond_nconsts"], params["body_nconsts"]
    cond, body = decision.bodies
    start = cond_consts + body_consts
    init = [_of_dtype(x, v) for x, v in zip(shards[start:], body.graph.inputs[body_consts:], strict=True)]
    with run.apart(decision.parted):
        return lax.while_loop(
            lambda carry: emitter.graph(cond, [*shards[:cond_consts], *carry])[0],
            lambda carry: emitter.graph(body, [*shards[cond_consts:start], *carry]),
            init,
        )


def _cond(emitter: Emitter, node: Node, decision: Decision, shards: Sequence[Any]) -> Sequence[Any]:
    branches = [lambda *xs, body=body: emitter.graph(body, xs) for body in decision.bodies]
    with run.apart(decision.parted):
        return switch(node, branches, *shards)


def switch(node: Node, branches: Sequence[Callable[..., Any]], index, *operands) -> Sequence[Any]:
    """Runs one of the branches of a cond, by its index or by the platform."""
    platforms = node.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, branches, *operands)
    pairs = list(
        zip(platforms, branches, strict=True)
    )  # a branch for one platform may not even lower for another
    of_platform = {name: branch for some, branch in pairs for name in some or ()}
    default = next((branch for some, branch in pairs if some is None), None)
    return lax.platform_dependent(*operands, default=default, **of_platform)


def _of_dtype(shard, value: Value):
    """A start of exactly the carry's type: a weakly typed one would change its type on the way."""
    return shard if not isinstance(shard, np.ndarray) else lax.convert_element_type(shard, value.aval.dtype)


def _island(emitter: Emitter, node: Node, decision: Decision, shards: Sequence[Any]) -> Sequence[Any]:
    """Where axes are manual in part, a shard comes as the one element of a stack along them."""
    if "partly_manual" not in node.params:
        return emitter.graph(decision.bodies[0], shards)
    taken = [
        lax.squeeze(x, range(len(spec))) for x, spec in zip(shards, node.params["in_specs"], strict=True)
    ]
    given = emitter.graph(decision.bodies[0], taken)
    return [
        lax.expand_dims(x, range(len(spec))) for x, spec in zip(given, node.params["out_specs"], strict=True)
    ]


_STRUCTURED = {"cond": _cond, "scan": _scan, "shard_map": _island, "while": _while}
