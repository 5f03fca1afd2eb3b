"""Passes: functions of the local program, run in the order of `Options.passes` after it is partitioned.

The first four run where a program is planned, so that plans tell what they do, and so do users' own. Those
for one platform run where a program is lowered for it, whatever their place in `Options.passes`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from jax.sharding import AbstractMesh, Mesh

from shardax import _jax
from shardax.cost.network import network_of
from shardax.options import Options
from shardax.partition.decisions import Origin
from shardax.passes import (
    brought,
    combine,
    cpu,
    dead,
    in_pieces,
    in_turn,
    layers,
    layouts,
    lookups,
    on_host,
    share,
    streamed,
    tpu,
    waits,
)
from shardax.passes.moves import is_at_host, moves
from shardax.sharding import AxisSizes
from shardax.spmd_rules.equations import any_inside
from shardax.validation import require


@dataclass(frozen=True)
class PassContext:
    """What a pass knows beside the program.

    sizes: those of the axes that the local program names. They know the chip too: `network_of` of
      `shardax.cost.network` has the prices.
    options: those of the function.
    """

    sizes: AxisSizes
    options: Options

    def origin(self, eqn: Any) -> Origin | None:
        """The node of the global program that an equation of the local one comes from, and its decision: the
        layouts of the node's operands and results, how its factors are split. A collective that brings an
        operand to where a node reads it is of that node. None where no node made it.
        """
        return _jax.innermost_mark(eqn.source_info.name_stack)


class Pass(Protocol):
    """A function from local program to local program, both closed jaxprs of the same arguments and results.

    The program is one `shard_map` equation, whose body is what each device runs. A pass must be
    deterministic, and hashable as functions are.
    """

    def __call__(self, jaxpr: Any, context: PassContext, /) -> Any: ...


def _hosted(jaxpr, context: PassContext) -> Any:
    """What rests at the host. Nothing is there but arguments, and what was sent."""
    opened = _jax.closed(jaxpr).jaxpr
    if not any(map(is_at_host, opened.invars)) and not any(any_inside(moves, eqn) for eqn in opened.eqns):
        return jaxpr
    tiles = network_of(context.sizes).tiles
    in_blocks = in_pieces.in_pieces(streamed.streamed(jaxpr, tiles), tiles)
    return in_turn.in_turn(on_host.called(brought.brought(lookups.looked_up(in_blocks))))


PASSES: dict[str, Pass] = {
    "dead": lambda jaxpr, context: dead.dropped(jaxpr),
    "share": lambda jaxpr, context: share.shared(jaxpr),
    "combine": lambda jaxpr, context: combine.combined(jaxpr, context.sizes),
    "streamed": _hosted,
}
"""Those that run where a program is planned."""

ON_PLATFORM: dict[str, Callable[[Any, Mesh | AbstractMesh], Any]] = {
    "cpu": lambda jaxpr, mesh: waits.waiting(cpu.suited(jaxpr)),
    "tpu": lambda jaxpr, mesh: tpu.suited(layouts.laid_out(layers.cut_out(jaxpr)), mesh),
}
"""Those that run where it is lowered for a platform of that name, with the mesh whose axes it names."""


def planned(jaxpr, context: PassContext) -> Any:
    """The local program after the passes of its options, which run with the axes of its mesh in scope."""
    with _jax.axes_in_scope(context.sizes):
        for entry in context.options.passes:
            if isinstance(entry, str) and entry in PASSES:
                jaxpr = PASSES[entry](jaxpr, context)
            elif not isinstance(entry, str):
                jaxpr = _checked(entry, jaxpr, entry(jaxpr, context))
    return jaxpr


def lowered(jaxpr, options: Options, platforms: tuple[str, ...], mesh: Mesh | AbstractMesh) -> Any:
    """The local program, which names the axes of `mesh`, as it is lowered for these platforms."""
    with _jax.axes_in_scope(mesh.shape):
        for platform, suited in ON_PLATFORM.items():
            if platform in platforms and platform in options.passes:
                jaxpr = suited(jaxpr, mesh)
    return jaxpr


def _checked(entry: Pass, before, after) -> Any:
    what = f"the result of the pass {getattr(entry, '__name__', entry)!r} in Options.passes"
    is_closed = _jax.is_jaxpr(after) and hasattr(after, "consts")
    require(is_closed, what, after, "a ClosedJaxpr, as the pass gets one")
    for old, new in ((before.in_avals, after.in_avals), (before.out_avals, after.out_avals)):
        if [(a.shape, a.dtype) for a in old] != [(a.shape, a.dtype) for a in new]:
            raise ValueError(f"{what} takes or gives other arrays than the program did: keep them")
    return after
