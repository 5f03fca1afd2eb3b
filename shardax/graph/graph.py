"""The flat view of a jaxpr on which completion and partition work: values, and nodes in program order, loops
with bodies.
"""

import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import _jax


@dataclass(eq=False, slots=True)
class Value:
    """One array of the global program. A literal of the jaxpr has its value in `literal`."""

    aval: Any
    literal: Any = None
    is_literal: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return getattr(self.aval.dtype, "itemsize", 4)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def is_zero(self) -> bool:
        """Whether it is the number 0 itself. Keys, and the float0 of integers' tangents, are no numbers."""
        is_number = jnp.issubdtype(self.aval.dtype, np.number) or self.aval.dtype == np.bool_
        return self.is_literal and not self.shape and is_number and bool(self.literal == 0)

    def __repr__(self):
        return f"{self.aval.str_short()}#{id(self) % 9973}"


@dataclass(eq=False, slots=True)
class Node:
    """One equation: a primitive, its parameters, and for `scan`, `while` and `cond` the graphs of its bodies.

    `eqn` is the jaxpr's equation (source info, context); `scope` its name stack, those of the inlined calls
    around it included; `callers` are those calls, innermost first.
    """

    primitive: Any
    params: dict[str, Any]
    inputs: list[Value]
    outputs: list[Value]
    eqn: Any
    scope: Any
    callers: tuple[Any, ...] = ()
    bodies: tuple["Graph", ...] = ()

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def line(self) -> str:
        """ "file.py:12" of the user's code: the equation's own, else that of the innermost call that has
        one.
        """
        return _jax.user_line(_jax.with_user_frame(self.eqn, self.callers))

    @property
    def in_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(v.shape for v in self.inputs)

    @property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(v.shape for v in self.outputs)


@dataclass(eq=False, slots=True)
class Graph:
    """A program: inputs, nodes in program order, outputs."""

    inputs: list[Value]
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)

    def __str__(self):
        return self.text()

    def text(self, *params: str) -> str:
        """The program as text, a line for each node; `params` are those of nodes to be shown.

        (a:f32[3])
        b:f32[2] = slice[start_indices=(1,)] a
        -> b
        """
        return "\n".join(_lines(self, params, {}))

    def walk(self):
        """Every node, those of bodies included, in program order."""
        for node in self.nodes:
            for body in node.bodies:
                yield from body.walk()
            yield node


def without_unread(graph: Graph) -> Graph:
    """The graph and its bodies without what nothing reads, as after nodes were replaced; nodes with effects
    stay. A graph or node that stays whole is not copied.
    """
    read, kept = set(graph.outputs), []
    for node in reversed(graph.nodes):
        if node.eqn.effects or any(v in read for v in node.outputs):
            bodies = tuple(map(without_unread, node.bodies))
            kept.append(node if bodies == node.bodies else replace(node, bodies=bodies))
            read.update(node.inputs)
    kept.reverse()
    return graph if kept == graph.nodes else Graph(graph.inputs, kept, graph.outputs)


def _lines(graph: Graph, params: Sequence[str], letters: dict[Value, str]) -> Iterator[str]:
    yield "(" + " ".join(_typed(v, letters) for v in graph.inputs) + ")"
    for node in graph.nodes:
        shown = " ".join(f"{name}={node.params[name]}" for name in params if name in node.params)
        operands = " ".join(_named(v, letters) for v in node.inputs)
        results = " ".join(_typed(v, letters) for v in node.outputs)
        yield f"{results} = {node.name}{shown and f'[{shown}]'} {operands}".strip()
        for body in node.bodies:
            yield from ("    " + line for line in _lines(body, params, letters))
    yield "-> " + " ".join(_named(v, letters) for v in graph.outputs)


def _typed(value: Value, letters: dict[Value, str]) -> str:
    return f"{_named(value, letters)}:{value.aval.str_short(short_dtypes=True)}"


def _named(value: Value, letters: dict[Value, str]) -> str:
    """a to z, then aa and so on; literals as they are, large ones and keys by their type."""
    if value.is_literal:
        is_key = jnp.issubdtype(value.aval.dtype, jax.dtypes.extended)
        shown = not is_key and math.prod(value.shape) <= 8
        return str(np.asarray(value.literal).tolist()).replace(" ", "") if shown else value.aval.str_short()
    if value not in letters:
        number, alphabet = len(letters), string.ascii_lowercase
        letters[value] = (alphabet[number // 26 - 1] if number >= 26 else "") + alphabet[number % 26]
    return letters[value]
