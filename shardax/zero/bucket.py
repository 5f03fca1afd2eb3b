"""Bucketed: a tree whose small arrays rest flat, one after the other, in one array for each dtype.

    biases of 13 and 3 numbers on 4 devices, in shards of 4:   a a a a | a a a a | a a a a | a b b b

By itself each of them would be padded, and be gathered and reduced alone. A bucket is padded once, and its
collectives are one. `shardax.zero.together` has steps compute with buckets where they would with their parts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.sharding import Axes

Shape = tuple[int, ...]

BUCKET = "zero_bucket"  # on the scopes of the equations that cut buckets, and that make them


@jax.tree_util.register_static
class InBucket:
    """Stands in a tree for an array that is part of a bucket: a pytree without leaves."""

    def __init__(self, shape: Shape, dtype: str):
        self.shape, self.dtype = shape, dtype

    def __repr__(self) -> str:
        return f"InBucket({self.dtype}{list(self.shape)})"

    def __eq__(self, other) -> bool:
        return isinstance(other, InBucket) and (self.shape, self.dtype) == (other.shape, other.dtype)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@jax.tree_util.register_pytree_with_keys_class
class Bucketed:
    """A tree at rest: `rest`, in which `InBucket` stands for the small arrays, and the `buckets` that have
    these in the order of the tree, by dtype.

    Attributes:
      rest: the tree. Its other arrays may be `Padded`.
      buckets: by the name of the dtype an array of one dim, `Padded` unless the devices divide it.
      axes: along which it is meant to rest.

    >>> tree = {"a": jnp.zeros(13), "b": jnp.zeros((3, 4)), "w": jnp.zeros((64, 64))}
    >>> bucketed(tree, [True, True, False])
    Bucketed({'a': InBucket(float32[13]), 'b': InBucket(float32[3, 4]), 'w': float32[64, 64]}, float32[25])
    """

    def __init__(self, rest: Any, buckets: Mapping[str, Any], axes: Axes = ()):
        self.rest, self.buckets, self.axes = rest, dict(buckets), tuple(axes)

    def __repr__(self) -> str:
        shown = (repr(_short(x)) for x in self.buckets.values())
        return f"Bucketed({', '.join([repr(jax.tree.map(_short, self.rest)), *shown])})"

    def tree_flatten_with_keys(self):
        keys = map(jax.tree_util.GetAttrKey, ("rest", "buckets"))
        return list(zip(keys, (self.rest, self.buckets), strict=True)), self.axes

    @classmethod
    def tree_unflatten(cls, axes: Axes, children) -> "Bucketed":
        bucketed = object.__new__(cls)  # where JAX has other things than a dict for the buckets
        bucketed.rest, bucketed.buckets, bucketed.axes = *children, axes
        return bucketed

    def members(self) -> dict[str, list[InBucket]]:
        """The parts of each bucket, in order."""
        parts: dict[str, list[InBucket]] = {dtype: [] for dtype in self.buckets}
        for x in jax.tree.leaves(self.rest, is_leaf=is_part):
            if is_part(x):
                parts[x.dtype].append(x)
        return parts

    def tree(self) -> Any:
        """The tree, all arrays in their own shapes; the buckets are not padded."""
        parts: dict[str, Iterator[Any]] = {
            dtype: iter(parts_of(self.buckets[dtype], [x.shape for x in members]))
            for dtype, members in self.members().items()
        }
        return jax.tree.map(lambda x: next(parts[x.dtype]) if is_part(x) else x, self.rest, is_leaf=is_part)


class _Short:
    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _short(x: Any) -> Any:
    return _Short(f"{x.dtype}{list(x.shape)}") if hasattr(x, "dtype") else x


def is_part(x: Any) -> bool:
    return isinstance(x, InBucket)


def is_bucketed(x: Any) -> bool:
    return isinstance(x, Bucketed)


def has_buckets(tree: Any) -> bool:
    return any(map(is_bucketed, jax.tree.leaves(tree, is_leaf=is_bucketed)))


def bucketed(tree: Any, small: Sequence[bool], axes: Axes = ()) -> Any:
    """The tree with some of its leaves in buckets, those that are `small`, where there are two of a dtype or
    more; the tree itself where there are none. Its leaves are arrays or their types.
    """
    leaves, structure = jax.tree.flatten(tree)
    by_dtype: dict[str, list[Any]] = {}
    for x, is_small in zip(leaves, small, strict=True):
        if is_small:
            by_dtype.setdefault(str(x.dtype), []).append(x)
    several = {dtype: xs for dtype, xs in by_dtype.items() if len(xs) > 1}
    if not several:
        return tree
    rest = [
        InBucket(x.shape, str(x.dtype)) if is_small and str(x.dtype) in several else x
        for x, is_small in zip(leaves, small, strict=True)
    ]
    return Bucketed(structure.unflatten(rest), {d: joined(xs) for d, xs in several.items()}, axes)


def joined(arrays: Sequence[Any]) -> Any:
    """One array of one dim, of arrays or of their types."""
    if isinstance(arrays[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((sum(math.prod(x.shape) for x in arrays),), arrays[0].dtype)
    with jax.named_scope(BUCKET):
        return lax.concatenate([lax.reshape(jnp.asarray(x), (math.prod(jnp.shape(x)),)) for x in arrays], 0)


def parts_of(flat: Any, shapes: Sequence[Shape]) -> list[Any]:
    """The arrays of these shapes of which `joined` made one: of a type types, of a NumPy array such."""
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    places = list(zip([0, *ends[:-1]], ends, shapes, strict=True))
    if isinstance(flat, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(shape, flat.dtype) for shape in shapes]
    if isinstance(flat, np.ndarray):
        return [flat[start:end].reshape(shape) for start, end, shape in places]
    with jax.named_scope(BUCKET):
        return [lax.reshape(lax.slice(flat, (start,), (end,)), shape) for start, end, shape in places]
