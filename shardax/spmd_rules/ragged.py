"""ragged_dot_general: rows in consecutive groups, each multiplied by its group's matrix, as mixtures of
experts do.

Rows may be split: a device counts how many rows of each group it has. So may the groups' matrices, the
experts: a device rolls the rows of its groups to the front, multiplies them, rolls back, and leaves zeros
elsewhere, a pending sum.
"""

import jax.numpy as jnp
from jax import lax

from shardax.graph.graph import Node
from shardax.spmd_rules import flops
from shardax.spmd_rules.registry import LINEAR, Local, register_rule


def ragged_dot_general(node: Node) -> str:
    """ "m k+, g+ k+ n, e! -> m n"; where rows are contracted, as in the matrices' gradient, "k+ m, k+ n, e!
    -> e! m n".
    """
    dims = node.params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims.dot_dimension_numbers
    lhs, rhs = (
        [f"{letter}{d}" for d in range(len(v.shape))] for letter, v in zip("mn", node.inputs[:2], strict=True)
    )
    for letter, mark, pairs in (("b", "", (lhs_batch, rhs_batch)), ("k", "+", (lhs_contract, rhs_contract))):
        for i, (a, b) in enumerate(zip(*pairs, strict=True)):
            lhs[a] = rhs[b] = f"{letter}{i}{mark}"
    # whether all batches share one list of group sizes, of rows that are no batch themselves
    shared = len(node.inputs[2].shape) == 1 and dims.lhs_ragged_dimensions[0] not in lhs_batch
    for d in dims.rhs_group_dimensions:
        rhs[d] = "g+" if shared else "g!"
    result = [lhs[d] for d in lhs_batch] + [f for side in (lhs, rhs) for f in side if f[0] in "mn"]
    sizes = ([] if shared else [lhs[d] for d in _dims_before(node)]) + ["e!"]
    texts = [lhs, rhs, sizes, result if len(result) == len(node.outputs[0].shape) else ["e!", *result]]
    rows = lhs[dims.lhs_ragged_dimensions[0]]
    unsplit = {} if shared else {rows: rows.rstrip("+") + "!"}
    lhs, rhs, sizes, result = (" ".join(unsplit.get(f, f) for f in text) for text in texts)
    return f"{lhs}, {rhs}, {sizes} -> {result}"


def _dims_before(node: Node) -> list[int]:
    """The dims of lhs that have a list of group sizes for each of their positions."""
    dims = node.params["ragged_dot_dimension_numbers"]
    (contract, _), (batch, _) = dims.dot_dimension_numbers
    rows = dims.lhs_ragged_dimensions[0]
    if rows in batch:
        return list(batch[: batch.index(rows)])
    free = [d for d in range(len(node.inputs[0].shape)) if d not in (*contract, *batch)]
    alike = contract if rows in contract else free
    return [*batch, *alike[: alike.index(rows)]]


def _ragged_dot_local(local: Local, lhs, rhs, sizes):
    dims = local.params["ragged_dot_dimension_numbers"]
    rows = dims.lhs_ragged_dimensions[0]
    if local.operands[0].dims[rows]:  # then all batches share the sizes
        start, ends = local.start(local.operands[0], rows), jnp.cumsum(sizes, dtype=sizes.dtype)
        low, high = (jnp.clip(edge - start, 0, lhs.shape[rows]) for edge in (ends - sizes, ends))
        sizes = high - low  # how many rows of each group this shard has
    if "g" not in local.splits:
        return local.bind(lhs, rhs, sizes, out_sharding=None)
    (groups,) = dims.rhs_group_dimensions
    first, count = local.start(local.operands[1], groups), rhs.shape[groups]
    number = lax.iota("int32", sizes.shape[0])
    skipped = jnp.sum(jnp.where(number < first, sizes, 0), dtype=sizes.dtype)
    own = lax.dynamic_slice(
        jnp.pad(sizes, (0, local.splits["g"].padded - sizes.shape[0])), (first,), (count,)
    )
    (product,) = local.bind(jnp.roll(lhs, -skipped, rows), rhs, own, out_sharding=None)
    (contract, _), (batch, _) = dims.dot_dimension_numbers
    at = len(batch) + sum(d not in (*contract, *batch) for d in range(rows))  # the rows' dim of the result
    filled = lax.broadcasted_iota(own.dtype, product.shape, at) < jnp.sum(own, dtype=own.dtype)
    return [jnp.roll(jnp.where(filled, product, jnp.zeros_like(product)), skipped, at)]


register_rule(
    "ragged_dot_general",
    ragged_dot_general,
    _ragged_dot_local,
    passes=(LINEAR(0), LINEAR(1)),
    flops=flops.ragged_dot_general,
)
