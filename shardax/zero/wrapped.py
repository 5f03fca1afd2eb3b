"""The explicit form of ZeRO: an optax optimizer that says itself how its state rests."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardax import _jax
from shardax.annotations.annotate import annotate, bind_annotation, broadcast_specs, describe, dims_of
from shardax.sharding import Axes, Sharding, at_rest, from_spec, replicated
from shardax.validation import require, require_mesh
from shardax.zero.bucket import has_buckets, is_part
from shardax.zero.by_cost import Dealt
from shardax.zero.deals import dealt_out
from shardax.zero.mixed import OfShapes, mixed_by
from shardax.zero.offload import DEVICE, HOST, require_memory
from shardax.zero.padded import Name, Padded, check_axes, has_padded, is_padded, padded_as, unpad
from shardax.zero.rest import split_further, split_padded
from shardax.zero.together import around_buckets
from shardax.zero.transform import Zero


class Transformation(NamedTuple):
    """As optax has it: `init(params)` makes a state, `update(grads, state, params)` updates and the next."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def shard(
    tx: Any,
    axis: str | Axes = "data",
    stage: int = 1,
    params: Any = None,
    offload: Literal["optimizer"] | tuple[Literal["optimizer"], ...] = (),
    dealt: Dealt | None = None,
) -> Any:
    """An optax optimizer whose state, and in stage 3 whose parameters, rest split as under `Zero`.

    For a step in which `Zero` does not find the update, or to have ZeRO in the model's code. What it
    annotates counts inside `shard_jit`, and places arrays where `init` is called under `jax.set_mesh`. In
    loops over layers and microbatches, which it does not see, the search alone decides.

    Args:
      tx: any `optax.GradientTransformation`, or another pair `init` and `update` of that form.
      axis, stage: as of `Zero`. Optimizer state may rest padded, as `init` makes it, which parameters cannot
        here.
      params: the shardings of parameters besides, as in in_shardings: a prefix tree of specs.
      offload: "optimizer": what `init` and `update` give of the state is in the host's memory, but for single
        numbers, and `update` brings it. Parameters at the host need `Zero`, which finds where they are read.
      dealt: as of `Zero`; None goes by the update alone, on the chip of the default `Options`.

    Raises ValueError for another offload, and where the mesh in context has no such memory; what is made has
    the errors of `Zero`.

    >>> import optax, shardax as sx
    >>> tx = sx.zero.shard(optax.adam(1e-3), axis="data")
    >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))):
    ...     tx.init(jax.numpy.zeros((8, 4)))[0].mu.sharding.spec[0]
    'data'
    """
    zero = Zero(axis, stage, offload=offload, dealt=dealt)
    require(hasattr(tx, "init") and hasattr(tx, "update"), "tx of shard", tx, "an optax optimizer")
    if "parameters" in zero.offloaded:
        raise ValueError(
            f"offload of shard is {offload!r}, and an optimizer cannot bring parameters to where the loss "
            "reads them: give 'optimizer', or name sx.zero.Zero(offload=...) in transforms="
        )

    def left(state):
        return _at(state, HOST) if offload else state

    def init(trained):
        state = tx.init(trained)
        mixed = mixed_by(tx.update, state, trained, trained)
        rests = _Rests(zero, trained, params, mixed)
        return left(_annotated(state, rests.split))

    def update(grads, state, trained=None, **extra):
        check_axes({Name("state", "state"): state}, zero.axes, "shard")
        _check_not_padded({"grads": grads, "params": trained})
        state = _at(state, DEVICE) if offload else state

        def run(grads, state, trained):
            mixed = mixed_by(partial(tx.update, **extra), unpad(state), grads, trained)
            rests = _Rests(zero, grads if trained is None else trained, params, mixed)
            state = _annotated(state, rests.split)
            rests.pad_as(state)
            grads = _annotated(grads, rests.split)
            trained = None if trained is None else _annotated(trained, rests.parameter)
            updates, new = tx.update(grads, unpad(state), trained, **extra)
            new = _annotated(padded_as(new, state), rests.split)
            return _annotated(updates, rests.parameter), left(new)

        run = around_buckets(run) if has_buckets(state) else run
        return dealt_out(run, (grads, state, trained), zero.axes, dealt)

    kind: Any = type(tx) if isinstance(tx, tuple) and len(tx) == 2 else Transformation
    return kind(init, update)


def _at(state: Any, memory: Any) -> Any:
    """The state with its arrays in a memory. Single numbers are always on the device."""
    return jax.tree.map(lambda x: jax.device_put(x, memory) if jax.numpy.ndim(x) else x, state)


def _check_not_padded(trees: dict[str, Any]) -> None:
    for name, tree in trees.items():
        if has_padded(tree):
            raise ValueError(
                f"{name} of the optimizer that sx.zero.shard made are padded, and it takes them in their "
                "true shapes: let the step begin with sx.zero.unpad(params), or name Zero in transforms=, "
                "which does"
            )


class _Rests:
    """How what has the shape of a parameter rests; anything else as if nothing had been requested of it."""

    def __init__(self, zero: Zero, params: Any, specs: Any, mixed: OfShapes):
        self._zero, self._mesh, self._mixed = zero, _jax.context_mesh(), mixed
        self._before: dict[tuple[int, ...], Sharding] = {}
        self._padded: dict[tuple[int, ...], PartitionSpec | None] = {}
        if self._mesh is not None:
            check_mesh(zero.axes, self._mesh, "shard")
            if zero.offload:
                require_memory(self._mesh, f"offload of shard is {zero.offload!r}")
            for x, spec in zip(
                jax.tree.leaves(params), broadcast_specs(specs, params, "params"), strict=True
            ):
                self._before[x.shape] = requested_of(spec, x.shape, self._mesh)

    def pad_as(self, state: Any) -> None:
        """Makes gradients of a shape that rests padded in the state split as that is, and leaves those open
        that have a place in a bucket.
        """
        for x in jax.tree.leaves(state, is_leaf=is_padded):
            if is_padded(x) and not _jax.is_eager(x) and (spec := self.split(x.value.shape)) is not None:
                self._padded[x.shape] = spec
        for x in jax.tree.leaves(state, is_leaf=is_part):  # what is in buckets has no leaves, but is one here
            if is_part(x):
                self._padded[x.shape] = None

    def parameter(self, shape: tuple[int, ...]) -> PartitionSpec | None:
        return self._known(shape, self._zero.axes if self._zero.stage == 3 else ())

    def split(self, shape: tuple[int, ...]) -> PartitionSpec | None:
        return self._padded[shape] if shape in self._padded else self._known(shape, self._zero.axes)

    def _known(self, shape: tuple[int, ...], axes: Axes = ()) -> PartitionSpec | None:
        if self._mesh is None or not shape:
            return None
        before = self._before.get(shape, replicated(len(shape)))
        if axes:
            mixed = self._mixed.get(shape, ())
            before = split_further(before, shape, axes, self._mesh.shape, mixed=mixed)
        return before.spec


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
    tx: Any = None,
    params: Any = None,
) -> Any:
    """The sharding of each array as it rests under ZeRO: of optimizer state, and of parameters in stage 3.

    For `out_shardings=` of what makes them, and for checkpoints. Where the step is at hand,
    `shardax.abstract_state(step, state, batch)` says it of all that a step takes, parameters of stages 1 and
    2 too, and knows which dims layers are scanned over.

    Args:
      tree: a tree of arrays or of shapes.
      axis: as of `Zero`.
      requested: the shardings besides, as in in_shardings: a prefix tree of specs.
      memory_kind: "pinned_host" of what `Zero(offload=...)` keeps there, which are no single numbers.
      tx, params: the optimizer whose state `tree` is, and the parameters, or their shapes: the dims along
        which its update needs whole matrices are split only where no other can.

    Raises ValueError where the mesh has no such axis, where `tree` is no state of `tx`, and where it has what
    is neither an array nor a shape.

    >>> mesh = AbstractMesh((4,), ("data",))
    >>> moments = {"w": jax.ShapeDtypeStruct((6, 8), "float32"), "b": jax.ShapeDtypeStruct((6,), "float32")}
    >>> {name: s.spec for name, s in specs(moments, mesh).items()}
    {'b': P(None,), 'w': P(None, 'data')}
    """
    axes = Zero(axis).axes
    check_mesh(axes, mesh, "specs")
    check_arrays(tree, "tree of specs")
    mixed = mixed_in(tree, tx, params, "specs")
    return resting_specs(tree, mesh, axes, requested, mixed, memory_kind)


def mixed_in(tree: Any, tx: Any, params: Any, what: str) -> OfShapes:
    """The dims that an update mixes, by the shapes in `tree`, a state of an optax optimizer `tx`, if any."""
    if tx is None:
        return {}
    require(hasattr(tx, "init") and hasattr(tx, "update"), f"tx of {what}", tx, "an optax optimizer")
    true = unpad(jax.eval_shape(lambda: tree))
    made, given = jax.tree.structure(jax.eval_shape(tx.init, params)), jax.tree.structure(true)
    if made != given:
        raise ValueError(
            f"{what} is given an optimizer tx whose state of these params is {made}, and the tree is "
            f"{given}: give it tx.init(params), or leave out tx"
        )
    return mixed_by(tx.update, true, params, params)


def resting_specs(
    tree: Any,
    mesh: Mesh | AbstractMesh,
    axes: Axes,
    requested: Any,
    mixed: OfShapes,
    memory_kind: str | None = None,
) -> Any:
    """`specs`, where the mixed dims are known."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_padded)

    def named(x: Any, spec: Any) -> Any:
        placed = placed_at(mesh, split(x, spec), x, memory_kind)
        return Padded(placed, x.shape, x.axes) if is_padded(x) else placed

    def split(x: Any, spec: Any) -> Sharding:
        if is_padded(x):
            check_mesh(x.axes, mesh, "a padded array in specs")
            before = requested_of(spec, x.value.shape, mesh)
            return split_padded(before, x.value.shape, x.shape, x.axes, mesh.shape)
        before = requested_of(spec, x.shape, mesh)
        return split_further(before, x.shape, axes, mesh.shape, mixed=mixed.get(x.shape, ()))

    of_leaves = broadcast_specs(requested, tree, "requested")
    return structure.unflatten(map(named, leaves, of_leaves))


def placed_at(mesh: Mesh | AbstractMesh, rests: Sharding, x: Any, memory_kind: str | None) -> NamedSharding:
    """The sharding of an array in that memory. A single number is always on the devices."""
    return NamedSharding(mesh, rests.spec, memory_kind=memory_kind if x.shape else None)


def requested_of(spec: Any, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> Sharding:
    """How an array of this shape rests without ZeRO."""
    dims = dims_of(spec, shape, mesh, "a spec for ZeRO")
    closed = tuple(dim or () for dim in dims or ((),) * len(shape))
    return at_rest(Sharding(closed), shape, mesh.shape)


def check_arrays(tree: Any, argument: str) -> None:
    """Raises ValueError where a leaf has no shape: Python's numbers have none."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        is_array = hasattr(x, "shape") and hasattr(x, "dtype")
        name = f"{argument} has {jax.tree_util.keystr(path) or 'a leaf'}, which"
        require(is_array, name, x, "an array, such as jnp.asarray(x), or a jax.ShapeDtypeStruct")


def check_mesh(axes: Axes, mesh: Any, what: str) -> None:
    require_mesh(mesh, what)
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"axis of {what} names {axis!r}, and the mesh ({describe(mesh)}) has no such axis: name the "
                "one that splits the batch"
            )
