"""Dealt: an optimizer of matrices that updates equal ones together, each device some of them."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from shardax import _jax
from shardax.validation import require
from shardax.zero.wrapped import Transformation

Groups = dict[str, list[int]]
Shape = tuple[int, ...]
Update = Callable[[Any, Any, Any], tuple[Any, Any]]


def dealt(tx: Any, padded: bool = False) -> Any:
    """An optax optimizer that treats arrays of one shape as a stack of them, under `jax.vmap`.

    An optimizer that computes with whole matrices (Muon, Shampoo, SOAP) is replicated, or split within each
    product, where layers are separate arrays. Along a stack nothing needs to be sent: under `Zero` each
    device gets whole matrices, as equal a number as can be, and computes with these alone. Layers that are
    stacked already need it only if `tx` does not know stacks. The state is a dict of stacks by their type.
    What of it no array has a part in, as a count of steps, is computed once for a stack, so that a `lax.cond`
    on it, as of a new basis every few steps, computes one branch.

    Args:
      tx: an `optax.GradientTransformation` that treats each array by itself. What looks at all of them, such
        as clipping by the global norm, belongs outside, in `optax.chain(clip, dealt(tx))`.
      padded: one stack of all matrices of a dtype, whatever their shapes, each with zeros to the sizes of the
        largest, those of more rows than columns transposed. For a `tx` to which zero rows and columns make no
        difference, and which treats a matrix and its transpose alike, as `optax.contrib.scale_by_muon` does;
        what scales updates by their shapes belongs outside. It pays where devices are as many as all matrices
        (see `docs/zero.md`).

    Raises ValueError where `tx` is no such pair of functions.

    >>> import optax
    >>> params = [jnp.ones((4, 4)), 2 * jnp.ones((4, 4)), jnp.ones(3)]
    >>> tx = dealt(optax.scale_by_trust_ratio())  # |w| / |g| of each array
    >>> updates, _ = tx.update([jnp.ones_like(w) for w in params], tx.init(params), params)
    >>> [float(update.ravel()[0]) for update in updates]
    [1.0, 2.0, 1.0]
    """
    require(hasattr(tx, "init") and hasattr(tx, "update"), "tx of dealt", tx, "an optax optimizer")

    def init(params: Any) -> Any:
        return {shape: jax.vmap(tx.init)(stack) for shape, stack in _stacked(params, padded).items()}

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        def one(grads, state, params):
            return tx.update(grads, state, params, **extra)

        stacks = _stacked(grads, padded)
        trained = dict.fromkeys(stacks) if params is None else _stacked(params, padded)
        made = {x: _updated(tx.init, one, stacks[x], state[x], trained[x]) for x in stacks}
        updates = _unstacked({shape: new for shape, (new, _) in made.items()}, grads, padded)
        return updates, {shape: new for shape, (_, new) in made.items()}

    kind: Any = type(tx) if isinstance(tx, tuple) and len(tx) == 2 else Transformation
    return kind(init, update)


def _updated(init: Callable[..., Any], update: Update, grads: Array, state: Any, params: Any) -> Any:
    """The updates and the new state of a stack."""
    leaves, tree = jax.tree.flatten(state)
    types = jax.tree.map(_row, (grads, state, params))
    alike = _alike(init, update, *types)
    axes = tree.unflatten([None if x else 0 for x in alike])
    rows = tree.unflatten([x[0] if is_alike else x for x, is_alike in zip(leaves, alike, strict=True)])
    updates, new = jax.vmap(update, (0, axes, 0), (0, axes))(grads, rows, params)
    whole = [
        jnp.broadcast_to(x, (len(grads), *x.shape)) if is_alike else x
        for x, is_alike in zip(tree.flatten_up_to(new), alike, strict=True)
    ]
    return updates, tree.unflatten(whole)


def _alike(init: Callable[..., Any], update: Update, grads: Any, state: Any, params: Any) -> list[bool]:
    """Of each leaf of the state, whether all rows have the same: neither when it is made nor in any update an
    array has a part in it.
    """
    made = jax.make_jaxpr(init)(grads if params is None else params)
    program = jax.make_jaxpr(update)(grads, state, params)
    depends = _depend(made, [True])
    while True:
        known = [True, *depends, *([] if params is None else [True])]
        _, *new = _depend(program, known)
        grown = [a or b for a, b in zip(depends, new, strict=True)]
        if grown == depends:
            return [not x for x in depends]
        depends = grown


def _depend(program: Any, inputs: Sequence[bool]) -> list[bool]:
    """Of each result, whether it depends on any of these arguments."""
    found = {v for v, depends in zip(program.jaxpr.invars, inputs, strict=True) if depends}
    for eqn in program.jaxpr.eqns:
        if any(not _jax.is_literal(v) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return [not _jax.is_literal(v) and v in found for v in program.jaxpr.outvars]


def _row(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _row_shapes(leaves: list[Any], padded: bool) -> list[Shape]:
    """The shape of each array in its stack."""
    largest: dict[Any, Shape] = {}
    for x in leaves if padded else ():
        if x.ndim == 2:
            m, n = largest.get(x.dtype, (0, 0))
            largest[x.dtype] = max(m, min(x.shape)), max(n, *x.shape)
    return [largest[x.dtype] if padded and x.ndim == 2 else x.shape for x in leaves]


def _groups(leaves: list[Any], padded: bool) -> Groups:
    """The numbers of the arrays of each stack, by the type of a row, "f32[4,4]"."""
    groups: Groups = defaultdict(list)
    for number, (x, shape) in enumerate(zip(leaves, _row_shapes(leaves, padded), strict=True)):
        row = jax.ShapeDtypeStruct(shape, x.dtype)
        groups[jax.typeof(row).str_short(short_dtypes=True)].append(number)
    return groups


def _stacked(tree: Any, padded: bool) -> dict[str, Any]:
    leaves = jax.tree.leaves(tree)
    rows = list(map(_as_row, leaves, _row_shapes(leaves, padded)))
    groups = _groups(leaves, padded)
    return {name: jnp.stack([rows[n] for n in numbers]) for name, numbers in groups.items()}


def _unstacked(stacks: dict[str, Any], like: Any, padded: bool) -> Any:
    leaves, tree = jax.tree.flatten(like)
    made = list(leaves)
    for name, numbers in _groups(leaves, padded).items():
        for row, number in enumerate(numbers):
            made[number] = _of_row(stacks[name][row], leaves[number].shape)
    return tree.unflatten(made)


def _as_row(x: Any, shape: Shape) -> Any:
    """A matrix in another shape: on its side if it has more rows than columns, and padded with zeros."""
    if x.shape == shape:
        return x
    wide = x if x.shape[0] <= x.shape[1] else x.T
    return jnp.pad(wide, [(0, more - size) for more, size in zip(shape, wide.shape, strict=True)])


def _of_row(row: Any, shape: Shape) -> Any:
    """The array of this shape of which `_as_row` made a row."""
    if row.shape == shape:
        return row
    m, n = sorted(shape)
    return row[:m, :n] if shape == (m, n) else row[:m, :n].T
