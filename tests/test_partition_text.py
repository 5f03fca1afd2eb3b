"""The program, its shardings and its decisions as text: what people read first where a plan surprises them."""

from inspect import cleandoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from tests.graphs import graph

pytestmark = pytest.mark.quick

LARGE = np.sin(np.arange(20, dtype="float32")).reshape(4, 5)
MESH = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def planned(f, *shapes, specs):
    options = sx.Options(chip="slow")
    args = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    return sx.shard_jit(f, mesh=MESH, in_shardings=specs, options=options).plan(*args)


def test_a_contraction():
    plan = planned(lambda x, w: jnp.sin(x @ w) * 2, (16, 16), (16, 12), specs=(P("x"), P("y")))
    assert str(plan.graph) == cleandoc("""
        (a:f32[16,16] b:f32[16,12])
        c:f32[16,16] = annotate a
        d:f32[16,12] = annotate b
        e:f32[16,12] = dot_general c d
        f:f32[16,12] = sin e
        g:f32[16,12] = mul f 2.0
        -> g""")
    assert str(plan.values) == cleandoc("""
        argument             f32[16,16]     P('x', None)
        argument             f32[16,12]     P('y', None)
        dot_general          f32[16,12]     P('x', None)
        sin                  f32[16,12]     P('x', None)
        mul                  f32[16,12]     P('x', None)""")
    assert str(plan.decisions) == cleandoc("""
        arguments: P('x', None)@[16, 16], P('y', None)@[16, 12]
        annotate: P('x', None)@[16, 16] -> P('x', None)@[16, 16]
        annotate: P('y', None)@[16, 12] -> P('y', None)@[16, 12]
        dot_general: P('x', None)@[16, 16], P(None, 'y')@[16, 12] -> P('x', 'y')@[16, 12]
          operand 1 from P('y', None)@[16, 12]
        sin: P('x', 'y')@[16, 12] -> P('x', 'y')@[16, 12]
        mul: P('x', 'y')@[16, 12], P()@[] -> P('x', 'y')@[16, 12]
        results: P('x', None)@[16, 12]
          result 0 from P('x', 'y')@[16, 12]""")


def test_a_loop():
    def f(x):
        return lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x)

    plan = planned(f, (8, 4), specs=P("x", "y"))
    assert str(plan.graph) == cleandoc("""
        (a:f32[8,4])
        b:f32[8,4] = annotate a
        c:f32[8,4] = scan b
            (d:f32[8,4])
            e:f32[8,4] = sin d
            -> e
        -> c""")
    assert str(plan.values) == cleandoc("""
        argument             f32[8,4]       P('x', 'y')
        scan of
          argument             f32[8,4]       P('x', 'y')
          sin                  f32[8,4]       P('x', 'y')
        scan                 f32[8,4]       P('x', 'y')""")
    assert "\n  sin: P('x', 'y')@[8, 4] -> P('x', 'y')@[8, 4]\n" in str(plan.decisions)


def test_literals_and_many_names():
    """Large literals stand by their type."""

    def f(x):
        for _ in range(30):
            x = jnp.sin(x)
        return x + LARGE, x * np.float32(2)

    text = str(graph(f, (4, 5)))
    assert "\naa:f32[4,5] = sin z\n" in text and "= add ae float32[4,5]" in text and "= mul ae 2.0" in text


def test_parameters_that_are_asked_for():
    program = graph(lambda x: x[1:], (4, 5))
    assert "= slice[start_indices=(1, 0)] a" in program.text("start_indices")
    assert "start" not in str(program)
