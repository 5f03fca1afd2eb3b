"""The train steps with sharded state that `python -m benchmarks.tpu` compiles: fully sharded data parallelism
annotated by hand under `jax.jit`, and beside it ZeRO as a transform of a step that knows nothing of it.

GPT-2 in four sizes, half a billion parameters to each v4 chip (the study of PyTorch/XLA's SPMD post, by which
4B reach 39.75 % MFU on v4-16, which are 8 chips), and Llama 3 8B on v5p.
By hand, parameters and optimizer state are split along their dims of size M, and the activations between
layers over the batch.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks import llama
from benchmarks.workload import Step, Way, Workload
from models import gpt2
from models.gpt2_sharding import PARAMS
from models.rules import specs_by_path
from models.steps import adamw

AXIS = "fsdp"
OPTIMIZER = adamw(1e-3, warmup=20, steps=200)
PER_CHIP = 16  # sequences


def fully_sharded() -> Iterator[Workload]:
    for size, layers, model, topology, chips in (
        ("2b", 24, 2560, "v4:2x2x1", 4),
        ("4b", 34, 3072, "v4:2x2x2", 8),
        ("8b", 38, 4096, "v4:2x2x4", 16),
        ("16b", 50, 5120, "v4:2x4x4", 32),
    ):
        yield _gpt2(f"zero-gpt2-{size}", f"GPT-2 {size.upper()}", (layers, model), topology, chips)
    dims = llama.Dims(L=2, B=16, M=512, K=2, G=2, D=64, H=1024, S=256, V=1024)
    yield _llama("zero-tiny", "Llama, small", dims, "v5p:2x2x2", 8)
    dims = llama.Dims(L=32, B=64, M=4096, K=8, G=4, D=128, H=14336)
    yield _llama("zero-llama-8b", "Llama 3 8B", dims, "v5p:4x4x4", 64)


def _gpt2(name: str, what: str, sizes: tuple[int, int], topology: str, chips: int) -> Workload:
    layers, model = sizes
    config = gpt2.Config(50257, 1024, layers, model // 128, model, jnp.bfloat16, scan=True, remat=True)
    batch = chips * PER_CHIP

    def args() -> tuple[Any, Any, jax.ShapeDtypeStruct]:
        params = jax.eval_shape(partial(gpt2.init_params, config), jax.random.key(0))
        text = jax.ShapeDtypeStruct((batch, config.seq + 1), jnp.int32)
        return params, jax.eval_shape(OPTIMIZER.init, params), text

    def by_hand(mesh: Mesh) -> Step:
        over_batch = NamedSharding(mesh, P(AXIS))
        annotated = replace(config, between_layers=lambda x: lax.with_sharding_constraint(x, over_batch))
        params, state, _ = (specs_by_path(PARAMS, tree, (AXIS,)) for tree in args())
        return Step(partial(gpt2_step, annotated), args(), (params, state, P(AXIS)))

    def plain(mesh: Mesh) -> Step:
        return Step(partial(gpt2_step, config), args(), (None, None, P(AXIS)))

    return _compared(name, what, topology, chips, by_hand, plain, gpt2_flops(config, batch))


def gpt2_step(config: gpt2.Config, params, opt_state, text_BS: Array):
    value, grads = jax.value_and_grad(partial(gpt2.loss, config))(params, text_BS)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def gpt2_flops(config: gpt2.Config, batch: int) -> int:
    """Model FLOPs of a train step, nothing recomputed, masked scores included. The embedding counts once, as
    that of the logits.
    """
    c = config
    weights = 12 * c.layers * c.model**2 + c.vocab * c.model
    return 3 * batch * c.seq * (2 * weights + 4 * c.layers * c.model * c.seq)


def _llama(name: str, what: str, dims: llama.Dims, topology: str, devices: int) -> Workload:
    params = llama.param_shapes(dims)
    state = jax.eval_shape(llama.OPTIMIZER.init, params)
    args = params, state, jax.ShapeDtypeStruct(dims.shape("BS"), jnp.int32)

    def by_hand(mesh: Mesh) -> Step:
        specs = llama.param_specs((AXIS,))
        split = optax.tree_map_params(
            llama.OPTIMIZER, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P()
        )
        return Step(partial(llama.train_step, mesh), args, (specs, split, P(AXIS)))

    def plain(mesh: Mesh) -> Step:
        return Step(partial(llama.train_step, None), args, (None, None, P(AXIS)))

    return _compared(name, what, topology, devices, by_hand, plain, llama.flops(dims))


def _compared(name: str, what: str, topology: str, devices: int, by_hand, plain, flops: int) -> Workload:
    """By hand under `jax.jit`, then ZeRO's stages."""
    ways = {"jax.jit": Way("jax.jit", by_hand)}
    for stage in (3, 2, 1):
        ways[f"zero {stage}"] = Way("shard_jit", plain, transforms=(sx.zero.Zero(AXIS, stage),))
    return Workload(name, what, topology, {AXIS: devices}, by_hand, flops, compared=ways)
