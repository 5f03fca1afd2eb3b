"""init, pad: a state of which nothing is replicated along an axis, however large its arrays are."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardax import _jax
from shardax.annotations.annotate import broadcast_specs, is_spec
from shardax.sharding import Axes
from shardax.validation import require
from shardax.zero.padded import is_padded, padded_to
from shardax.zero.rest import padded_shape
from shardax.zero.transform import Zero
from shardax.zero.wrapped import check_mesh, requested_of, specs


def init(
    tx: Any,
    params: Any,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str | Axes = "data",
    stage: int = 1,
    requested: Any = None,
) -> tuple[Any, Any]:
    """The state `(params, tx.init(params))` as it rests under `Zero(axis, stage)`. Each array of the
    optimizer's state, and in stage 3 of the parameters, is split: what the axis divides along no dim is a
    `Padded`.

    A step with `Zero(axis, stage)` in its transforms takes and returns it, and sees true shapes. No device
    ever holds more of the optimizer's state than its shards.

    Args:
      tx: an optax optimizer.
      params: a tree of arrays, or of shapes (`jax.ShapeDtypeStruct`): then shapes come back.
      mesh: the devices, by default those of the context. It may be abstract where `params` are shapes.
      axis, stage: as of `Zero`.
      requested: the shardings of parameters besides, as in in_shardings: a prefix tree of specs. What has the
        shape of a parameter in the optimizer's state is split alike.

    Raises ValueError where the mesh has no such axis, or has no devices for arrays.

    >>> import optax
    >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")
    >>> params = {"w": shape(13, 101), "b": shape(101)}
    >>> params, (adam, _) = init(optax.adam(1e-3), params, AbstractMesh((8,), ("data",)))
    >>> adam.mu
    {'b': Padded(float32[101] as [104]), 'w': Padded(float32[13, 101] as [13, 104])}
    """
    zero = Zero(axis, stage)
    require(hasattr(tx, "init"), "tx of init", tx, "an optax optimizer")
    mesh = _mesh(mesh, zero.axes, "init")
    of_params = broadcast_specs(requested, params, "requested")
    by_shape = {x.shape: spec for x, spec in zip(jax.tree.leaves(params), of_params, strict=True)}
    of_state = jax.tree.map(lambda x: by_shape.get(x.shape), jax.eval_shape(tx.init, params))
    of_params = jax.tree.structure(params).unflatten(of_params)

    def make(params):
        rests = _padded(params, mesh, zero.axes, of_params) if stage == 3 else params
        return rests, _padded(tx.init(params), mesh, zero.axes, of_state)

    def rest(made):
        params, state = made
        if stage == 3:
            params = specs(params, mesh, zero.axes, of_params)
        else:
            leaves = zip(jax.tree.leaves(params), jax.tree.leaves(of_params, is_leaf=is_spec), strict=True)
            whole = [NamedSharding(mesh, requested_of(spec, x.shape, mesh).spec) for x, spec in leaves]
            params = jax.tree.structure(params).unflatten(whole)
        return params, specs(state, mesh, zero.axes, of_state)

    return _placed(make, rest, params, mesh, "init")


def pad(
    tree: Any, mesh: Mesh | AbstractMesh | None = None, axis: str | Axes = "data", requested: Any = None
) -> Any:
    """A tree of true shapes as it rests split: what the axis divides along no dim is a `Padded`, with one dim
    longer, which takes the fewest zeros; of three dims and more not the first, over which layers may be
    stacked. Arrays of one number stay as they are.

    For a state that no optax optimizer made, and for one that was restored from a checkpoint. Inside a
    function that makes a state, `specs` of what `jax.eval_shape` gives are its `out_shardings`.

    Args:
      tree: arrays, which are placed as `specs` says; or shapes; or, under `jax.jit`, what is being traced.
      mesh, axis, requested: as of `init`; `requested` is a prefix of `tree`.

    Raises ValueError where the mesh has no such axis, or has no devices for arrays.

    >>> mesh = AbstractMesh((8,), ("data",))
    >>> state = pad({"m": jax.ShapeDtypeStruct((7, 3), "float32")}, mesh)
    >>> state, specs(state, mesh)["m"].value.spec
    ({'m': Padded(float32[7, 3] as [8, 3])}, P('data', None))
    """
    axes = Zero(axis).axes
    mesh = _mesh(mesh, axes, "pad")
    of_leaves = jax.tree.structure(tree).unflatten(broadcast_specs(requested, tree, "requested"))
    return _placed(
        lambda tree: _padded(tree, mesh, axes, of_leaves),
        lambda made: specs(made, mesh, axes, of_leaves),
        tree,
        mesh,
        "pad",
    )


def _mesh(mesh: Mesh | AbstractMesh | None, axes: Axes, what: str) -> Mesh | AbstractMesh:
    mesh = mesh or _jax.context_mesh()
    check_mesh(axes, mesh, what)
    assert mesh is not None
    return mesh


def _padded(tree: Any, mesh: Mesh | AbstractMesh, axes: Axes, requested: Any) -> Any:
    def padded(spec, x):
        if is_padded(x) or not jnp.shape(x) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        shape = padded_shape(requested_of(spec, x.shape, mesh), x.shape, axes, mesh.shape)
        return x if shape is None else padded_to(x, shape, axes)

    return jax.tree.map(padded, requested, tree, is_leaf=is_spec)


def _placed(make, rest, tree: Any, mesh: Mesh | AbstractMesh, what: str) -> Any:
    """`make(tree)`, of arrays on their devices as `rest` says of its shapes."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
        return jax.eval_shape(make, tree)
    if not _jax.is_eager(tree):
        return make(tree)
    require(
        isinstance(mesh, Mesh), f"mesh of {what}, for arrays,", mesh, "one with devices, or give it shapes"
    )
    return jax.jit(make, out_shardings=rest(jax.eval_shape(make, tree)))(tree)
