"""`value_and_grad` of a loss whose layers lie on stages, and `apply` of a function without gradients."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax  # noqa: F401  (doctests)
import jax.numpy as jnp  # noqa: F401  (doctests)
from jax.sharding import AbstractMesh, AxisType  # noqa: F401  (doctests)

from shardax.pipeline.batch import check_names
from shardax.pipeline.call import Call
from shardax.pipeline.packed import PACKING, Packing
from shardax.pipeline.repacking import unpack
from shardax.pipeline.schedules import check_schedule
from shardax.pipeline.scopes import patterns
from shardax.pipeline.table import positive
from shardax.validation import is_number, require, require_argument_numbers


def value_and_grad(
    loss: Callable[..., Any],
    *,
    axis: str = "stage",
    microbatches: int,
    schedule: Any = "1f1b",
    chunks: int | None = None,
    argnums: int | Sequence[int] = 0,
    batch_argnames: str | Sequence[str] | None = None,
    has_aux: bool = False,
    reduce: str = "mean",
    memory: float | None = None,
    at: str | Sequence[str] | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad`, the layers of `loss` spread over the stages of a mesh axis.

    The batch is cut into microbatches, which pass the stages one after the other. Contract: the loss of a
    batch is the mean (or the sum) of those of its microbatches. A loss that is another function of them, such
    as a mean over tokens of which each microbatch has another number, has to be summed, and divided outside.

    `loss` is not changed for it. It is cut where its stages take equally long and send little: between any
    two computations, and between the layers of a `jax.lax.scan` over stacked parameters;
    `sx.pipeline.stage(x)` in it, or `at`, says where instead. What only the parameters go into, such as
    casts, is done once, before.

    Args:
      loss: a function of parameters and others that returns a scalar, or with `has_aux` a pair of that and a
        tree of arrays. Of the others, the batch is cut; all else, such as keys and scalars, goes to every
        microbatch as it is.
      axis: of the mesh, along which the stages lie.
      microbatches: how many. Microbatch i of m has rows i, i + m, i + 2 m, ..., so that the rows of each
        device stay there. Where they do not divide the batch, the loss has to be a sum over its rows, as a
        mean is, and each row counts alike.
      schedule: which instruction each stage runs when: a name, a text, a function or a `Schedule`; "auto" is
        the fastest of those with names that fit into memory, simulated with the stages' own seconds.
      chunks: pieces of the model on each stage, as "interleaved" has them; None: as the schedule wants it.
      batch_argnames: of the arguments whose arrays have a row for each row of the batch. None: all arrays
        that are no parameters and have as many rows as there are microbatches, or more; where they have
        different numbers of rows, it has to be said.
      argnums, has_aux: as in `jax.value_and_grad`. The others' results are stacked, one row per microbatch.
      reduce: "mean" or "sum": what the loss of a batch is of those of its microbatches.
      memory: of "auto", bytes that weights, their gradients, the batch and what is kept for backward passes
        may take on each device; leave room for optimizer state. None: the HBM of the chip of
        `Options(chip=...)`, no limit where that names none.
      at: a pattern, or several, of modules, such as "Block_*": stages begin where one of these does. They are
        the named scopes that Flax linen makes, or `jax.named_scope`; of nested ones the outermost counts.

    Returns a function as `jax.value_and_grad` does. Call it inside of a `shardax.shard_jit` function, or
    where a mesh with the axis is in context.

    Raises ValueError: where there are more microbatches than rows, or they do not divide the batch and the
    loss is no sum over its rows or has other results, `batch_argnames` has a name of no argument or arrays of
    different numbers of rows, or has to say which are meant, the axis is not in the mesh, there are more
    stages than places to cut, `at` matches nothing, the loss is no scalar, or shows itself as a plain sum
    over rows where `reduce` is "mean", or no schedule fits into memory.

    Source: GSPMD (arXiv 2105.04663) §3.3 for stages as a dim of the mesh; schedules:
    `shardax.pipeline.schedules`.

    >>> import shardax as sx
    >>> mesh = AbstractMesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    >>> def loss(params, x):
    ...     layer = lambda x, w: (jnp.tanh(x @ w), None)
    ...     return (jax.lax.scan(layer, x, params)[0] ** 2).mean()
    >>> step = sx.shard_jit(sx.pipeline.value_and_grad(loss, microbatches=8), mesh=mesh)
    >>> params, x = jax.ShapeDtypeStruct((8, 64, 64), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")
    >>> plan = step.plan(params, x)
    >>> sorted({c.kind for c in plan.collectives})
    ['all_reduce', 'ppermute']
    """
    _check(loss, axis, microbatches, reduce, batch_argnames)
    check_schedule(schedule, "schedule of value_and_grad")
    require(memory is None or is_number(memory, 0), "memory of value_and_grad", memory, "bytes, or None")
    numbers = _numbers(argnums, "value_and_grad")
    how = numbers, batch_argnames, axis, int(microbatches), patterns(at, "value_and_grad")

    @wraps(loss)
    def run(*args, **kwargs):
        call = Call.of(loss, args, kwargs, *how)
        value, aux, gradients = call.gradients((schedule, chunks, memory), reduce, has_aux)
        gradients = tuple(gradients) if isinstance(argnums, Sequence) else gradients[0]
        return ((value, aux) if has_aux else value), gradients

    def packing(args: Sequence[Any], said: tuple[Any, Any]) -> Packing:
        call = Call.of(loss, unpack(args), {}, *how)
        return call.packing(call.of_gradients(reduce, has_aux)[0], (schedule, chunks, memory), said)

    run.__dict__[PACKING] = packing
    return run


def apply(
    function: Callable[..., Any],
    *,
    axis: str = "stage",
    microbatches: int,
    schedule: Any = "forward",
    chunks: int | None = None,
    argnums: int | Sequence[int] = 0,
    batch_argnames: str | Sequence[str] | None = None,
    at: str | Sequence[str] | None = None,
) -> Callable[..., Any]:
    """A function of parameters and a batch, without gradients, its layers spread over the stages of a mesh
    axis.

    As `value_and_grad`, but `function` returns a tree of arrays whose first dim is that of the batch, as
    scores and activations have it, and so does what this returns.

    Raises ValueError as `value_and_grad` does, where the microbatches do not divide the batch, and where a
    result has not the rows of its microbatch.

    >>> import shardax as sx
    >>> mesh = AbstractMesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    >>> def scores(params, x):
    ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0].sum(-1)
    >>> score = sx.shard_jit(sx.pipeline.apply(scores, microbatches=8), mesh=mesh)
    >>> params, x = jax.ShapeDtypeStruct((8, 64, 64), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")
    >>> jax.eval_shape(score, params, x).shape
    (256,)
    """
    _check(function, axis, microbatches, "mean", batch_argnames)
    check_schedule(schedule, "schedule of apply")
    numbers = _numbers(argnums, "apply")
    how = numbers, batch_argnames, axis, int(microbatches), patterns(at, "apply")

    @wraps(function)
    def run(*args, **kwargs):
        call = Call.of(function, args, kwargs, *how)
        return call.results((schedule, chunks, None))

    def packing(args: Sequence[Any], said: tuple[Any, Any]) -> Packing:
        call = Call.of(function, unpack(args), {}, *how)
        return call.packing(call.of_results()[0], (schedule, chunks, None), said)

    run.__dict__[PACKING] = packing
    return run


def _numbers(argnums: int | Sequence[int], what: str) -> tuple[int, ...]:
    require_argument_numbers(argnums, f"argnums of {what}", or_none=False)
    return tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)


def _check(loss, axis, microbatches, reduce, batch_argnames) -> None:
    if not callable(loss):
        raise ValueError(f"loss is {loss!r}; expected a function, as jax.value_and_grad takes it")
    if not isinstance(axis, str):
        raise ValueError(f"axis is {axis!r}; expected the name of a mesh axis, such as 'stage'")
    positive("microbatches", microbatches)
    if reduce not in ("mean", "sum"):
        raise ValueError(
            f"reduce is {reduce!r}; expected 'mean' or 'sum': how losses of microbatches make the batch's"
        )
    check_names(batch_argnames, getattr(loss, "__name__", "the loss"))
