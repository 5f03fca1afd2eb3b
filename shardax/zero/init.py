"""init, pad: a state of which nothing is replicated along an axis, however large its arrays are."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from shardax import _jax
from shardax.annotations.annotate import broadcast_specs
from shardax.sharding import Axes, shard_count
from shardax.validation import is_integer, require
from shardax.zero.bucket import Bucketed, bucketed, is_bucketed, stacks
from shardax.zero.deals import alike, seconds
from shardax.zero.mixed import OfShapes, mixed_by
from shardax.zero.offload import KIND, require_memory
from shardax.zero.padded import padded_to
from shardax.zero.rest import MIXED, padded_shape, split_further
from shardax.zero.transform import Offloaded, Zero
from shardax.zero.wrapped import check_arrays, check_mesh, mixed_in, placed_at, requested_of, resting_specs

SMALL = 2**20  # bytes

Groups = Sequence[Sequence[int]]


def init(
    tx: Any,
    params: Any,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str | Axes = "data",
    stage: int = 1,
    requested: Any = None,
    bucket: int = SMALL,
    offload: Offloaded | tuple[Offloaded, ...] = (),
    dealt: bool | None = None,
) -> tuple[Any, Any]:
    """The state `(params, tx.init(params))` as it rests under `Zero(axis, stage)`. Each array of the
    optimizer's state, and in stage 3 of the parameters, is split: what the axis divides along no dim, or
    along the layers of a stack alone, is a `Padded`, or where there are several small ones in a tree like
    that of the parameters, a part of a bucket: that tree is a `Bucketed`. Dims along which the optimizer's
    update needs whole matrices are split only where no other can be, so that a `dealt` state is not sent.
    State of separate matrices with which the optimizer computes alike may rest in stacks, as parts of a
    `Bucketed`, with whole matrices on each device.

    A step with `Zero(axis, stage)` in its transforms takes and returns it, and sees true shapes. No device
    ever holds more of the optimizer's state than its shards.

    Args:
      tx: an optax optimizer.
      params: a tree of arrays, or of shapes (`jax.ShapeDtypeStruct`): then shapes come back.
      mesh: the devices, by default those of the context. It may be abstract where `params` are shapes.
      axis, stage: as of `Zero`.
      requested: the shardings of parameters besides, as in in_shardings: a prefix tree of specs. What has the
        shape of a parameter in the optimizer's state is split alike.
      bucket: the bytes that an array may have at most to rest in a bucket, 0 for no buckets. By itself it
        would need a collective for its gradient, and one for its new value; in a bucket it is copied there
        and back. By default a MiB, which a TPU copies in about the time in which a collective starts.
      offload: as of `Zero`: what is given back in the host's memory.
      dealt: whether state of such matrices rests in stacks. None: where the update alone then takes no more
        time, by its plans for the chip of the default `Options`, and not under `offload`.

    Raises ValueError where the mesh has no such axis, or has no devices for arrays, where these have no such
    memory, and where `params` has what is neither an array nor a shape.

    >>> import optax
    >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")
    >>> params = {"w": shape(1300, 1001), "b": shape(1001), "scale": shape(13)}
    >>> params, (adam, _) = init(optax.adam(1e-3), params, AbstractMesh((8,), ("data",)))
    >>> adam.mu.rest["w"], adam.mu.buckets["float32"]
    (Padded(float32[1300, 1001] as [1304, 1001]), Padded(float32[1014] as [1016]))
    """
    zero = Zero(axis, stage, offload=offload)
    require(dealt in (None, True, False), "dealt of init", dealt, "True, False or None")
    require(hasattr(tx, "init") and hasattr(tx, "update"), "tx of init", tx, "an optax optimizer")
    require(is_integer(bucket, 0), "bucket of init", bucket, "a number of bytes")
    check_arrays(params, "params of init")
    made = jax.eval_shape(tx.init, params)
    mixed = mixed_by(tx.update, made, params, params)
    rests = _Rests(_mesh(mesh, zero.axes, "init"), zero.axes, params, bucket, mixed)
    of_params = broadcast_specs(requested, params, "requested")
    by_shape = {x.shape: spec for x, spec in zip(jax.tree.leaves(params), of_params, strict=True)}
    of_state = [by_shape.get(x.shape) for x in jax.tree.leaves(made)]
    memory = {role: KIND if role in zero.offloaded else None for role in ("parameters", "optimizer")}
    if offload:
        require_memory(rests.mesh, f"offload of init is {offload!r}")
    groups = rests.groups(tx, made, params, of_state, False if offload and dealt is None else dealt)

    def make(params):
        trained = rests.made(params, of_params) if stage == 3 else params
        return trained, rests.made(tx.init(params), of_state, groups)

    def placed():
        state = rests.shardings(made, of_state, memory["optimizer"], groups)
        trained = rests.shardings if stage == 3 else rests.unsplit
        return trained(params, of_params, memory["parameters"]), state

    return _placed(make, placed, params, rests.mesh, "init")


def pad(
    tree: Any,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str | Axes = "data",
    requested: Any = None,
    params: Any = None,
    bucket: int = SMALL,
    tx: Any = None,
    dealt: bool | None = None,
) -> Any:
    """A tree of true shapes as it rests split: what the axis divides along no dim is a `Padded`, with one dim
    longer, which takes the fewest zeros; the first of three dims and more, over which layers may be stacked,
    only where this saves an eighth of the array. Arrays of one number stay as they are.

    For a state that no optax optimizer made, and for one that was restored from a checkpoint. Inside a
    function that makes a state, `specs` of what `jax.eval_shape` gives are its `out_shardings`.

    Args:
      tree: arrays, which are placed as `specs` says; or shapes; or, under `jax.jit`, what is being traced.
      mesh, axis, requested: as of `init`; `requested` is a prefix of `tree`.
      params: the parameters, or their shapes: parts of `tree` that are like this tree, or like it but for
        some leaves, have their small arrays in buckets, as `init` makes them. Without it nothing is in one.
      bucket: as of `init`.
      tx: the optimizer whose state `tree` is, with its `params`: as of `specs`.
      dealt: with `tx`, as of `init`.

    Raises ValueError where the mesh has no such axis, or has no devices for arrays.

    >>> import shardax as sx
    >>> mesh = AbstractMesh((8,), ("data",))
    >>> state = pad({"m": jax.ShapeDtypeStruct((7, 3), "float32")}, mesh)
    >>> state, sx.zero.specs(state, mesh)["m"].value.spec
    ({'m': Padded(float32[7, 3] as [8, 3])}, P('data', None))
    """
    axes = Zero(axis).axes
    require(dealt in (None, True, False), "dealt of pad", dealt, "True, False or None")
    require(is_integer(bucket, 0), "bucket of pad", bucket, "a number of bytes")
    mixed = mixed_in(tree, tx, params, "pad")
    rests = _Rests(_mesh(mesh, axes, "pad"), axes, params, bucket, mixed)
    of_leaves = broadcast_specs(requested, tree, "requested")
    types = jax.eval_shape(lambda: tree)
    groups = [] if tx is None else rests.groups(tx, types, params, of_leaves, dealt)
    return _placed(
        lambda tree: rests.made(tree, of_leaves, groups),
        lambda: rests.shardings(tree, of_leaves, groups=groups),
        tree,
        rests.mesh,
        "pad",
    )


def _mesh(mesh: Mesh | AbstractMesh | None, axes: Axes, what: str) -> Mesh | AbstractMesh:
    mesh = mesh or _jax.context_mesh()
    check_mesh(axes, mesh, what)
    assert mesh is not None
    return mesh


class _Rests:
    """How trees rest: what is padded, and what is in buckets."""

    def __init__(self, mesh: Mesh | AbstractMesh, axes: Axes, params: Any, most: int, mixed: OfShapes):
        self.mesh, self._axes, self._most, self._mixed = mesh, axes, most, mixed
        self._paths = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)}

    def made(self, tree: Any, requested: Sequence[Any], groups: Groups = ()) -> Any:
        """The tree as it rests; `requested` has a spec for each of its leaves, `groups` the numbers of those
        that rest in a stack.
        """
        return self._with_stacks(tree, requested, groups)[0]

    def shardings(
        self, tree: Any, requested: Sequence[Any], memory_kind: str | None = None, groups: Groups = ()
    ) -> Any:
        made, wanted = self._with_stacks(jax.eval_shape(lambda: tree), requested, groups)
        return resting_specs(made, self.mesh, self._axes, wanted, self._mixed, memory_kind)

    def groups(
        self, tx: Any, state: Any, params: Any, requested: Sequence[Any], dealt: bool | None
    ) -> Groups:
        """The leaves of the state that rest in stacks, where `dealt` says so, or where that is no slower."""
        shapes = [x.shape for x in jax.tree.leaves(state)]

        def fits(group: Sequence[int]) -> bool:
            is_split = requested_of(requested[group[0]], shapes[group[0]], self.mesh).axes
            return not is_split and self._longer(len(group)) <= (1 + MIXED) * len(group)

        groups = [] if dealt is False else list(filter(fits, alike(tx.update, state, params)))
        if not groups or dealt:
            return groups

        def estimated(groups: Groups) -> float:
            form, placed = self.made(state, requested, groups), self.shardings(state, requested, None, groups)
            return seconds(tx.update, params, form, placed, self.mesh, self._axes)

        return groups if estimated(groups) <= estimated(()) else []

    def _longer(self, size: int) -> int:
        count = shard_count(self._axes, self.mesh.shape)
        return -(-size // count) * count

    def unsplit(self, tree: Any, requested: Sequence[Any], memory_kind: str | None = None) -> Any:
        """As requested alone."""
        leaves, structure = jax.tree.flatten(tree)
        pairs = zip(leaves, requested, strict=True)
        rests = ((x, requested_of(spec, x.shape, self.mesh)) for x, spec in pairs)
        return structure.unflatten([placed_at(self.mesh, s, x, memory_kind) for x, s in rests])

    def _with_stacks(self, tree: Any, requested: Sequence[Any], groups: Groups) -> tuple[Any, Any]:
        """The tree as it rests, and such a tree of specs."""
        if not groups:
            return self._with_requested(tree, requested)
        whole, grouped = stacks(tree, groups, self._axes), {k for group in groups for k in group}
        rest, wanted = self._with_requested(
            whole.rest, [spec for k, spec in enumerate(requested) if k not in grouped]
        )
        buckets = {
            name: padded_to(x, (self._longer(x.shape[0]), *x.shape[1:]), self._axes)
            for name, x in whole.buckets.items()
        }
        return Bucketed(rest, buckets, self._axes), Bucketed(wanted, dict.fromkeys(buckets), self._axes)

    def _with_requested(self, tree: Any, requested: Sequence[Any]) -> tuple[Any, Any]:
        """The tree as it rests, and such a tree of specs."""
        parts, structure = jax.tree.flatten(tree, is_leaf=self._is_like_params)
        left, made, wanted = iter(requested), [], []
        for part in parts:
            its = list(itertools.islice(left, len(jax.tree.leaves(part))))
            in_buckets, its = self._in_buckets(part, its) if self._is_like_params(part) else (part, its)
            made.append(
                jax.tree.unflatten(
                    jax.tree.structure(in_buckets), map(self._padded, jax.tree.leaves(in_buckets), its)
                )
            )
            wanted.append(jax.tree.unflatten(jax.tree.structure(made[-1]), its))
        return structure.unflatten(made), structure.unflatten(wanted)

    def _is_like_params(self, part: Any) -> bool:
        """Whether this node has leaves where parameters have some, and no others."""
        leaves = jax.tree.leaves_with_path(part)
        return len(leaves) > 1 and all(jax.tree_util.keystr(path) in self._paths for path, _ in leaves)

    def _in_buckets(self, tree: Any, requested: Sequence[Any]) -> tuple[Any, list[Any]]:
        """A tree with its small arrays in buckets, and the specs of its leaves."""
        small = [self._is_small(x, s) for x, s in zip(jax.tree.leaves(tree), requested, strict=True)]
        made = bucketed(tree, small, self._axes)
        if not is_bucketed(made):
            return made, list(requested)
        places = jax.tree.leaves(made.rest, is_leaf=made.has)
        rest = [spec for x, spec in zip(places, requested, strict=True) if not made.has(x)]
        return made, [*rest, *[None] * len(made.buckets)]

    def _is_small(self, x: Any, spec: Any) -> bool:
        """Whether it may rest in a bucket: what the axes divide along no dim, and nothing else splits."""
        if not _is_array(x) or x.size < 2 or x.size * x.dtype.itemsize > self._most:
            return False
        before = requested_of(spec, x.shape, self.mesh)
        return not before.axes and split_further(before, x.shape, self._axes, self.mesh.shape) == before

    def _padded(self, x: Any, spec: Any) -> Any:
        if not _is_array(x):
            return x
        before = requested_of(spec, x.shape, self.mesh)
        shape = padded_shape(before, x.shape, self._axes, self.mesh.shape, self._mixed.get(x.shape, ()))
        return x if shape is None else padded_to(x, shape, self._axes)


def _is_array(x: Any) -> bool:
    """Whether it has numbers that can be padded: no scalar, no keys."""
    return bool(jnp.shape(x)) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _placed(make, shardings, tree: Any, mesh: Mesh | AbstractMesh, what: str) -> Any:
    """`make(tree)`, of arrays on their devices, in the `shardings`."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
        return jax.eval_shape(make, tree)
    if not _jax.is_eager(tree):
        return make(tree)
    require(
        isinstance(mesh, Mesh), f"mesh of {what}, for arrays,", mesh, "one with devices, or give it shapes"
    )
    return jax.jit(make, out_shardings=shardings())(tree)
