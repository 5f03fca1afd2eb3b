"""Finds what rests otherwise than wanted, because its sharding does not divide it or has no spec, and what is
sent for that.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardax.graph import annotations
from shardax.graph.annotations import Annotation
from shardax.graph.graph import Node, Value
from shardax.meshes.refinement import Placement
from shardax.partition.decisions import Decision, Reshard
from shardax.program import Program
from shardax.reshard import paths


@dataclass(frozen=True)
class Elsewhere:
    """An argument or result, by its number. `came`: bytes that one device sends to have it as wanted, `left`:
    to bring it, or what succeeds it, to rest again."""

    number: int
    wanted: Placement
    came: int = 0
    left: int = 0


def arguments(program: Program) -> Iterator[Elsewhere]:
    """Those that an annotation wants otherwise."""
    numbers = {value: i for i, value in enumerate(program.graph.inputs)}
    noted = [
        (node, note, decision)
        for node, decision in program.decisions.pairs()
        if (note := annotations.of_node(node)) is not None
    ]
    back = _back(program, noted)
    for node, note, decision in noted:
        value = node.inputs[0]
        if value in numbers and (wanted := _wanted(program, note, value)):
            sent, number = _sent(program, value, decision.reshards[0]), numbers[value]
            yield Elsewhere(number, wanted, sent, back.get(number, 0))


def _back(program: Program, noted: Sequence[tuple[Node, Annotation, Decision]]) -> dict[int, int]:
    """By the number of a donated argument: bytes to have its successor as it rests, which the annotation that
    says so does. `noted`: the annotations, by node, with how each runs.
    """
    results = {value: i for i, value in enumerate(program.graph.outputs)}
    sent = {}
    for node, note, decision in noted:
        if note.like is not None and node.outputs[0] in results:
            nbytes = _sent(program, node.inputs[0], decision.reshards[0])
            sent[note.like] = nbytes + _left(program, results[node.outputs[0]])
    return sent


def results(program: Program) -> Iterator[Elsewhere]:
    """Those that an annotation, or without one completion, wants otherwise; what succeeds an argument counts
    with that.
    """
    notes = {node.outputs[0]: note for node, note in annotations.among(program.graph.nodes)}
    for i, (value, rest) in enumerate(zip(program.graph.outputs, program.out_shardings, strict=True)):
        note, completed = notes.get(value), program.completion.sharding(value)
        if note is None or note.like is None and None in note.dims:
            wanted = program.refinement.placement(completed) if completed != rest.settled else None
        else:
            wanted = _wanted(program, note, value)
        if wanted is not None:
            yield Elsewhere(i, wanted, left=_left(program, i))


def _wanted(program: Program, note: Annotation, value: Value) -> Placement | None:
    """What a closed annotation asks for, where the value cannot rest so."""
    if None in note.dims:
        return None
    sharding, refined = note.sharding.settled, program.refinement
    rest = refined.rest(sharding, value.shape, note.on, across=note.is_of_result)
    return refined.placement(sharding, note.on) if refined.sharding(rest) != sharding else None


def _left(program: Program, number: int) -> int:
    return _sent(program, program.graph.outputs[number], program.decisions.outputs[number])


def _sent(program: Program, value: Value, reshard: Reshard) -> int:
    path = paths.plan(reshard.source, reshard.target, value.shape, value.itemsize, program.refinement.sizes)
    return sum(math.ceil(step.nbytes) for step in path.steps)
