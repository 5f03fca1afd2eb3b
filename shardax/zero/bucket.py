"""Bucketed: a tree whose small arrays rest flat, one after the other, in one array for each dtype.

    biases of 13 and 3 numbers on 4 devices, in shards of 4:   a a a a | a a a a | a a a a | a b b b

By itself each of them would be padded, and be gathered and reduced alone. A bucket is padded once, and its
collectives are one. `shardax.zero.together` has steps compute with buckets where they would with their parts.

Matrices with which an optimizer computes alike may rest in one array too, as a stack: of shape [count, m, n].
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
    """Stands in a tree for an array that is part of the bucket of this name: a pytree without leaves."""

    def __init__(self, shape: Shape, dtype: str, name: str = ""):
        self.shape, self.dtype, self.name = shape, dtype, name or dtype

    def __repr__(self) -> str:
        return f"InBucket({self.dtype}{list(self.shape)})"

    def __eq__(self, other) -> bool:
        return isinstance(other, InBucket) and self._told == other._told

    def __hash__(self) -> int:
        return hash(self._told)

    @property
    def _told(self) -> tuple[Shape, str, str]:
        return self.shape, self.dtype, self.name

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@jax.tree_util.register_pytree_with_keys_class
class Bucketed:
    """A tree at rest: `rest`, in which `InBucket` stands for some of the arrays, and the `buckets` that have
    these in the order of the tree.

    Attributes:
      rest: the tree. Its other arrays may be `Padded`, and parts of it `Bucketed`.
      buckets: by the name of the dtype small arrays in one of one dim, `Padded` unless the devices divide it;
        by another name a stack of arrays of one shape, always `Padded`.
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
        parts: dict[str, list[InBucket]] = {name: [] for name in self.buckets}
        for x in jax.tree.leaves(self.rest, is_leaf=self.has):
            if self.has(x):
                parts[x.name].append(x)
        return parts

    def has(self, x: Any) -> bool:
        """Whether it stands for a part of one of these buckets."""
        return is_part(x) and x.name in self.buckets

    def tree(self) -> Any:
        """The tree, what is in these buckets in its own shapes; the buckets are not padded."""
        parts: dict[str, Iterator[Any]] = {
            name: iter(parts_of(self.buckets[name], [x.shape for x in members]))
            for name, members in self.members().items()
        }
        return jax.tree.map(lambda x: next(parts[x.name]) if self.has(x) else x, self.rest, is_leaf=self.has)


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


def stacks(tree: Any, groups: Sequence[Sequence[int]], axes: Axes = ()) -> Any:
    """The tree with some of its leaves in stacks, those of each group, by their numbers, in one; the tree
    itself where there are none. Its leaves are arrays or their types.

    >>> tree = {"a": jnp.zeros((3, 4)), "b": jnp.zeros((3, 4)), "c": jnp.zeros(3)}
    >>> stacks(tree, [[0, 1]])
    Bucketed({'a': InBucket(float32[3, 4]), 'b': InBucket(float32[3, 4]), 'c': float32[3]}, float32[2, 3, 4])
    """
    if not groups:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    buckets, rest = {}, list(leaves)
    for number, group in enumerate(groups):
        name = f"stack {number}"
        buckets[name] = joined([leaves[k] for k in group], is_stack=True)
        for k in group:
            rest[k] = InBucket(leaves[k].shape, str(leaves[k].dtype), name)
    return Bucketed(structure.unflatten(rest), buckets, axes)


def joined(arrays: Sequence[Any], is_stack: bool = False) -> Any:
    """One array of one dim, or a stack, of arrays or of their types."""
    shapes = [(1, *x.shape) if is_stack else (math.prod(jnp.shape(x)),) for x in arrays]
    if isinstance(arrays[0], jax.ShapeDtypeStruct):
        size = sum(shape[0] for shape in shapes)
        return jax.ShapeDtypeStruct((size, *shapes[0][1:]), arrays[0].dtype)
    with jax.named_scope(BUCKET):
        rows = [lax.reshape(jnp.asarray(x), shape) for x, shape in zip(arrays, shapes, strict=True)]
        return lax.concatenate(rows, 0)


def parts_of(whole: Any, shapes: Sequence[Shape]) -> list[Any]:
    """The arrays of these shapes of which `joined` made one: of a type types, of a NumPy array such."""
    is_stack = len(whole.shape) > 1
    ends = np.cumsum([1 if is_stack else math.prod(shape) for shape in shapes]).tolist()
    places = list(zip([0, *ends[:-1]], ends, shapes, strict=True))
    if isinstance(whole, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(shape, whole.dtype) for shape in shapes]
    if isinstance(whole, np.ndarray):
        return [whole[start:end].reshape(shape) for start, end, shape in places]
    with jax.named_scope(BUCKET):
        rows = (lax.slice_in_dim(whole, start, end) for start, end, _ in places)
        return [lax.reshape(row, shape) for row, shape in zip(rows, shapes, strict=True)]
