"""Padded: what an axis divides along no dim rests with a tail of zeros, which no function ever sees.

    a bias of 13 numbers on 8 devices, in shards of 2:   x x | x x | x x | x x | x x | x x | x 0 | 0 0

At rest an array is split evenly or not at all. `pad` makes one of its dims longer; `unpad` cuts it again, at
the entry of a step. Inside, the partitioner knows uneven dims: it cuts nothing, and sends nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax import _jax
from shardax.sharding import Axes
from shardax.zero.branches import buckets_in
from shardax.zero.bucket import Bucketed, is_bucketed, is_part, joined

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


def is_resting(x: Any) -> bool:
    """Whether it is in another form than functions have it: an array that is padded, a tree with buckets."""
    return is_padded(x) or is_bucketed(x)


def has_padded(tree: Any) -> bool:
    return any(map(is_resting, jax.tree.leaves(tree, is_leaf=is_resting)))


def unpad(tree: Any) -> Any:
    """The tree with arrays in their true shapes, those in buckets too; what is not padded stays.

    This is the tree that a checkpoint should have. What was padded is whole on each device then; of
    `jax.device_get(tree)` it makes NumPy arrays. Takes shapes (`jax.ShapeDtypeStruct`) too.

    >>> state = {"w": Padded(jnp.zeros((16, 4)), (13, 4), ("data",)), "count": jnp.zeros(())}
    >>> jax.tree.map(jnp.shape, unpad(state), is_leaf=lambda x: hasattr(x, "shape"))
    {'count': (), 'w': (13, 4)}
    """
    cut = jax.tree.map(lambda x: _cut(x) if is_padded(x) else x, tree, is_leaf=is_padded)
    return jax.tree.map(lambda x: unpad(x.tree()) if is_bucketed(x) else x, cut, is_leaf=is_bucketed)


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


class Name(NamedTuple):
    """Of an argument or a part of it: in words, and the last key of its path, "" where that is a number or
    unknown.
    """

    words: str
    key: str


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
        named = {Name(f"argument {i}", ""): x for i, x in enumerate(args)}
        named |= {Name(f"argument {name}", name): x for name, x in kwargs.items()}
        check_axes(named, axes, what)
        args_, kwargs_ = unpad((args, kwargs))
        return padded_like(function(*args_, **kwargs_), named)

    return run


def check_axes(named: dict[Name, Any], axes: Axes, what: str) -> None:
    for name, tree in named.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_resting):
            if is_resting(x) and set(x.axes) != set(axes):
                raise ValueError(
                    f"{name.words}{jax.tree_util.keystr(path)} is padded for {_axis(x.axes)}, "
                    f"and axis of {what} is {_axis(axes)}: sx.zero.unpad the state, and sx.zero.pad it for "
                    "that axis"
                )


def _axis(axes: Axes) -> str:
    return repr(axes[0] if len(axes) == 1 else axes)


class _Done:
    """A part of the results that is as it has to be: a leaf of the tree around it."""

    def __init__(self, tree: Any):
        self.tree = tree


def padded_like(results: Any, arguments: dict[Name, Any]) -> Any:
    """Results, of which what has the structure of an argument is padded as that is. Where no result has it,
    the parts of the argument are looked for one by one.

    Of several with one structure those go together that have one name, then the others in their order.
    Raises ValueError where that leaves open what succeeds a padded argument.
    """
    level = arguments
    while any(map(has_padded, level.values())):
        alike: dict[Any, list[Name]] = {}
        for name, x in level.items():
            alike.setdefault(_form(x), []).append(name)
        parts: dict[Name, Any] = {}
        for form, names in alike.items():
            likes = {name: level[name] for name in names}
            if any(map(has_padded, likes.values())):
                results, found = _replaced(results, form, likes)
                parts |= {} if found else _parts(likes)
        level = parts
    return jax.tree.map(lambda x: x.tree if isinstance(x, _Done) else x, results)


def _form(tree: Any) -> tuple[Any, tuple[Shape, ...]]:
    """The structure and the true shapes."""
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), getattr(x, "dtype", "float32")), tree)
    leaves, structure = jax.tree.flatten(unpad(types))
    return structure, tuple(x.shape for x in leaves)


def _replaced(results: Any, form: Any, likes: dict[Name, Any]) -> tuple[Any, bool]:
    """The results, of which those of this form are padded as the arguments are, and whether there are any."""

    def matches(x: Any) -> bool:
        return not isinstance(x, _Done) and jax.tree.structure(x) == form[0] and _form(x) == form

    pairs, tree = jax.tree.flatten_with_path(results, is_leaf=lambda x: isinstance(x, _Done) or matches(x))
    leaves = [x for _, x in pairs]
    found = {i: _key(path) for i, (path, x) in enumerate(pairs) if matches(x)}
    for name, i in _paired(likes, found):
        leaves[i] = _Done(padded_as(leaves[i], likes[name]))
    return tree.unflatten(leaves), bool(found)


def _key(path: Any) -> str:
    """The last key, "" of a number: what is the second in one tuple may be the third in another."""
    key = jax.tree_util.keystr(path[-1:], simple=True)
    return "" if key.isdigit() else key


def _paired(likes: dict[Name, Any], found: dict[int, str]) -> Iterator[tuple[Name, int]]:
    """Arguments with the numbers of the results that succeed them; `found` has the last keys of these."""
    left, free = list(likes), list(found)
    for name in likes:
        same = [i for i in free if name.key and found[i] == name.key]
        if len(same) == 1:
            yield name, same[0]
            left.remove(name)
            free.remove(same[0])
    unclear = [name for name in left if is_resting(likes[name]) or free and has_padded(likes[name])]
    if unclear and len(free) != len(left):
        raise ValueError(
            f"{unclear[0].words} rests padded, and {len(found) or 'no'} results have the structure and "
            f"shapes of {', '.join(name.words for name in likes)}: return new state in the tree in which the "
            "old one came, or in a dict with the same keys; where a function has no new state, it may begin "
            "with sx.zero.unpad"
        )
    yield from zip(left, free, strict=False)


def padded_as(tree: Any, like: Any) -> Any:
    """A tree of true shapes, padded and in buckets as one of its structure is."""

    def rests(like: Any, x: Any) -> Any:
        if is_padded(like):
            return padded_to(x, like.value.shape, like.axes)
        return _bucketed_as(x, like) if is_bucketed(like) else x

    return jax.tree.map(rests, like, tree, is_leaf=is_resting)


def _bucketed_as(tree: Any, like: Bucketed) -> Bucketed:
    """First what is within, in which arrays stay that are in a bucket around it, then these buckets."""

    def within(like: Any, x: Any) -> Any:
        return padded_as(x, like) if is_resting(like) else x

    tree = jax.tree.map(within, like.rest, tree, is_leaf=lambda x: is_part(x) or is_resting(x))
    places, structure = jax.tree.flatten(like.rest, is_leaf=is_part)
    rest, parts = structure.flatten_up_to(tree), {name: [] for name in like.buckets}
    for i, place in enumerate(places):
        if like.has(place):
            parts[place.name].append(rest[i])
            rest[i] = place
    buckets = {name: padded_as(joined(parts[name], len(x.shape) > 1), x) for name, x in like.buckets.items()}
    return Bucketed(structure.unflatten(rest), buckets, like.axes)


def _parts(trees: dict[Name, Any]) -> dict[Name, Any]:
    """The children of nodes in which something is padded."""
    return {
        Name(name.words + jax.tree_util.keystr(path), _key(path)): child
        for name, tree in trees.items()
        if has_padded(tree)
        for path, child in jax.tree.leaves_with_path(tree, is_leaf=lambda x, tree=tree: x is not tree)
    }


def cuts(jaxpr) -> dict[int, Shape]:
    """By the number of an argument of a closed jaxpr that is padded, or is a bucket, its true shape."""
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
    whole = buckets_in(jaxpr.jaxpr.eqns).cut
    return found | {numbers[v]: v.aval.shape for v in whole if v in numbers}


def is_cut(eqn) -> bool:
    """Whether an equation takes an array out of one that is padded."""
    return eqn.primitive.name == "slice" and CUT in str(eqn.source_info.name_stack)


def is_tail(name: str, scope: Any) -> bool:
    """Whether a primitive of this name in this scope makes a padded array."""
    return name == "pad" and CUT in str(scope)


def is_cut_or_tail(name: str, scope: Any) -> bool:
    """Whether it takes an array out of one that is padded, or makes one."""
    return name in ("pad", "slice") and CUT in str(scope)
