"""Transforms: functions of the global program, applied in order before it is partitioned.

A transform gets a program and what is known of its arguments and results, and gives another program. It is
found by nobody: `shard_jit(step, transforms=[...])` names it. `docs/extending.md` writes one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardax import _jax
from shardax.annotations.annotate import TYPE_OF_ANNOTATION
from shardax.graph import annotations
from shardax.graph.annotations import Annotation
from shardax.options import Options


@dataclass(frozen=True)
class Argument:
    """An input of the global program.

    path: with the name of the argument first, as plans have it: "state/params/w"; "" of what the function
      closes over, which comes after the arguments.
    type: shape and dtype.
    sharding: what in_shardings request, None where they leave it to completion.
    donated: whether the call may overwrite it.
    is_state: whether it comes back, updated or as a gradient: parameters and moments, no batch. A scalar
      is none.
    """

    path: str
    type: jax.ShapeDtypeStruct
    sharding: PartitionSpec | None = None
    donated: bool = False
    is_state: bool = False


@dataclass(frozen=True)
class Result:
    """A result of the global program: `path` in its pytree, its type, what out_shardings request, and the
    number of the donated argument that it succeeds, None where there is none. What Refs among the arguments
    hold in the end comes last, and succeeds them.
    """

    path: str
    type: jax.ShapeDtypeStruct
    sharding: PartitionSpec | None = None
    succeeds: int | None = None


@dataclass(frozen=True)
class Context:
    """What a transform knows beside the program. Arguments and results are those of the program that it is
    given, in its order; `mesh` has Auto axes and may be abstract.

    at_rest: the types in which the program that it gives back has to take the arguments. They are other ones
      than those of `arguments` only for a `Retyping`.
    """

    mesh: Mesh | AbstractMesh
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    options: Options
    at_rest: tuple[jax.ShapeDtypeStruct, ...] = ()


class Transform(Protocol):
    """A function from global program to global program, both closed jaxprs of the same arguments and results.

    It runs whenever a function is traced, and must be deterministic. A function of the jaxpr alone will do,
    too, where nothing of the context is needed.
    """

    def __call__(self, jaxpr: Any, context: Context, /) -> Any: ...


@runtime_checkable
class Retyping(Protocol):
    """A transform of programs whose arguments rest in other types than the function computes with: in another
    dtype, padded, or flat.

    The function is traced with the types that `traced_types` gives. The program that the transform makes of
    it takes the arguments in the types of `context.at_rest`, and may give results of other types. What
    succeeds a donated argument it should give in the type of that, whose memory it then takes.

    One array rests as one array: several that rest as one are one argument of the function, which cuts it.
    What in_shardings and out_shardings request is requested at rest; inside also, where the rank is the same.

    Among `transforms`, the last one is next to the call, the first next to the function. `traced_types` of
    the last is asked first, each one before it of what that gave; the programs are made from the first on.
    So `[rests_in_bfloat16, rests_padded]` pads what is in bfloat16. (Only those that lay parts of the program
    on stages may be applied earlier than they stand: `staging_first`.)

    Thirteen numbers that rest as sixteen, in equal shards, and a mean that does not count the others:

    >>> import shardax as sx
    >>> from jax.extend.core import jaxpr_as_fun
    >>> class RestsPadded:
    ...     def traced_types(self, arguments):
    ...         return [jax.ShapeDtypeStruct((13,), a.type.dtype) for a in arguments]
    ...     def __call__(self, jaxpr, context):
    ...         def run(x):
    ...             return [jax.numpy.pad(new, (0, 3)) for new in jaxpr_as_fun(jaxpr)(x[:13])]
    ...         return jax.make_jaxpr(run)(*context.at_rest)
    >>> mesh = AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> how = {"mesh": mesh, "in_shardings": jax.P("x"), "donate_argnums": 0}
    >>> centred = sx.shard_jit(lambda x: x - x.mean(), transforms=[RestsPadded()], **how)
    >>> plan = centred.plan(jax.ShapeDtypeStruct((16,), "float32"))
    >>> plan.out_shardings.spec, [f"{c.kind} {c.shape}" for c in plan.collectives]
    (P('x',), ['all_reduce ()'])
    """

    def traced_types(self, arguments: Sequence[Argument], /) -> Sequence[jax.ShapeDtypeStruct]:
        """The type of each argument of the function, its own where it stays. Those given are of the call, or
        of what the transforms after this one make of it; of what the function closes over none is told. A
        sharding in a type counts for its memory kind alone; without one, the memory stays.

        Everything is known of them, also what is state: that of the program which is traced with these types.
        Since it is not traced yet, this may be called several times, and must depend on its arguments alone:
        first as if the state were what is donated (all arrays, where nothing is), then as the program shows.
        ValueError where that never agrees. Types that do not depend on what is state are traced once.
        """
        ...

    def __call__(self, jaxpr: Any, context: Context, /) -> Any: ...


@runtime_checkable
class Wrapping(Protocol):
    """A transform of functions that do not take their arguments as they come, in other trees say: they are
    called through what `wrapped` makes of them. Among `transforms`, the first one is next to the function.
    """

    def wrapped(self, function: Callable[..., Any], /) -> Callable[..., Any]: ...


@runtime_checkable
class Reporting(Protocol):
    """A transform that adds a table to what a plan shows: a `shardax.explain.tables.Table`."""

    def report(self, plan: Any, /) -> Any: ...


class Resting(Protocol):
    """A transform that says how state rests, where `rests_state` is True. Those that lay state on stages
    (`Staging`) are applied before it, wherever they stand: it splits further what each stage has. One that
    has `axes` is the only one over these.
    """

    rests_state: bool


class Staging(Protocol):
    """A transform that lays parts of the program, with their state, on the devices along an axis of its own,
    where `lays_on_stages` is True.
    """

    lays_on_stages: bool


def staging_first(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """The transforms in the order in which they are applied: as they stand, but each `Staging` one before the
    first `Resting` one.

    All others keep their order, a `Retyping` and a `Resting` one among them, which may be one itself: that
    decides in which types the call takes the arguments.

    >>> import shardax as sx
    >>> zero, pipeline = sx.zero.Zero("data", stage=1), sx.pipeline.Pipeline("stage", microbatches=8)
    >>> staging_first([zero, pipeline]) == (pipeline, zero)
    True
    """
    first = next((i for i, t in enumerate(transforms) if getattr(t, "rests_state", False)), len(transforms))
    ahead, behind = transforms[:first], transforms[first:]
    late = [t for t in behind if getattr(t, "lays_on_stages", False)]
    return (*ahead, *late, *(t for t in behind if not getattr(t, "lays_on_stages", False)))


def annotations_of(jaxpr: Any) -> Iterator[tuple[Any, Annotation]]:
    """The annotations in a jaxpr and the bodies in it: each equation, of one operand and one result, and what
    it requests of the result.

    >>> import shardax as sx
    >>> x = jax.ShapeDtypeStruct((4, 2), "float32")
    >>> with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("data",))):
    ...     jaxpr = jax.make_jaxpr(lambda x: sx.annotate(2 * x, jax.P("data")))(x)
    >>> [annotation.dims for _, annotation in annotations_of(jaxpr)]
    [(('data',), ())]
    """
    for eqn in _jax.closed(jaxpr).jaxpr.eqns:
        for body in jaxprs_in_params(eqn.params):
            yield from annotations_of(body)
        only_types = TYPE_OF_ANNOTATION in str(eqn.source_info.name_stack)
        if (annotation := annotations.of_equation(eqn)) is not None and not only_types:
            yield eqn, annotation
