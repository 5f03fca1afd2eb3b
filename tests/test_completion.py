"""Completion of small programs, as text: the sharding of every value, by the primitive that makes it."""

import os
import subprocess
import sys
from inspect import cleandoc
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import _jax
from shardax.completion.complete import Completion, complete
from shardax.graph import inline
from shardax.graph.graph import Graph
from shardax.trace import Request, trace

pytestmark = pytest.mark.quick

SIZES = {"x": 4, "y": 2}
OPEN = P.UNCONSTRAINED


def completed(f, *shapes, **how) -> str:
    """What completion makes of a function of float32 arguments of these shapes, a pytree of tuples."""
    return str(completion(f, *shapes, **how)[1])


def completion(f, *shapes, specs=None, outs=None, donated=(), sizes=SIZES) -> tuple[Graph, Completion]:
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), shapes, is_leaf=_is_shape)
    names = tuple(f"args[{i}]" for i in range(len(args)))
    request = Request(f, args, {}, names, frozenset(donated), mesh, specs, outs)
    program = inline.from_jaxpr(_jax.dce(trace(request).jaxpr))
    return program, complete(program, [None] * len(program.inputs), sizes)


def _is_shape(tree) -> bool:
    return isinstance(tree, tuple) and all(isinstance(n, int) for n in tree)


def mlp(x, up, down):
    return jnp.sin(x @ up) @ down


def test_mlp():
    found = completed(mlp, (8, 16), (16, 64), (64, 16), specs=(P("x"), P(None, "y"), None))
    assert found == cleandoc("""
        argument             f32[8,16]      P('x', None)
        argument             f32[16,64]     P(None, 'y')
        argument             f32[64,16]     P('y', None)
        dot_general          f32[8,64]      P('x', 'y')
        sin                  f32[8,64]      P('x', 'y')
        dot_general          f32[8,16]      P('x', None)
    """)


def test_mlp_backward():
    def loss(weights, x):
        return mlp(x, *weights).sum()

    found = completed(jax.grad(loss), ((16, 64), (64, 16)), (8, 16), specs=((P(None, "y"), None), P("x")))
    assert found == cleandoc("""
        argument             f32[16,64]     P(None, 'y')
        argument             f32[64,16]     P('y', None)
        argument             f32[8,16]      P('x', None)
        dot_general          f32[8,64]      P('x', 'y')
        sin                  f32[8,64]      P('x', 'y')
        cos                  f32[8,64]      P('x', 'y')
        broadcast_in_dim     f32[8,16]      P('x', None)
        dot_general          f32[16,64]     P(None, 'y')
        transpose            f32[64,16]     P('y', None)
        dot_general          f32[8,64]      P('x', 'y')
        mul                  f32[8,64]      P('x', 'y')
        dot_general          f32[64,16]     P('y', None)
        transpose            f32[16,64]     P(None, 'y')
    """)


def layers(weights, x):
    return lax.scan(lambda x, pair: (mlp(x, *pair), x.max(1)), x, weights)


def test_scan_over_layers():
    found = completed(layers, ((3, 16, 64), (3, 64, 16)), (8, 16), specs=((P(None, None, "y"), None), P("x")))
    assert found == cleandoc("""
        argument             f32[3,16,64]   P(None, None, 'y')
        argument             f32[3,64,16]   P(None, 'y', None)
        argument             f32[8,16]      P('x', None)
        scan of
          argument             f32[8,16]      P('x', None)
          argument             f32[16,64]     P(None, 'y')
          argument             f32[64,16]     P('y', None)
          dot_general          f32[8,64]      P('x', 'y')
          sin                  f32[8,64]      P('x', 'y')
          dot_general          f32[8,16]      P('x', None)
          reduce_max           f32[8]         P('x')
        scan                 f32[8,16]      P('x', None)
        scan                 f32[3,8]       P(None, 'x')
    """)


def test_scan_over_layers_backward():
    """What each layer leaves for the backward pass is stacked, and lies in the stack as it did in the
    layer.
    """
    f = jax.grad(lambda weights, x: layers(weights, x)[0].sum())
    found = completed(f, ((3, 16, 64), (3, 64, 16)), (8, 16), specs=((P(None, None, "y"), None), P("x")))
    assert found == cleandoc("""
        argument             f32[3,16,64]   P(None, None, 'y')
        argument             f32[3,64,16]   P(None, 'y', None)
        argument             f32[8,16]      P('x', None)
        scan of
          argument             f32[8,16]      P('x', None)
          argument             f32[16,64]     P(None, 'y')
          argument             f32[64,16]     P('y', None)
          dot_general          f32[8,64]      P('x', 'y')
          sin                  f32[8,64]      P('x', 'y')
          cos                  f32[8,64]      P('x', 'y')
          dot_general          f32[8,16]      P('x', None)
        scan                 f32[8,16]      P('x', None)
        scan                 f32[3,8,16]    P(None, 'x', None)
        scan                 f32[3,8,64]    P(None, 'x', 'y')
        scan                 f32[3,8,64]    P(None, 'x', 'y')
        broadcast_in_dim     f32[8,16]      P('x', None)
        scan of
          argument             f32[8,16]      P('x', None)
          argument             f32[16,64]     P(None, 'y')
          argument             f32[8,16]      P('x', None)
          argument             f32[8,64]      P('x', 'y')
          argument             f32[64,16]     P('y', None)
          argument             f32[8,64]      P('x', 'y')
          dot_general          f32[16,64]     P(None, 'y')
          transpose            f32[64,16]     P('y', None)
          dot_general          f32[8,64]      P('x', 'y')
          mul                  f32[8,64]      P('x', 'y')
          dot_general          f32[64,16]     P('y', None)
          transpose            f32[16,64]     P(None, 'y')
          dot_general          f32[8,16]      P('x', None)
        scan                 f32[8,16]      P('x', None)
        scan                 f32[3,16,64]   P(None, None, 'y')
        scan                 f32[3,64,16]   P(None, 'y', None)
    """)


def test_carries_learn_from_the_body():
    """The body's annotation reaches the first carry, and the result."""

    def body(_, x):
        return jnp.sin(lax.with_sharding_constraint(x, P("x")))

    found = completed(lambda x: lax.fori_loop(0, 3, body, x + 1.0), (8, 4))
    assert found == cleandoc("""
        argument             f32[8,4]       P('x', None)
        add                  f32[8,4]       P('x', None)
        scan of
          argument             f32[8,4]       P('x', None)
          sin                  f32[8,4]       P('x', None)
        scan                 f32[8,4]       P('x', None)
    """)


def test_an_open_loop():
    def loop(x, w):
        return lax.while_loop(lambda x: x.sum() < 9.0, lambda x: x @ w, x)

    found = completed(loop, (8, 4), (4, 4), specs=(P("x"), P(None, "y")))
    assert found == cleandoc("""
        argument             f32[8,4]       P('x', None)
        argument             f32[4,4]       P(None, 'y')
        while of
          argument             f32[8,4]       P('x', 'y')
        while of
          argument             f32[4,4]       P(None, 'y')
          argument             f32[8,4]       P('x', 'y')
          dot_general          f32[8,4]       P('x', 'y')
        while                f32[8,4]       P('x', 'y')
    """)


def test_branches_agree():
    def branches(x, y):
        return lax.cond(x.sum() > 0.0, lambda x, y: x + 1.0, lambda x, y: jnp.sin(y), x, y)

    found = completed(branches, (8, 4), (8, 4), specs=(P("x"), None))
    assert found == cleandoc("""
        argument             f32[8,4]       P('x', None)
        argument             f32[8,4]       P('x', None)
        cond of
          argument             f32[8,4]       P('x', None)
          argument             f32[8,4]       P('x', None)
          sin                  f32[8,4]       P('x', None)
        cond of
          argument             f32[8,4]       P('x', None)
          argument             f32[8,4]       P('x', None)
          add                  f32[8,4]       P('x', None)
        cond                 f32[8,4]       P('x', None)
    """)


@pytest.mark.promotes_ranks
def test_a_bias_learns_from_what_it_is_added_to():
    """GSPMD, figure 4: backward through the broadcast before forward."""
    found = completed(lambda x, b: jnp.sin(x) + b, (8, 4, 16), (16,), specs=(P("x", None, "y"), None))
    assert found == cleandoc("""
        argument             f32[8,4,16]    P('x', None, 'y')
        argument             f32[16]        P('y')
        sin                  f32[8,4,16]    P('x', None, 'y')
        broadcast_in_dim     f32[1,1,16]    P(None, None, 'y')
        add                  f32[8,4,16]    P('x', None, 'y')
    """)


@pytest.mark.promotes_ranks
def test_a_bias_does_not_decide():
    """GSPMD, figure 4: were its broadcast as early as the sum, this would be split over the bias's dim, and x
    gathered.
    """
    found = completed(
        lambda w, b, x: jnp.cos(x @ w + b),
        (32, 16),
        (16,),
        (8, 4, 32),
        specs=(None, P("x"), None),
        outs=P("x"),
    )
    assert found == cleandoc("""
        argument             f32[32,16]     P(None, None)
        argument             f32[16]        P('x')
        argument             f32[8,4,32]    P('x', None, None)
        dot_general          f32[8,4,16]    P('x', None, None)
        broadcast_in_dim     f32[1,1,16]    P(None, None, 'x')
        add                  f32[8,4,16]    P('x', None, None)
        cos                  f32[8,4,16]    P('x', None, None)
    """)


def test_what_is_stretched_does_not_decide():
    """Elementwise equations between the larger operand and the result come before products, and before
    smaller operands.
    """
    found = completed(
        lambda b, x: (jnp.cos(x) + b) * x,
        (1, 1, 16),
        (8, 4, 16),
        specs=(P(None, None, "x"), None),
        outs=P("x"),
    )
    assert found == cleandoc("""
        argument             f32[1,1,16]    P(None, None, 'x')
        argument             f32[8,4,16]    P('x', None, None)
        cos                  f32[8,4,16]    P('x', None, None)
        add                  f32[8,4,16]    P('x', None, None)
        mul                  f32[8,4,16]    P('x', None, None)
    """)


@pytest.mark.promotes_ranks
def test_a_bias_decides_where_nothing_else_does():
    found = completed(lambda x, b: jnp.sin(x) + b, (8, 4, 16), (16,), specs=(None, P("x")))
    assert found == cleandoc("""
        argument             f32[8,4,16]    P(None, None, 'x')
        argument             f32[16]        P('x')
        sin                  f32[8,4,16]    P(None, None, 'x')
        broadcast_in_dim     f32[1,1,16]    P(None, None, 'x')
        add                  f32[8,4,16]    P(None, None, 'x')
    """)


def test_open_dims_learn():
    def f(x, y):
        return lax.with_sharding_constraint(x, P("x", OPEN)) + y

    found = completed(f, (8, 16), (8, 16), specs=(None, P(None, "y")))
    assert found == cleandoc("""
        argument             f32[8,16]      P('x', 'y')
        argument             f32[8,16]      P(None, 'y')
        add                  f32[8,16]      P('x', 'y')
    """)


def test_closed_dims_do_not():
    def f(x, y):
        return lax.with_sharding_constraint(x, P("x", None)) + y

    found = completed(f, (8, 16), (8, 16), specs=(None, P(None, "y")))
    assert found == cleandoc("""
        argument             f32[8,16]      P('x', None)
        argument             f32[8,16]      P(None, 'y')
        add                  f32[8,16]      P('x', 'y')
    """)


def test_open_dims_of_an_argument_learn():
    found = completed(jnp.add, (8, 16), (8, 16), specs=(P("x", OPEN), P(None, "y")))
    assert found == cleandoc("""
        argument             f32[8,16]      P('x', 'y')
        argument             f32[8,16]      P(None, 'y')
        add                  f32[8,16]      P('x', 'y')
    """)


def test_an_annotation_in_the_middle_is_a_border():
    def f(x):
        return jnp.sin(lax.with_sharding_constraint(jnp.cos(x), P(None, "x")))

    found = completed(f, (8, 16), specs=P("x"))
    assert found == cleandoc("""
        argument             f32[8,16]      P('x', None)
        cos                  f32[8,16]      P(None, 'x')
        sin                  f32[8,16]      P(None, 'x')
    """)


def test_conflict_of_a_product():
    """Both want x: rows of the larger operand win."""
    found = completed(jnp.matmul, (64, 16), (16, 8), specs=(P("x"), P("x")))
    assert found == cleandoc("""
        argument             f32[64,16]     P('x', None)
        argument             f32[16,8]      P('x', None)
        dot_general          f32[64,8]      P('x', None)
    """)


def test_conflict_of_a_contracted_dim():
    found = completed(jnp.matmul, (8, 64), (64, 32), specs=(P(None, "x"), P("y")))
    assert found == cleandoc("""
        argument             f32[8,64]      P(None, 'x')
        argument             f32[64,32]     P('y', None)
        dot_general          f32[8,32]      P(None, None)
    """)


def test_conflict_of_equals_goes_to_the_first():
    found = completed(jnp.add, (8, 8), (8, 8), specs=(P("x"), P(None, "x")))
    assert found == cleandoc("""
        argument             f32[8,8]       P('x', None)
        argument             f32[8,8]       P(None, 'x')
        add                  f32[8,8]       P('x', None)
    """)


def test_merging():
    """Rows from one operand, columns from the other."""
    found = completed(jnp.multiply, (8, 16), (8, 16), specs=(P("x"), P(None, "y")))
    assert found == cleandoc("""
        argument             f32[8,16]      P('x', None)
        argument             f32[8,16]      P(None, 'y')
        mul                  f32[8,16]      P('x', 'y')
    """)


def test_merging_in_a_product():
    found = completed(jnp.matmul, (8, 16), (16, 4), specs=(P("x"), P(None, "y")))
    assert found == cleandoc("""
        argument             f32[8,16]      P('x', None)
        argument             f32[16,4]      P(None, 'y')
        dot_general          f32[8,4]       P('x', 'y')
    """)


def test_refinement():
    found = completed(jnp.multiply, (8, 16), (8, 16), specs=(P("x"), P(("x", "y"))))
    assert found == cleandoc("""
        argument             f32[8,16]      P('x', None)
        argument             f32[8,16]      P(('x', 'y'), None)
        mul                  f32[8,16]      P(('x', 'y'), None)
    """)


def test_refinement_keeps_the_order_of_axes():
    found = completed(jnp.multiply, (8, 16), (8, 16), specs=(P("y"), P(("x", "y"))))
    assert found == cleandoc("""
        argument             f32[8,16]      P('y', None)
        argument             f32[8,16]      P(('x', 'y'), None)
        mul                  f32[8,16]      P('y', None)
    """)


def test_reshape_takes_factors_apart():
    found = completed(lambda x: x.reshape(8, 2, 12), (8, 24), specs=P(None, ("y", "x")))
    assert found == cleandoc("""
        argument             f32[8,24]      P(None, ('y', 'x'))
        reshape              f32[8,2,12]    P(None, 'y', 'x')
    """)


def test_reshape_puts_factors_together():
    """Minor factors follow only where the major one is split to single positions."""
    found = completed(lambda x: (x.reshape(16, 12), x.reshape(8, 24)), (8, 2, 12), specs=P(None, "y", "x"))
    assert found == cleandoc("""
        argument             f32[8,2,12]    P(None, 'y', 'x')
        reshape              f32[16,12]     P(None, 'x')
        reshape              f32[8,24]      P(None, ('y', 'x'))
    """)


def test_reshape_in_the_middle_of_a_block():
    """24 over four devices are blocks of six, which are no rows of eight."""
    found = completed(lambda x: x.reshape(8, 3, 8), (8, 24), specs=P(None, "x"))
    assert found == cleandoc("""
        argument             f32[8,24]      P(None, 'x')
        reshape              f32[8,3,8]     P(None, None, None)
    """)


def test_heads():
    """Reshape, transpose, and back."""
    found = completed(
        lambda x: jnp.sin(x.reshape(8, 4, 6).transpose(1, 0, 2)).reshape(4, 48), (8, 24), specs=P(None, "x")
    )
    assert found == cleandoc("""
        argument             f32[8,24]      P(None, 'x')
        reshape              f32[8,4,6]     P(None, 'x', None)
        transpose            f32[4,8,6]     P('x', None, None)
        sin                  f32[4,8,6]     P('x', None, None)
        reshape              f32[4,48]      P('x', None)
    """)


def test_fewer_positions_than_devices():
    found = completed(lambda x: x @ x.T, (2, 8), specs=P(None, "x"))
    assert found == cleandoc("""
        argument             f32[2,8]       P(None, 'x')
        transpose            f32[8,2]       P('x', None)
        dot_general          f32[2,2]       P(None, None)
    """)


def test_data_before_state():
    """Fully sharded data parallelism: parameters are stored split, data flows split, both over x."""
    f = jax.grad(lambda weights, x: mlp(x, *weights).sum())
    found = completed(f, ((16, 64), (64, 16)), (8, 16), specs=((P("x"), P("x")), P("x")))
    assert found == cleandoc("""
        argument             f32[16,64]     P('x', None)
        argument             f32[64,16]     P('x', None)
        argument             f32[8,16]      P('x', None)
        dot_general          f32[8,64]      P('x', None)
        sin                  f32[8,64]      P('x', None)
        cos                  f32[8,64]      P('x', None)
        broadcast_in_dim     f32[8,16]      P('x', None)
        dot_general          f32[16,64]     P(None, None)
        transpose            f32[64,16]     P(None, None)
        dot_general          f32[8,64]      P('x', None)
        mul                  f32[8,64]      P('x', None)
        dot_general          f32[64,16]     P(None, None)
        transpose            f32[16,64]     P(None, None)
    """)


def test_activations_that_come_back_are_no_state():
    """They were taken for state: the weights decided, and the activations were gathered."""

    def layer(x, up, down):
        return x + mlp(x, up, down)

    found = completed(layer, (512, 16), (16, 64), (64, 16), specs=(P("x"), P("x"), P("x")))
    assert found == cleandoc("""
        argument             f32[512,16]    P('x', None)
        argument             f32[16,64]     P('x', None)
        argument             f32[64,16]     P('x', None)
        dot_general          f32[512,64]    P('x', None)
        sin                  f32[512,64]    P('x', None)
        dot_general          f32[512,16]    P('x', None)
        add                  f32[512,16]    P('x', None)
    """)


def test_successors_lie_as_donated():
    found = completed(lambda x, g: x - g.T, (8, 4), (4, 8), specs=(P("x"), None), donated=[0])
    assert found == cleandoc("""
        argument             f32[8,4]       P('x', None)
        argument             f32[4,8]       P(None, 'x')
        transpose            f32[8,4]       P('x', None)
        sub                  f32[8,4]       P('x', None)
    """)


def test_uneven_state_is_updated_as_it_rests():
    f = lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.sin(x @ w).sum())(w)  # noqa: E731
    found = completed(f, (9, 8), (12, 9), specs=(P("x"), None), donated=[0])
    assert found == cleandoc("""
        argument             f32[9,8]       P(None, 'x')
        argument             f32[12,9]      P(None, 'x')
        annotate             f32[9,8]       P('x', None)
        dot_general          f32[12,8]      P(None, None)
        cos                  f32[12,8]      P(None, None)
        broadcast_in_dim     f32[12,8]      P(None, None)
        mul                  f32[12,8]      P(None, None)
        dot_general          f32[8,9]       P(None, 'x')
        transpose            f32[9,8]       P(None, 'x')
        mul                  f32[9,8]       P(None, 'x')
        sub                  f32[9,8]       P(None, 'x')
    """)


def test_uneven_state_scaled_by_rows_is_updated_as_it_rests():
    """As by adafactor, whose factors are stretched over the parameter."""
    f = lambda w, x, y, rows: w - (x.T @ y) * rows  # noqa: E731
    found = completed(f, (9, 8), (12, 9), (12, 8), (9, 1), specs=(P("x"), None, None, None), donated=[0])
    assert found == cleandoc("""
        argument             f32[9,8]       P(None, 'x')
        argument             f32[12,9]      P(None, 'x')
        argument             f32[12,8]      P(None, None)
        argument             f32[9,1]       P('x', None)
        annotate             f32[9,8]       P('x', None)
        transpose            f32[9,12]      P('x', None)
        dot_general          f32[9,8]       P(None, 'x')
        mul                  f32[9,8]       P(None, 'x')
        sub                  f32[9,8]       P(None, 'x')
    """)


def test_it_is_said_where_axes_came_from():
    program, done = completion(lambda x, w: jnp.sin(x) @ w, (8, 16), (16, 4), specs=(None, P("y")))
    (x, _), (_, sin, _) = program.inputs, program.nodes
    chain = [origin.source or origin.node.name for origin in done.why(x, 1)]
    assert sin.name == "sin" and chain == ["sin", "dot_general", "in_shardings[1]"]


def test_the_order_of_dicts_does_not_matter():
    def loss(weights, x):
        return mlp(x, **weights).sum()

    specs = {"up": P(None, "y"), "down": P("y")}
    reordered = dict(reversed(specs.items()))
    shapes = {"up": (16, 64), "down": (64, 16)}
    texts = {
        completed(jax.grad(loss), s, (8, 16), specs=(given, P("x")))
        for s in (shapes, dict(reversed(shapes.items())))
        for given in (specs, reordered)
    }
    assert len(texts) == 1


def test_repeated_runs_are_equal():
    """Under another seed, sets are ordered otherwise."""
    program = (
        "from tests.test_completion import *; test_scan_over_layers_backward(); test_data_before_state()"
    )
    for seed in "1", "2":
        env = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", program], env=env, cwd=Path(__file__).parents[1])
        assert done.returncode == 0


# Both directions through everything: arguments of shape (8, 4, 4) unless said, split over x by an annotation
# at one end.


def both_ways(f, *shapes, dim: int = 0) -> tuple[list[P], P]:
    """The shardings of the arguments where the first result is annotated, and of the first result where the
    arguments are.
    """
    spec = lambda rank: P(*[None] * dim, "x", *[None] * (rank - dim - 1))  # noqa: E731

    def annotated(*args):
        out = jax.tree.leaves(f(*args))[0]
        return lax.with_sharding_constraint(out, spec(out.ndim))

    backward, found = completion(annotated, *shapes)
    first = next(i for i, shape in enumerate(shapes) if len(shape) > dim)
    specs = tuple(spec(len(shape)) if i == first else None for i, shape in enumerate(shapes))
    forward, told = completion(lambda *args: jax.tree.leaves(f(*args))[0], *shapes, specs=specs)
    return [found.sharding(v).spec for v in backward.inputs], told.sharding(forward.outputs[0]).spec


def _custom_vjp(x):
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    return f(x)


def _mine(x):
    return sx.partition_as("b m n! -> b m n!")(lambda x: jnp.sort(x, -1))(x)


MATRICES = (8, 4, 4)
BOTH_WAYS = {
    "call": (lambda x: jax.jit(jnp.sin)(x), MATRICES),
    "cholesky": (jnp.linalg.cholesky, MATRICES),
    "closed call": (lambda x: jax.closure_convert(jnp.sin, x)[0](x), MATRICES),
    "cond": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), MATRICES),
    "conv": (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), (8, 3, 4, 4), (2, 3, 3, 3)),
    "cumsum": (lambda x: jnp.cumsum(x, 1), MATRICES),
    "custom_jvp": (jax.nn.relu, MATRICES),
    "custom_vjp": (_custom_vjp, MATRICES),
    "eigh": (lambda x: jnp.linalg.eigh(x)[0], MATRICES),
    "fft": (lambda x: jnp.fft.fft(x).real, MATRICES),
    "fft of two dims": (lambda x: jnp.fft.rfft2(x).real, MATRICES),
    "gather": (lambda x: x[:, jnp.array([2, 0])], MATRICES),
    "gradient of remat": (
        jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum()),
        MATRICES,
    ),
    "inverse": (jnp.linalg.inv, MATRICES),
    "lu": (lambda x: lax.linalg.lu(x)[0], MATRICES),
    "map": (lambda x: lax.map(jnp.sin, x), MATRICES),
    "nested scan": (
        lambda x: lax.fori_loop(0, 2, lambda _, x: lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x), x),
        MATRICES,
    ),
    "qr": (jnp.linalg.qr, MATRICES),
    "remat": (jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))), MATRICES),
    "rule for a function": (_mine, MATRICES),
    "solve": (jnp.linalg.solve, MATRICES, (8, 4, 3)),
    "sort": (lambda x: jnp.sort(x, 2), MATRICES),
    "svd": (lambda x: jnp.linalg.svd(x)[1], MATRICES),
    "triangular solve": (lambda a, b: jax.scipy.linalg.solve_triangular(a, b), MATRICES, (8, 4, 3)),
    "vmap of while": (
        jax.vmap(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)),
        MATRICES,
    ),
    "while": (lambda x: lax.while_loop(lambda x: x.sum() < 9, jnp.sin, x), MATRICES),
}


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_both_ways(name):
    f, *shapes = BOTH_WAYS[name]
    found, told = both_ways(f, *shapes)
    assert found[0][0] == told[0] == "x"
    if len(shapes) > 1 and shapes[1][0] == shapes[0][0]:
        assert found[1][0] == "x"


def test_a_stacked_dim_reaches_through_scan_and_back():
    """xs and ys of a scan keep their other dims; trips are not split."""

    def f(xs):
        return lax.scan(lambda carry, x: (carry + x, jnp.sin(x)), jnp.zeros((8, 4)), xs)[1]

    found, told = both_ways(f, (3, 8, 4), dim=1)
    assert found[0][1] == told[1] == "x"


def test_a_barrier_passes_each_operand_on_by_itself():
    """As a remat's does with parameters and activations, some of which have dims of one size."""
    found = completed(
        lambda x, y: [a + 1.0 for a in lax.optimization_barrier((x, y))],
        (8, 8),
        (8, 8),
        specs=(P("x"), P(None, "y")),
    )
    assert found == cleandoc("""
        argument             f32[8,8]       P('x', None)
        argument             f32[8,8]       P(None, 'y')
        optimization_barrier f32[8,8]       P('x', None)
        optimization_barrier f32[8,8]       P(None, 'y')
        add                  f32[8,8]       P('x', None)
        add                  f32[8,8]       P(None, 'y')
    """)


def test_state_speaks_to_its_own_before_data_does():
    """The data knows nothing of the columns when it reaches the cast weights: it would split their rows over
    y.
    """

    def loss(w, x):
        y = x @ w.astype(x.dtype)
        return (lax.with_sharding_constraint(jnp.sin(y).reshape(8, 4, 8), P("x", "y")) ** 2).sum()

    def step(w, x):
        return w - jax.grad(loss)(w, x)

    found = completed(step, (16, 32), (8, 16), specs=(P("x", "y"), P("x", "y")), donated=[0])
    weights = [line for line in found.splitlines() if "[16,32]" in line]
    assert weights and all(line.endswith("P('x', 'y')") for line in weights)


def test_layers_cut_out_of_a_stack_are_split_as_it_is():
    """A pipeline in chunks puts its stages' layers together anew. The data says y of the rows, m."""

    def step(w_LMN, x_BM):
        def loss(w_LMN):
            picked_GLMN = jnp.stack([w_LMN[0:2], w_LMN[4:6]])
            y_BM = lax.with_sharding_constraint(jnp.sin(x_BM), P(None, "y"))
            return jnp.sin(jnp.einsum("bm,glmn->bgln", y_BM, picked_GLMN)).sum()

        return w_LMN - jax.grad(loss)(w_LMN)

    found = completed(step, (8, 16, 64), (8, 16), specs=(P(None, "x", "y"), None), donated=[0])
    weights = [line for line in found.splitlines() if ",16,64]" in line]
    assert len(weights) > 8 and all(line.endswith("'x', 'y')") for line in weights)


# GSPMD's other example: a pipeline's wrapper (section 3.3): stages stacked by vmap, the stage dim annotated,
# the others open.


def pipeline(weights, xs):
    """`weights` of each stage, stacked; microbatches in `xs` shift through the stages (one more each
    tick).
    """

    def stage(w, x):
        return jnp.sin(lax.with_sharding_constraint(x @ w, P(None, "y"))) @ w.T

    def tick(state, x):
        state = jnp.concatenate([x[None], state[:-1]])
        state = lax.with_sharding_constraint(state, P("x", OPEN, OPEN))
        return jax.vmap(stage)(weights, state), state[-1]

    return lax.scan(tick, jnp.zeros((4, *xs.shape[1:])), xs)


def test_the_pipeline_wrapper_leaves_the_stages_their_shardings():
    """Were its other dims closed, what the stages split over y would be gathered at each tick."""
    program, done = completion(pipeline, (4, 16, 32), (6, 8, 16), specs=(P("x"), None))
    assert done.sharding(program.inputs[0]).spec == P("x", None, None)  # in_shardings closes it
    (loop,) = (node for node in program.nodes if node.name == "scan")
    shardings = {
        v.shape: done.sharding(v).spec
        for node in loop.bodies[0].walk()
        for v in node.outputs
        if node.name == "dot_general"
    }
    assert shardings == {(4, 8, 32): P("x", None, "y"), (4, 8, 16): P("x", None, None)}
    open_program, opened = completion(pipeline, (4, 16, 32), (6, 8, 16), specs=(P("x", OPEN, OPEN), None))
    assert opened.sharding(open_program.inputs[0]).spec == P("x", None, "y")


def test_the_seed_of_hashes_does_not_matter():
    """The whole plan as text, under two seeds and with keyword arguments and dicts in two orders."""
    program = """
import jax, jax.numpy as jnp
import shardax as sx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
def loss(weights, *, x, y):
    return ((jnp.sin(x @ weights["up"]) @ weights["down"] - y) ** 2).mean()
def plan(backward):
    f = lambda n: jax.ShapeDtypeStruct(n, "float32")
    weights = {"up": f((16, 64)), "down": f((64, 16))}
    data = {"x": f((8, 16)), "y": f((8, 16))}
    specs = {"up": P(None, "y"), "down": P("y")}
    weights, data, specs = ({k: d[k] for k in sorted(d, reverse=backward)} for d in (weights, data, specs))
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return sx.shard_jit(jax.grad(loss), mesh=mesh, in_shardings=(specs,)).plan(weights, **data)
for backward in False, True:
    made = plan(backward)
    print(made.shardings(), made.local_jaxpr, *made.collectives)
"""
    texts = []
    for seed in "1", "2":
        env = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        how = {
            "check": True,
            "env": env,
            "cwd": Path(__file__).parents[1],
            "capture_output": True,
            "text": True,
        }
        texts.append(subprocess.run([sys.executable, "-c", program], **how).stdout)
    first, second = texts[0][: len(texts[0]) // 2], texts[0][len(texts[0]) // 2 :]
    assert texts[0] == texts[1] and first == second and "P('y'" in first
