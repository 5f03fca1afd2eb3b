"""Pipelining by hand, as GSPMD (arXiv 2105.04663 §3.3) and praxis do it: a buffer that is shifted from stage
to stage, for `jax.jit`.

Stages are a dim that `jax.vmap` goes over and the mesh splits. In each of m + p - 1 ticks all stages run on
what the buffer has for them; then it is shifted, which the partitioner turns into a permute. The backward
pass is that of the loop, each stage under `jax.checkpoint`: GPipe's schedule.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def shifting_buffer(layer: Callable[[Any, Any], Any], stages: int, microbatches: int, constrain=lambda x: x):
    """The function of stacked layers [L, ...] and x [B, ...] that applies them all.

    Args:
      layer: (x of a microbatch, its weights) to the next x.
      stages: must divide L. `microbatches` must divide B.
      constrain: what says how the buffer [stages, rows, ...] is split.
    """

    @jax.checkpoint
    def run_stage(w, x):
        return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]

    def run(layers, x):
        of_stages = jax.tree.map(lambda w: w.reshape(stages, -1, *w.shape[1:]), layers)
        x = jnp.swapaxes(x.reshape(-1, microbatches, *x.shape[1:]), 0, 1)
        waiting = jnp.concatenate([x, jnp.zeros_like(x[: stages - 1])])
        buffer = jnp.zeros((stages, *x.shape[1:]), x.dtype)

        def tick(buffer, entering):
            buffer = constrain(jnp.concatenate([entering[None], buffer[:-1]]))
            buffer = constrain(jax.vmap(run_stage)(of_stages, buffer))
            return buffer, buffer[-1]

        _, left = lax.scan(tick, constrain(buffer), waiting)
        return jnp.swapaxes(left[stages - 1 :], 0, 1).reshape(-1, *x.shape[2:])

    return run
