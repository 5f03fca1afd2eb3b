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
    is_state: whether it comes back, updated or as a gradient: parameters and moments, no batch.
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
    hold in the end comes last.
    """

    path: str
    type: jax.ShapeDtypeStruct
    sharding: PartitionSpec | None = None
    succeeds: int | None = None


@dataclass(frozen=True)
class Context:
    """What a transform knows beside the program. Arguments and results are those of the traced program, in
    its order; `mesh` has Auto axes and may be abstract.
    """

    mesh: Mesh | AbstractMesh
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    options: Options


class Transform(Protocol):
    """A function from global program to global program, both closed jaxprs of the same arguments and results.

    It runs whenever a function is traced, and must be deterministic. A function of the jaxpr alone will do,
    too, where nothing of the context is needed.
    """

    def __call__(self, jaxpr: Any, context: Context, /) -> Any: ...


@runtime_checkable
class Retyping(Protocol):
    """A transform of programs whose arguments rest in other types than the function computes with.

    The function is traced with the types that `traced_types` gives; the program that the transform makes of
    it takes the arguments as the call has them, and may give results of other dtypes.
    """

    def traced_types(self, arguments: Sequence[Argument], /) -> Sequence[jax.ShapeDtypeStruct]: ...

    def __call__(self, jaxpr: Any, context: Context, /) -> Any: ...


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
        if (annotation := annotations.of_equation(eqn)) is not None:
            yield eqn, annotation


def map_equations(jaxpr: Any, change: Callable[[list[Any]], list[Any]]) -> Any:
    """The same jaxpr, closed or open, the list of its equations as `change` returns it; so are the bodies in
    it, which come first.

    `change` may leave equations out, move them, and put others there, as `eqn.replace(...)` makes them. It
    must not change what the jaxpr takes and gives.
    """
    eqns = _jax.closed(jaxpr).jaxpr.eqns
    inner = [_jax.with_bodies(eqn, lambda body: map_equations(body, change)) for eqn in eqns]
    return _jax.replaced_eqns(jaxpr, change(inner))
