"""From tables of (pattern, PartitionSpec) to the spec of each leaf of a pytree."""

import re
from collections.abc import Collection, Sequence

import jax
from jax.sharding import PartitionSpec as P

Rules = Sequence[tuple[str, P]]


def specs_by_path(rules: Rules, tree, axes: Collection[str]):
    """The spec of each leaf: that of the first rule whose pattern ends its path, else replicated.

    Axes that the mesh lacks are dropped. A leaf with more dims than its spec (layers stacked in front) keeps
    those whole, so optimizer states, whose paths end as their parameter's do, are covered too.

    >>> stacked = {"up": {"kernel": jax.ShapeDtypeStruct((4, 8, 8), "float32")}}
    >>> specs_by_path([("up/kernel", P("fsdp", "model"))], stacked, ["model"])
    {'up': {'kernel': P(None, None, 'model')}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _spec(rules, path_name(path), leaf.ndim, axes), tree
    )


def path_name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def on_axes(spec: P, axes: Collection[str]) -> P:
    """The spec without the axes that the mesh lacks.

    >>> on_axes(P(("data", "fsdp"), "model"), ["data"])
    P('data', None)
    """
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    kept = (tuple(axis for axis in entry if axis in axes) for entry in entries)
    return P(*(entry[0] if len(entry) == 1 else entry or None for entry in kept))


def _spec(rules: Rules, path: str, rank: int, axes: Collection[str]) -> P:
    for pattern, spec in rules:
        if re.search(rf"(^|/){pattern}$", path) and rank >= len(spec):
            return P(*[None] * (rank - len(spec)), *on_axes(spec, axes))
    return P()
