"""Pipelining by hand, as GSPMD (arXiv 2105.04663 §3.3) and praxis do it: a buffer that is shifted from stage
to stage, for `jax.jit`.

Stages are a dim that `jax.vmap` goes over and the mesh splits. In each tick all stages run on what the buffer
has for them; then it is shifted, which the partitioner turns into a permute. The backward pass is that of the
loop: GPipe's schedule, or with several repeats the circular one.

    tick      0   1   2   3   4   5      3 stages, 3 microbatches, 2 repeats: stage 0 has layers 0 and 3
    stage 0   a0  b0  c0  a3  b3  c3  .  .
    stage 1   .   a1  b1  c1  a4  b4  c4 .
    stage 2   .   .   a2  b2  c2  a5  b5 c5
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def shifting_buffer(
    layer: Callable[[Any, Any], Any],
    stages: int,
    constrain=lambda x: x,
    *,
    repeats: int = 1,
    axis: str | None = None,
    remat: Callable[..., Any] | None = jax.checkpoint_policies.nothing_saveable,
):
    """The function of stacked layers [L, ...] and x [microbatches, rows, ...] that applies them all. Where
    layers go round several times, there must be as many microbatches as stages.

    Args:
      layer: (x of a microbatch, its weights) to the next x.
      stages: times `repeats` must divide L.
      constrain: what says how the buffer [stages, rows, ...] is split.
      repeats: how often a microbatch goes round the stages. With several, the stack is in the order of
        stages, as praxis stores it: its rows are [stages, repeats, layers].
      axis: of the mesh, over which the stages lie, for annotations in `layer`.
      remat: what of each stage is kept for its backward pass, a policy of `jax.checkpoint`; the rest is
        computed again from the stage's inputs. None: what `layer` says counts.
    """

    def run_stage(w, x, repeat):
        if repeats > 1:
            w = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, repeat, keepdims=False), w)
        return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]

    if remat:
        run_stage = jax.checkpoint(run_stage, policy=remat)
    run_stages = jax.vmap(run_stage, spmd_axis_name=axis)
    place = jnp.arange(stages)

    def run(layers, x):
        count = len(x)
        if repeats > 1 and count < stages:
            raise ValueError(f"{count} microbatches go round {stages} stages; take as many, or 1 repeat")
        lead = (stages, repeats, -1) if repeats > 1 else (stages, -1)
        of_stages = jax.tree.map(lambda w: w.reshape(*lead, *w.shape[1:]), layers)
        buffer = constrain(jnp.zeros((stages, *x.shape[1:]), x.dtype))
        ticks = jnp.arange(repeats * count + stages - 1)

        def at(stage):
            return (place == stage).reshape(stages, *[1] * (x.ndim - 1))

        def tick(state, t):
            buffer, waiting = state
            entering = lax.dynamic_index_in_dim(x, t % count, keepdims=False)[None]
            buffer = constrain(jnp.roll(buffer, 1, 0))
            if repeats > 1:  # what the last stage made waits at the first until its turn comes
                row = jnp.where(t >= stages, (t - stages) % count, count)
                waiting = lax.dynamic_update_index_in_dim(waiting, buffer, row, 0)
                again = lax.dynamic_index_in_dim(waiting, t % count, keepdims=False)
                entering = jnp.where(t < count, entering, constrain(again))
            buffer = jnp.where(at(0), entering, buffer)
            buffer = constrain(run_stages(of_stages, constrain(buffer), _repeat(t - place, count, repeats)))
            return (buffer, waiting), jnp.where(at(stages - 1), buffer, 0).sum(0, dtype=x.dtype)

        waiting = jnp.broadcast_to(buffer, (count + 1, *buffer.shape)) if repeats > 1 else ()
        _, left = lax.scan(tick, (buffer, waiting), ticks)
        return left[len(ticks) - count :]

    return run


def _repeat(tick, count: int, repeats: int):
    """How often what is at a stage has gone round, by the ticks since the first microbatch came there."""
    return jnp.clip(tick // count, 0, repeats - 1)
