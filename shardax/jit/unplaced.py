"""Arguments that are not committed to devices: a call places them where its program takes them.

They would come back as results that are committed, and `jax.jit` compiles anew for those. Placed before the
first call, they find it compiled.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardax import _jax
from shardax.annotations.explicit import shape_of

# These look at the arrays that the user gave.
_DEBUGGING = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs", "jax_debug_key_reuse")


def may_be_placed(leaves: Sequence[Any], mesh: Mesh | AbstractMesh) -> bool:
    """Whether some are not committed, and all can be placed: by this one process, without asking others
    whether they have the same.
    """
    several = isinstance(mesh, Mesh) and mesh.is_multi_process
    if several or any(getattr(jax.config, name) for name in _DEBUGGING):
        return False
    return _jax.is_eager(leaves) and all(map(_is_value, leaves)) and any(map(_is_unplaced, leaves))


def agree(shardings: Sequence[NamedSharding], leaves: Sequence[Any]) -> bool:
    """Whether the leaves that are committed are so in these shardings."""
    return all(
        _is_unplaced(x) or x.sharding.is_equivalent_to(sharding, x.ndim)
        for x, sharding in zip(leaves, shardings, strict=True)
    )


def placed(leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """The leaves, those that are not committed in these shardings."""
    pairs = [(x, _short(s)) for x, s in zip(leaves, shardings, strict=True) if _is_unplaced(x)]
    new = iter(jax.device_put(*map(list, zip(*pairs, strict=True))))
    return [next(new) if _is_unplaced(x) else x for x in leaves]


def typed(leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """The leaves, for those that are not committed their types in these shardings."""
    return [
        shape_of(jax.typeof(x), s) if _is_unplaced(x) else x for x, s in zip(leaves, shardings, strict=True)
    ]


def _short(sharding: NamedSharding) -> NamedSharding:
    """The same with the spec that `jax.jit` gives to results: it ends with the last dim that is split."""
    spec = list(sharding.spec)
    while spec and spec[-1] is None:
        spec.pop()
    return sharding.update(spec=PartitionSpec(*spec))


def _is_value(x) -> bool:
    kinds = jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | int | float | complex
    return isinstance(x, kinds) and not _jax.is_ref(x)


def _is_unplaced(x) -> bool:
    abstract = isinstance(x, jax.ShapeDtypeStruct)
    return x.sharding is None if abstract else not getattr(x, "committed", False)
