"""abstract_state: the shapes and shardings in which the arguments of a sharded function rest, before any of
them exists.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from shardax import _jax
from shardax.validation import require_argument_numbers


@runtime_checkable
class Planned(Protocol):
    """What `shard_jit` returns, as far as it matters here."""

    __name__: str

    def plan(self, /, *args, **kwargs) -> Any: ...

    def trace(self, /, *args, **kwargs) -> jax.stages.Traced: ...


@_jax.boundary
def abstract_state(step: Any, *args: Any, argnums: int | Sequence[int] = 0, **kwargs: Any) -> Any:
    """Argument `argnums` of a sharded function as it rests: a `jax.ShapeDtypeStruct` with its sharding for
    each array.

    Give it to orbax to restore a checkpoint into it, or as `out_shardings=` to the function that makes the
    state, so that no device ever holds more of the state than its shards. The shardings of optimizer states
    follow from the parameters by completion.

    Args:
      step: what `shard_jit` returned.
      *args, **kwargs: of a call of `step`: arrays, or shapes (`jax.ShapeDtypeStruct`, as `jax.eval_shape`
        makes them).
      argnums: which positional arguments, of those that are not static, as `jax.grad` has it: a number gives
        that argument, a sequence gives a tuple.

    Raises ValueError where `step` is no sharded function, or has no such argument.

    >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
    >>> import shardax as sx
    >>> mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    >>> add = lambda state, x: state["sum"] + state["w"] @ x
    >>> step = sx.shard_jit(add, mesh=mesh, in_shardings=(None, P("x")))
    >>> init = lambda: {"sum": jax.numpy.zeros(6), "w": jax.numpy.zeros((6, 8))}
    >>> state = sx.abstract_state(step, jax.eval_shape(init), jax.ShapeDtypeStruct((8,), "float32"))
    >>> state["w"].shape, state["w"].sharding.spec
    ((6, 8), P(None, 'x'))
    """
    if not isinstance(step, Planned):
        raise ValueError(
            f"abstract_state: step is {step!r}, which shard_jit did not make: give it shard_jit(fun, ...)"
        )
    require_argument_numbers(argnums, "argnums of abstract_state", or_none=False)
    shardings = step.plan(*args, **kwargs).in_shardings
    infos = step.trace(*args, **kwargs).args_info[0]
    resting = jax.tree.map(_resting, infos, tuple(shardings))
    numbers = tuple(argnums) if isinstance(argnums, Iterable) else (argnums,)
    _check(numbers, len(resting))
    selected = tuple(resting[i] for i in numbers)
    return selected if isinstance(argnums, Iterable) else selected[0]


def _resting(info, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)


def _check(numbers: tuple[int, ...], count: int) -> None:
    for i in numbers:
        if not -count <= i < count:
            raise ValueError(
                f"abstract_state: argnums names argument {i}, and this call has {count} positional "
                "arguments that are not static: give a number below that"
            )
