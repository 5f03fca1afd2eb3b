"""`schedule="auto"`: the fastest schedule, simulated with the stages' own seconds, of those that fit into
memory.

Seconds are those of the passes by roofline, bytes those of what a forward pass keeps. How axes besides the
stages' split a stage is not known when it is traced: its work and what it keeps of a microbatch are taken to
be shared evenly, weights not at all. The plan has the real ones.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from shardax import _jax
from shardax.cost.network import PICO, Network
from shardax.explain.roofline import work
from shardax.ledger.words import bytes_text
from shardax.pipeline.cut import Cut
from shardax.pipeline.halves import halves, is_inexact
from shardax.pipeline.schedules import make_schedule
from shardax.pipeline.simulate import Choice, Costs, choose
from shardax.pipeline.slotting import places
from shardax.pipeline.stacks import Stacks

Type = jax.ShapeDtypeStruct


def chosen(
    cut: Cut,
    stages: int,
    microbatches: int,
    values: Sequence[Type],
    batch: Sequence[Type],
    rest: Sequence[Type],
    network: Network,
    axis: str,
    memory: float | None = None,
) -> Choice:
    """The choice for a loss that is cut into the virtual stages of a schedule.

    Args:
      cut: the loss, of a microbatch. `values`: the types of what is hoisted; `batch`: those of a microbatch;
        `rest`: of the other arguments.
      network: the mesh and its prices. `axis`: along which stages lie.
      memory: bytes that weights, their gradients, the batch and what is kept may take on each device.

    Raises ValueError where no schedule keeps within `memory`.
    """
    count = len(cut.stages)
    chunks = count // stages
    schedule = make_schedule("1f1b" if chunks == 1 else "interleaved", stages, microbatches, chunks)
    stacks = Stacks.of(cut, schedule, values)
    pieces = [stacks.piece_types(k) for k in range(count)]
    share = math.prod(network.values()) // network[axis]
    costs = _costs(cut, pieces, batch, rest, network, axis, share)
    limit = None
    if memory is not None:
        homes = [schedule.homes[k][0] for k in range(count)]
        resting = [sum(_resting(pieces[k]) for k in range(count) if homes[k] == d) for d in range(stages)]
        spare = max(costs.of("saved")) + 3 * costs.boundary  # a slot of each buffer that nobody reads
        limit = memory - max(resting) - microbatches * _nbytes(batch) / share - spare
        if limit < 0:
            raise ValueError(
                f"pipeline: memory is {memory:,.0f} bytes, and the weights of a stage, their gradients, the "
                f"batch and a microbatch alone take {bytes_text(memory - limit)} on each device; use more "
                "stages, more microbatches, or more devices for the batch"
            )
    return choose(stages, microbatches, count, costs, limit=limit, chunks=chunks)


def _costs(cut: Cut, pieces, batch, rest, network: Network, axis: str, share: int) -> Costs:
    each = [_measured(cut, k, pieces[k], batch, rest, network) for k in range(len(cut.stages))]
    forward, inputs, weights, backward, kept = zip(*each, strict=True)
    received = [stage.received for stage in cut.stages]
    returned = [tuple(filter(is_inexact, types)) for types in received]
    boundary = _nbytes(places([*received, *returned]).types) / share
    send = network.collective("ppermute", (axis,), boundary) / PICO if len(cut.stages) > 1 else 0.0
    spread = [tuple(seconds / share for seconds in x) for x in (forward, inputs, weights, backward)]
    saved = max(0.0, _nbytes(places(kept).types) / share - boundary)  # buffers are the same on all stages
    return Costs(*spread, saved=(saved,) * len(each), send=send, boundary=boundary)


def _measured(cut: Cut, k: int, pieces, batch, rest, network: Network) -> tuple[Any, ...]:
    """Seconds of F, of B for the inputs alone, of W, and of a whole B; the types of what is kept."""
    stage, last = cut.stages[k], k == len(cut.stages) - 1
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        half = halves(stage, pieces, batch, rest, last)
        forward = jax.make_jaxpr(half.forward)(pieces, batch, rest, list(stage.received))
        sent = [x for x in stage.sent if is_inexact(x)][: 1 if last else None]
        backward = jax.make_jaxpr(half.backward)(pieces, batch, rest, list(half.kept), sent)
    of_pieces = sum(map(is_inexact, pieces))
    is_weights = [i < of_pieces for i in range(len(backward.out_avals))]
    seconds = [_seconds(forward, network)] + [
        _seconds(_jax.prune(backward, wanted)[0], network)
        for wanted in ([not w for w in is_weights], is_weights, [True] * len(is_weights))
    ]
    return (*seconds, half.kept)


def _seconds(jaxpr, network: Network) -> float:
    return sum(w.trips * network.compute(w.flops, w.nbytes) for w in work(jaxpr)) / PICO


def _resting(pieces: Sequence[Type]) -> float:
    """Bytes of weights and of their gradients, which are added up in float32 at least."""
    gradients = (math.prod(x.shape) * max(4, x.dtype.itemsize) for x in pieces if is_inexact(x))
    return _nbytes(pieces) + sum(gradients)


def _nbytes(types: Iterable[Any]) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in types)
