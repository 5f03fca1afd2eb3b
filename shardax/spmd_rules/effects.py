"""Callbacks and prints: Python is called once, on the global value, as under `jax.jit`.

The operands are gathered, the first device calls, and its results are broadcast. A pure callback is called
once too: other devices would have to wait for the same Python interpreter, and only the result is sent.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from shardax.graph.graph import Node
from shardax.sharding import Axes
from shardax.spmd_rules.registry import Local, register_rule, replicated_rule
from shardax.spmd_rules.sends import all_reduce


def _once_local(local: Local, *shards):
    """Bound on the first device alone; the others start from zeros."""
    axes: Axes = tuple(local.sizes)
    words = lax.cond(
        local.index(axes) == 0,
        lambda: _as_bits(local.bind(*shards)),
        lambda: _as_bits([jnp.zeros(v.shape, v.aval.dtype) for v in local.node.outputs]),
    )
    words = [all_reduce(local, "result", word, axes) for word in words]
    return [_from_bits(word, v.aval) for word, v in zip(words, local.node.outputs, strict=True)]


def _as_bits(results: Sequence[Any]) -> list[Any]:
    """Floats as unsigned integers, because sums of floats would lose the sign of zero and the payload of
    NaN.
    """
    return [_bits(jnp.asarray(x)) for x in results]


def _bits(x):
    if jnp.iscomplexobj(x):
        return jnp.stack([_bits(x.real), _bits(x.imag)])
    return (
        x.astype("uint8") if x.dtype == bool else lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    )


def _from_bits(word, aval):
    if aval.dtype.kind == "c":
        part = "float32" if aval.dtype.itemsize == 8 else "float64"
        return lax.complex(*(lax.bitcast_convert_type(word[i], part) for i in (0, 1)))
    return word.astype(bool) if aval.dtype == bool else lax.bitcast_convert_type(word, aval.dtype)


def debug_callback(node: Node) -> str:
    """ "k0 k1 -> " where each device calls on what it has, as the user may request; else unsplit."""
    return _every_dim_kept(node) if node.params.get("partitioned") else replicated_rule(node)


def _every_dim_kept(node: Node) -> str:
    operands = (" ".join(f"k{i}_{d}" for d in range(len(shape))) for i, shape in enumerate(node.in_shapes))
    return f"{', '.join(operands)} -> "


def _debug_callback_local(local: Local, *shards):
    if not local.params.get("partitioned"):
        return _once_local(local, *shards)
    return local.bind(*(local.mask(i, shard, 0) for i, shard in enumerate(shards)))


def _inspect_sharding_local(local: Local, shard):
    """The callback wants the sharding, not the value: it is called while the program is made."""
    mesh = AbstractMesh(
        tuple(local.sizes.values()), tuple(local.sizes), axis_types=(AxisType.Auto,) * len(local.sizes)
    )
    local.params["callback"](NamedSharding(mesh, local.operands[0].sharding.spec))
    return []


register_rule("debug_callback", debug_callback, _debug_callback_local, once=True)
register_rule("debug_print", debug_callback, _debug_callback_local, once=True)
register_rule("inspect_sharding", _every_dim_kept, _inspect_sharding_local)
register_rule("io_callback", replicated_rule, _once_local, once=True)
register_rule("platform_index", replicated_rule)
register_rule("pure_callback", replicated_rule, _once_local, once=True)
