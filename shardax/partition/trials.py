"""Ways to decide a node with bodies: each is tried from the same state, and the one that costs least is taken."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from shardax.partition.candidates import Candidate
from shardax.partition.decisions import Decision, Decisions, Move, local_trips
from shardax.sharding import Layout

if TYPE_CHECKING:
    from shardax.graph import Node, Value
    from shardax.partition.choose import Chooser


def cheapest(chooser: "Chooser", node: "Node", ways: Sequence[Callable[[], Decision]]) -> Decision:
    """The decision of the way that costs least: bytes sent, by its operands, its bodies and those who want its results, and
    what it computes, in bytes (`cost/nominal.py`). Among equals the first."""
    if len(ways) == 1:
        return ways[0]()
    before = _stored(chooser, node.inputs)
    tried = []
    for way in ways:
        decision = way()
        tried.append((_price(chooser, node, decision), decision, _stored(chooser, [*node.inputs, *node.outputs])))
        chooser.stored.update(before)
    _, decision, after = min(tried, key=lambda one: one[0])
    chooser.stored.update(after)
    return decision


def _stored(chooser: "Chooser", values: Sequence["Value"]) -> dict["Value", tuple[Layout, ...]]:
    return {v: chooser.stored[v] for v in values if not v.is_literal}


def _price(chooser: "Chooser", node: "Node", decision: Decision) -> float:
    """The price of a node, its results brought to where completion wants them."""
    results = zip(node.outputs, decision.results, strict=True)
    owed = (chooser.price(v, made, chooser.destination(v, made)) for v, made in results if chooser.uses[v])
    return _spent(chooser, node, decision) + sum(owed)


def _spent(chooser: "Chooser", node: "Node", decision: Decision, computes: bool = True) -> float:
    """The price of what a node itself sends and computes."""
    sent = sum(_moves(chooser, node.inputs, decision.moves))
    if decision.factors is None or decision.entry is None:
        return sent + _of_bodies(chooser, node, decision, computes)
    made = Candidate(decision.splits, decision.operands, decision.results)
    sent += chooser.sends(node, decision.entry, made)
    return sent + chooser.compute(node, made, decision.factors) if computes else sent


def _of_bodies(chooser: "Chooser", node: "Node", decision: Decision, computes: bool) -> float:
    """The price of the bodies: a scan's for each of its trips, a `while`'s once, and of a `cond` the dearest branch."""
    bodies = [price_of_body(chooser, body, computes) for body in decision.bodies]
    if node.name == "scan":
        return sum(bodies) * local_trips(node, decision, chooser.sizes)
    return max(bodies) if node.name == "cond" else sum(bodies)


def price_of_body(chooser: "Chooser", body: Decisions, computes: bool = True) -> float:
    """What a body sends and, unless left out, computes in one trip. Nodes that share a decision cost the same."""
    often = Counter(map(id, body.steps))
    steps = {id(decision): (node, decision) for node, decision in body.pairs()}
    spent = sum(often[i] * (_spent(chooser, *step, computes) + sum(_settled(chooser, *step))) for i, step in steps.items())
    return spent + sum(_moves(chooser, body.graph.outputs, body.outputs))


def _settled(chooser: "Chooser", node: "Node", step: Decision) -> Iterator[float]:
    for i, layout in step.settled.items():
        yield chooser.price(node.outputs[i], step.results[i], layout)


def _moves(chooser: "Chooser", values: Sequence["Value"], moves: Sequence[Move]) -> Iterator[float]:
    """The price of each move; a value that is read twice alike moves once."""
    for value, move in dict.fromkeys(zip(values, moves, strict=True)):
        yield chooser.price(value, move.source, move.target)
