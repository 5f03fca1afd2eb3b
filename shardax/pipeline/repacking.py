"""pack and unpack: parameters as they rest on stages, and as they are.

Both are equations of a program, each the transpose of the other, by which a pipeline finds in it what rests
packed, and which gradients are to be packed. For everybody else they are the slices and pads that they stand
for.

    unpack   arrays at rest    -> leaves of the parameters
    pack     leaves            -> arrays at rest, zeros where a stage lacks something
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from shardax.annotations.explicit import shape_of
from shardax.pipeline.packed import FLAT, STACKED, WHOLE, Packed, PackedArray, Packing, Part
from shardax.validation import require


def pack(tree: Any, packing: Packing) -> Any:
    """Parameters as they rest on stages: wherever `tree` has a tree like the parameters, a `Packed` of it.

    So it packs parameters, and an optimizer's state with its moments. Under `shard_jit` with
    `out_shardings`, no device has them all; under `jax.eval_shape` it takes shapes.

    Args:
      tree: arrays. Moments may have dtypes of their own.
      packing: `sx.pipeline.packing(...)`.

    Raises ValueError where `tree` has nothing like the parameters.

    >>> from jax.sharding import AbstractMesh, AxisType
    >>> import shardax as sx
    >>> def loss(layers, x):
    ...     for w in layers:
    ...         x = jnp.tanh(x @ w)
    ...     return x.mean()
    >>> grad = sx.pipeline.value_and_grad(loss, microbatches=4)
    >>> layers, x = [jnp.ones((2, 2))] * 8, jnp.ones((8, 2))
    >>> mesh = AbstractMesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    >>> packed = pack(layers, sx.pipeline.packing(grad, layers, x, mesh=mesh))
    >>> packed
    Packed(0 and 3 more, array 0: float32[4, 2, 2], 1 and 3 more, array 1: float32[4, 2, 2])
    >>> len(unpack(packed))
    8
    """
    require(isinstance(packing, Packing), "packing of pack", packing, "what sx.pipeline.packing returns")
    found = []

    def change(x):
        if not packing.is_like(x):
            return x
        found.append(x)
        return Packed(packed(list(map(jnp.asarray, jax.tree.leaves(x))), packing), packing)

    made = jax.tree.map(change, tree, is_leaf=packing.is_like)
    if not found:
        raise ValueError(
            f"nothing in the tree has the structure and shapes of the parameters ({_described(packing)}); "
            f"found {jax.tree.structure(tree)}"
        )
    return made


def unpack(tree: Any) -> Any:
    """The tree with what is packed in it as it was before `pack`; what is not packed stays.

    A checkpoint of it is restored to any number of stages, or none. In a loss that `sx.pipeline.Pipeline`
    takes the gradient of, each stage reads what it has, and nothing is sent. See `pack`.
    """

    def change(x):
        return jax.tree.unflatten(x.packing.tree, unpacked(x)) if _is_packed(x) else x

    return jax.tree.map(change, tree, is_leaf=_is_packed)


def _is_packed(x: Any) -> bool:
    return isinstance(x, Packed)


def _described(packing: Packing) -> str:
    return ", ".join(
        f"{name}: {list(shape)}" for name, shape in zip(packing.names[:3], packing.shapes, strict=False)
    ) + (", ..." if len(packing.names) > 3 else "")


def array_of(each: PackedArray, leaves: Sequence[Array]) -> Array:
    """An array at rest, of the leaves of the parameters."""
    if each.kind == WHOLE:
        return leaves[each.parts[0][0].leaf]
    dtypes = {leaves[part.leaf].dtype for parts in each.parts for part in parts}
    if len(dtypes) > 1:
        raise ValueError(
            f"leaves that rest in one array have dtypes {', '.join(sorted(map(str, dtypes)))}; expected one"
        )
    (dtype,) = dtypes
    if (leaf := _in_order(each, [np.shape(x) for x in leaves])) is not None:
        return leaves[leaf].reshape(len(each.parts), *each.shape)
    row = _flat_row if each.kind == FLAT else _stacked_row
    return jnp.stack([row(each, parts, leaves, dtype) for parts in each.parts])


def _flat_row(each: PackedArray, parts, leaves, dtype) -> Array:
    flat = [leaves[part.leaf].reshape(-1) for part in parts]
    missing = each.shape[0] - sum(x.size for x in flat)
    return jnp.concatenate([*flat, jnp.zeros(missing, dtype)])


def _stacked_row(each: PackedArray, parts, leaves, dtype) -> Array:
    if not parts:
        return jnp.zeros(each.shape, dtype)
    leaf = leaves[parts[0].leaf]
    if parts[0].rows is None:
        return leaf
    own = leaf[slice(*parts[0].rows)]
    missing = each.shape[0] - own.shape[0]
    return jnp.pad(own, [(0, missing)] + [(0, 0)] * (own.ndim - 1)) if missing else own


def _in_order(each: PackedArray, shapes: Sequence[tuple[int, ...]]) -> int | None:
    """The leaf that an array is all rows of, in their order and in equal shares; None: it is none such."""
    parts = [part for parts in each.parts for part in parts]
    leaf = parts[0].leaf
    if each.kind != STACKED or parts[0].rows is None or {part.leaf for part in parts} != {leaf}:
        return None
    share = each.shape[0]
    rows = [(d * share, (d + 1) * share) for d in range(len(each.parts))]
    return leaf if [part.rows for part in parts] == rows and rows[-1][1] == shapes[leaf][0] else None


def leaves_of(packed: Packed) -> list[Array]:
    """The leaves of the parameters."""
    packing = packed.packing
    found: list[list[tuple[int, Callable[[], Array]]]] = [[] for _ in packing.shapes]
    for each, x in zip(packing.arrays, packed.arrays, strict=True):
        if (leaf := _in_order(each, packing.shapes)) is not None:
            found[leaf].append((0, partial(jnp.reshape, x, packing.shapes[leaf])))
            continue
        for d, parts in enumerate(each.parts):
            for part in parts:
                rows = part.rows or (0, 0)
                made = partial(_part, each, x, d, part, packing.shapes[part.leaf])
                found[part.leaf].append((rows[0], made))
    leaves = []
    for some in found:
        made = [make() for _, make in sorted(some, key=lambda pair: pair[0])]
        leaves.append(made[0] if len(made) == 1 else jnp.concatenate(made))
    return leaves


def _part(each: PackedArray, x: Array, d: int, part: Part, shape: tuple[int, ...]) -> Array:
    if each.kind == WHOLE:
        return x
    if each.kind == FLAT:
        return x[d, part.start : part.start + math.prod(shape)].reshape(shape)
    return x[d] if part.rows is None else x[d, : part.rows[1] - part.rows[0]]


# As equations


unpack_p = Primitive("unpack")
unpack_p.multiple_results = True
"""unpack *arrays: the leaves of the parameters that rest as `packing` says."""

pack_p = Primitive("pack")
pack_p.multiple_results = True
"""pack *leaves: the arrays in which they rest."""


def unpacked(tree: Packed) -> list[Array]:
    """The leaves of the parameters, as an equation that a pipeline finds."""
    return _bind(unpack_p, tree.arrays, tree.packing)


def packed(leaves: Sequence[Array], packing: Packing) -> list[Array]:
    """The arrays in which leaves rest, likewise."""
    return _bind(pack_p, leaves, packing)


def _bind(primitive: Primitive, operands: Sequence[Array], packing: Packing) -> list[Array]:
    types = jax.sharding.get_abstract_mesh().axis_types or ()
    if any(type_ is not AxisType.Auto for type_ in types):  # types of results have shardings then
        return PROGRAMS[primitive](*operands, packing=packing)
    return primitive.bind(*operands, packing=packing)


def _unpack(*arrays, packing: Packing) -> list[Array]:
    return leaves_of(Packed(arrays, packing))


def _pack(*leaves, packing: Packing) -> list[Array]:
    return [array_of(each, leaves) for each in packing.arrays]


PROGRAMS = {unpack_p: _unpack, pack_p: _pack}


def types_of(primitive: Primitive, *operands, packing: Packing) -> list[Any]:
    """Of what an equation makes."""
    return jax.make_jaxpr(partial(PROGRAMS[primitive], packing=packing))(*map(shape_of, operands)).out_avals


def _define(primitive: Primitive, inverse: Primitive) -> None:
    program = PROGRAMS[primitive]

    def transpose(cotangents, *_, packing: Packing):
        return inverse.bind(*map(ad.instantiate_zeros, cotangents), packing=packing)

    def batch(operands, dims, packing: Packing):
        made = jax.vmap(partial(program, packing=packing), dims)(*operands)
        return made, [0] * len(made)

    primitive.def_impl(program)
    primitive.def_abstract_eval(partial(types_of, primitive))
    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(program, multiple_results=True))


_define(unpack_p, pack_p)
_define(pack_p, unpack_p)
