"""This file says which values something reads that wants them in even blocks.

Half of a split array lies on half of the devices, and may stay there, in blocks twice as large as they would be if all devices
had an equal part. That is free where the halves are reduced, or put together again, as in rotary embeddings:

    x            |0 0|1 1|2 2|3 3|      x[:4] as it lies     |0 0|1 1|. .|. .|      in even blocks    |0|0|1|1|

Who multiplies such a half by a matrix, or gives it back, moves it to even blocks. Then it is better cut into them at once.
"""

from collections.abc import Collection

from shardax.graph import Graph, Node, Value

_PUT_TOGETHER = ("concatenate", "pad")
_CUT = ("slice", "split")
_REDUCE = ("argmax", "argmin", "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum")
_IN_ANY_BLOCKS = frozenset((*_PUT_TOGETHER, *_CUT, *_REDUCE))


def evened(graph: Graph, multiply: Collection[str]) -> set[Value]:
    """Returns the values of a graph that something wants in even blocks, or that go elementwise into one that is so wanted.

    `multiply`: the names of what multiplies matrices: not elementwise, though results may have the shapes of operands.
    """
    found = set(graph.outputs)
    for node in reversed(list(graph.walk())):
        for body in node.bodies:
            found.update(body.outputs)
        if node.name not in _IN_ANY_BLOCKS:
            found.update(v for v in node.inputs if _wants_even(node, v, found, node.name in multiply))
    return found


def _wants_even(node: Node, value: Value, found: set[Value], multiplies: bool) -> bool:
    """Tells whether a node wants an operand in even blocks: what makes results of its shape does so if they are wanted so."""
    alike = [] if multiplies else [v for v in node.outputs if v.shape == value.shape]
    return not alike or not found.isdisjoint(alike)
