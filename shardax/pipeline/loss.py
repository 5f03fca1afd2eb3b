"""`value_and_grad` of a loss whose layers lie on stages."""
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from shardax.annotations.explicit import shape_of
from shardax.pipeline import execute
from shardax.pipeline.cut import cut
from shardax.pipeline.schedules import make_schedule


def value_and_grad(
    loss: Callable[..., Any],
    *,
    axis: str = "stage",
    microbatches: int,
    schedule: Any = "1f1b",
    chunks: int | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    reduce: Literal["mean", "sum"] = "mean",
):
    def run(*args):
        mesh = jax.sharding.get_abstract_mesh()
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        params, tree = jax.tree.flatten([args[i] for i in numbers])
        others, other_tree = jax.tree.flatten([x for i, x in enumerate(args) if i not in numbers])
        size = next(x.shape[0] for x in others if getattr(x, "ndim", 0))
        is_batch = [getattr(x, "ndim", 0) > 0 and x.shape[0] == size for x in others]
        batch = [jnp.swapaxes(x.reshape(size // microbatches, microbatches, *x.shape[1:]), 0, 1) for x, b in zip(others, is_batch) if b]
        rest = [x for x, b in zip(others, is_batch) if not b]

        out_trees = []
        def of_leaves(*leaves):
            own = iter(jax.tree.unflatten(tree, leaves[: len(params)]))
            rows, left = iter(leaves[len(params) : len(params) + len(batch)]), iter(leaves[len(params) + len(batch) :])
            rest_args = iter(jax.tree.unflatten(other_tree, [next(rows) if b else next(left) for b in is_batch]))
            full = [next(own) if i in numbers else next(rest_args) for i in range(len(args))]
            value, aux = loss(*full) if has_aux else (loss(*full), ())
            flat, out_tree = jax.tree.flatten(aux)
            out_trees.append(out_tree)
            return [value, *flat]

        types = [shape_of(jax.typeof(x)) for x in params]
        types += [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in batch]
        types += [shape_of(jax.typeof(x)) for x in rest]
        closed = jax.make_jaxpr(of_leaves)(*types)
        made = make_schedule(schedule, mesh.shape[axis], microbatches, chunks)
        stages = cut(closed, len(params), len(batch), made.virtual_stages)
        inexact = [jnp.issubdtype(x.dtype, jnp.inexact) for x in params]

        def hoist(*moved):
            own = iter(moved)
            full = [next(own) if d else x for x, d in zip(params, inexact)]
            return stages.hoist(full, rest)
        values, pull = jax.vjp(hoist, *[x for x, d in zip(params, inexact) if d])
        scale = 1 / microbatches if reduce == "mean" else 1.0
        value, aux, grads = execute.run(stages, made, values, batch, rest, axis=axis, scale=scale)
        import numpy as np
        cts = [np.zeros(v.shape, jax.dtypes.float0) if g is None else g.astype(v.dtype) for g, v in zip(grads, values)]
        found = iter(pull(cts))
        leaves = [next(found) if d else np.zeros(x.shape, jax.dtypes.float0) for x, d in zip(params, inexact)]
        grads = jax.tree.unflatten(tree, leaves)
        grads = grads[0] if isinstance(argnums, int) else tuple(grads)
        value = value.astype(types and closed.out_avals[0].dtype)
        return ((value, jax.tree.unflatten(out_trees[-1], aux)) if has_aux else value), grads
    return run
