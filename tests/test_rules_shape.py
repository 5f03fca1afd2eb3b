"""Primitives that only place elements: every claim of their rules, against the plain primitive. One line per
case.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax import spmd_rules  # noqa: F401  (registers the built-in rules)
from shardax.check import check_rule, ramp
from shardax.graph.inline import from_jaxpr
from shardax.spmd_rules.registry import RULES

CASES = {
    "bitcast": (lambda x: lax.bitcast_convert_type(x, "int32"), ramp(5, 6)),
    "bitcast narrow": (lambda x: lax.bitcast_convert_type(x, "uint8"), ramp(5, 6)),
    "bitcast wide": (lambda x: lax.bitcast_convert_type(x, "int32"), ramp(5, 4, dtype="uint8")),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (3, 5, 7, 6), (1, 3)), ramp(5, 6)),
    "broadcast stretched": (lambda x: lax.broadcast_in_dim(x, (5, 6), (0, 1)), ramp(1, 6)),
    "broadcast scalar": (lambda x: jnp.broadcast_to(x, (5, 6)), 2.5),
    "concatenate": (lambda x, y: lax.concatenate([x, y, x], 1), ramp(5, 6), ramp(5, 3)),
    "concatenate far": (lambda x, y: lax.concatenate([x, y, x[:2]], 0), ramp(3), ramp(11)),
    "expand_dims": (lambda x: lax.expand_dims(x, (1, 3)), ramp(5, 6)),
    "iota": (lambda: lax.broadcasted_iota("int32", (5, 6), 1),),
    "iota bfloat16": (lambda: lax.broadcasted_iota(jnp.bfloat16, (600, 2), 0),),
    "iota uint8": (lambda: lax.broadcasted_iota("uint8", (300, 2), 0),),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), ramp(5, 6), ramp(3, dtype="int32")),
    "pad": (lambda x: lax.pad(x, jnp.float32(0), ((0, 0, 0), (1, 2, 0))), ramp(5, 6)),
    "pad inside": (lambda x: lax.pad(x, jnp.float32(3), ((0, 0, 2), (0, 0, 0))), ramp(5, 6)),
    "pad negative": (lambda x: lax.pad(x, jnp.float32(3), ((-1, 0, 0), (0, 0, 0))), ramp(5, 6)),
    "pad far": (lambda x: lax.pad(x, jnp.float32(3), ((7, 2, 0),)), ramp(5)),
    "pad dilated": (lambda x: lax.pad(x, jnp.float32(3), ((2, -3, 2),)), ramp(7)),
    "pad crops": (lambda x: lax.pad(x, jnp.float32(3), ((-4, 3, 1),)), ramp(7)),
    "pad two dims": (lambda x: lax.pad(x, jnp.float32(0), ((1, 1, 0), (-1, 3, 0))), ramp(5, 6)),
    "pad int": (lambda x: lax.pad(x, jnp.int32(0), ((1, 1, 0),)), ramp(8, dtype="int32")),
    "pad one": (lambda x: lax.pad(x, jnp.float32(0), ((0, 0, 0), (4, 2, 0), (0, 5, 0))), ramp(5, 1, 1)),
    "pad one with": (lambda x, v: lax.pad(x, v, ((4, 2, 0), (0, 0, 0))), ramp(1, 6), jnp.float32(2.5)),
    "reshape split": (lambda x: x.reshape(6, 3, 4), ramp(6, 12)),
    "reshape merge": (lambda x: x.reshape(6, 12), ramp(6, 3, 4)),
    "reshape uneven": (lambda x: x.reshape(15, 2), ramp(5, 3, 2)),
    "reshape heads": (lambda x: x.reshape(3, 5, 4, 2), ramp(3, 5, 8)),
    "reshape across": (lambda x: x.reshape(8, 2, 3), ramp(4, 4, 3)),
    "reshape chain": (lambda x: x.reshape(2, 4, 3), ramp(4, 6)),
    "reshape ones": (lambda x: x.reshape(1, 5, 1, 6, 1), ramp(5, 1, 6)),
    "reshape no factors": (lambda x: x.reshape(5, 4, 6), ramp(5, 6, 4)),
    "reshape some factors": (lambda x: x.reshape(2, 4, 6, 5), ramp(12, 4, 5)),
    "reshape two groups": (lambda x: x.reshape(4, 3, 3, 8), ramp(6, 2, 4, 6)),
    "reshape turned, no factors": (lambda x: lax.reshape(x, (4, 3, 5), (2, 0, 1)), ramp(5, 4, 3)),
    "reshape unsolvable": (lambda x: x.reshape(4, 6, 5), ramp(2, 6, 10)),
    "reshape flat": (lambda x: x.reshape(-1), ramp(5, 6)),
    "reshape to scalar": (lambda x: x.reshape(()), ramp(1, 1)),
    "reshape empty": (lambda x: x.reshape(3, 0, 2), ramp(0, 5)),
    "reshape turned": (lambda x: lax.reshape(x, (30,), (1, 0)), ramp(5, 6)),
    "rev": (lambda x: lax.rev(x, (1,)), ramp(5, 6)),
    "rev even": (lambda x: lax.rev(x, (0, 1)), ramp(8, 5)),
    "slice": (lambda x: x[:, 1:4], ramp(5, 6)),
    "slice strided": (lambda x: x[:, ::2], ramp(5, 6)),
    "slice far": (lambda x: x[13:], ramp(17)),
    "slice strided far": (lambda x: x[5::3], ramp(17)),
    "slice two dims": (lambda x: x[1:-1, 2:], ramp(6, 7)),
    "slice bool window": (lambda x: x[1:4], ramp(5, 6) > 0),
    "slice key": (lambda x: jax.random.split(jax.random.key(x), 6)[1:4], np.uint32(3)),
    "slice one": (lambda x: x[4:5, :, 1:2], ramp(5, 6, 3)),
    "slice one strided": (lambda x: x[4::3], ramp(5, 6)),
    "slice bool": (lambda x: x[4:5], ramp(5, 6) > 0),
    "slice int": (lambda x: x[4:5], ramp(5, 6, dtype="int32")),
    "slice none": (lambda x: x[2:2], ramp(5, 6)),
    "split": (lambda x: lax.split(x, (2, 4), 1), ramp(5, 6)),
    "squeeze": (lambda x: lax.squeeze(x, (0, 2)), ramp(1, 5, 1, 6)),
    "stack": (lambda x, y: jnp.stack([x, y, x], 1), ramp(5, 6), ramp(5, 6)),
    "tile": (lambda x: jnp.tile(x, (1, 3)), ramp(5, 6)),
    "tile one": (lambda x: jnp.tile(x, (5, 1)), ramp(1, 6)),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), ramp(5, 6, 3)),
    "unstack": (lambda x: jnp.unstack(x, axis=1), ramp(5, 2, 6)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.mixed_dtypes
def test_claims(name):
    f, *args = CASES[name]
    check_rule(f, *args)


@pytest.mark.parametrize(
    "name, text",
    [
        ("broadcast", "k0 k1 -> n0 k0 n2 k1"),
        ("broadcast stretched", "1 k1 -> n0 k1"),
        ("broadcast scalar", " -> n0 n1"),
        ("concatenate", "k0 c~, k0 c~, k0 c~ -> k0 c~"),
        ("pad", "k0 w1~, -> k0 w1~"),
        ("pad one", "k0 1 1, -> k0 n1 n2"),
        ("reshape split", "f0 (f1 f2) -> f0 f1 f2"),
        ("reshape across", "f0 (f1 f2) f3 -> (f0 f1) f2 f3"),
        ("reshape chain", "(f0 f1) (f2 f3) -> f0 (f1 f2) f3"),
        ("reshape ones", "f0 1 f1 -> 1 f0 1 f1 1"),
        ("reshape no factors", "f0 g0~ w2! -> f0 g0~ r2!"),
        ("reshape some factors", "(f0 w0!) w1! f1 -> f0 r1! r2! f1"),
        ("reshape two groups", "g0~ w1! g1~ w3! -> g0~ r1! g1~ r3!"),
        ("reshape unsolvable", "g0~ w1! w2! -> g0~ r1! r2!"),
        ("reshape turned", "f1 f0 -> (f0 f1)"),
        ("slice", "k0 w1~ -> k0 w1~"),
        ("slice one", "x0+ k1 x2+ -> 1 k1 1"),
        ("slice bool", "x0:max k1 -> 1 k1"),
        ("split", "k0 c~ -> k0 c~, k0 c~"),
        ("stack", "k0 k1, k0 k1, k0 k1 -> k0 s! k1"),
        ("tile", "k0 k1 -> k0 (n1 k1)"),
        ("transpose", "k0 k1 k2 -> k2 k0 k1"),
        ("unstack", "k0 s! k1 -> k0 k1, k0 k1"),
    ],
)
@pytest.mark.mixed_dtypes
def test_rules_read(name, text):
    f, *args = CASES[name]
    (node,) = (n for n in from_jaxpr(jax.make_jaxpr(f)(*args)).nodes if n.name.startswith(name.split()[0]))
    assert RULES[node.name].rule(node) == text
