"""What the programs that write text share: names of dims as mesh axes, int8 arrays, a cache, and the loop
that prefills and decodes.

A model says which arrays its weights and its cache are made of (`Array`), and gives `forward`. Everything
is plain JAX on a mesh of Explicit axes, which `jax.set_mesh` brings into context: types carry the
shardings, and `reshard` and `out_sharding=` change them. `Config.jit` is `jax.jit` or `shardax.shard_jit`;
nothing else differs.

Shape suffixes: B batch, S tokens of this call, T places of the cache, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import shardax as sx

PADDING = 0  # a token that no prompt has


def make_mesh(x: int = 2, y: int = 2, z: int = 2) -> Mesh:
    devices = jax.devices()[: x * y * z]
    return jax.make_mesh((x, y, z), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3, devices=devices)


@dataclass(frozen=True)
class Config:
    """What compiles, and what a model adds: its sizes, and a mesh axis for each name of a dim (`rules`)."""

    mesh: Mesh
    jit: Callable[..., Any]
    layers: int = 2
    batch: int = 4
    places: int = 64
    vocabulary: int = 96
    dtype: str = "bfloat16"  # of activations, and of weights that are not int8
    rules: tuple[tuple[str, Any], ...] = ()

    def spec(self, *names: str | None) -> P:
        """The axes of dims by their names; a dim without one is whole."""
        rules = dict(self.rules)
        return P(*(rules[name] if name else None for name in names))


@dataclass(frozen=True)
class Array:
    """An array to be made; `names` are those of its dims. `over`: the dims that a product with it sums
    over. A random one is as much smaller as keeps that sum's size, and in int8 it has one scale over them.
    """

    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    over: tuple[int, ...] = ()
    int8: bool = False
    random: bool = True

    def make(self, config: Config, rng: np.random.Generator) -> "jax.Array | Int8":
        deviation = self.random / math.sqrt(math.prod(self.shape[dim] for dim in self.over))
        values = jnp.asarray(rng.normal(size=self.shape) * deviation, config.dtype)
        if not self.int8:
            return self._put(config, values, self.names)
        int8 = quantized(values, self.over)
        kept = tuple(name for dim, name in enumerate(self.names) if dim not in self.over)
        return Int8(self._put(config, int8.values, self.names), self._put(config, int8.scales, kept))

    def _put(self, config: Config, values, names):
        return jax.device_put(values, NamedSharding(config.mesh, config.spec(*names)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """`values` times `scales`, which lack the dims that each scale is shared over. Or the specs of both."""

    values: Any
    scales: Any


def quantized(x: jax.Array, dims: tuple[int, ...]) -> Int8:
    """`x` in int8, with one scale over `dims`."""
    scales = jnp.maximum(jnp.abs(x.astype("float32")).max(dims, keepdims=True), 1e-6) / 127
    values = jnp.round(x.astype("float32") / scales).astype("int8")
    return Int8(values, scales.squeeze(dims).astype(x.dtype))


def product(subscripts: str, x: jax.Array, weight: Int8 | jax.Array, out: P) -> jax.Array:
    """An einsum with a weight. Its scales, if it has any, are along the last dims of the result."""
    if isinstance(weight, Int8):
        y = jnp.einsum(subscripts, x, weight.values.astype(x.dtype), out_sharding=out)
        scales = reshard(weight.scales, P(*out[len(out) - weight.scales.ndim :]))
        return y * scales
    return jnp.einsum(subscripts, x, weight, out_sharding=out)


def written(cache: Int8 | jax.Array, x: jax.Array, place: jax.Array) -> Int8 | jax.Array:
    """A cache with new rows along dim 1 from `place` on, in the sharding that it has. Int8 is scaled over the
    last dim.
    """
    if isinstance(cache, Int8):
        new = quantized(x, (x.ndim - 1,))
        return Int8(written(cache.values, new.values, place), written(cache.scales, new.scales, place))
    x = reshard(x.astype(cache.dtype), jax.typeof(cache).sharding.spec)
    return jax.lax.dynamic_update_slice_in_dim(cache, x, place, axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """What each layer keeps of the tokens before: `filled` places. Those of row b begin at `starts_B`."""

    layers: list[Any]
    starts_B: jax.Array
    filled: jax.Array

    def positions(self, tokens_BS: jax.Array) -> jax.Array:
        """Of new tokens, [B, S]: below 0 for padding."""
        return self.filled + jnp.arange(tokens_BS.shape[1]) - self.starts_B[:, None]

    def mask(self, tokens_BS: jax.Array, places: int) -> jax.Array:
        """Which places new tokens attend to, [B, S, T]."""
        t, s = jnp.arange(places), self.filled + jnp.arange(tokens_BS.shape[1])
        return (self.starts_B[:, None, None] <= t) & (t <= s[:, None])

    def followed(self, layers: list[Any], count: int) -> "Cache":
        return replace(self, layers=layers, filled=self.filled + count)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype("float32")
    return (x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotated(x: jax.Array, positions_BS: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021) of the last dim, [B, S, ..., D]."""
    half = x.shape[-1] // 2
    angles = positions_BS[..., None] * 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.expand_dims(angles, tuple(range(2, x.ndim - 1)))
    first, second = x[..., :half].astype("float32"), x[..., half:].astype("float32")
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


@dataclass(frozen=True)
class Model:
    """Trees of `Array`s for the weights and for a layer's cache, and `forward(config, tokens_BS, weights,
    cache)`, which gives the logits of the last token, [B, V], and the cache.
    """

    config: Callable[..., Config]
    weights: Callable[[Any], Any]
    cache: Callable[[Any], Any]
    forward: Callable[..., tuple[jax.Array, Cache]]

    def init(self, config: Config, prompts: Sequence[Sequence[int]]) -> tuple[Any, Cache]:
        """Random weights, and an empty cache for prompts that `chunks` pads to one length."""
        rng, longest = np.random.default_rng(0), max(map(len, prompts))
        make = partial(
            jax.tree.map, lambda array: array.make(config, rng), is_leaf=lambda x: isinstance(x, Array)
        )
        starts = [longest - len(prompt) for prompt in prompts]
        starts_B = jax.device_put(
            np.asarray(starts, np.int32), NamedSharding(config.mesh, config.spec("batch"))
        )
        filled = jax.device_put(np.int32(0), NamedSharding(config.mesh, P()))
        return make(self.weights(config)), Cache(
            [make(self.cache(config)) for _ in range(config.layers)], starts_B, filled
        )

    def step(self, config: Config):
        """A chunk of tokens of each row -> the next tokens, [B, 1], their logits, and the cache, in place."""

        def step(config: Config, tokens_BS, weights, cache: Cache):
            logits_BV, cache = self.forward(config, tokens_BS, weights, cache)
            next_B1 = jnp.argmax(reshard(logits_BV, config.spec("batch", None)), -1, keepdims=True)
            return next_B1, logits_BV, cache

        return config.jit(step, static_argnames="config", donate_argnames="cache")

    def generate(self, config: Config, prompts: Sequence[Sequence[int]], steps: int, chunk: int = 8):
        """`steps` tokens after each prompt, [B, steps], their logits, [B, steps, V], and the cache."""
        pieces = list(chunks(config, prompts, chunk))  # before any mesh is in context
        with jax.set_mesh(config.mesh):
            weights, cache = self.init(config, prompts)
            step, found, next_B1 = self.step(config), [], None
            for piece_BS in pieces:
                next_B1, logits_BV, cache = step(config, piece_BS, weights, cache)
            for _ in range(steps):
                found.append((np.asarray(next_B1), np.asarray(logits_BV, "float32")))
                next_B1, logits_BV, cache = step(config, next_B1, weights, cache)
        tokens, logits = zip(*found, strict=True)
        return np.concatenate(tokens, 1), np.stack(logits, 1), cache


def chunks(config: Config, prompts: Sequence[Sequence[int]], size: int) -> Iterator[jax.Array]:
    """The prompts in pieces of `size` tokens, padded on the left to one length; the first may be shorter."""

    def padded(row_S, length: int):
        return jnp.pad(row_S, (length - len(row_S), 0), constant_values=PADDING)

    longest = max(map(len, prompts))
    pad = config.jit(padded, static_argnums=1)
    tokens_BS = jnp.stack([pad(np.asarray(prompt, np.int32), longest) for prompt in prompts])
    edges = [0, *range(longest % size or size, longest + 1, size)]
    return (tokens_BS[:, a:b] for a, b in zip(edges, edges[1:], strict=False))


PROMPTS = (
    [5, 17, 3, 88, 42, 7, 9, 61, 30, 2, 13, 27],
    [11, 4],
    [23, 71, 8, 15, 16, 95, 1, 50, 33],
    [64, 64, 12, 90, 77],
)


def main(model: Model, steps: int = 6) -> None:
    """Prints the tokens that both write."""
    mesh = make_mesh()
    for name, jit in {"jax.jit": jax.jit, "shard_jit": sx.shard_jit}.items():
        tokens, _, _ = model.generate(model.config(mesh, jit), PROMPTS, steps)
        print(name, *(" ".join(map(str, row)) for row in tokens.tolist()), sep="\n  ")
