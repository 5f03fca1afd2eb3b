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
import jax.numpy as jnp

from shardax.cost.network import PICO, Network
from shardax.explain.roofline import work
from shardax.ledger.words import bytes_text
from shardax.pipeline import slots
from shardax.pipeline.passes import Passes
from shardax.pipeline.simulate import Choice, Costs, choose
from shardax.pipeline.slotting import places
from shardax.pipeline.table import Schedule

Type = jax.ShapeDtypeStruct


def chosen(
    costs: Costs,
    schedule: Schedule,
    pieces: Sequence[Sequence[Type]],
    waiting: float,
    network: Network,
    axis: str,
    memory: float | None = None,
) -> Choice:
    """The choice for a region on the virtual stages of a schedule.

    Args:
      costs: of the virtual stages.
      schedule: one of those to choose from: it says how many stages, chunks and microbatches.
      pieces: the types of what each reads of the parameters.
      waiting: bytes of a microbatch that each stage has from the start to the end.
      network: the mesh and its prices. `axis`: along which stages lie.
      memory: bytes that weights, their gradients, the batch and what is kept may take on each device.

    Raises ValueError where no schedule keeps within `memory`.
    """
    stages, microbatches, count = schedule.stages, schedule.microbatches, schedule.virtual_stages
    limit = None
    if memory is not None:
        homes = [schedule.homes[k][0] for k in range(count)]
        resting = [sum(_resting(pieces[k]) for k in range(count) if homes[k] == d) for d in range(stages)]
        spare = max(costs.of("saved")) + 3 * costs.boundary  # a slot of each buffer that nobody reads
        rows = microbatches * waiting / _share(network, axis)
        limit = memory - max(resting) - rows - spare
        if limit < 0:
            raise ValueError(
                f"pipeline: memory is {memory:,.0f} bytes, and the weights of a stage, their gradients, the "
                f"batch and a microbatch alone take {bytes_text(memory - limit)} on each device; use more "
                "stages, more microbatches, or more devices for the batch"
            )
    return choose(stages, microbatches, count, costs, limit=limit, chunks=schedule.chunks)


def costs(whole: Sequence[Passes], halved: Sequence[Passes], network: Network, axis: str) -> Costs:
    """Of each virtual stage, whose backward passes are `whole`, or `halved` into B and W."""

    def seconds(passes: Sequence[Passes], kind: int) -> tuple[float, ...]:
        return tuple(_seconds(each.of[kind].closed, network) / share for each in passes)

    def nbytes(types: Sequence[Sequence[Type]]) -> float:
        return _nbytes(places(types).types) / share

    share, stages = _share(network, axis), len(whole)
    boundary = nbytes([*(each.received for each in whole), *(each.returned for each in whole)])
    send = network.collective("ppermute", (axis,), boundary) / PICO if stages > 1 else 0.0
    saved = max(0.0, nbytes([each.kept for each in whole]) - boundary)  # buffers are the same on all stages
    return Costs(
        seconds(whole, slots.FORWARD),
        seconds(halved, slots.BACKWARD_INPUTS),
        seconds(halved, slots.BACKWARD_WEIGHTS),
        seconds(whole, slots.BACKWARD),
        saved=(saved,) * stages,
        send=send,
        boundary=boundary,
        held=(nbytes([each.held for each in halved]),) * stages,
    )


def _share(network: Network, axis: str) -> int:
    """Among how many devices the work of a stage is shared."""
    return math.prod(network.values()) // network[axis]


def _seconds(jaxpr, network: Network) -> float:
    return sum(w.trips * network.compute(w.flops, w.nbytes) for w in work(jaxpr)) / PICO


def _resting(pieces: Sequence[Type]) -> float:
    """Bytes of weights and of their gradients, which are added up in float32 at least."""
    inexact = (x for x in pieces if jnp.issubdtype(x.dtype, jnp.inexact))
    return _nbytes(pieces) + sum(math.prod(x.shape) * max(4, x.dtype.itemsize) for x in inexact)


def _nbytes(types: Iterable[Any]) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in types)
