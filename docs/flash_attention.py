"""Causal flash attention (Dao et al., arXiv 2205.14135) as Pallas kernels, each with the rule by which it may
be split.

B batch, S queries, T keys, H heads, D head. Batch, heads and queries are split as they come; the gradients of
keys and values are sums over the queries.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

import shardax as sx

BLOCK = 64  # rows of queries, or of keys, at a time; a shard takes what divides it


@jax.custom_vjp
def flash_attention(q_BSHD, k_BTHD, v_BTHD):
    """softmax(q k / sqrt(D)) v of the keys up to each query, without ever holding the scores."""
    return _forward(jnp.arange(q_BSHD.shape[1]), q_BSHD, k_BTHD, v_BTHD)[0]


def _remember(q_BSHD, k_BTHD, v_BTHD):
    out_BSHD, lse_BSH = _forward(jnp.arange(q_BSHD.shape[1]), q_BSHD, k_BTHD, v_BTHD)
    return out_BSHD, (q_BSHD, k_BTHD, v_BTHD, out_BSHD, lse_BSH)


def _gradients(saved, ct_BSHD):
    q_BSHD, k_BTHD, v_BTHD, out_BSHD, lse_BSH = saved
    rest = (ct_BSHD, lse_BSH, (out_BSHD * ct_BSHD).sum(-1))
    at_S = jnp.arange(q_BSHD.shape[1])
    of_keys = _of_keys(at_S, q_BSHD, k_BTHD, v_BTHD, *rest)
    return _of_queries(at_S, q_BSHD, k_BTHD, v_BTHD, *rest), *of_keys


flash_attention.defvjp(_remember, _gradients)


def _products(count: int):
    """The FLOPs of so many products of the queries' rows with those of the keys, of the shapes that a shard
    has.
    """

    def flops(in_shapes, out_shapes):
        (b, s, h, d), t = in_shapes[1], in_shapes[2][1]
        return count * 2 * b * s * t * h * d

    return flops


@sx.partition_as("s, b s h d!, b t! h d!, b t! h d! -> b s h d!, b s h", flops=_products(2))
def _forward(at_S, q_BSHD, k_BTHD, v_BTHD):
    """The result, and the logarithm of the sum of the exponentials of each row."""
    like = [jax.ShapeDtypeStruct(shape, q_BSHD.dtype) for shape in (q_BSHD.shape, q_BSHD.shape[:-1])]
    return _call(_forward_kernel, like, "q", "qr", (at_S, q_BSHD, k_BTHD, v_BTHD), "aqkk")


@sx.partition_as("s, b s h d!, b t! h d!, b t! h d!, b s h d!, b s h, b s h -> b s h d!", flops=_products(3))
def _of_queries(at_S, q_BSHD, k_BTHD, v_BTHD, ct_BSHD, lse_BSH, delta_BSH):
    args = (at_S, q_BSHD, k_BTHD, v_BTHD, ct_BSHD, lse_BSH, delta_BSH)
    return _call(_of_queries_kernel, [q_BSHD], "q", "q", args, "aqkkqrr")[0]


@sx.partition_as(
    "s+, b s+ h d!, b t! h d!, b t! h d!, b s+ h d!, b s+ h, b s+ h -> b t! h d!, b t! h d!",
    flops=_products(4),
)
def _of_keys(at_S, q_BSHD, k_BTHD, v_BTHD, ct_BSHD, lse_BSH, delta_BSH):
    args = (at_S, q_BSHD, k_BTHD, v_BTHD, ct_BSHD, lse_BSH, delta_BSH)
    return _call(_of_keys_kernel, [k_BTHD, v_BTHD], "k", "kk", args, "aqkkqrr")


def _call(kernel, like, over: str, outs: str, args, kinds: str):
    """Runs a kernel for each batch, head and block of queries ("q") or keys ("k"); of the other side it sees
    all.

    `kinds` and `outs`, of arguments and results: "q" and "k" BSHD and BTHD, "r" BSH, "a" S.
    """
    _, s, h, d = args[1].shape
    t = args[2].shape[1]
    rows, cols = (math.gcd(n, BLOCK) if side == over else n for n, side in ((s, "q"), (t, "k")))
    i, j = (lambda n: n, lambda n: 0) if over == "q" else (lambda n: 0, lambda n: n)
    specs = {
        "a": pl.BlockSpec((rows,), lambda b, h, n: (i(n),)),
        "q": pl.BlockSpec((None, rows, None, d), lambda b, h, n: (b, i(n), h, 0)),
        "r": pl.BlockSpec((None, rows, None), lambda b, h, n: (b, i(n), h)),
        "k": pl.BlockSpec((None, cols, None, d), lambda b, h, n: (b, j(n), h, 0)),
    }
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        grid=(args[1].shape[0], h, s // rows if over == "q" else t // cols),
        in_specs=[specs[kind] for kind in kinds],
        out_specs=[specs[kind] for kind in outs],
        interpret=jax.default_backend() == "cpu",
    )(*args)


def _scores(at, q, k, first):
    """Of a block of queries at the places `at` and of keys from `first` on; those to come are left out."""
    s = jnp.dot(q, k.T) / jnp.sqrt(jnp.float32(q.shape[-1]))
    places = first + lax.broadcasted_iota("int32", s.shape, 1)
    return jnp.where(places <= at[:, None], s, -jnp.inf)


def _forward_kernel(at, q, k, v, out, lse):
    cols = math.gcd(k.shape[0], BLOCK)

    def block(n, state):
        most, total, sums = state
        keys = pl.ds(n * cols, cols)
        s = _scores(at[...], q[...], k[keys], n * cols)
        new = jnp.maximum(most, s.max(1))
        p, old = jnp.exp(s - new[:, None]), jnp.exp(most - new)
        return new, total * old + p.sum(1), sums * old[:, None] + jnp.dot(p, v[keys])

    rows = q.shape[0]
    start = jnp.full((rows,), -1e30, q.dtype), jnp.zeros((rows,), q.dtype), jnp.zeros(q.shape, q.dtype)
    most, total, sums = lax.fori_loop(0, k.shape[0] // cols, block, start)
    out[...], lse[...] = sums / total[:, None], most + jnp.log(total)


def _of_scores(at, q, k, v, ct, lse, delta, first):
    """The softmax of a block, and the gradient of its scores."""
    p = jnp.exp(_scores(at, q, k, first) - lse[:, None])
    return p, p * (jnp.dot(ct, v.T) - delta[:, None]) / jnp.sqrt(jnp.float32(q.shape[-1]))


def _of_queries_kernel(at, q, k, v, ct, lse, delta, out):
    cols = math.gcd(k.shape[0], BLOCK)

    def block(n, sums):
        keys = pl.ds(n * cols, cols)
        _, ds = _of_scores(at[...], q[...], k[keys], v[keys], ct[...], lse[...], delta[...], n * cols)
        return sums + jnp.dot(ds, k[keys])

    out[...] = lax.fori_loop(0, k.shape[0] // cols, block, jnp.zeros(q.shape, q.dtype))


def _of_keys_kernel(at, q, k, v, ct, lse, delta, dk, dv):
    rows, first = math.gcd(q.shape[0], BLOCK), pl.program_id(2) * k.shape[0]

    def block(n, sums):
        some = pl.ds(n * rows, rows)
        p, ds = _of_scores(at[some], q[some], k[...], v[...], ct[some], lse[some], delta[some], first)
        return sums[0] + jnp.dot(ds.T, q[some]), sums[1] + jnp.dot(p.T, ct[some])

    zeros = jnp.zeros(k.shape, k.dtype)
    dk[...], dv[...] = lax.fori_loop(0, q.shape[0] // rows, block, (zeros, zeros))


def plain_attention(q_BSHD, k_BTHD, v_BTHD):
    """The same in five lines, which holds all scores."""
    s_BHST = jnp.einsum("bshd,bthd->bhst", q_BSHD, k_BTHD) / jnp.sqrt(jnp.float32(q_BSHD.shape[-1]))
    earlier_ST = jnp.arange(k_BTHD.shape[1]) <= jnp.arange(q_BSHD.shape[1])[:, None]
    p_BHST = jax.nn.softmax(jnp.where(earlier_ST, s_BHST, -jnp.inf))
    return jnp.einsum("bhst,bthd->bshd", p_BHST, v_BTHD)
