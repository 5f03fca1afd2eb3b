"""Causes: why a collective is sent. The facts are noted where it is made; `explain/because.py` words them
when a plan is read.

A cause is an attribute of the name of the scope around its collective, such as `all_gather[dot_general in
P('data', None)]`. XLA sees only the text.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax

from shardax import _jax


class Cause:
    """The facts of one reason. Each kind is defined where such collectives are made, and worded in
    `explain/because.py`.
    """

    __slots__ = ()

    @property
    def also(self) -> tuple[str, ...]:
        """The lines that a collective serves besides its own."""
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A collective of these operands, on each device, that a combined one stands for: its line, its reason
    and its cause.
    """

    operands: tuple[jax.ShapeDtypeStruct, ...]
    line: str
    reason: str
    cause: Cause | None


@dataclass(frozen=True, slots=True, eq=False)
class Combined(Cause):
    """It stands for several that were too small to be sent one by one."""

    parts: tuple[Part, ...]

    @property
    def also(self) -> tuple[str, ...]:
        """Those of its parts, which themselves are told with it."""
        return tuple(dict.fromkeys(line for part in self.parts if part.cause for line in part.cause.also))


class Named(str):
    """The name of a scope around a collective, with the reason in words and its cause."""

    reason: str
    cause: Cause


def scope(kind: str, reason: str, cause: Cause) -> AbstractContextManager:
    """Collectives that are made inside have this reason and cause. (Slashes part the names of scopes, so the
    name has none.)
    """
    return jax.named_scope(named(kind, reason, cause))


def named(kind: str, reason: str, cause: Cause) -> Named:
    """The name of that scope."""
    name = Named(f"{kind}[{reason}]".replace("/", "\\"))
    name.reason, name.cause = reason, cause
    return name


def of(name_stack) -> Named | None:
    """The innermost name around an equation that has a cause."""
    return next((name for name in reversed(_jax.scope_names(name_stack)) if isinstance(name, Named)), None)
