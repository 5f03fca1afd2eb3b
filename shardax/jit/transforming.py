"""Traces a function as its transforms want it, applies them, and checks what they give back."""

import inspect
import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax

from shardax import _jax
from shardax.annotations.annotate import unlinked
from shardax.annotations.explicit import shape_of
from shardax.trace import Request, Traced, arguments_of, retyped, trace
from shardax.transforms import Argument, Context, Retyping, Transform
from shardax.validation import require

Types = tuple[jax.ShapeDtypeStruct, ...]

ROUNDS = 4  # in which what is state and the types that follow from it have to agree


def traced_as(request: Request, transforms: Sequence[Transform]) -> tuple[Traced, Sequence[Types]]:
    """The function, traced with the types that the transforms want, and the types of its arguments: in the
    program that each transform is given, and last in the call.

    What is state follows from the program, and with which types that is traced may follow from what is state.
    So a guess of the state gives the types, these the program, and that the state, until nothing changes.
    """
    if not any(isinstance(transform, Retyping) for transform in transforms):
        traced = trace(request)
        types = tuple(argument.type for argument in traced.arguments[: len(traced.slots[0])])
        return traced, [types] * (len(transforms) + 1)
    arguments, errors = arguments_of(request), []
    for guess in _guesses(arguments, transforms):
        try:
            return _traced_from(guess, request, arguments, transforms)
        except Exception as error:  # the function may take the types of another guess
            errors.append(error)
    raise errors[0]


def _guesses(arguments: Sequence[Argument], transforms: Sequence[Transform]) -> list[Sequence[Types]]:
    """The types if the state is what is donated, all arrays, or none: mostly these are the same types."""
    arrays = {i for i, argument in enumerate(arguments) if argument.type.shape}
    donated = {i for i in arrays if arguments[i].donated}
    guesses = [_types_of(arguments, state, transforms) for state in (donated or arrays, arrays, ())]
    return [types for i, types in enumerate(guesses) if types not in guesses[:i]]


def _traced_from(
    types: Sequence[Types], request: Request, arguments: Sequence[Argument], transforms: Sequence[Transform]
) -> tuple[Traced, Sequence[Types]]:
    before = types
    for _ in range(ROUNDS):
        traced = trace(replace(request, types=types[0]))
        state = {i for i, a in enumerate(traced.arguments[: len(arguments)]) if a.is_state}
        before, types = types, _types_of(arguments, state, transforms)
        if types == before:
            return traced, types
    changes = zip(itertools.cycle(arguments), itertools.chain(*before), itertools.chain(*types), strict=False)
    argument, old, new = next(change for change in changes if change[1] != change[2])
    is_state = "state" if arguments.index(argument) in state else "no state"
    raise ValueError(
        f"traced_types of the transforms of shard_jit contradict themselves: argument {argument.path}, "
        f"traced as {_text([old])}, is {is_state} (is_state), and so they give {_text([new])}, and so on: "
        "decide by its path, its type, or whether it is donated"
    )


def _types_of(
    arguments: Sequence[Argument], state: Collection[int], transforms: Sequence[Transform]
) -> Sequence[Types]:
    told = tuple(replace(argument, is_state=i in state) for i, argument in enumerate(arguments))
    types = [tuple(argument.type for argument in told)]
    for number, transform in reversed(list(enumerate(transforms))):
        if isinstance(transform, Retyping):
            told = _retyped(told, transform, f"traced_types of transforms[{number}] of shard_jit")
        types.append(tuple(argument.type for argument in told))
    return types[::-1]


def _retyped(arguments: tuple[Argument, ...], transform: Retyping, name: str) -> tuple[Argument, ...]:
    types = transform.traced_types(arguments)
    require(isinstance(types, Sequence), f"the result of {name}", types, "a list of jax.ShapeDtypeStruct")
    if len(types) != len(arguments):
        raise ValueError(
            f"{name} gave {len(types)} types for {len(arguments)} arguments: give one for each, its own "
            "where it stays. Several arrays cannot rest as one: let the function take the one, and cut it"
        )
    for argument, type in zip(arguments, types, strict=True):
        what = f"what {name} gave for argument {argument.path}"
        require(isinstance(type, jax.ShapeDtypeStruct), what, type, "a jax.ShapeDtypeStruct")
    return tuple(map(_as, arguments, types))


def _as(argument: Argument, type: jax.ShapeDtypeStruct) -> Argument:
    """In the memory that it names, else in the one in which it comes."""
    memory, weak = type.sharding or argument.type.sharding, argument.type.weak_type and type.weak_type
    return replace(
        argument, type=jax.ShapeDtypeStruct(type.shape, type.dtype, sharding=memory, weak_type=weak)
    )


def transformed(
    traced: Traced, types: Sequence[Types], context: Context, transforms: Sequence[Transform]
) -> Any:
    """The program that the transforms, in their order, make of a traced one; `types` as `traced_as` gives
    them.
    """
    jaxpr = traced.jaxpr
    for number, (transform, before, after) in enumerate(zip(transforms, types[:-1], types[1:], strict=True)):
        moved = [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
        jaxpr, retypes = unlinked(jaxpr, moved), isinstance(transform, Retyping)
        what = f"the result of transforms[{number}] of shard_jit"
        new = _applied(transform, jaxpr, _told(context, jaxpr, after), what)
        jaxpr = retyped(new, jaxpr, traced) if retypes else new
    return jaxpr


def _told(context: Context, jaxpr, after: Types) -> Context:
    """What a transform of this program knows, which takes the arguments of the call as `after`."""
    arguments = _of_types(context.arguments, jaxpr.in_avals)
    at_rest = (*after, *(argument.type for argument in arguments[len(after) :]))
    results = _of_types(context.results, jaxpr.out_avals)
    return replace(context, arguments=arguments, results=results, at_rest=at_rest)


def _of_types(told: Sequence[Any], avals) -> tuple[Any, ...]:
    return tuple(
        x if _same(x.type, aval) else replace(x, type=shape_of(aval))
        for x, aval in zip(told, avals, strict=True)
    )


def _applied(transform: Transform, jaxpr, context: Context, what: str) -> Any:
    function: Any = transform
    new = function(jaxpr, context) if _takes_context(function) else function(jaxpr)
    is_closed = _jax.is_jaxpr(new) and hasattr(new, "consts")
    require(is_closed, what, new, "a ClosedJaxpr, as that function gets one")
    retypes = isinstance(transform, Retyping)
    _check("inputs", what, jaxpr.in_avals, new.in_avals, retypes)
    _check("results", what, jaxpr.out_avals, new.out_avals, retypes)
    if retypes:
        _check_at_rest(what, context, new)
    return new


def _takes_context(function) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it has no signature, as functions in C
        return True
    return True


def _check(side: str, what: str, old, new, retypes: bool) -> None:
    if len(old) != len(new) or not retypes and not all(map(_same, old, new)):
        raise ValueError(
            f"{what} has other {side}, {_text(new)}, than the jaxpr that it was given, {_text(old)}: "
            "keep them"
        )


def _check_at_rest(what: str, context: Context, new) -> None:
    """A Retyping has to take the arguments as they come."""
    for argument, type, aval in zip(context.arguments, context.at_rest, new.in_avals, strict=True):
        if not _same(type, aval):
            name = f"argument {argument.path}" if argument.path else "what the function closes over"
            raise ValueError(
                f"{what} takes {_text([aval])} for {name}, which comes as {_text([type])}, and which "
                f"traced_types had traced as {_text([argument.type])}: take it as it comes, in "
                "context.at_rest, or leave traced_types out"
            )


def _same(a, b) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _text(types) -> str:
    """ "f32[8,4], i32[]"; "none"."""
    return ", ".join(jax.typeof(shape_of(x)).str_short(short_dtypes=True) for x in types) or "none"
