"""Causes: why a collective is there. The facts are noted where it is made; `explain/because.py` words them when a plan is read.

A cause is an attribute of the name of the scope around its collective, such as `all_gather[dot_general in P('data', None)]`.
XLA sees only the text.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

import jax

from shardax import _jax
from shardax.sharding import Axes, Layout

if TYPE_CHECKING:
    from shardax.crossing import Crossing
    from shardax.graph import Node, Value
    from shardax.partition.decisions import Decision
    from shardax.spmd_rules.registry import Local


@dataclass(frozen=True, slots=True, eq=False)
class Resharded:
    """A value was resharded from layout `source` to `target`, over `axes` in this collective.

    `reader` is the node that wanted it, as operand `place`, by its `decision`. Without a reader it was result `place` of the
    program, or of a body of the node `around`.
    """

    value: "Value"
    source: Layout
    target: Layout
    axes: Axes
    reader: "Node | None" = None
    decision: "Decision | None" = None
    place: int = 0
    around: "Node | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """The reduction over `axes` that a node, run by this decision, left owed was settled. Without a node it came in with the
    carry of a loop.
    """

    axes: Axes
    node: "Node | None"
    decision: "Decision | None"


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """The lowering of a node itself sent it, over `axes`."""

    local: "Local"
    axes: Axes


@dataclass(frozen=True, slots=True, eq=False)
class Crossed:
    """It moves an argument or result between the program's mesh and a mesh that does not fit it."""

    crossing: "Crossing"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A collective of these operands, on each device, that a combined one stands for: its line, its reason and its cause."""

    operands: tuple[jax.ShapeDtypeStruct, ...]
    line: str
    reason: str
    cause: "Cause | None"


@dataclass(frozen=True, slots=True, eq=False)
class Combined:
    """It stands for several that were too small to be sent one by one."""

    parts: tuple[Part, ...]


Cause = Union[Resharded, Settled, Sent, Crossed, Combined]  # noqa: UP007 (the parts' annotations are text)


class Named(str):
    """The name of a scope around a collective, with the reason in words and its cause."""

    reason: str
    cause: Cause


def scope(kind: str, reason: str, cause: Cause) -> AbstractContextManager:
    """Collectives that are made inside have this reason and cause. (Slashes part the names of scopes, so the name has none.)"""
    return jax.named_scope(named(kind, reason, cause))


def named(kind: str, reason: str, cause: Cause) -> Named:
    """The name of that scope."""
    name = Named(f"{kind}[{reason}]".replace("/", "\\"))
    name.reason, name.cause = reason, cause
    return name


def sent(kind: str, what: str, local: "Local", axes: Axes) -> AbstractContextManager:
    """The scope around what a lowering sends; `what` is a word for that, such as "halo" or "totals"."""
    return scope(kind, f"{what} of {local.node.name}", Sent(local, axes))


def of(name_stack) -> Named | None:
    """The innermost name around an equation that has a cause."""
    return next((name for name in reversed(_jax.scope_names(name_stack)) if isinstance(name, Named)), None)
