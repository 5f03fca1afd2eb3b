"""Small graphs, and their values under short names, for tests of what works on graphs."""

from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh, AxisType

from shardax.graph.graph import Graph, Node, Value
from shardax.graph.inline import from_jaxpr


def graph(f, *shapes, dtype="float32") -> Graph:
    """The graph of a function of arrays; an argument that is no shape stands for itself."""
    args = [jax.ShapeDtypeStruct(s, dtype) if isinstance(s, tuple) else s for s in shapes]
    return from_jaxpr(jax.make_jaxpr(f)(*args))


def the(name: str, program: Graph) -> Node:
    """The one node of a primitive, bodies included."""
    (node,) = (node for node in program.walk() if node.name == name)
    return node


def primitives(program: Graph) -> str:
    """Names in program order; bodies stand in brackets behind their node."""
    return " ".join(
        node.name + "".join(f"[{primitives(body)}]" for body in node.bodies) for node in program.nodes
    )


def names(program: Graph, prefix: str = "") -> dict[Value, str]:
    """a, b, ... for inputs, those of a body of a scan scan.a, ...; what a node makes is called as the node.
    Literals are their numbers.
    """
    found = {v: f"{prefix}{chr(ord('a') + i)}" for i, v in enumerate(program.inputs)}
    for node in program.nodes:
        for i, body in enumerate(node.bodies):
            found |= names(body, f"{prefix}{node.name}{i or ''}.")
        found |= {v: f"{v.literal}" for v in node.inputs if v.is_literal}
        found |= {v: f"{prefix}{node.name}{i or ''}" for i, v in enumerate(node.outputs)}
    return found


def auto_mesh(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def walk_values(program: Graph) -> Iterator[Value]:
    yield from program.inputs
    for node in program.walk():
        yield from node.outputs
