"""Whiles that count to a known number are scans."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax.rewrites.driver import rewritten
from shardax.rewrites.whiles import counted_whiles
from tests.graph_text import after, graph_of


@pytest.mark.parametrize(
    "start, stop, step", [(0, 5, 1), (3, 3, 1), (5, 0, 1), (0, 7, 3), (5, 0, -2), (1, 2, 5)]
)
@pytest.mark.parametrize("test", [lax.lt, lax.le, lax.gt, lax.ge])
def test_whiles_that_count(start, stop, step, test):
    """Only loops that end are scans, and they have as many trips."""
    going = range(start, stop + (test in (lax.le, lax.ge)) * (1 if step > 0 else -1), step)
    ends = (step > 0) == (test in (lax.lt, lax.le))

    def loop(x):
        return lax.while_loop(lambda c: test(c[0], stop), lambda c: (c[0] + step, c[1] * 2), (start, x))

    (node,) = rewritten(graph_of(loop, 1.0), [counted_whiles]).nodes
    assert (node.name, node.params.get("length")) == (("scan", len(going)) if ends else ("while", None))


def test_a_while_whose_counter_wraps_stays():
    def loop(x):
        return lax.while_loop(lambda c: c[0] <= 127, lambda c: (c[0] + np.int8(1), c[1]), (np.int8(0), x))

    (node,) = rewritten(graph_of(loop, 1.0), [counted_whiles]).nodes
    assert node.name == "while"


def test_a_counted_while_inside_of_one_that_is_not():
    def f(x):
        def halved(x):
            return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] / 2), (0, x))[1]

        return lax.while_loop(lambda x: x.sum() > 1, halved, x)

    assert (
        after([counted_whiles], f, jnp.zeros(4), shows=("length",))
        == """\
(a:f32[4])
b:f32[4] = while a
    (c:f32[4])
    d:f32[] = reduce_sum c
    e:bool[] = gt d 1.0
    -> e
    (f:f32[4])
    g:i32[] h:f32[4] = scan[length=3] 0 f
        (i:i32[] j:f32[4])
        k:i32[] = add i 1
        l:f32[4] = div j 2.0
        -> k l
    -> h
-> b"""
    )
