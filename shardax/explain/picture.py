"""How an array is laid out on the devices, as the page's picture draws it: blocks with their padding, and who
holds which.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardax.annotations.user_mesh import user_mesh
from shardax.explain.facts import Facts
from shardax.explain.placed import Placed
from shardax.graph.graph import Graph, Value
from shardax.ledger.words import spec_text
from shardax.partition.decisions import Decisions
from shardax.sharding import Axes, Layout, Padding


@dataclass(frozen=True)
class Picture:
    """`sharding` as a person reads it. Per dim the axes that split it, and its size with padding. `mesh`: the
    axes that are meant, with their sizes; `devices`: the numbers of its devices, None where they count up."""

    sharding: str
    dims: tuple[Axes, ...]
    padded: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    devices: tuple[int, ...] | None = None


def picture_of(plan: Facts, place: Placed) -> Picture:
    """The picture of an argument or result, which is even."""
    own = user_mesh(place.mesh, plan.mesh)
    assert own is not None
    return Picture(place.text, place.sharding.dims, tuple(place.aval.shape), own.axes, own.places)


class Pictures:
    """Of the values of a program."""

    def __init__(self, plan: Facts):
        self.plan = plan
        self.mesh = tuple(plan.values.sizes.items())
        self.padding = Padding(plan.values.sizes, frozenset(plan.values.splits()))
        self.made = dict(_made(plan.graph, plan.decisions)) if plan.decisions else {}

    def of(self, value: Value) -> Picture:
        """The picture of a value in the layout in which it is made, if that is what completion requests; else
        in the one in which it is read.
        """
        sharding, made = self.plan.values.sharding(value), self.made.get(value)
        layout = made if made and made.sharding == sharding else self.padding.layout(sharding, value.shape)
        return Picture(spec_text(self.plan.sharding(value)), sharding.dims, layout.padded, self.mesh)


def _made(graph: Graph, decisions: Decisions) -> Iterator[tuple[Value, Layout]]:
    """The layout in which each value is made; nodes that are alike may share a decision, and its bodies."""
    yield from zip(graph.inputs, decisions.inputs, strict=True)
    for node, decision in zip(graph.nodes, decisions.steps, strict=True):
        yield from zip(node.outputs, decision.results, strict=True)
        for body, inside in zip(node.bodies, decision.bodies, strict=True):
            yield from _made(body, inside)
