"""Weights at rest where their stages are: `pack`, `unpack`, and the `Packing` that says which rests where.

    of the parameters                                rests as
    rows of stacked layers, chunk by chunk           [stages, rows of the longest, ...]
    what one stage alone reads, of one shape         [stages, ...]
      on most stages
    what else one stage alone reads                  [stages, numbers of the fullest], one for each dtype
    what several stages share, and all else          as it is

What a stage lacks is zeros.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, PartitionSpec, use_abstract_mesh

STACKED, FLAT, WHOLE = "stacked", "flat", "whole"


class Part(NamedTuple):
    """Leaf `leaf` of the parameters, or rows of it; of a flat array, from number `start` on."""

    leaf: int
    rows: tuple[int, int] | None = None
    start: int = 0


@dataclass(frozen=True)
class Resting:
    """One array at rest.

    Attributes:
      kind: "stacked", "flat", or "whole": a leaf as it is.
      parts: for each stage the leaves that it has here; one tuple alone of what is whole.
      shape, dtype: of one stage's part.
      spec: of the other dims.
    """

    kind: str
    parts: tuple[tuple[Part, ...], ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec


PACKING = "packing"  # the attribute by which `packing` asks a function of `value_and_grad` or `apply`


def packing(
    function: Callable[..., Any], *args: Any, mesh: Any = None, specs: Any = None, labels: Any = None
) -> "Packing":
    """How the parameters of a pipelined function rest so that each stage has its own.

    Args:
      function: of `sx.pipeline.value_and_grad` or `apply`.
      args: what it is called with, all by position; shapes are enough.
      mesh: on which it will run, if it is not in context. It may be abstract.
      specs: a tree like the parameters, of the PartitionSpecs along other axes that the stages' own tensors
        have (None: whole); of a stack of layers the whole spec, its first dim None. What is split so rests in
        no flat array.
      labels: a tree like the parameters; leaves with different labels rest in different arrays.

    Returns a `Packing`, for `sx.pipeline.pack`; `.specs` says how what it packs is split.

    Raises ValueError where the function is not a pipelined one, or `argnums` has several arguments.

    >>> from jax.sharding import AbstractMesh, AxisType
    >>> import shardax as sx
    >>> def loss(params, x):
    ...     x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x @ params["in"], params["layers"])
    ...     return x.sum()
    >>> grad = sx.pipeline.value_and_grad(loss, microbatches=4, schedule="interleaved")
    >>> params = {"in": jnp.ones((2, 2)), "layers": jnp.ones((16, 2, 2))}
    >>> mesh = AbstractMesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    >>> packing(grad, params, jnp.ones((8, 2)), mesh=mesh).specs
    Packed(layers, array 0: P('stage', None), layers, array 1: P('stage', None), in: P())
    """
    ask = getattr(function, PACKING, None)
    if ask is None:
        raise ValueError(
            f"{getattr(function, '__name__', function)!r} is not pipelined; expected what "
            "sx.pipeline.value_and_grad or sx.pipeline.apply returned"
        )
    found = []

    def run(*args):
        found.append(ask(args, (specs, labels)))

    with contextlib.nullcontext() if mesh is None else use_abstract_mesh(_abstract(mesh)):
        jax.eval_shape(run, *args)
    return found[-1]


def _abstract(mesh: Any) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


@dataclass(frozen=True)
class Packing:
    """How a tree of parameters rests on the stages of a mesh axis. Made by `sx.pipeline.packing`.

    Attributes:
      tree: of the parameters. `shapes`, `dtypes`, `names`: of its leaves.
      arrays: at rest.
      axis, stages: of the mesh.
    """

    tree: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    names: tuple[str, ...]
    arrays: tuple[Resting, ...]
    axis: str
    stages: int

    @property
    def specs(self) -> "Packed":
        """The PartitionSpec of each array, for `in_shardings` and `out_shardings`."""
        return Packed([_spec(each, self.axis) for each in self.arrays], self)

    def specs_of(self, tree: Any) -> Any:
        """`specs` wherever `tree`, an optimizer's state say, has a tree like the parameters, else P()."""
        like = partial(_is_like, self)
        return jax.tree.map(lambda x: self.specs if like(x) else PartitionSpec(), tree, is_leaf=like)

    def labels(self, tree: Any) -> "Packed":
        """What is said of each leaf of the parameters, as a mask of optax is, of each array at rest.

        Raises ValueError where it differs between leaves of one array; give `labels=` to
        `sx.pipeline.packing`, and they are kept apart.
        """
        said = self.tree.flatten_up_to(tree)
        return Packed([self._label(each, said) for each in self.arrays], self)

    def _label(self, each: Resting, said: Sequence[Any]) -> Any:
        leaves = [part.leaf for parts in each.parts for part in parts]
        for leaf in leaves:
            if said[leaf] != said[leaves[0]]:
                raise ValueError(
                    f"labels are {said[leaves[0]]!r} for {self.names[leaves[0]]} and {said[leaf]!r} for "
                    f"{self.names[leaf]}, which rest in one array; give these labels to "
                    "sx.pipeline.packing(..., labels=labels), so that they rest apart"
                )
        return said[leaves[0]]

    def key(self, number: int) -> str:
        """A name of an array: that of its first leaf, and how many others it has."""
        each = self.arrays[number]
        leaves = list(dict.fromkeys(part.leaf for parts in each.parts for part in parts))
        others = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
        chunk = f", array {number}" if each.kind != WHOLE else ""
        return f"{self.names[leaves[0]]}{others}{chunk}"

    def check_stages(self, stages: int, axis: str) -> None:
        if (stages, axis) != (self.stages, self.axis):
            raise ValueError(
                f"parameters are packed for {self.stages} stages along {self.axis!r}, and the pipeline has "
                f"{stages} along {axis!r}; sx.pipeline.unpack them, and pack them for these"
            )


def _spec(each: Resting, axis: str) -> PartitionSpec:
    if each.kind == WHOLE:
        return each.spec
    if each.kind == FLAT:
        return PartitionSpec(axis)
    rows = any(part.rows for parts in each.parts for part in parts)
    return PartitionSpec(axis, *((None, *each.spec[1:]) if rows else each.spec))


@jax.tree_util.register_pytree_with_keys_class
class Packed:
    """Parameters at rest, or a tree like them (gradients, moments): a pytree whose leaves are the arrays of
    `packing`, [stages, ...] most of them.
    """

    def __init__(self, arrays: Sequence[Any], packing: Packing):
        self.arrays, self.packing = tuple(arrays), packing

    def __repr__(self) -> str:
        types = ", ".join(f"{self.packing.key(i)}: {_text(x)}" for i, x in enumerate(self.arrays))
        return f"Packed({types})"

    def tree_flatten_with_keys(self):
        keys = (jax.tree_util.DictKey(self.packing.key(i)) for i in range(len(self.arrays)))
        return list(zip(keys, self.arrays, strict=True)), self.packing

    @classmethod
    def tree_unflatten(cls, packing: Packing, arrays) -> "Packed":
        return cls(arrays, packing)


def _text(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else repr(x)


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
    ...     return x.sum()
    >>> grad = sx.pipeline.value_and_grad(loss, microbatches=4)
    >>> layers, x = [jnp.ones((2, 2))] * 8, jnp.ones((8, 2))
    >>> mesh = AbstractMesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    >>> packed = pack(layers, sx.pipeline.packing(grad, layers, x, mesh=mesh))
    >>> packed
    Packed(0 and 3 more, array 0: float32[4, 2, 2], 1 and 3 more, array 1: float32[4, 2, 2])
    >>> len(unpack(packed))
    8
    """
    found = []

    def change(x):
        if not _is_like(packing, x):
            return x
        found.append(x)
        leaves = list(map(jnp.asarray, jax.tree.leaves(x)))
        return Packed([array_of(each, leaves) for each in packing.arrays], packing)

    made = jax.tree.map(change, tree, is_leaf=partial(_is_like, packing))
    if not found:
        raise ValueError(
            f"nothing in the tree has the structure and shapes of the parameters ({_described(packing)}); "
            f"found {jax.tree.structure(tree)}"
        )
    return made


def unpack(tree: Any) -> Any:
    """The tree with what is packed in it as it was before `pack`; what is not packed stays.

    A checkpoint of it is restored to any number of stages, or none. See `pack`.
    """

    def change(x):
        return jax.tree.unflatten(x.packing.tree, leaves_of(x)) if _is_packed(x) else x

    return jax.tree.map(change, tree, is_leaf=_is_packed)


def _is_packed(x: Any) -> bool:
    return isinstance(x, Packed)


def _described(packing: Packing) -> str:
    return ", ".join(
        f"{name}: {list(shape)}" for name, shape in zip(packing.names[:3], packing.shapes, strict=False)
    ) + (", ..." if len(packing.names) > 3 else "")


def _is_like(packing: Packing, tree: Any) -> bool:
    if jax.tree.structure(tree) != packing.tree:
        return False
    return tuple(map(jnp.shape, jax.tree.leaves(tree))) == packing.shapes


def array_of(each: Resting, leaves: Sequence[Array]) -> Array:
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


def _flat_row(each: Resting, parts, leaves, dtype) -> Array:
    flat = [leaves[part.leaf].reshape(-1) for part in parts]
    missing = each.shape[0] - sum(x.size for x in flat)
    return jnp.concatenate([*flat, jnp.zeros(missing, dtype)])


def _stacked_row(each: Resting, parts, leaves, dtype) -> Array:
    if not parts:
        return jnp.zeros(each.shape, dtype)
    leaf = leaves[parts[0].leaf]
    if parts[0].rows is None:
        return leaf
    own = leaf[slice(*parts[0].rows)]
    missing = each.shape[0] - own.shape[0]
    return jnp.pad(own, [(0, missing)] + [(0, 0)] * (own.ndim - 1)) if missing else own


def _in_order(each: Resting, shapes: Sequence[tuple[int, ...]]) -> int | None:
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


def _part(each: Resting, x: Array, d: int, part: Part, shape: tuple[int, ...]) -> Array:
    if each.kind == WHOLE:
        return x
    if each.kind == FLAT:
        return x[d, part.start : part.start + math.prod(shape)].reshape(shape)
    return x[d] if part.rows is None else x[d, : part.rows[1] - part.rows[0]]
