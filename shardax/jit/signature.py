"""What `shard_jit` is given: whether it is of the right kinds, and which argument a name, a number or a
sharding means.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardax.annotations.annotate import is_names, is_spec, plain_names
from shardax.options import Options
from shardax.validation import require_argument_names, require_argument_numbers


def check_arguments(
    fun, mesh, transforms, options, by_number: Mapping[str, Any], by_name: Mapping[str, Any]
) -> None:
    """Raises ValueError where an argument of `shard_jit` is of another kind than it must be.

    `by_number` and `by_name`: those that say which arguments are meant.
    """
    if not callable(fun) or isinstance(fun, Mesh):
        raise ValueError(
            f"shard_jit's first argument is {fun!r}, not a function: give shardings and the mesh by their "
            "names"
        )
    if not isinstance(mesh, Mesh | AbstractMesh | None):
        raise ValueError(
            f"mesh={mesh!r} of shard_jit is no mesh: give one, such as jax.make_mesh((4, 2), ('data', "
            "'model'))"
        )
    if not isinstance(transforms, Sequence) or not all(map(_is_transform, transforms)):
        raise ValueError(
            f"transforms={transforms!r} of shard_jit: must be a tuple of functions of a jaxpr, such as "
            "(shardax.zero.Zero('data'),)"
        )
    _check_rests(transforms)
    if not isinstance(options, Options):
        raise ValueError(
            f"options={options!r} of shard_jit: must be shardax.Options, such as shardax.Options(strict=True)"
        )
    for name, argument in by_number.items():
        require_argument_numbers(argument, f"{name} of shard_jit")
    for name, argument in by_name.items():
        require_argument_names(argument, f"{name} of shard_jit")


def _is_transform(x: Any) -> bool:
    return callable(x) and not isinstance(x, type)


def _check_rests(transforms: Sequence[Any]) -> None:
    """Raises ValueError where two transforms say how state rests over the same axis."""
    by_axis: dict[str, Any] = {}
    for transform in (t for t in transforms if getattr(t, "rests_state", False)):
        for axis in getattr(transform, "axes", ()):
            if axis in by_axis:
                raise ValueError(
                    f"transforms of shard_jit has {by_axis[axis]} and {transform}, and each says how state "
                    f"rests over {axis!r}: give one of them, or let each have axes of its own"
                )
            by_axis[axis] = transform


def check_no_device(given: Mapping[str, Any]) -> None:
    """Raises ValueError where `device` or `backend` of `jax.jit` is given."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} of shard_jit: the mesh says which devices run: give mesh=, or, without a "
                "mesh, place the arguments there (jax.device_put, jax.default_device)"
            )


def positional_names(fun: Callable[..., Any]) -> list[str]:
    """The names of the arguments that may be given by position, none where the signature is not known."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (ValueError, TypeError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def argument_name(fun: Callable[..., Any], index: int) -> str:
    """ "state", or "args[2]" where the signature does not name it."""
    parameters = positional_names(fun)
    return parameters[index] if index < len(parameters) else f"args[{index}]"


def shardings_by_name(
    in_shardings: Any, positional: Sequence[str], parameters: Sequence[str], keywords: Collection[str]
) -> tuple[Any, dict[str, Any]]:
    """in_shardings of the `positional` arguments, and of those among the function's other `parameters` that
    are passed as `keywords`: all not static.

    Raises ValueError where there are more or fewer of them than arguments.

    >>> shardings_by_name(("a", "b"), ["x"], ["x", "w"], ["w", "scale"])
    (('a',), {'w': 'b'})
    """
    if is_spec(in_shardings) or type(in_shardings) not in (tuple, list):
        return in_shardings, {}
    count = len(positional)
    own, rest, later = (
        tuple(in_shardings[:count]),
        in_shardings[count:],
        parameters[count : len(in_shardings)],
    )
    if len(own) < count or len(later) < len(rest) or not all(name in keywords for name in later):
        entries = "1 entry" if len(in_shardings) == 1 else f"{len(in_shardings)} entries"
        arguments = ", ".join([*positional, *(f"{name}=" for name in keywords)])
        if is_names(in_shardings):
            raise ValueError(
                f"in_shardings is {plain_names(in_shardings)} for all arguments ({arguments}), or a tuple "
                "with a sharding for each"
            )
        raise ValueError(
            f"in_shardings is a tuple of {entries}, but the arguments of this call that are not static are "
            f"({arguments}): give one for each positional argument, None where it is left open, or one "
            "sharding for all of them, not in a tuple"
        )
    return own, dict(zip(later, rest, strict=True))
