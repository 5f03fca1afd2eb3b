"""Weights at rest where their stages are: `packing` makes the `Packing` that says which rests where.

    of the parameters                                rests as
    rows of stacked layers, chunk by chunk           [stages, rows of the longest, ...]
    what one stage alone reads, of one shape         [stages, ...]
      on most stages
    what else one stage alone reads                  [stages, numbers of the fullest], one for each dtype
    what several stages share, and all else          as it is

What a stage lacks is zeros.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec, use_abstract_mesh

STACKED, FLAT, WHOLE = "stacked", "flat", "whole"


class Part(NamedTuple):
    """Leaf `leaf` of the parameters, or rows of it; of a flat array, from number `start` on."""

    leaf: int
    rows: tuple[int, int] | None = None
    start: int = 0


@dataclass(frozen=True)
class PackedArray:
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
    ...     layer = lambda x, w: (jax.numpy.tanh(x @ w), None)
    ...     return jax.lax.scan(layer, x @ params["in"], params["layers"])[0].mean()
    >>> grad = sx.pipeline.value_and_grad(loss, microbatches=4, schedule="interleaved")
    >>> params = {"in": jax.numpy.ones((2, 2)), "layers": jax.numpy.ones((16, 2, 2))}
    >>> mesh = AbstractMesh((4,), ("stage",), axis_types=(AxisType.Auto,))
    >>> packing(grad, params, jax.numpy.ones((8, 2)), mesh=mesh).specs
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
    arrays: tuple[PackedArray, ...]
    axis: str
    stages: int

    @property
    def specs(self) -> "Packed":
        """The PartitionSpec of each array, for `in_shardings` and `out_shardings`."""
        return Packed([_spec(each, self.axis) for each in self.arrays], self)

    def specs_of(self, tree: Any) -> Any:
        """`specs` wherever `tree`, an optimizer's state say, has a tree like the parameters, else P()."""

        def specs(x):
            return self.specs if self.is_like(x) else PartitionSpec()

        return jax.tree.map(specs, tree, is_leaf=self.is_like)

    def is_like(self, tree: Any) -> bool:
        """Whether it is a tree like the parameters."""
        if jax.tree.structure(tree) != self.tree:
            return False
        return tuple(map(jax.numpy.shape, jax.tree.leaves(tree))) == self.shapes

    def labels(self, tree: Any) -> "Packed":
        """What is said of each leaf of the parameters, as a mask of optax is, of each array at rest.

        Raises ValueError where it differs between leaves of one array; give `labels=` to
        `sx.pipeline.packing`, and they are kept apart.
        """
        said = self.tree.flatten_up_to(tree)
        return Packed([self._label(each, said) for each in self.arrays], self)

    def _label(self, each: PackedArray, said: Sequence[Any]) -> Any:
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


def _spec(each: PackedArray, axis: str) -> PartitionSpec:
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
