"""Random keys and bits. Under threefry each device computes exactly its part of the global stream, and sends
nothing.

Bit i of `random_bits(key, shape)` is a hash of the key and of i, the element's row-major position in the
global `shape`. So a device only needs to know where its block is. That holds for threefry with
`jax_threefry_partitionable`, which is JAX's default; other generators draw one stream in sequence, and are
unsplit.
"""

import math
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from shardax.graph.graph import Node
from shardax.spmd_rules.registry import Local, register_rule, replicated_rule

_THREEFRY = "key<fry>"


def is_drawn_per_key(eqn) -> bool:
    """Whether what it draws of each random key, if it draws, depends on that key alone. Under vmap, rbg draws
    for all keys from the first.
    """
    if eqn.primitive.name == "rng_bit_generator":
        return False
    dtypes = [v.aval.dtype for v in eqn.invars if hasattr(v.aval, "dtype")]
    return all(d.name == _THREEFRY for d in dtypes if jax.numpy.issubdtype(d, jax.dtypes.prng_key))


def _per_key(node: Node) -> bool:
    return node.inputs[0].aval.dtype.name == _THREEFRY


def _by_position(node: Node) -> bool:
    return _per_key(node) and node.eqn.ctx.threefry_partitionable


def _factors(letter: str, count: int, mark: str = "") -> list[str]:
    return [f"{letter}{i}{mark}" for i in range(count)]


def random_bits(node: Node) -> str:
    """ "k -> k s": one block of shape s for each key."""
    if not _per_key(node):
        return replicated_rule(node)
    keys = _factors("k", len(node.inputs[0].shape))
    drawn = _factors("s", len(node.params["shape"]), "" if _by_position(node) else "!")
    return f"{' '.join(keys)} -> {' '.join(keys + drawn)}"


def _random_bits_local(local: Local, keys):
    if not _by_position(local.node):
        return local.bind(keys)
    first, second = _hash_positions(local, keys)
    width = local.params["bit_width"]
    dtype = np.dtype(f"uint{width}")
    if width < 64:
        return [lax.convert_element_type(first ^ second, dtype)]
    high, low = (lax.convert_element_type(word, dtype) for word in (first, second))
    return [lax.shift_left(high, lax.full_like(high, 32)) | low]


def _random_split_local(local: Local, keys):
    if not _by_position(local.node):
        return local.bind(keys)
    rank = len(local.out_shape())
    words = [lax.expand_dims(word, [rank]) for word in _hash_positions(local, keys)]
    return [jax.random.wrap_key_data(lax.concatenate(words, rank), impl=jax.random.key_impl(keys))]


def _hash_positions(local: Local, keys):
    """Two words for each element of this device's block: threefry of its key and of its position in the
    global shape.
    """
    block, rank = local.out_shape(), len(local.in_shape())
    words = jax.random.key_data(keys)
    key_words = [lax.broadcast_in_dim(words[..., i], block, range(rank)) for i in (0, 1)]
    return threefry2x32_p.bind(*key_words, *_positions(local, block, rank))


def _positions(local: Local, block: tuple[int, ...], rank: int) -> tuple[Any, Any]:
    """The row-major positions of this device's block in the global `shape`, as the high and low words of 64
    bits.
    """
    high = low = lax.full(block, np.uint32(0))
    stride, shape = 1, local.node.outputs[0].shape
    for d in reversed(range(rank, len(block))):
        start = lax.convert_element_type(local.start(local.results[0], d), "uint32")
        place = lax.broadcasted_iota("uint32", block, d) + start
        step = place * np.uint32(stride & 0xFFFFFFFF)
        low = low + step
        if math.prod(shape[rank:]) > 2**32:
            high = high + _high_word(place, stride) + lax.convert_element_type(low < step, "uint32")
        stride *= shape[d]
    return high, low


def _high_word(x, factor: int):
    """Bits 32 to 63 of the product of 32-bit words and a constant, by 16-bit halves: (a·2¹⁶ + b)(c·2¹⁶ +
    d).
    """
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a, b, c, d = x >> half, x & mask, np.uint32(factor >> 16 & 0xFFFF), np.uint32(factor & 0xFFFF)
    bc = b * c + (b * d >> half)
    ad = a * d + (bc & mask)
    return a * c + (bc >> half) + (ad >> half) + x * np.uint32(factor >> 32 & 0xFFFFFFFF)


def random_fold_in(node: Node) -> str:
    """Keys and messages of equal rank; a dim of size one meets any."""
    return _broadcasting(node) if _per_key(node) else replicated_rule(node)


def _broadcasting(node: Node) -> str:
    shape = node.outputs[0].shape
    operands = (" ".join(f"d{i}" if n == shape[i] else "1" for i, n in enumerate(s)) for s in node.in_shapes)
    result = " ".join(_factors("d", len(shape)))
    return f"{', '.join(operands)} -> {', '.join([result] * len(node.outputs))}"


def iota_2x32_shape(node: Node) -> str:
    """ "-> s0 s1, s0 s1": the high and the low words of the row-major positions."""
    dims = " ".join(_factors("s", len(node.out_shapes[0])))
    return f" -> {dims}, {dims}"


def _iota_2x32_shape_local(local: Local):
    return _positions(local, local.out_shape(), 0)


def random_gamma(node: Node) -> str:
    """Dims of the samples of one key stay unsplit: each sample is drawn from keys that are split off inside
    the primitive.
    """
    if not _per_key(node):
        return replicated_rule(node)
    keys = _factors("k", len(node.inputs[0].shape))
    samples = " ".join(keys + _factors("s", len(node.inputs[1].shape) - len(keys), "!"))
    return f"{' '.join(keys)}, {samples} -> {samples}"


def _with_words(node: Node) -> tuple[str, str]:
    keys, words = sorted((node.inputs[0].shape, node.outputs[0].shape), key=len)
    factors = _factors("k", len(keys))
    return " ".join(factors), " ".join(factors + _factors("w", len(words) - len(keys), "!"))


def random_unwrap(node: Node) -> str:
    """ "k -> k w!": the words of a key stay together."""
    return " -> ".join(_with_words(node))


def random_wrap(node: Node) -> str:
    """ "k w! -> k"."""
    return " -> ".join(reversed(_with_words(node)))


register_rule("iota_2x32_shape", iota_2x32_shape, _iota_2x32_shape_local)
register_rule("philox2x32", _broadcasting)
register_rule("philox4x32", _broadcasting)
register_rule("random_bits", random_bits, _random_bits_local, heavy=True)
register_rule("random_clone", "... -> ...")
register_rule("random_fold_in", random_fold_in)
register_rule("random_gamma", random_gamma, heavy=True)
register_rule("random_seed", "... -> ...")
register_rule("random_split", random_bits, _random_split_local)
register_rule("random_unwrap", random_unwrap)
register_rule("random_wrap", random_wrap)
register_rule("rng_bit_generator", replicated_rule, heavy=True)
register_rule("rng_uniform", replicated_rule, anew=True)
register_rule("threefry2x32", _broadcasting, heavy=True)
register_rule("threefry4x32", _broadcasting, heavy=True)
