"""Padded: what an axis divides along no dim rests with a tail of zeros, which no function ever sees.

    a bias of 13 numbers on 8 devices, in shards of 2:   x x | x x | x x | x x | x x | x x | x 0 | 0 0

At rest an array is split evenly or not at all. `pad` makes one of its dims longer; `unpad` cuts it again, at
the entry of a step. Inside, the partitioner knows uneven dims: it cuts nothing, and sends nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax import _jax
from shardax.sharding import Axes

Shape = tuple[int, ...]

CUT = "zero_padding"  # on the scopes of the equations that `unpad` and `pad` make


@jax.tree_util.register_pytree_with_keys_class
class Padded:
    """An array at rest, and what it is an array of: a pytree with one leaf, `value`.

    Attributes:
      value: the array with its tail of zeros, or whatever a tree like the state has for it: a shape, a
        sharding.
      shape: without the tail.
      axes: along which it is meant to rest.

    >>> Padded(jnp.zeros(16), (13,), ("data",))
    Padded(float32[13] as [16])
    """

    def __init__(self, value: Any, shape: Shape, axes: Axes):
        self.value, self.shape, self.axes = value, tuple(shape), tuple(axes)

    def __repr__(self) -> str:
        if not hasattr(self.value, "dtype"):
            return f"Padded({list(self.shape)}: {self.value})"
        return f"Padded({self.value.dtype}{list(self.shape)} as {list(self.value.shape)})"

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("value"), self.value)], (self.shape, self.axes)

    @classmethod
    def tree_unflatten(cls, told: tuple[Shape, Axes], children) -> "Padded":
        (value,) = children
        return cls(value, *told)


def is_padded(x: Any) -> bool:
    return isinstance(x, Padded)


def has_padded(tree: Any) -> bool:
    return any(map(is_padded, jax.tree.leaves(tree, is_leaf=is_padded)))


def unpad(tree: Any) -> Any:
    """The tree with arrays in their true shapes; what is not padded stays.

    This is the tree that a checkpoint should have. What was padded is whole on each device then; of
    `jax.device_get(tree)` it makes NumPy arrays. Takes shapes (`jax.ShapeDtypeStruct`) too.

    >>> state = {"w": Padded(jnp.zeros((16, 4)), (13, 4), ("data",)), "count": jnp.zeros(())}
    >>> jax.tree.map(jnp.shape, unpad(state), is_leaf=lambda x: hasattr(x, "shape"))
    {'count': (), 'w': (13, 4)}
    """
    return jax.tree.map(lambda x: _cut(x) if is_padded(x) else x, tree, is_leaf=is_padded)


def _cut(x: Padded) -> Any:
    if isinstance(x.value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.value.dtype)
    if isinstance(x.value, np.ndarray):
        return x.value[tuple(map(slice, x.shape))]
    with jax.named_scope(CUT):
        return lax.slice(x.value, (0,) * len(x.shape), x.shape)


def padded_to(x: Any, shape: Shape, axes: Axes) -> Padded:
    """An array, or its type, with zeros up to a shape."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return Padded(jax.ShapeDtypeStruct(shape, x.dtype), x.shape, axes)
    x = jnp.asarray(x)
    tail = [(0, to - size, 0) for to, size in zip(shape, x.shape, strict=True)]
    with jax.named_scope(CUT):
        return Padded(lax.pad(x, jnp.zeros((), x.dtype), tail), x.shape, axes)


def around(function: Callable[..., Any], axes: Axes, what: str) -> Callable[..., Any]:
    """The function of true shapes, as one of arguments some of which are padded. What it returns in the
    structure of such an argument, or of a part of it, is padded alike.

    Raises ValueError where something is padded for other axes than those of `what`.

    >>> state = {"m": Padded(jnp.arange(4.0), (3,), ("data",)), "count": jnp.zeros(())}
    >>> new, total = around(lambda state: (state, state["m"].sum()), ("data",), "Zero")(state)
    >>> new, float(total)
    ({'count': Array(0., dtype=float32), 'm': Padded(float32[3] as [4])}, 3.0)
    """

    def run(*args, **kwargs):
        if not has_padded((args, kwargs)):
            return function(*args, **kwargs)
        named = {f"argument {i}": x for i, x in enumerate(args)} | kwargs
        check_axes(named, axes, what)
        args_, kwargs_ = unpad((args, kwargs))
        return padded_like(function(*args_, **kwargs_), named)

    return run


def check_axes(named: dict[str, Any], axes: Axes, what: str) -> None:
    for name, tree in named.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_padded):
            if is_padded(x) and set(x.axes) != set(axes):
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)} is padded for {_axis(x.axes)}, and axis of {what} "
                    f"is {_axis(axes)}: sx.zero.unpad the state, and sx.zero.pad it for that axis"
                )


def _axis(axes: Axes) -> str:
    return repr(axes[0] if len(axes) == 1 else axes)


class _Done:
    """A part of the results that is as it has to be: a leaf of the tree around it."""

    def __init__(self, tree: Any):
        self.tree = tree


def padded_like(results: Any, arguments: dict[str, Any]) -> Any:
    """Results, of which what has the structure of an argument is padded as that is. Where no result has it,
    the parts of the argument are looked for one by one.

    Raises ValueError where none is found, or a single array is like several.
    """
    level = {name: x for name, x in arguments.items() if has_padded(x)}
    while level:
        parts = {}
        for name, like in level.items():
            results, found = _replaced(results, like, name)
            if not found:
                parts.update(_parts(name, like))
        level = parts
    return jax.tree.map(lambda x: x.tree if isinstance(x, _Done) else x, results)


def _replaced(results: Any, like: Any, name: str) -> tuple[Any, bool]:
    """The results, the first that is like an argument padded as that, and whether there is one."""
    structure, shapes = _form(like)

    def matches(x: Any) -> bool:
        return jax.tree.structure(x) == structure and [jnp.shape(y) for y in jax.tree.leaves(x)] == shapes

    leaves, tree = jax.tree.flatten(results, is_leaf=lambda x: isinstance(x, _Done) or matches(x))
    found = [i for i, x in enumerate(leaves) if not isinstance(x, _Done) and matches(x)]
    if is_padded(like) and len(found) != 1:
        raise ValueError(
            f"{name} rests padded, {like}, and {len(found) or 'no'} results have that shape: return what "
            "succeeds it in a tree of the structure of the argument that it came in (sx.zero.unpad gives "
            "arrays in their true shapes)"
        )
    if found:
        leaves[found[0]] = _Done(padded_as(leaves[found[0]], like))
    return tree.unflatten(leaves), bool(found)


def _form(like: Any) -> tuple[Any, list[Shape]]:
    leaves, structure = jax.tree.flatten(like, is_leaf=is_padded)
    return structure, [x.shape if is_padded(x) else jnp.shape(x) for x in leaves]


def padded_as(tree: Any, like: Any) -> Any:
    """A tree of true shapes, padded as one of its structure is."""
    leaves, structure = jax.tree.flatten(like, is_leaf=is_padded)
    pairs = zip(jax.tree.leaves(tree), leaves, strict=True)
    return structure.unflatten(padded_to(x, y.value.shape, y.axes) if is_padded(y) else x for x, y in pairs)


def _parts(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """The children of a node, by their paths, of which something is padded."""
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    for path, child in children:
        if has_padded(child):
            yield name + jax.tree_util.keystr(path), child


def cuts(jaxpr) -> dict[int, Shape]:
    """By the number of an argument of a closed jaxpr that is padded its true shape."""
    numbers = {v: i for i, v in enumerate(jaxpr.jaxpr.invars)}
    found = {}
    for eqn in jaxpr.jaxpr.eqns:
        number = next((numbers[v] for v in eqn.invars if not _jax.is_literal(v) and v in numbers), None)
        if number is None:
            continue
        if is_cut(eqn):
            found[number] = eqn.outvars[0].aval.shape
        elif eqn.primitive.name in ("annotate", "device_put"):
            numbers[eqn.outvars[0]] = number
    return found


def is_cut(eqn) -> bool:
    """Whether an equation takes an array out of one that is padded."""
    return eqn.primitive.name == "slice" and CUT in str(eqn.source_info.name_stack)


def is_tail(name: str, scope: Any) -> bool:
    """Whether a primitive of this name in this scope makes a padded array."""
    return name == "pad" and CUT in str(scope)
