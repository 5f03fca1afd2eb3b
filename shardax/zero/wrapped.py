"""The explicit form of ZeRO: an optax optimizer that says itself how its state rests."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardax import _jax
from shardax.annotations.annotate import annotate, bind_annotation, broadcast_specs, describe, dims_of
from shardax.sharding import Axes, Sharding, at_rest, from_spec, replicated
from shardax.validation import require, require_mesh
from shardax.zero.rest import split_further
from shardax.zero.transform import Zero


class Transformation(NamedTuple):
    """As optax has it: `init(params)` makes a state, `update(grads, state, params)` updates and the next."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def shard(tx: Any, axis: str | Axes = "data", stage: int = 1, params: Any = None) -> Any:
    """An optax optimizer whose state, and in stage 3 whose parameters, rest split as under `Zero`.

    For a step in which `Zero` does not find the update, or to have ZeRO in the model's code. What it
    annotates counts inside `shard_jit`, and places arrays where `init` is called under `jax.set_mesh`. In
    loops over layers and microbatches, which it does not see, the search alone decides.

    Args:
      tx: any `optax.GradientTransformation`, or another pair `init` and `update` of that form.
      axis, stage: as of `Zero`.
      params: the shardings of parameters besides, as in in_shardings: a prefix tree of specs.

    >>> import optax, shardax as sx
    >>> tx = sx.zero.shard(optax.adam(1e-3), axis="data")
    >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))):
    ...     tx.init(jax.numpy.zeros((8, 4)))[0].mu.sharding.spec[0]
    'data'
    """
    zero = Zero(axis, stage)
    require(hasattr(tx, "init") and hasattr(tx, "update"), "tx of shard", tx, "an optax optimizer")

    def init(trained):
        return _annotated(tx.init(trained), _Rests(zero, trained, params).split)

    def update(grads, state, trained=None, **extra):
        rests = _Rests(zero, grads if trained is None else trained, params)
        grads, state = _annotated(grads, rests.split), _annotated(state, rests.split)
        trained = None if trained is None else _annotated(trained, rests.parameter)
        updates, state = tx.update(grads, state, trained, **extra)
        return _annotated(updates, rests.parameter), _annotated(state, rests.split)

    kind: Any = type(tx) if isinstance(tx, tuple) and len(tx) == 2 else Transformation
    return kind(init, update)


class _Rests:
    """How what has the shape of a parameter rests; anything else as if nothing had been requested of it."""

    def __init__(self, zero: Zero, params: Any, specs: Any):
        self._zero, self._mesh = zero, _jax.context_mesh()
        self._before: dict[tuple[int, ...], Sharding] = {}
        if self._mesh is not None:
            _check(zero.axes, self._mesh, "shard")
            for x, spec in zip(
                jax.tree.leaves(params), broadcast_specs(specs, params, "params"), strict=True
            ):
                self._before[x.shape] = _requested(spec, x.shape, self._mesh)

    def parameter(self, shape: tuple[int, ...]) -> PartitionSpec | None:
        return self.split(shape) if self._zero.stage == 3 else self._known(shape)

    def split(self, shape: tuple[int, ...]) -> PartitionSpec | None:
        return self._known(shape, self._zero.axes)

    def _known(self, shape: tuple[int, ...], axes: Axes = ()) -> PartitionSpec | None:
        if self._mesh is None or not shape:
            return None
        before = self._before.get(shape, replicated(len(shape)))
        return (split_further(before, shape, axes, self._mesh.shape) if axes else before).spec


def _annotated(tree: Any, rests: Callable[[tuple[int, ...]], PartitionSpec | None]) -> Any:
    def annotated(x):
        spec = rests(jax.numpy.shape(x))
        if spec is None or _jax.is_eager(x):
            return annotate(x, spec)
        return bind_annotation(x, from_spec(spec, x.ndim).dims, "sx.zero.shard", "state")

    return jax.tree.map(annotated, tree)


def specs(
    tree: Any,
    mesh: Mesh | AbstractMesh,
    axis: str | Axes = "data",
    requested: Any = None,
    memory_kind: str | None = None,
) -> Any:
    """The sharding of each array as it rests under ZeRO: of optimizer state, and of parameters in stage 3.

    For `out_shardings=` of what makes them, and for checkpoints. Where the step is at hand,
    `shardax.abstract_state(step, state, batch)` says it of all that a step takes, parameters of stages 1 and
    2 too, and knows which dims layers are scanned over.

    Args:
      tree: a tree of arrays or of shapes.
      axis: as of `Zero`.
      requested: the shardings besides, as in in_shardings: a prefix tree of specs.
      memory_kind: "pinned_host" of what `Zero(offload=...)` keeps there.

    Raises ValueError where the mesh has no such axis.

    >>> mesh = AbstractMesh((4,), ("data",))
    >>> moments = {"w": jax.ShapeDtypeStruct((6, 8), "float32"), "b": jax.ShapeDtypeStruct((6,), "float32")}
    >>> {name: s.spec for name, s in specs(moments, mesh).items()}
    {'b': P(None,), 'w': P(None, 'data')}
    """
    require_mesh(mesh, "specs")
    axes = Zero(axis).axes
    _check(axes, mesh, "specs")
    leaves, structure = jax.tree.flatten(tree)
    found = [
        split_further(_requested(spec, x.shape, mesh), x.shape, axes, mesh.shape)
        for x, spec in zip(leaves, broadcast_specs(requested, tree, "requested"), strict=True)
    ]
    return structure.unflatten(NamedSharding(mesh, s.spec, memory_kind=memory_kind) for s in found)


def _requested(spec: Any, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> Sharding:
    dims = dims_of(spec, shape, mesh, "a spec for ZeRO")
    closed = tuple(dim or () for dim in dims or ((),) * len(shape))
    return at_rest(Sharding(closed), shape, mesh.shape)


def _check(axes: Axes, mesh: Mesh | AbstractMesh, what: str) -> None:
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"axis of {what} names {axis!r}, and the mesh ({describe(mesh)}) has no such axis: name the "
                "one that splits the batch"
            )
