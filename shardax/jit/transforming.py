"""Applies the transforms of a function to its traced program, and checks what they give back."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from shardax import _jax
from shardax.trace import Request, arguments_of
from shardax.transforms import Context, Retyping, Transform
from shardax.validation import require


def retyped(request: Request, transforms: Sequence[Transform]) -> Request:
    """The request, with the types as which these transforms, the last one first, want the function traced."""
    arguments = arguments_of(request) if any(isinstance(t, Retyping) for t in transforms) else ()
    for transform in reversed(transforms):
        if isinstance(transform, Retyping):
            types = tuple(transform.traced_types(arguments))
            if len(types) != len(arguments):
                raise ValueError(
                    f"traced_types of a transform of shard_jit gave {len(types)} types for {len(arguments)} "
                    "arguments: give one for each, its own where it stays"
                )
            arguments = tuple(replace(a, type=t) for a, t in zip(arguments, types, strict=True))
            request = replace(request, types=types)
    return request


def transformed(jaxpr, context: Context, transforms: Sequence[Transform]) -> Any:
    """The program that the transforms, in their order, make of a traced one."""
    for i, transform in enumerate(transforms):
        function: Any = transform
        new = function(jaxpr, context) if _takes_context(function) else function(jaxpr)
        argument = f"the result of transforms[{i}] of shard_jit"
        is_closed = _jax.is_jaxpr(new) and hasattr(new, "consts")
        require(is_closed, argument, new, "a ClosedJaxpr, as that function gets one")
        _check_types(argument, jaxpr, new, isinstance(transform, Retyping))
        jaxpr = new
    return jaxpr


def _takes_context(function) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it has no signature, as functions in C
        return True
    return True


def _check_types(argument: str, before, after, retypes: bool) -> None:
    for side, old, new in _sides(before, after):
        if len(old) != len(new) if retypes else _types(old) != _types(new):
            raise ValueError(
                f"{argument} has other {side}, {_text(new)}, than the jaxpr that it was given, {_text(old)}: "
                "keep them"
            )


def check_arguments(jaxpr, arguments: Sequence[Any]) -> None:
    """A Retyping has to take the arguments as they come."""
    avals = list(map(jax.typeof, arguments))
    if _types(avals) != _types(jaxpr.in_avals):
        raise ValueError(
            f"the transforms of shard_jit gave a jaxpr of {_text(jaxpr.in_avals)}, but the arguments "
            f"of the call are {_text(avals)}: take them as they come, or leave traced_types out"
        )


def _sides(before, after):
    return ("inputs", before.in_avals, after.in_avals), ("results", before.out_avals, after.out_avals)


def _types(avals) -> list[Any]:
    return [(aval.shape, aval.dtype) for aval in avals]


def _text(avals) -> str:
    return ", ".join(aval.str_short(short_dtypes=True) for aval in avals) or "none"
