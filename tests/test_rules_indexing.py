"""gather, scatter, dynamic slices: every claim of their rules, against the plain primitive. One line per
case.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.check import check_rule, ramp
from shardax.graph.inline import from_jaxpr
from shardax.spmd_rules import indexing
from shardax.spmd_rules.registry import RULES

I32, U8 = np.dtype("int32"), np.dtype("uint8")
TOKENS = np.array(
    [[0, 4, 6, 2], [6, -1, 7, 99], [3, 3, -7, -200]], I32
)  # some out of the range of 7, on both sides
FEW = np.array([4, 0, 6, 6, 99, -3], I32)


def label(logits, labels, **how):
    return jnp.take_along_axis(logits, labels[..., None], -1, **how)


def two_dims(x, i, mode=None):
    return x.at[i, 2, i - 1].get(mode=mode)


def windows(x, i, **how):
    """Windows of two rows, one column, all of the last dim."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1, 2), collapsed_slice_dims=(1,), start_index_map=(0, 1)
    )
    return lax.gather(x, i, numbers, (2, 1, x.shape[2]), **how)


def long_windows(x, i, **how):
    """Windows of two rows and three planes; the slices' dims around that of the indices."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(0, 2, 3), collapsed_slice_dims=(), start_index_map=(2, 0)
    )
    return lax.gather(x, i, numbers, (2, x.shape[1], 3), **how)


def put_long_windows(x, i, updates, **how):
    return lax.scatter_add(x, i, updates, lax.ScatterDimensionNumbers((0, 2, 3), (), (2, 0)), **how)


def put_windows(scatter, x, i, updates, **how):
    numbers = lax.ScatterDimensionNumbers((1, 2), (1,), (0, 1))
    return scatter(x, i, updates, numbers, **how)


def embed_grad(table, tokens, how):
    return jax.vjp(lambda t: t.at[tokens].get(**how), table)[1](ramp(*tokens.shape, table.shape[1]))


def label_grad(logits, labels):
    return jax.vjp(lambda x: label(x, labels), logits)[1](ramp(*labels.shape, 1))


def cut(x, starts, sizes):
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def put(x, update, starts):
    return lax.dynamic_update_slice(x, update, starts, allow_negative_indices=False)


PAIRS = np.array([[0, 1], [5, 2], [6, 0], [-1, 1], [3, 9]], I32)
LONG = np.array([[0, 1], [4, 3], [5, 3], [2, -1], [3, 2]], I32)

CASES = {
    "embedding": (lambda e, i: e[i], ramp(7, 3), TOKENS),
    "embedding clip": (lambda e, i: e.at[i].get(mode="clip"), ramp(7, 3), TOKENS),
    "embedding fill": (lambda e, i: e.at[i].get(mode="fill"), ramp(7, 3), TOKENS),
    "embedding fill 5": (lambda e, i: e.at[i].get(mode="fill", fill_value=5), ramp(7, 3), TOKENS),
    "embedding fill 0": (lambda e, i: e.at[i].get(mode="fill", fill_value=0), ramp(7, 3), TOKENS),
    "embedding int": (lambda e, i: e.at[i].get(mode="fill"), ramp(7, 3, dtype="int32"), TOKENS),
    "embedding bool": (lambda e, i: e.at[i].get(mode="fill"), ramp(7, 3) > 0, TOKENS),
    "embedding bf16": (lambda e, i: e[i], ramp(7, 3).astype(jnp.bfloat16), TOKENS),
    "embedding uint8": (lambda e, i: e.at[i].get(mode="fill"), ramp(7, 3), TOKENS.astype(U8)),
    "embedding uint8 clip": (lambda e, i: e.at[i].get(mode="clip"), ramp(300, 1), TOKENS.astype(U8)),
    "embedding uint32": (lambda e, i: e.at[i].get(mode="fill"), ramp(7, 3), TOKENS.astype("uint32")),
    "embedding int8 clip": (lambda e, i: e.at[i].get(mode="clip"), ramp(100, 1), TOKENS.astype("int8")),
    "take": (lambda e, i: jnp.take(e, i, axis=1), ramp(3, 7), TOKENS),
    "take wrap": (lambda e, i: jnp.take(e, i, axis=0, mode="wrap"), ramp(7, 3), TOKENS),
    "label": (label, ramp(3, 4, 7), TOKENS),
    "label uint8": (label, ramp(3, 4, 7), TOKENS.astype(U8)),
    "label int": (label, ramp(3, 4, 7, dtype="int32"), TOKENS),
    "label clip": (lambda x, i: label(x, i, mode="clip"), ramp(3, 4, 7), TOKENS),
    "label of many": (lambda x, i: jnp.take_along_axis(x, i, 0), ramp(7, 4), TOKENS),
    "vmap both": (jax.vmap(lambda x, i: x[i], (1, 0)), ramp(7, 3), TOKENS),
    "vmap operand": (jax.vmap(lambda x, i: x[i], (1, None)), ramp(7, 3), FEW),
    "two dims fill": (lambda x, i: two_dims(x, i, "fill"), ramp(7, 3, 5), FEW),
    "two dims clip": (lambda x, i: two_dims(x, i, "clip"), ramp(7, 3, 5), FEW),
    "windows": (windows, ramp(7, 3, 4), PAIRS),
    "windows clip": (lambda x, i: windows(x, i, mode="clip"), ramp(7, 3, 4), PAIRS),
    "windows fill": (lambda x, i: windows(x, i, mode="fill", fill_value=7), ramp(7, 3, 4), PAIRS),
    "long windows clip": (lambda x, i: long_windows(x, i, mode="clip"), ramp(5, 2, 7), LONG),
    "long windows vmap": (
        jax.vmap(lambda x, i: long_windows(x, i, mode="fill")),
        ramp(3, 5, 2, 7),
        np.stack([LONG] * 3),
    ),
    "embedding gradient": (lambda e, i: embed_grad(e, i, {}), ramp(7, 3), TOKENS),
    "embedding gradient clip": (lambda e, i: embed_grad(e, i, {"mode": "clip"}), ramp(7, 3), TOKENS),
    "embedding gradient fill": (lambda e, i: embed_grad(e, i, {"mode": "fill"}), ramp(7, 3), TOKENS),
    "label gradient": (label_grad, ramp(3, 4, 7), TOKENS),
    "add": (lambda x, i, u: x.at[i].add(u), ramp(7, 3), FEW, ramp(6, 3)),
    "add int": (lambda x, i, u: x.at[i].add(u), ramp(7, 3, dtype="int32"), FEW, ramp(6, 3, dtype="int32")),
    "add uint8": (lambda x, i, u: x.at[i].add(u), ramp(7, 3), FEW.astype(U8), ramp(6, 3)),
    "add clip": (lambda x, i, u: x.at[i].add(u, mode="clip"), ramp(7, 3), FEW, ramp(6, 3)),
    "add two dims": (lambda x, i, u: x.at[i, 1, i - 1].add(u), ramp(7, 3, 5), FEW, ramp(6)),
    "add windows": (
        lambda x, i, u: put_windows(lax.scatter_add, x, i, u),
        ramp(7, 3, 4),
        PAIRS,
        ramp(5, 2, 4),
    ),
    "add windows clip": (
        lambda x, i, u: put_windows(lax.scatter_add, x, i, u, mode="clip"),
        ramp(7, 3, 4),
        PAIRS,
        ramp(5, 2, 4),
    ),
    "add long windows vmap": (
        jax.vmap(put_long_windows),
        ramp(3, 5, 2, 7),
        np.stack([LONG] * 3),
        ramp(3, 2, 5, 2, 3),
    ),
    "add vmap": (jax.vmap(lambda x, i, u: x.at[i].add(u)), ramp(3, 7), TOKENS, ramp(3, 4)),
    "subtract": (lambda x, i, u: x.at[i].subtract(u), ramp(7, 3), FEW, ramp(6, 3)),
    "mul": (lambda x, i, u: x.at[i].mul(u), ramp(7, 3), FEW, ramp(6, 3)),
    "max": (lambda x, i, u: x.at[i].max(u), ramp(7, 3), FEW, ramp(6, 3)),
    "max clip": (lambda x, i, u: x.at[i].max(u, mode="clip"), ramp(7, 3), FEW, ramp(6, 3)),
    "max bool": (lambda x, i, u: x.at[i].max(u), ramp(7, 3) > 0, FEW, ramp(6, 3) > 0),
    "min": (lambda x, i, u: x.at[i].min(u), ramp(7, 3, dtype="int32"), FEW, ramp(6, 3, dtype="int32")),
    "set": (lambda x, i, u: x.at[i].set(u), ramp(7, 3), FEW, ramp(6, 3)),
    "set column": (lambda x, i, u: x.at[:, i].set(u), ramp(3, 7), FEW, ramp(3, 6)),
    "set one": (lambda x, u: x.at[4].set(u), ramp(7, 3), ramp(3)),
    "set slice": (lambda x, u: x.at[2:4].set(u), ramp(17, 3), ramp(2, 3)),
    "apply": (lambda x, i: x.at[i].apply(jnp.square), ramp(7, 3), FEW[:2]),
    "dynamic_slice": (lambda x, i: cut(x, (i, 2, 1), (1, 2, 5)), ramp(7, 3, 5), 4),
    "dynamic_slice below": (lambda x, i: cut(x, (i, 9), (1, 1)), ramp(7, 6), -20),
    "dynamic_slice uint8": (lambda x, i: cut(x, (i, i), (1, 1)), ramp(200, 6), np.uint8(199)),
    "dynamic_slice bool": (lambda x, i: cut(x, (i,), (1,)), ramp(7) > 0, 5),
    "dynamic_slice long": (lambda x, i: cut(x, (i, i, 0), (3, 2, 4)), ramp(7, 3, 5), 3),
    "x[i]": (lambda x, i: x[i], ramp(7, 3), -2),
    "append": (lambda x, u, i: put(x, u, (0, i, 0)), ramp(2, 7, 3), ramp(2, 1, 3), 60),
    "append two": (lambda x, u, i: put(x, u, (i, 0)), ramp(7, 3), ramp(2, 3), 5),
    "append block": (lambda x, u, i: put(x, u, (i, 1)), ramp(7, 5), ramp(3, 2), 3),
    "append uint8": (lambda x, u, i: put(x, u, (i, i)), ramp(200, 3), ramp(1, 1), np.uint8(199)),
}


def _indexing_node(f, args):
    """The last equation that indexes: of a gradient that is the scatter."""
    nodes = from_jaxpr(jax.make_jaxpr(f)(*args)).nodes
    return [node for node in nodes if RULES[node.name].rule.__module__ == indexing.__name__][-1]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.mixed_dtypes
def test_claims(name):
    f, *args = CASES[name]
    primitive = _indexing_node(f, args).name
    assert check_rule(f, *args, only=primitive)[primitive]


@pytest.mark.parametrize("start", (1, 4, 7))
def test_a_window_that_is_clamped_and_then_cut(start):
    """jaxlib 0.10 adds the two starts without clamping the first."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    f = sx.shard_jit(lambda x, i: cut(x, (i,), (4,)), mesh=mesh, out_shardings=P("x"))
    start = np.int32(start)
    np.testing.assert_array_equal(f(ramp(6), start), cut(ramp(6), (start,), (4,)))


@pytest.mark.parametrize(
    "name, primitive, text",
    [
        ("embedding", "gather", "x0+ o1, u0 u1 v! -> u0 u1 o1"),
        ("embedding bool", "gather", "x0:max o1, u0 u1 v! -> u0 u1 o1"),
        ("embedding gradient", "scatter-add", "x0 o1, u0+ u1+ v!, u0+ u1+ o1 -> x0 o1"),
        ("label", "gather", "b0 b1 x2+, b0 b1 u2 v! -> b0 b1 u2"),
        ("label gradient", "scatter-add", "b0 b1 x2, b0 b1 u2+ v!, b0 b1 u2+ -> b0 b1 x2"),
        ("windows", "gather", "x0+ x1+ o2, u0 v! -> u0 s0! o2"),
        ("set", "scatter", "x0 o1, u0! v!, u0! o1 -> x0 o1"),
        ("dynamic_slice", "dynamic_slice", "x0+ x1+ o2, , ,  -> 1 s1! o2"),
        ("append", "dynamic_update_slice", "o0 x1 o2, o0 1 o2, , ,  -> o0 x1 o2"),
    ],
)
@pytest.mark.mixed_dtypes
def test_rules_read(name, primitive, text):
    f, *args = CASES[name]
    node = _indexing_node(f, args)
    assert (node.name, RULES[primitive].rule(node)) == (primitive, text)
