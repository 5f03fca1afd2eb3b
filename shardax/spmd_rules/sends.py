"""Every collective that a lowering sends is made here, with the reason that plans show.

`what` is a word for what is sent, "halo" or "totals"; the reason names the primitive with it: "halo of
slice".
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from jax import lax

from shardax.ledger import causes
from shardax.reshard import run
from shardax.sharding import Axes
from shardax.spmd_rules.registry import Local


@dataclass(frozen=True, slots=True, eq=False)
class Sent(causes.Cause):
    """The lowering of a node itself sent it, over `axes`."""

    local: Local
    axes: Axes


def sending(kind: str, what: str, local: Local, axes: Axes) -> AbstractContextManager:
    """The scope around what a lowering sends; `what` is a word for that, such as "halo" or "totals"."""
    return causes.scope(kind, f"{what} of {local.node.name}", Sent(local, axes))


def all_gather(local: Local, what: str, x, axes: Axes, axis: int | None = None):
    """What every device has, joined along `axis`, or without one stacked in front."""
    with sending("all_gather", what, local, axes):
        return lax.all_gather(x, axes) if axis is None else lax.all_gather(x, axes, axis=axis, tiled=True)


def all_reduce(local: Local, what: str, x, axes: Axes):
    """The sum of what every device has."""
    with sending("all_reduce", what, local, axes):
        return lax.psum(x, axes)


def all_to_all(local: Local, what: str, x, axes: Axes, split: int = 0, joined: int = 0):
    """Of an array whose dim `split` has parts for each device, this device's parts of all of them, joined
    along `joined`.
    """
    with sending("all_to_all", what, local, axes):
        return lax.all_to_all(x, axes, split_axis=split, concat_axis=joined, tiled=True)


def ppermute(local: Local, what: str, x, axes: Axes, pairs: Sequence[tuple[int, int]]):
    """What the sender of the pair (sender, receiver) has, zeros where there is none."""
    with sending("ppermute", what, local, axes):
        return run.ppermute(x, axes, pairs, local.sizes)


def reduce_scatter(local: Local, what: str, x, axes: Axes, axis: int):
    """This device's part along `axis` of the sum of what every device has."""
    with sending("reduce_scatter", what, local, axes):
        return lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True)
