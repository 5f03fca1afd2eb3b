"""The last phase of completion: state that cannot rest in the sharding of its annotation is updated as it
rests.

A parameter of 257 rows that is annotated P("model", None) rests in P(None, "model"), because all shards of a
`jax.Array` have one size. Its moments rest likewise. If the optimizer followed the annotation, each of them
would be resharded on the way in and on the way out. Instead the elementwise neighbourhood of the new
parameter, up to values that an annotation fixes, takes the sharding at rest. Then only the gradient is
resharded, and the parameter once, for the forward pass.
"""

from collections.abc import Iterable, Iterator, Sequence

from shardax.completion.blocks import Block
from shardax.completion.edges import ELEMENTWISE
from shardax.graph.annotations import Annotation
from shardax.graph.graph import Graph, Node, Value
from shardax.sharding import Sharding

Updates = Sequence[tuple[Value, Sharding]]
"""Results that succeed an argument which rests otherwise than it is used, and the sharding in which it rests.
"""


def successors(graph: Graph, notes: Iterable[tuple[Node, Annotation]]) -> list[tuple[Value, Value]]:
    """The pairs (argument, the result that succeeds it) of all donated arguments."""
    return [(graph.inputs[note.like], node.outputs[0]) for node, note in notes if note.like is not None]


def updated_at_rest(
    updates: Updates, blocks: Sequence[Block], home: dict[Value, Block], fixed: set[Value]
) -> dict[Value, Sharding]:
    """The values that take a sharding at rest; `home` is a block of each value, `fixed` are those that
    annotations fixed.

    Each block for itself, alike ones together, if no block changes what it shares with others.
    """
    of: dict[Block, list[tuple[Value, Sharding]]] = {}
    for result, sharding in updates:
        of.setdefault(home[result], []).append((result, sharding))
    known: dict[tuple, dict[int, Sharding]] = {}
    taken: dict[Value, Sharding] = {}
    for block, mine in of.items():
        key = (block.state, tuple([(block.place[result], sharding) for result, sharding in mine]))
        if key not in known:
            in_block = _taken(mine, [block], fixed)
            known[key] = {block.place[value]: sharding for value, sharding in in_block.items()}
        if any(block.pattern.shared[place] for place in known[key]):
            return _taken(updates, blocks, fixed)
        taken.update((block.values[place], sharding) for place, sharding in known[key].items())
    return taken


def _taken(updates: Updates, blocks: Sequence[Block], fixed: set[Value]) -> dict[Value, Sharding]:
    taken: dict[Value, Sharding] = {}
    for result, sharding in updates:
        front = [result]
        while front:
            value = front.pop()
            if value not in taken:
                taken[value] = sharding
                beside = _neighbours(value, blocks)
                front.extend(
                    v for v in beside if v.shape == value.shape and v not in fixed and not v.is_literal
                )
    return taken


def _neighbours(value: Value, blocks: Sequence[Block]) -> Iterator[Value]:
    """The values that elementwise equations of one shape connect with a value."""
    for block in blocks:
        place = block.place.get(value)
        for _, code in block.pattern.touching[place] if place is not None else ():
            edge, wires, _ = block.pattern.edges[code >> 1]
            if edge.levels == (ELEMENTWISE, ELEMENTWISE) and len(set(edge.factors.tensors)) == 1:
                yield from (block.values[w] for w in wires)
